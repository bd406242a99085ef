"""Collections at a service, over both databases and a store in a folder."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from aotcache.db.engine import Database
from aotcache.errors import BadCursor
from aotcache.manifest import Manifest
from aotcache.service import gc
from aotcache.service.gc import Collector, Round
from aotcache.service.index import Index
from aotcache.service.leases import Lease, Leases
from aotcache.service.usage import Usage
from aotcache.store import ObjectStore, layout, open_store
from aotcache.store.evict import DAY, Limits
from aotcache.types import CacheKey, sha256
from tests.manifests import make_manifest, write_archive
from tests.service import racers

ROUNDS = 12


class Place:
    """A store, its index and what collects in them."""

    def __init__(self, database: Database, folder: Path) -> None:
        store = open_store(folder / "store")
        assert isinstance(store, ObjectStore)
        self.database, self.folder, self.store = database, folder, store
        self.index, self.leases = Index(database), Leases(database)
        self.collector = Collector(database, self.index, self.leases, store)

    def put(self, data: bytes, age: float = 0.0, **what: Any) -> Manifest:
        manifest = make_manifest(data, **{"call": f"call of {data[:9]!r}", **what})
        assert self.store.publish(manifest, write_archive(self.folder, data))
        entry = self.store.entry(manifest.key, manifest.variant)
        assert entry is not None
        self.index.add(manifest, manifest.document(), modified=entry.modified)
        self.age(manifest, age)
        return manifest

    def age(self, manifest: Manifest, age: float) -> None:
        with self.database.session(write=True) as session:
            session.execute(
                text("UPDATE usage SET last_used = last_used - :age WHERE key = :key AND variant = :variant"),
                {"age": age, "key": manifest.key, "variant": str(manifest.variant)},
            )

    def old_file(self, path: str, age: float = 3 * DAY) -> None:
        os.utime(self.folder / "store" / path, (time.time() - age,) * 2)

    def collect(self, **limits: Any) -> list[Round]:
        """All rounds of a collection."""
        rounds: list[Round] = []
        options = {name: limits.pop(name) for name in ("locked", "dry_run", "seconds") if name in limits}
        while True:
            done = self.collector.round(
                Limits(**limits), cursor=rounds[-1].next if rounds else None, **options
            )
            rounds.append(done)
            if done.next is None:
                return rounds
            assert len(rounds) < 2000

    def there(self, *manifests: Manifest) -> list[bool]:
        """Which of them are in the index and in the store, or in neither."""
        found = []
        for manifest in manifests:
            indexed = any(
                r.digest == manifest.digest for r in self.index.resolve([manifest.key])[manifest.key]
            )
            assert indexed is (manifest in self.store.lookup(manifest.key))
            found.append(indexed)
        return found


@pytest.fixture
def place(database: Database, tmp_path: Path) -> Place:
    return Place(database, tmp_path)


def reasons(rounds: list[Round]) -> list[tuple[bool, str]]:
    return [(d.remove, d.reason) for done in rounds for d in done.decisions]


def test_what_was_used_longest_ago_goes_until_the_limit_is_kept(place: Place) -> None:
    made = [place.put(bytes([n]) * 100, age=1000.0 - n) for n in range(4)]
    usage = Usage(place.database)
    usage.hit(made[0].key, str(made[0].variant))
    usage.flush()
    [tried] = place.collect(max_bytes=250, dry_run=True)
    assert place.there(*made) == [True] * 4
    [done] = place.collect(max_bytes=250)
    for one in (tried, done):
        assert (one.before, one.after, one.over) == (400, 200, 0)
        assert [d.candidate.key for d in one.decisions] == [m.key for m in made[1:3]]
    assert place.there(*made) == [True, False, False, True]
    assert place.store.usage().blobs == 2
    assert place.index.totals().bytes == 200


def test_by_age_goes_what_nobody_asked_for(place: Place) -> None:
    old, young = place.put(b"old", age=500.0), place.put(b"young")
    assert reasons(place.collect(max_age=100.0)) == [(True, "age")]
    assert place.there(old, young) == [False, True]


def test_pins_lock_files_and_live_leases_keep_what_the_limits_would_take(place: Place) -> None:
    pinned, locked, built, free = (place.put(name, age=500.0) for name in (b"1", b"2", b"3", b"4"))
    place.store.pin(pinned.key, "release")
    lease = place.leases.acquire(built.key, str(built.variant), "builder")
    assert isinstance(lease, Lease)
    [done] = place.collect(max_bytes=0, max_age=1.0, locked={locked.digest})
    assert place.there(pinned, locked, built, free) == [True, True, True, False]
    assert done.over == 3
    assert sorted(d.reason for d in done.decisions) == ["age", "leased", "locked", "pinned"]
    place.leases.release(lease.id, lease.token)
    place.collect(max_bytes=0)
    assert place.there(pinned, locked, built) == [True, False, False]


def test_an_archive_goes_with_the_last_entry_that_names_it(place: Place) -> None:
    one, two = place.put(b"shared", age=500.0, call="one"), place.put(b"shared", call="two")
    place.collect(max_age=100.0)
    assert place.there(one, two) == [False, True]
    one = place.put(b"shared", age=500.0, call="one")
    [done] = place.collect(max_bytes=0)
    assert place.there(one, two) == [False, False]
    assert (len(done.decisions), done.before, done.after) == (2, 6, 0)
    assert place.store.usage().blobs == 0


@pytest.mark.parametrize("dry_run", [True, False])
def test_rounds_go_on_where_the_one_before_has_ended(
    place: Place, monkeypatch: pytest.MonkeyPatch, dry_run: bool
) -> None:
    monkeypatch.setattr(gc, "_PAGE", 3)
    made = [place.put(bytes([n]) * 10, age=1000.0 - n) for n in range(20)]
    place.store.pin(made[0].key, "")
    rounds = place.collect(max_bytes=50, dry_run=dry_run, seconds=0.0)
    assert len(rounds) > 5
    removed = [d.candidate.key for done in rounds for d in done.decisions if d.remove]
    assert removed == [m.key for m in made[1:16]]
    assert (rounds[-1].after, rounds[-1].over) == (50, 0)
    assert place.there(*made) == [True] * 20 if dry_run else [True] + [False] * 15 + [True] * 4


@pytest.mark.parametrize(
    "cursor",
    ["", "x", "W10", gc.pack("others", 1.0, "", "", 0, 0, 0), gc.pack("refs", 1.0, "", "", 256, 0, 0)],
)
def test_a_cursor_that_no_round_handed_out_is_refused(place: Place, cursor: str) -> None:
    with pytest.raises(BadCursor):
        place.collector.round(Limits(), cursor=cursor)


def test_archives_that_no_entry_names_go_after_a_day(place: Place) -> None:
    uploads = [sha256(data) for data in (b"old", b"young", b"locked", b"pinned")]
    for data in (b"old", b"young", b"locked", b"pinned"):
        place.store.put_blob(sha256(data), write_archive(place.folder, data))
    old, _young, locked, pinned = uploads
    for digest in (old, locked, pinned):
        place.old_file(layout.blob(digest))
    place.store.pin(pinned, "")
    named = place.put(b"named")
    place.old_file(layout.blob(named.digest))
    assert [d.remove for d in place.collect(locked={locked}, dry_run=True)[-1].decisions].count(True) == 1
    place.collect(locked={locked})
    found = [place.store.blob_size(digest) is not None for digest in (*uploads, named.digest)]
    assert found == [False, True, True, True, True]


def test_a_store_that_is_not_in_the_index_keeps_its_archives(place: Place) -> None:
    """As after a move to another database, before the index is made anew."""
    manifest = make_manifest(b"not indexed")
    assert place.store.publish(manifest, write_archive(place.folder, b"not indexed"))
    place.old_file(layout.blob(manifest.digest))
    place.old_file(layout.ref(manifest.key, str(manifest.variant)))
    [done] = place.collect(max_bytes=0, max_age=1.0)
    assert (done.decisions, len(done.notes)) == ([], 1)
    assert "db reindex" in done.notes[0]
    assert place.store.lookup(manifest.key) == [manifest]
    place.index.reindex(place.store)
    place.age(manifest, 100.0)
    assert place.collect(max_age=1.0)[-1].notes == []
    assert place.store.lookup(manifest.key) == []


def test_a_ref_that_was_replaced_behind_the_index_keeps_its_archive(place: Place) -> None:
    before = place.put(b"before")
    after = make_manifest(b"after", components=before.components, key=before.key)
    assert place.store.publish(after, write_archive(place.folder, b"after"), replace=True)
    place.old_file(layout.blob(after.digest))
    place.old_file(layout.ref(after.key, str(after.variant)), 2 * DAY)
    assert len(place.collect()[-1].notes) == 1
    assert place.store.lookup(after.key) == [after]


def test_refs_that_are_misses_go_by_their_rules(place: Place) -> None:
    broken, gone, newer = place.put(b"broken"), place.put(b"gone"), place.put(b"newer")
    folder = place.folder / "store"
    (folder / layout.ref(broken.key, str(broken.variant))).write_bytes(b"{")
    (folder / layout.ref(newer.key, str(newer.variant))).write_bytes(b'{"schema": 99}')
    (folder / layout.blob(gone.digest)).unlink()
    for manifest in (broken, gone, newer):
        place.index.remove(manifest.key)
        place.old_file(layout.ref(manifest.key, str(manifest.variant)))
    for manifest in (broken, newer):
        place.old_file(layout.blob(manifest.digest))
    rounds = place.collect()
    assert set(reasons(rounds)) == {(True, "gone"), (False, "newer")}
    rounds = place.collect(max_age=100.0)
    assert set(reasons(rounds)) == {(True, "age"), (False, "newer")}
    # While there is a ref that cannot be read, nothing says which archives it names.
    assert len(rounds[-1].notes) == 1
    assert place.store.usage().blobs == 2
    place.store.delete_ref(newer.key, newer.variant)
    place.collect()
    assert place.store.usage().blobs == 0


@pytest.mark.parametrize("document", [b'{"schema": 99}', b"{"])
def test_a_ref_that_became_unreadable_behind_the_index_is_not_taken_for_what_it_was(
    place: Place, document: bytes
) -> None:
    manifest = place.put(b"readable", age=500.0)
    path = place.folder / "store" / layout.ref(manifest.key, str(manifest.variant))
    path.write_bytes(document)
    assert (False, "busy") in reasons(place.collect(max_bytes=0, max_age=100.0))
    assert path.read_bytes() == document
    assert place.store.blob_size(manifest.digest) is not None


def test_what_is_used_leased_replaced_or_pinned_meanwhile_stays(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def used(manifest: Manifest) -> None:
        usage = Usage(place.database)
        usage.hit(manifest.key, str(manifest.variant))
        usage.flush()

    def leased(manifest: Manifest) -> None:
        place.leases.acquire(manifest.key, str(manifest.variant), "builder")

    def replaced(manifest: Manifest) -> None:
        new = make_manifest(b"new", components=manifest.components, key=manifest.key)
        assert place.store.publish(new, write_archive(place.folder, b"new"), replace=True)
        place.index.add(new, new.document(), modified=time.time())

    def pinned(manifest: Manifest) -> None:
        place.store.pin(manifest.key, "")

    acts: list[Callable[[Manifest], None]] = [used, leased, replaced, pinned]
    for act in acts:
        manifest = place.put(act.__name__.encode(), age=500.0)
        remove = place.collector.remove

        def late(key: CacheKey, variant: str, **planned: Any) -> tuple[bool, int]:
            act(manifest)  # noqa: B023
            return remove(key, variant, **planned)  # noqa: B023

        with monkeypatch.context() as patch:
            patch.setattr(place.collector, "remove", late)
            [done] = place.collect(max_age=100.0)
        found = [(d.remove, d.reason) for d in done.decisions if d.candidate.key == manifest.key]
        assert found == [(False, "busy")], act.__name__
        assert done.after == done.before
        assert len(place.store.lookup(manifest.key)) == 1


def test_what_a_killed_collection_left_in_the_index_goes_with_its_archive(place: Place) -> None:
    manifest = place.put(b"half", age=500.0)
    place.store.delete_ref(manifest.key, manifest.variant)
    assert reasons(place.collect(max_age=100.0)) == [(True, "age")]
    assert place.there(manifest) == [False]
    usage, totals = place.store.usage(), place.index.totals()
    assert (usage.refs, usage.blobs, totals.artifacts, totals.bytes) == (0, 0, 0, 0)


def test_a_round_reads_no_more_of_a_large_index_than_it_needs(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc, "_PAGE", 4)
    for number in range(40):
        place.put(bytes([number]) * 10, age=1000.0 - number)
    pages: list[int] = []
    oldest = place.index.oldest

    def counted(limit: int, after: tuple[float, str, str] | None = None) -> Any:
        found = oldest(limit, after)
        pages.append(len(found))
        return found

    monkeypatch.setattr(place.index, "oldest", counted)
    assert [len(done.decisions) for done in place.collect(max_bytes=350)] == [5]
    assert pages == [4, 4]
    pages.clear()
    place.collect(max_bytes=350, max_age=5000.0)
    assert pages == [4]


def test_two_collections_and_publishers_at_once_lose_nothing(
    database: Database, database_url: str, tmp_path: Path
) -> None:
    place = Place(database, tmp_path)
    context = multiprocessing.get_context("spawn")
    stop = tmp_path / "stop"
    publishers = context.Process(target=racers.publish_both, args=(database_url, str(tmp_path), ROUNDS))
    collections = context.Process(target=racers.collect_until, args=(database_url, str(tmp_path), str(stop)))
    publishers.start()
    collections.start()
    publishers.join(120)
    stop.touch()
    collections.join(60)
    assert (publishers.exitcode, collections.exitcode) == (0, 0)
    rows = {artifact.key: artifact.digest for artifact in place.index.page(limit=1000).artifacts}
    stored = {entry.key: entry for entry in place.store.entries()}
    assert rows.keys() == stored.keys()
    for key, entry in stored.items():
        assert entry.problem is None
        assert entry.manifest is not None
        assert entry.manifest.digest == rows[key]
        place.store.fetch(entry.manifest.digest, tmp_path / "copy")
    # The last of each publisher's is protected by a pin; of the others some went.
    pinned = [pin.what for pin in place.store.pins()]
    assert len(pinned) == 2
    assert set(pinned) <= rows.keys()
    assert len(rows) < 2 * ROUNDS
