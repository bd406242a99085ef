"""Connections to the service's database, and the few things its two dialects say differently.

SQLite lets one process write at a time, PostgreSQL locks what it is told to. `exclusive`
is the one primitive that all leases and builds stand on: while it is held, nobody else,
in any process, is inside it for the same key and variant. What is read inside is what was
committed last, and what is written inside is there for the next one or, after an error, not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout
from sqlalchemy import (
    ColumnElement,
    Connection,
    Double,
    Engine,
    Text,
    create_engine,
    event,
    func,
    literal,
    select,
)
from sqlalchemy import exc as sql
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import InstrumentedAttribute, Session
from sqlalchemy.sql.functions import FunctionElement

from aotcache.db.models import Base
from aotcache.errors import ConfigError, DatabaseError

CONNECT_SECONDS = 10
LOCK_SECONDS = 30
"""How long a statement waits for another writer before it gives up."""
STATEMENT_SECONDS = 60
IDLE_SECONDS = 300
"""How long PostgreSQL keeps a transaction whose client says nothing: a server that was lost in the
middle of a publish must not keep the entry locked. Longer than any write to a store may take."""
POOL = 20
OVERFLOW = 20
_SQLITE = (3, 35, 0)
"""The first with RETURNING."""


class now(FunctionElement[float]):
    """The database's own clock: seconds since the epoch at the moment of evaluation."""

    type = Double()
    inherit_cache = True
    name = "now"


