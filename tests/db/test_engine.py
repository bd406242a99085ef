from __future__ import annotations

import shutil
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import select, text

from aotcache.db import engine
from aotcache.db.engine import Database, among, clean, moment, upsert
from aotcache.db.models import BlobRow, CounterRow
from aotcache.errors import ConfigError, DatabaseError
from aotcache.service.index import Index
from tests.service.entries import enter


def count(database: Database) -> int:
    with database.session() as session:
        return session.get_one(CounterRow, "hits").value


def add_one(session) -> None:
    row = session.get(CounterRow, "hits", populate_existing=True)
    row.value += 1
    session.flush()


@pytest.mark.parametrize(
    "url",
    ["", "nonsense", "mysql://host/name", "sqlite://", "sqlite:///:memory:", "postgresql+asyncpg://h/n"],
)
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="expected sqlite:////absolute"):
        Database(url)


def test_a_password_is_not_shown(tmp_path: Path) -> None:
    database = Database("postgresql://user:s3cret@127.0.0.1:1/name")
    assert "s3cret" not in repr(database)
    with pytest.raises(DatabaseError) as raised, database.session() as session:
        moment(session)
    assert "s3cret" not in str(raised.value) + str(raised.value.details)
    database.close()


def test_the_dialect_is_told(database: Database, dialect: str) -> None:
    assert database.dialect == dialect


def test_the_clock_is_the_databases_own(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    with database.session() as session:
        first, second = moment(session), moment(session)
    assert abs(first - real) < 5
    assert second >= first


def test_the_clock_goes_on_within_a_transaction(database: Database) -> None:
    with database.session() as session:
        first = moment(session)
        while moment(session) == first:
            assert moment(session) < first + 5


def test_an_error_undoes_everything(database: Database) -> None:
    def fail() -> None:
        with database.session(write=True) as session:
            add_one(session)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert count(database) == 0


def test_a_session_inside_another_is_the_same_transaction(database: Database) -> None:
    with database.session(write=True) as outer:
        with database.exclusive("key", "variant") as inner:
            assert inner is outer
            add_one(inner)
        with database.session() as reading:
            assert reading.get_one(CounterRow, "hits").value == 1
    assert count(database) == 1


def test_writing_inside_a_session_that_reads_is_a_mistake(database: Database) -> None:
    with database.session(), pytest.raises(RuntimeError, match="only reads"):
        with database.session(write=True):
            pytest.fail("entered")


def test_who_is_alone_with_an_entry_reads_what_was_written_last(database: Database) -> None:
    def add(_: int) -> None:
        with database.exclusive("key", "variant") as session:
            add_one(session)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(40)))
    assert count(database) == 40


def test_two_databases_objects_exclude_each_other_too(database: Database, database_url: str) -> None:
    other = Database(database_url)
    inside, met = threading.Event(), []

    def second() -> None:
        inside.wait(10)
        with other.exclusive("key", "variant") as session:
            met.append(session.get_one(CounterRow, "hits").value)

    thread = threading.Thread(target=second)
    thread.start()
    with database.exclusive("key", "variant") as session:
        inside.set()
        thread.join(0.3)
        add_one(session)
    thread.join(20)
    other.close()
    assert met == [1]


def test_a_wait_has_an_end(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "LOCK_SECONDS", 1)
    first, second = Database(database_url), Database(database_url)
    with first.exclusive("key", "variant"):
        with pytest.raises(DatabaseError, match="another writer was in the way"):
            with second.exclusive("key", "variant"):
                pytest.fail("entered")
    first.close()
    second.close()


def test_a_file_is_for_its_user_alone_and_in_write_ahead_mode(tmp_path: Path) -> None:
    path = tmp_path / "service" / "aotcache.db"
    database = Database(f"sqlite:///{path}")
    with database.session(write=True) as session:
        settings = {
            name: session.execute(text(f"PRAGMA {name}")).scalar()
            for name in ("journal_mode", "foreign_keys", "synchronous", "busy_timeout")
        }
    database.close()
    assert settings == {"journal_mode": "wal", "foreign_keys": 1, "synchronous": 1, "busy_timeout": 30_000}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_place_where_no_file_can_be_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    database = Database(f"sqlite:///{tmp_path}/file/aotcache.db")
    with pytest.raises(DatabaseError, match=r"file/aotcache\.db"), database.session() as session:
        moment(session)
    database.close()


