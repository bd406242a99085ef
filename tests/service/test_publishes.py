"""Publishes that are broken off between ref and row, over both databases and a store in a folder."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, func, select

from aotcache.db.engine import Database
from aotcache.db.models import PublishRow
from aotcache.errors import DatabaseError, NotStored, StoreError
from aotcache.manifest import Manifest
from aotcache.service.gc import Collector, _Place
from aotcache.service.index import Index
from aotcache.service.leases import Leases
from aotcache.service.publishes import Publish, Publishes
from aotcache.store import ObjectStore, layout, open_store
from aotcache.store.evict import DAY, Limits
from aotcache.types import CacheKey, Digest
from tests.manifests import make_manifest, write_archive


class Killed(Exception):
    """Stands where a process ends."""


class Place:
    """A store, its index, and what publishes and removes there."""

    def __init__(self, database: Database, folder: Path) -> None:
        store = open_store(folder / "store")
        assert isinstance(store, ObjectStore)
        self.database, self.folder, self.store = database, folder, store
        self.index = Index(database)
        self.publishes = Publishes(database, self.index, store)
        self.collector = Collector(database, self.index, Leases(database), store)

    def publish(self, manifest: Manifest, data: bytes, *, dies: str | None = None) -> None:
        """As the service does; the same file is sent each time."""
        self.store.put_blob(manifest.digest, write_archive(self.folder, data))
        with self.publishes.begun(manifest) as publish, self.database.session(write=True) as session:
            if dies == "before":
                raise Killed
            publish.write(session)
            if dies == "between":
                raise Killed
            self.store.put_ref(manifest)
            if dies == "after":
                raise Killed
            entry = self.store.entry(manifest.key, manifest.variant)
            assert entry is not None
            self.index.add(manifest, manifest.document(), modified=entry.modified)
            publish.entered(session)

    def broken_off(self) -> int:
        with self.database.session() as session:
            return session.execute(select(func.count()).select_from(PublishRow)).scalar_one()

    def remove(self, manifest: Manifest) -> None:
        assert self.collector.remove(manifest.key, str(manifest.variant))[0]

    def indexed(self, manifest: Manifest) -> bool:
        return bool(self.index.resolve([manifest.key])[manifest.key])


@pytest.fixture
def place(database: Database, tmp_path: Path) -> Place:
    return Place(database, tmp_path)


ONE, TWO = make_manifest(b"shared", call="one"), make_manifest(b"shared", call="two")


def test_an_archive_does_not_go_while_a_ref_without_its_row_has_it(place: Place) -> None:
    place.publish(ONE, b"shared")
    with pytest.raises(Killed):
        place.publish(TWO, b"shared", dies="after")
    place.remove(ONE)
    [left] = place.store.entries()
    assert (left.key, left.problem) == (TWO.key, None)
    assert (place.publishes.finish(), place.indexed(TWO)) == (0, False)  # it may be going on
    assert (place.publishes.finish(seconds=0), place.indexed(TWO)) == (1, True)
    assert place.broken_off() == 0
    place.remove(TWO)
    assert place.store.usage().blobs == 0


def test_the_same_publish_once_more_enters_it(place: Place) -> None:
    with pytest.raises(Killed):
        place.publish(TWO, b"shared", dies="after")
    place.publish(TWO, b"shared")
    assert (place.indexed(TWO), place.broken_off()) == (True, 1)
    place.publish(ONE, b"shared")
    place.remove(TWO)
    place.remove(ONE)
    assert place.store.usage().blobs == 0
    assert (place.publishes.finish(seconds=0), place.broken_off()) == (0, 0)


@pytest.mark.parametrize(("dies", "left"), [("before", 0), ("between", 1)])
def test_what_left_no_ref_holds_nothing(place: Place, dies: str, left: int) -> None:
    place.publish(ONE, b"shared")
    with pytest.raises(Killed):
        place.publish(TWO, b"shared", dies=dies)
    assert place.broken_off() == left
    place.remove(ONE)
    assert place.store.usage().blobs == 0
    assert (place.publishes.finish(seconds=0), place.broken_off()) == (0, 0)


def test_an_archive_does_not_go_while_its_publish_is_being_finished(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another service enters it between the collector's two questions."""
    with pytest.raises(Killed):
        place.publish(TWO, b"shared", dies="after")
    os.utime(place.folder / "store" / layout.blob(TWO.digest), (time.time() - 3 * DAY,) * 2)
    finishing: list[Future[int]] = []
    with ThreadPoolExecutor(1) as pool:

        def between(of: Callable[[Digest], bool]) -> Callable[[Digest], bool]:
            def names(digest: Digest) -> bool:
                answer = of(digest)
                if not finishing:
                    finishing.append(pool.submit(place.publishes.finish, seconds=0))
                    wait(finishing, 0.5)
                return answer

            return names

        monkeypatch.setattr(place.collector._index, "names", between(place.index.names))
        monkeypatch.setattr(place.collector._publishes, "names", between(place.publishes.names))
        place.collector.round(Limits(), cursor=_Place("archives").text(0))
    assert [finished.result() for finished in finishing] == [1]
    assert place.indexed(TWO)
    [left] = place.store.entries()
    assert (left.key, left.problem) == (TWO.key, None)


def test_who_waited_until_the_note_was_gone_writes_nothing(place: Place) -> None:
    with place.publishes.begun(TWO) as publish, place.database.session(write=True) as session:
        session.execute(delete(PublishRow))  # as `finish` does
        with pytest.raises(DatabaseError, match="send it again"):
            publish.write(session)
    assert not publish.writing


def test_a_note_that_somebody_took_before_the_ref_was_there_is_made_again(place: Place) -> None:
    place.store.put_blob(TWO.digest, write_archive(place.folder, b"shared"))
    publish = Publish(place.database, TWO)
    publish.note()
    with place.database.session(write=True) as session:
        publish.write(session)
    assert place.publishes.finish(seconds=0) == 0  # its transaction was lost, and the ref comes late
    place.store.put_ref(TWO)
    publish.failed()
    assert (place.broken_off(), place.publishes.finish(seconds=0), place.indexed(TWO)) == (1, 1, True)


def test_one_that_cannot_be_read_keeps_no_other_waiting(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for made in (ONE, TWO):
        with pytest.raises(Killed):
            place.publish(made, b"shared", dies="after")
    entry, bad = place.store.entry, min(ONE, TWO, key=lambda made: made.key)

    def reading(key: CacheKey, variant: Any) -> Any:
        if key == bad.key:
            raise StoreError("cannot read")
        return entry(key, variant)

    monkeypatch.setattr(place.store, "entry", reading)
    with pytest.raises(StoreError, match="cannot read"):
        place.publishes.finish(seconds=0)
    assert (place.indexed(ONE), place.indexed(TWO)) == (bad is TWO, bad is ONE)
    assert place.broken_off() == 1


def test_what_was_refused_leaves_nothing(place: Place) -> None:
    place.publish(ONE, b"shared")
    with pytest.raises(NotStored), place.publishes.begun(TWO):
        raise NotStored("refused")
    assert place.broken_off() == 0