@compiles(now, "sqlite")
def _sqlite_now(*_: Any, **__: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(now, "postgresql")
def _postgresql_now(*_: Any, **__: Any) -> str:
    # Not now(): that is when the transaction began, which can be long before a lock was granted.
    return "CAST(extract(epoch FROM clock_timestamp()) AS double precision)"


class Database:
    """One database; made for the life of a process, used by any number of its threads.

    Makes no connection until it is used. Not to be used across a fork.

    Args:
        url: `sqlite:////absolute/file.db` or `postgresql://user:password@host/name`.

    Raises:
        ConfigError: for any other address.
    """

    def __init__(self, url: str) -> None:
        self._url = _parse(url)
        self._engine = _engine(self._url)
        self._writing = self._engine.execution_options(aotcache_write=True)
        self._mine = threading.local()

    def __repr__(self) -> str:
        return f"Database({self.url!r})"

    @property
    def url(self) -> str:
        """Where it is, without the password."""
        plain = self._url.set(drivername=self._url.get_backend_name())
        return plain.render_as_string(hide_password=True)

    @property
    def dialect(self) -> Literal["sqlite", "postgresql"]:
        """Which of the two it is."""
        return "sqlite" if self._engine.dialect.name == "sqlite" else "postgresql"

    def close(self) -> None:
        """Close every connection that is not in use."""
        self._engine.dispose()

    @contextmanager
    def session(self, *, write: bool = False) -> Iterator[Session]:
        """One transaction: committed at the end, rolled back after an error.

        Inside another session of the same thread it is that session, and ends with it.

        Args:
            write: Whether it will write. On SQLite it then waits for other writers at its
                beginning, where that can do no harm.

        Raises:
            DatabaseError: if the database cannot be reached, is not at the version of this
                program, or another writer was in the way for too long.
        """
        outer: Session | None = getattr(self._mine, "session", None)
        if outer is not None:
            if write and not self._mine.write:
                raise RuntimeError("a session that writes was opened inside one that only reads")
            yield outer
            return
        with self._explained(), Session(self._writing if write else self._engine) as session, session.begin():
            self._mine.session, self._mine.write = session, write
            try:
                if write:
                    session.connection()  # waits here, and not only at the first statement
                yield session
            finally:
                del self._mine.session

    @contextmanager
    def exclusive(self, key: str, variant: str) -> Iterator[Session]:
        """A session that writes, alone for this key and variant; waits for its turn.

        Raises:
            DatabaseError: as `session`.
        """
        with self.session(write=True) as session:
            if self.dialect == "postgresql":
                session.execute(select(func.pg_advisory_xact_lock(_number(key, variant))))
            yield session

    @contextmanager
    def connection(self, *, write: bool = False, migrating: bool = False) -> Iterator[Connection]:
        """A bare connection in a transaction.

        Args:
            write: As in `session`.
            migrating: Whether it will change tables. SQLite changes one by making it anew, and would
                take the rows that refer to the old one along; so it looks at references at the end alone.

        Raises:
            DatabaseError: as `session`.
        """
        unchecked = migrating and self.dialect == "sqlite"
        engine = self._writing if write else self._engine
        with self._explained(), engine.connect() as connection:
            raw = connection.connection.driver_connection
            assert raw is not None
            try:
                if unchecked:
                    raw.execute("PRAGMA foreign_keys=OFF")
                with connection.begin():
                    yield connection
                    if unchecked and connection.exec_driver_sql("PRAGMA foreign_key_check").first():
                        raise DatabaseError(
                            f"database {self.url}: a change of its tables would leave rows astray"
                        )
            finally:
                if unchecked:
                    raw.execute("PRAGMA foreign_keys=ON")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (sql.OperationalError, sql.InterfaceError, sql.InternalError, sql.ProgrammingError) as error:
            raise DatabaseError(f"database {self.url}: {_cause(error)}", url=self.url) from error
        except sql.TimeoutError as error:
            raise DatabaseError(
                f"database {self.url}: all {POOL + OVERFLOW} connections stayed in use for "
                f"{LOCK_SECONDS} s; something holds them, or there are more requests than it can take",
                url=self.url,
            ) from error


def clean(value: str, limit: int | None = None) -> str:
    """`value` as both databases can store and compare it: no NUL, no lone surrogate, at most `limit` characters.

    What had any is changed so that it equals nothing that was stored without.
    """
    return value.encode("utf-8", "replace").decode().replace("\0", "\ufffd")[:limit]


def among(session: Session, column: InstrumentedAttribute[str], values: Iterable[str]) -> ColumnElement[bool]:
    """`column IN values` with one parameter, however many values there are."""
    plain = [clean(value) for value in values]
    if session.get_bind().dialect.name == "sqlite":
        listed = func.json_each(json.dumps(plain)).table_valued("value")
        return column.in_(select(listed.c.value))
    # Not of the type of the column: PostgreSQL would cut what is longer, and find what nobody asked for.
    return column == func.any(literal(plain, postgresql.ARRAY(Text())))


def upsert(
    session: Session,
    model: type[Base],
    rows: Sequence[Mapping[str, Any]],
    *,
    update: Sequence[str] = (),
) -> None:
    """Insert rows; where the primary key is there already, set the columns in `update`, or leave the row alone."""
    if not rows:
        return
    table = model.__table__
    keys = [column.name for column in table.primary_key]
    statement: Any
    if session.get_bind().dialect.name == "sqlite":
        statement = sqlite.insert(model)
    else:
        statement = postgresql.insert(model)
    if update:
        changes = {name: statement.excluded[name] for name in update}
        statement = statement.on_conflict_do_update(index_elements=keys, set_=changes)
    else:
        statement = statement.on_conflict_do_nothing(index_elements=keys)
    session.execute(statement.values(list(rows)))


def moment(session: Session) -> float:
    """The database's clock, now."""
    return float(session.execute(select(now())).scalar_one())


def _number(key: str, variant: str) -> int:
    """The advisory lock of an entry: two entries with one number would only wait for each other."""
    named = hashlib.sha256(f"aotcache {key} {variant}".encode("utf-8", "replace"))
    return int.from_bytes(named.digest()[:8], "big", signed=True)


def _parse(address: str) -> URL:
    expected = "expected sqlite:////absolute/path/to/file.db or postgresql://user:password@host:5432/name"
    try:
        url = make_url(address)
    except sql.ArgumentError:
        raise ConfigError(f"the database's address cannot be understood; {expected}") from None
    if url.drivername in ("postgresql", "postgres", "postgresql+psycopg"):
        return url.set(drivername="postgresql+psycopg")
    if url.drivername not in ("sqlite", "sqlite+pysqlite"):
        raise ConfigError(f"a database of kind {url.drivername!r} is not supported; {expected}")
    if url.database in (None, "", ":memory:"):
        raise ConfigError(f"a database in memory would be another one for every connection; {expected}")
    path = Path(str(url.database)).expanduser().absolute()
    return url.set(drivername="sqlite+pysqlite", database=str(path))


def _engine(url: URL) -> Engine:
    shared = {"pool_size": POOL, "max_overflow": OVERFLOW, "pool_timeout": LOCK_SECONDS}
    if url.get_backend_name() == "sqlite":
        engine = create_engine(url, connect_args={"timeout": LOCK_SECONDS, "isolation_level": None}, **shared)
        path = Path(str(url.database))
        event.listen(engine, "do_connect", lambda *_: _make_file(path))
        event.listen(engine, "connect", lambda raw, _: _set_up_sqlite(raw, path))
        event.listen(engine, "begin", _begin_sqlite)
        return engine
    limits = {
        "lock_timeout": LOCK_SECONDS,
        "statement_timeout": STATEMENT_SECONDS,
        "idle_in_transaction_session_timeout": IDLE_SECONDS,
    }
    connect = {
        "connect_timeout": CONNECT_SECONDS,
        "application_name": "aotcache",
        # Indexes that are read all the time are in memory: a thousand look-ups there beat reading the table.
        "options": " ".join(
            [*(f"-c {name}={limit}s" for name, limit in limits.items()), "-c random_page_cost=1.1"]
        ),
    }
    return create_engine(
        url, connect_args=connect, pool_pre_ping=True, isolation_level="READ COMMITTED", **shared
    )


def _make_file(path: Path) -> None:
    """The file holds what tokens are checked against: nobody else's to read."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # One that is there is not touched: closing it would drop every lock that this process's
        # connections hold on it, and another process would delete the log that they still read and write.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        pass
    except OSError as error:
        raise DatabaseError(f"database {path} cannot be opened: {error}", path=str(path)) from error


def _set_up_sqlite(raw: Any, path: Path) -> None:
    cursor = raw.cursor()
    try:
        found = tuple(
            int(part) for part in cursor.execute("SELECT sqlite_version()").fetchone()[0].split(".")
        )
        if found < _SQLITE:
            raise ConfigError(
                f"this Python has SQLite {'.'.join(map(str, found))}; 3.35 or newer is needed: "
                "use a newer Python, or PostgreSQL (AOTCACHE_DATABASE=postgresql://...)"
            )
        cursor.execute("PRAGMA foreign_keys=ON")
        cursor.execute("PRAGMA synchronous=NORMAL")
        if cursor.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            # SQLite answers "locked" at once, without waiting, when two switch at the same time.
            with FileLock(f"{path}.lock", timeout=LOCK_SECONDS):
                cursor.execute("PRAGMA journal_mode=WAL")
    except Timeout as error:
        raise DatabaseError(
            f"database {path}: another process held {path}.lock for {LOCK_SECONDS} s", path=str(path)
        ) from error
    finally:
        cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    # A transaction that begins with a read and then writes fails at once if another one wrote in between.
    write = connection.get_execution_options().get("aotcache_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


def _cause(error: sql.DBAPIError) -> str:
    said = str(error.orig).strip().splitlines()
    state = getattr(error.orig, "sqlstate", None)
    first = said[0] if said else type(error.orig).__name__
    if state in ("42P01", "42703") or "no such table" in first or "no such column" in first:
        return f"{first}; its tables are not those of this program: run `aotcache db upgrade`"
    if state in ("55P03", "57014") or "database is locked" in first:
        return f"{first}; another writer was in the way for too long: try again"
    return first


__all__ = ["Database", "among", "clean", "moment", "now", "upsert"]
