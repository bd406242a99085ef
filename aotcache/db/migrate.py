"""Bringing a database to this program's tables, and finding out whether it has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import as_file, files
from typing import Any

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, text

from aotcache.db.engine import Database
from aotcache.db.models import Base
from aotcache.errors import DatabaseError

STEP_SECONDS = 900
"""How long one statement of a migration may take on PostgreSQL: an index over millions of rows."""
_LOCK = 0x616F7463616368
"""PostgreSQL's number of the lock that migrations take: "aotcach"."""


def upgrade(database: Database) -> str:
    """Make or upgrade the tables; does nothing where they are as they must be.

    All steps are one transaction. Several processes may do it at once: one of them does
    the work and the others wait for it.

    Returns:
        The version that the database has now.

    Raises:
        DatabaseError: if it cannot be reached, was left by a newer program, or is locked for too long.
    """
    with _scripts() as config, database.connection(write=True, migrating=True) as connection:
        if database.dialect == "postgresql":
            connection.execute(text(f"SET LOCAL statement_timeout = '{STEP_SECONDS}s'"))
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
        _refuse_newer(database, connection, config)
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        return str(_current(connection))


def current(database: Database) -> str | None:
    """The version that the database has; None for an empty one. Raises DatabaseError."""
    with database.connection() as connection:
        return _current(connection)


def head() -> str:
    """The version that this program works with."""
    with _scripts() as config:
        return str(ScriptDirectory.from_config(config).get_current_head())


def at_head(database: Database) -> bool:
    """Whether the database has this program's version; quick enough for a health check. Raises DatabaseError."""
    return current(database) == head()


def check(database: Database) -> list[str]:
    """How the database's tables differ from the models; empty if they do not.

    Raises:
        DatabaseError: if it cannot be reached.
    """
    expected, found = head(), current(database)
    if found != expected:
        return [f"version {found or '(no tables)'}, expected {expected}: run `aotcache db upgrade`"]
    with database.connection() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        return [_readable(step) for step in compare_metadata(context, Base.metadata)]


def _readable(step: Any) -> str:
    # One change is a tuple that starts with its name; changes of one column come as a list of those.
    if isinstance(step, list):
        return "; ".join(_readable(part) for part in step)
    return " ".join(str(part) for part in step)


def _current(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def _refuse_newer(database: Database, connection: Connection, config: Config) -> None:
    found = _current(connection)
    if found is None:
        return
    try:
        ScriptDirectory.from_config(config).get_revision(found)
    except CommandError as error:
        raise DatabaseError(
            f"database {database.url} has version {found}, which this program does not know: "
            "it was upgraded by a newer aotcache. Run that one, or restore a backup",
            found=found,
        ) from error


@contextmanager
def _scripts() -> Iterator[Config]:
    # No alembic.ini: the migrations are in the package, and the database is the caller's.
    with as_file(files("aotcache.migrations")) as folder:
        config = Config()
        config.set_main_option("script_location", str(folder).replace("%", "%%"))
        yield config


__all__ = ["at_head", "check", "current", "head", "upgrade"]
