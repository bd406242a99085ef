"""The file of an SQLite database, shared by processes."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from sqlalchemy import text

from aotcache.db.engine import Database

_OTHER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("INSERT INTO written VALUES ('there')")
connection.close()
"""


def test_another_process_that_ends_takes_no_log_away(tmp_path: Path) -> None:
    """SQLite's last connection deletes the log, and finds out by locks whether it is the last one.

    A process loses its locks on a file as soon as it closes the file anywhere, so a server that
    opens the file by itself would go on writing into a log that nobody else sees.
    """
    path = tmp_path / "aotcache.db"
    database = Database(f"sqlite:///{path}")
    try:
        with database.connection(write=True) as connection:
            connection.execute(text("CREATE TABLE written (who TEXT)"))
        with ExitStack() as several:  # more connections than one: all but the first find the file there
            for _ in range(3):
                several.enter_context(database.connection())
        subprocess.run([sys.executable, "-c", _OTHER, str(path)], check=True, timeout=60)
        with database.connection(write=True) as connection:
            connection.execute(text("INSERT INTO written VALUES ('here')"))
        other = Database(f"sqlite:///{path}")
        for reader in (database, other):
            with reader.connection() as connection:
                found = connection.execute(text("SELECT who FROM written ORDER BY who")).scalars().all()
            assert list(found) == ["here", "there"]
        other.close()
    finally:
        database.close()


def test_the_file_is_this_users_alone(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'made' / 'aotcache.db'}")
    with database.connection() as connection:
        connection.execute(text("SELECT 1"))
    database.close()
    assert (tmp_path / "made" / "aotcache.db").stat().st_mode & 0o777 == 0o600
