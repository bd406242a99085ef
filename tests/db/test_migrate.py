from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import select, text

from aotcache.db import migrate
from aotcache.db.engine import Database
from aotcache.db.models import COUNTERS, Base, CounterRow
from aotcache.errors import DatabaseError


@pytest.fixture
def empty(empty_url: str):
    database = Database(empty_url)
    yield database
    database.close()


def test_an_empty_database_is_brought_to_the_head(empty: Database) -> None:
    assert migrate.current(empty) is None
    assert not migrate.at_head(empty)
    assert migrate.upgrade(empty) == migrate.head()
    assert migrate.at_head(empty)


def test_migrations_make_what_the_models_say(database: Database) -> None:
    assert migrate.check(database) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("ALTER TABLE blobs ADD COLUMN surplus integer", "surplus"),
        ("DROP INDEX ix_usage_oldest", "ix_usage_oldest"),
        ("DROP TABLE tokens", "tokens"),
    ],
)
def test_drift_is_told(database: Database, change: str, told: str) -> None:
    with database.connection(write=True) as connection:
        connection.execute(text(change))
    assert any(told in problem for problem in migrate.check(database))


def test_a_database_without_tables_is_told_by_its_version(empty: Database) -> None:
    assert migrate.check(empty) == [
        f"version (no tables), expected {migrate.head()}: run `aotcache db upgrade`"
    ]


def test_upgrading_again_changes_nothing(database: Database) -> None:
    with database.session(write=True) as session:
        session.get_one(CounterRow, "fencing").value = 7
    migrate.upgrade(database)
    with database.session() as session:
        assert session.get_one(CounterRow, "fencing").value == 7


def test_counters_begin_at_zero(database: Database) -> None:
    with database.session() as session:
        assert {row.name: row.value for row in session.scalars(select(CounterRow))} == dict.fromkeys(
            COUNTERS, 0
        )


def test_several_upgrade_at_once(empty_url: str) -> None:
    databases = [Database(empty_url) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(migrate.upgrade, databases)) == [migrate.head()] * 4
    assert migrate.check(databases[0]) == []
    for database in databases:
        database.close()


def test_a_step_that_fails_leaves_the_database_as_it_was(empty: Database) -> None:
    # A table of that name is in the way of the last step but one.
    with empty.connection(write=True) as connection:
        connection.execute(text("CREATE TABLE counters (mine integer)"))
    with pytest.raises(DatabaseError, match="counters"):
        migrate.upgrade(empty)
    assert migrate.current(empty) is None
    with empty.connection() as connection, pytest.raises(Exception, match="artifacts"):
        connection.execute(text("SELECT * FROM artifacts"))


def test_a_newer_database_is_refused(database: Database) -> None:
    with database.connection(write=True) as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(DatabaseError, match=r"version 9999.*newer aotcache"):
        migrate.upgrade(database)


def test_a_downgrade_removes_every_table(database: Database) -> None:
    from alembic import command

    with migrate._scripts() as config, database.connection(write=True) as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "base")
    with database.connection() as connection:
        left = set(connection.dialect.get_table_names(connection)) & set(Base.metadata.tables)
    assert left == set()


def test_what_has_no_tables_says_how_to_get_them(empty: Database) -> None:
    with pytest.raises(DatabaseError, match="aotcache db upgrade"), empty.session() as session:
        session.scalars(select(CounterRow)).all()
