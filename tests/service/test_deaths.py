"""Deaths of workers: each counts once, and only for what is there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from aotcache.db.engine import Database
from aotcache.service import deaths as counting
from aotcache.service.deaths import Deaths, Told
from aotcache.service.index import Index
from aotcache.types import CacheKey
from tests.service.entries import enter


def told(number: int, digest: str, stage: str = "forward") -> Told:
    return Told(f"{number:032x}", digest, stage, 5.0)


def counts(index: Index) -> dict[CacheKey, int]:
    return {row.key: row.deaths for row in index.page().artifacts}


def test_deaths_are_counted_by_archive_and_shown_by_every_entry_that_names_it(
    index: Index, database: Database
) -> None:
    first, same = enter(index, b"one", call="a"), enter(index, b"one", call="b")
    other = enter(index, b"two", call="c")
    assert Deaths(database).record([told(1, first.digest, "open"), told(2, first.digest)]) == 2
    assert counts(index) == {first.key: 2, same.key: 2, other.key: 0}
    assert index.totals().deaths == 2


def test_what_is_told_again_counts_once(index: Index, database: Database) -> None:
    manifest, deaths = enter(index), Deaths(database)
    assert deaths.record([told(1, manifest.digest), told(1, manifest.digest)]) == 1
    assert deaths.record([told(1, manifest.digest), told(2, manifest.digest)]) == 1
    assert counts(index) == {manifest.key: 2}
    assert index.totals().deaths == 2


def test_archives_that_no_entry_names_are_passed_over(index: Index, database: Database) -> None:
    manifest = enter(index)
    assert Deaths(database).record([told(1, "f" * 64), told(2, manifest.digest)]) == 1
    assert index.totals().deaths == 1


def test_an_archive_that_goes_takes_its_deaths_along_and_not_those_of_the_total(
    index: Index, database: Database
) -> None:
    manifest = enter(index)
    Deaths(database).record([told(1, manifest.digest)])
    index.remove(manifest.key)
    enter(index)
    assert counts(index) == {manifest.key: 0}
    assert index.totals().deaths == 1


def test_whoever_may_read_cannot_fill_the_database(
    index: Index, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "MOST", 5)
    manifest, deaths = enter(index), Deaths(database)
    assert deaths.record([told(n, manifest.digest) for n in range(4)]) == 4
    assert deaths.record([told(n, manifest.digest) for n in range(4, 9)]) == 1
    assert deaths.record([told(9, manifest.digest)]) == 0
    assert counts(index) == {manifest.key: 5}


def test_many_at_once_lose_none(index: Index, database: Database) -> None:
    manifest, deaths = enter(index), Deaths(database)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: deaths.record([told(n, manifest.digest)]), range(40)))
    assert sum(found) == 40
    assert counts(index) == {manifest.key: 40}
