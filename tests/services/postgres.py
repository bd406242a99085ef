"""Databases for tests: SQLite in a file and a real PostgreSQL server, and fixtures that run a test over both.

A folder's conftest imports the fixtures that it wants:
`database` is migrated and new for the test, `database_url` the same by its address,
`empty_url` has no tables, `dialect` says which of the two it is.
"""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from aotcache.db import migrate
from aotcache.db.engine import Database

_USER = "aotcache"
_SECONDS = 60.0
_FAST = {
    "listen_addresses": "",
    "max_connections": "200",
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "shared_buffers": "64MB",
}
_MISSING = (
    "these tests need PostgreSQL's server programs, and none are in PATH or in /usr/lib/postgresql: "
    "run scripts/setup.sh, or apt-get install postgresql"
)


class Postgres:
    """One server of its own, on a socket in a folder of its own; nothing in it outlives the run.

    Args:
        settings: Of the server, over those that make tests fast.
    """

    def __init__(self, **settings: str) -> None:
        self._settings = _FAST | settings
        self._bin = _programs()
        # Not below pytest's folder, which is for its user alone: root must run the server as another one.
        self._folder = Path(tempfile.mkdtemp(prefix="aotcache-pg-"))
        self._numbers = itertools.count(1)
        self._as: dict[str, object] = {"cwd": self._folder, "stdin": subprocess.DEVNULL}
        if os.getuid() == 0:
            owner = pwd.getpwnam("postgres")
            os.chown(self._folder, owner.pw_uid, owner.pw_gid)
            self._as |= {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}
        data = self._folder / "data"
        self._run(
            "initdb", "-D", str(data), "-U", _USER, "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8", "-N"
        )
        self.start()

    def start(self) -> None:
        """Start the server over its data, and wait until it answers."""
        settings = [part for name, value in self._settings.items() for part in ("-c", f"{name}={value}")]
        with (self._folder / "log").open("ab") as log:
            self._server = subprocess.Popen(
                [
                    *_with_us(),
                    *(self._bin / "postgres", "-D", self._folder / "data", "-k", self._folder),
                    *settings,
                ],
                stdout=log,
                stderr=log,
                **self._as,  # type: ignore[call-overload]
            )
        self._wait()

    def url(self, name: str = "postgres") -> str:
        """The address of one of its databases."""
        return f"postgresql://{_USER}@/{name}?host={self._folder}"

    def create(self, template: str | None = None, name: str | None = None) -> str:
        """A new database, empty or like the template; returns its name."""
        name = name or f"t{next(self._numbers)}"
        self._command(f"CREATE DATABASE {name} TEMPLATE {template or 'template0'}")
        return name

    def drop(self, name: str) -> None:
        """Remove a database, whoever is connected to it."""
        self._command(f"DROP DATABASE {name} WITH (FORCE)")

    def close(self) -> None:
        """End the server at once; its data is not worth an orderly end."""
        self._server.send_signal(signal.SIGQUIT)
        self._server.wait(_SECONDS)
        shutil.rmtree(self._folder)

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [self._bin / program, *arguments],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            **self._as,  # type: ignore[call-overload]
        )
        assert done.returncode == 0, done.stderr

    def _command(self, text: str) -> None:
        with psycopg.connect(self.url(), autocommit=True, connect_timeout=10) as connection:
            connection.execute(text)  # type: ignore[arg-type, call-overload]

    def _wait(self) -> None:
        ends = time.monotonic() + _SECONDS
        while True:
            try:
                self._command("SELECT 1")
            except psycopg.OperationalError:
                log = (self._folder / "log").read_text()
                assert self._server.poll() is None, log
                assert time.monotonic() < ends, log
                time.sleep(0.05)
            else:
                return


def _with_us() -> list[str]:
    """Where that can be said, the server ends with this process, also if this one is killed."""
    setpriv = shutil.which("setpriv")
    return [] if setpriv is None else [setpriv, "--pdeathsig", "QUIT", "--"]


def _programs() -> Path:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[4]))
    on_path = shutil.which("initdb")
    if found:
        return found[-1].parent
    if on_path is not None:
        return Path(on_path).resolve().parent
    pytest.fail(_MISSING)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """The server of this run."""
    server = Postgres()
    yield server
    server.close()


@pytest.fixture(scope="session")
def migrated_postgres(postgres: Postgres) -> str:
    """The name of a migrated database that others are made like."""
    name = postgres.create(name="migrated")
    _upgrade(postgres.url(name))
    return name


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated file that others are copies of."""
    path = tmp_path_factory.mktemp("sqlite") / "migrated.db"
    _upgrade(f"sqlite:///{path}")
    return path


def _upgrade(url: str) -> None:
    database = Database(url)
    migrate.upgrade(database)
    database.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def dialect(request: pytest.FixtureRequest) -> str:
    """Which database the test runs on."""
    return str(request.param)


@pytest.fixture
def empty_url(dialect: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The address of a new database without tables."""
    if dialect == "sqlite":
        yield f"sqlite:///{tmp_path / 'empty.db'}"
        return
    server: Postgres = request.getfixturevalue("postgres")
    name = server.create()
    yield server.url(name)
    server.drop(name)


@pytest.fixture
def database_url(dialect: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The address of a new database with its tables."""
    if dialect == "sqlite":
        path = tmp_path / "aotcache.db"
        shutil.copyfile(request.getfixturevalue("migrated_sqlite"), path)
        yield f"sqlite:///{path}"
        return
    server: Postgres = request.getfixturevalue("postgres")
    name = server.create(request.getfixturevalue("migrated_postgres"))
    yield server.url(name)
    server.drop(name)


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """A new database with its tables."""
    opened = Database(database_url)
    yield opened
    opened.close()
