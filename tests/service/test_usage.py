from __future__ import annotations

import threading

import pytest
from sqlalchemy import event, text

from aotcache.db.engine import Database
from aotcache.errors import DatabaseError
from aotcache.service.index import Index
from aotcache.service.usage import Usage
from tests.service.entries import KEY, VARIANT, enter


def test_hits_are_counted_by_entry_and_time(index: Index, database: Database) -> None:
    first, second = enter(index, call="a"), enter(index, call="b")
    usage = Usage(database)
    for _ in range(3):
        usage.hit(first.key, str(first.variant))
    usage.flush()
    usage.hit(first.key, str(first.variant))
    usage.flush()
    found = {row.key: row for row in index.page().artifacts}
    assert found[first.key].hits == 4
    assert found[first.key].last_used >= found[first.key].created
    assert (found[second.key].hits, found[second.key].last_used) == (0, None)


def test_nothing_counted_is_nothing_written(database: Database) -> None:
    seen = []
    event.listen(database._engine, "before_cursor_execute", lambda *a: seen.append(a[2]))
    Usage(database).flush()
    assert seen == []


def test_what_was_flushed_is_not_counted_again(index: Index, database: Database) -> None:
    usage = Usage(database)
    usage.miss(KEY)
    usage.flush()
    usage.flush()
    assert index.totals().misses == 1


def test_hits_of_what_is_gone_meanwhile_count_in_all(index: Index, database: Database) -> None:
    usage = Usage(database)
    usage.hit(KEY, VARIANT)
    usage.flush()
    totals = index.totals()
    assert (totals.hits, totals.saved_seconds) == (1, 0)


def test_many_threads_and_flushes_lose_no_hit(index: Index, database: Database) -> None:
    manifests = [enter(index, call=f"x[{n}]") for n in range(5)]
    usage = Usage(database)

    def work() -> None:
        for number in range(100):
            manifest = manifests[number % 5]
            usage.hit(manifest.key, str(manifest.variant))
            if number % 25 == 0:
                usage.flush()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    usage.flush()
    assert [row.hits for row in index.page().artifacts] == [80] * 5


def test_what_could_not_be_written_is_kept_for_the_next_time(index: Index, database: Database) -> None:
    manifest = enter(index)
    usage = Usage(database)
    usage.hit(manifest.key, str(manifest.variant))
    with database.session(write=True) as session:
        session.execute(text("ALTER TABLE counters RENAME TO away"))
    with pytest.raises(DatabaseError, match="counters"):
        usage.flush()
    with database.session(write=True) as session:
        session.execute(text("ALTER TABLE away RENAME TO counters"))
    usage.hit(manifest.key, str(manifest.variant))
    usage.flush()
    assert index.page().artifacts[0].hits == 2
