"""Publishes that are broken off between ref and row, over both databases and a store in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import func, select

from aotcache.db.engine import Database
from aotcache.db.models import PublishRow
from aotcache.errors import NotStored
from aotcache.manifest import Manifest
from aotcache.service.gc import Collector
from aotcache.service.index import Index
from aotcache.service.leases import Leases
from aotcache.service.publishes import Publishes
from aotcache.store import ObjectStore, open_store
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
            publish.writing = True
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


def test_what_was_refused_leaves_nothing(place: Place) -> None:
    place.publish(ONE, b"shared")
    with pytest.raises(NotStored), place.publishes.begun(TWO):
        raise NotStored("refused")
    assert place.broken_off() == 0