def test_a_table_that_is_made_anew_keeps_the_rows_that_refer_to_it(
    migrated_sqlite: Path, tmp_path: Path
) -> None:
    shutil.copyfile(migrated_sqlite, tmp_path / "copy.db")
    database = Database(f"sqlite:///{tmp_path}/copy.db")
    enter(Index(database))
    with database.connection(write=True, migrating=True) as connection:
        for step in ("CREATE TABLE anew AS SELECT * FROM artifacts", "DROP TABLE artifacts"):
            connection.execute(text(step))
        connection.execute(text("ALTER TABLE anew RENAME TO artifacts"))
        connection.execute(text("CREATE UNIQUE INDEX anew ON artifacts (key, variant)"))
    with database.session() as session:
        assert session.execute(text("SELECT count(*) FROM usage")).scalar_one() == 1
        assert session.execute(text("PRAGMA foreign_keys")).scalar_one() == 1

    def lose_rows() -> None:
        with database.connection(write=True, migrating=True) as connection:
            connection.execute(text("DELETE FROM artifacts"))

    with pytest.raises(DatabaseError, match="astray"):
        lose_rows()
    assert len(Index(database).page().artifacts) == 1
    database.close()


def test_many_open_a_new_file_at_once(tmp_path: Path) -> None:
    databases = [Database(f"sqlite:///{tmp_path}/new.db") for _ in range(12)]

    def use(database: Database) -> float:
        with database.session(write=True) as session:
            return moment(session)

    with ThreadPoolExecutor(12) as pool:
        assert len(list(pool.map(use, databases))) == 12
    for database in databases:
        database.close()


@pytest.mark.parametrize(
    ("given", "kept"), [("plain é 中", "plain é 中"), ("a\0b", "a\ufffdb"), ("a\ud800b", "a?b"), ("", "")]
)
def test_texts_that_can_be_stored_come_back(database: Database, given: str, kept: str) -> None:
    assert clean(given) == kept
    with database.session(write=True) as session:
        session.add(BlobRow(digest=clean(given), size=1, stored=1.0))
    with database.session() as session:
        assert session.scalars(select(BlobRow.digest)).all() == [kept]


def test_one_parameter_asks_for_many(database: Database) -> None:
    with database.session(write=True) as session:
        upsert(session, BlobRow, [{"digest": f"{n}", "size": n, "stored": 1.0} for n in range(500)])
    wanted = [f"{n}" for n in range(0, 100_000, 100)]
    with database.session() as session:
        found = session.scalars(select(BlobRow.digest).where(among(session, BlobRow.digest, wanted)))
        assert sorted(map(int, found)) == [0, 100, 200, 300, 400]
        assert session.scalars(select(BlobRow.digest).where(among(session, BlobRow.digest, []))).all() == []


def test_a_text_that_is_too_long_is_not_cut_to_one_that_is_there(database: Database) -> None:
    with database.session(write=True) as session:
        upsert(session, BlobRow, [{"digest": "a" * 64, "size": 1, "stored": 1.0}])
    with database.session() as session:
        for asked in (among(session, BlobRow.digest, ["a" * 65]), BlobRow.digest == "a" * 65):
            assert session.scalars(select(BlobRow.digest).where(asked)).all() == []


def test_upsert_sets_what_it_is_told_to_and_leaves_the_rest(database: Database) -> None:
    row = {"digest": "a", "size": 1, "stored": 1.0}
    with database.session(write=True) as session:
        upsert(session, BlobRow, [row])
        upsert(session, BlobRow, [row | {"size": 2, "stored": 2.0}], update=["size"])
        upsert(session, BlobRow, [row | {"size": 3}])
    with database.session() as session:
        found = session.get_one(BlobRow, "a")
        assert (found.size, found.stored) == (2, 1.0)
