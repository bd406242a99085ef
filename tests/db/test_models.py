"""Migrations and models say the same, also where alembic's comparison does not look."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, text

from aotcache.db.engine import Database
from aotcache.db.models import ACTIVE, STATES, Base

POSTGRESQL = (
    """SELECT table_name, column_name, data_type, character_maximum_length, is_nullable, collation_name
       FROM information_schema.columns WHERE table_schema = 'public'""",
    "SELECT tablename, indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'",
    """SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint
       WHERE connamespace = 'public'::regnamespace""",
)
SQLITE = (
    'SELECT m.name, x.name, x.type, x."notnull", x.pk FROM sqlite_master m, pragma_table_xinfo(m.name) x',
    """SELECT m.name, l.name, l."unique", l.partial, x.seqno, x.name, x.key FROM sqlite_master m,
       pragma_index_list(m.name) l, pragma_index_xinfo(l.name) x WHERE m.type = 'table'""",
    """SELECT m.name, f."from", f."to", f."table", f.on_delete FROM sqlite_master m, pragma_foreign_key_list(m.name) f
       WHERE m.type = 'table'""",
    "SELECT name, instr(sql, 'WITHOUT ROWID') > 0, instr(sql, 'CHECK (state IN') > 0 FROM sqlite_master",
    "SELECT name, substr(sql, instr(sql, 'WHERE')) FROM sqlite_master WHERE sql LIKE '%WHERE%'",
)


def described(database: Database) -> list[set[Any]]:
    def rows(connection: Connection, query: str) -> set[Any]:
        found = {tuple(row) for row in connection.execute(text(query))}
        return {
            row for row in found if row[0] not in ("alembic_version", "sqlite_autoindex_alembic_version_1")
        }

    with database.connection() as connection:
        queries = SQLITE if database.dialect == "sqlite" else POSTGRESQL
        return [rows(connection, query) for query in queries]


def test_tables_made_by_migrations_are_those_of_the_models(database: Database, empty_url: str) -> None:
    made = Database(empty_url)
    with made.connection(write=True) as connection:
        Base.metadata.create_all(connection)
    expected, found = described(made), described(database)
    made.close()
    for one, other in zip(expected, found, strict=True):
        assert one
        assert (one - other, other - one) == (set(), set())


def test_names_are_compared_by_their_bytes_on_postgresql(database: Database) -> None:
    if database.dialect == "sqlite":
        return  # it never does otherwise
    query = "SELECT DISTINCT collation_name FROM information_schema.columns WHERE column_name = 'variant'"
    with database.connection() as connection:
        assert connection.execute(text(query)).scalars().all() == ["C"]


def test_states_that_are_left_are_states() -> None:
    assert set(ACTIVE) < set(STATES)
