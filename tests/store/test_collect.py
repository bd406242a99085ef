"""Collections of a directory, of a bucket and of memory, undisturbed and disturbed at every step."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aotcache.errors import NotStored, ServiceError, StoreError
from aotcache.manifest import SCHEMA, Manifest
from aotcache.store import ObjectStore, layout, open_store
from aotcache.store.clients import Client, Info
from aotcache.store.collect import Collected, Collection, collect
from aotcache.store.evict import DAY, plan
from aotcache.store.files import FileClient
from aotcache.store.http import HttpStore
from aotcache.store.survey import words
from aotcache.store.tiered import TieredStore
from aotcache.trust import sign
from aotcache.types import Digest, sha256
from tests.faults.disks import fill, mounted
from tests.manifests import make_manifest, write_archive
from tests.store.faulty import faulty

LONG_AGO = 3 * DAY


class Aged:
    """A client in whose eyes some objects are older than they are: of a bucket nothing else can make them so.

    `before` is called before every operation that changes something, with its name and path.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self.ages: dict[str, float] = {}
        self.before: Callable[[str, str], None] = quiet

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.client, name)
        if name not in ("put", "move", "delete"):
            return found

        def watched(path: str, *arguments: Any, **options: Any) -> Any:
            self.before(name, path)
            return found(path, *arguments, **options)

        return watched

    def list(self, prefix: str) -> Iterator[Info]:
        return (self.older(info) for info in self.client.list(prefix))

    def head(self, path: str) -> Info | None:
        info = self.client.head(path)
        return None if info is None else self.older(info)

    def older(self, info: Info) -> Info:
        return replace(info, modified=info.modified - self.ages.get(info.path, 0.0))


class Place:
    """A store whose entries the tests make, age and look at."""

    def __init__(self, url: str, folder: Path) -> None:
        store = open_store(url, tier=False)
        assert isinstance(store, ObjectStore)
        self.store, self.folder = store, folder
        # Publishers see the client as it is, collections one that can be disturbed.
        self.client = store.client
        self.aged = Aged(store.client)

    def put(self, data: bytes, age: float = 0.0, **what: Any) -> Manifest:
        manifest = make_manifest(data, **{"call": f"call of {data[:9]!r}", **what})
        assert self.store.publish(manifest, write_archive(self.folder, data))
        self.age(manifest, age)
        return manifest

    def age(self, manifest: Manifest, age: float) -> None:
        for path in (ref(manifest), layout.blob(manifest.digest)):
            self.aged.ages[path] = age

    def collect(self, **limits: Any) -> Collected:
        return collect(ObjectStore(self.store.url, self.aged), **limits)

    def there(self, *manifests: Manifest) -> list[bool]:
        """Which of the entries can be fetched, and are right then."""
        found = []
        for manifest in manifests:
            usable = manifest in self.store.lookup(manifest.key)
            found.append(usable)
            if usable:
                self.store.fetch(manifest.digest, self.folder / "copy")
        return found

    def left(self) -> list[str]:
        """Paths of whatever collections have not cleared away."""
        return [info.path for info in self.client.list(layout.COLLECTING)]


@pytest.fixture(params=["file", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    urls = {"file": (tmp_path / "store").as_uri(), "memory": "memory:///"}
    url = urls.get(request.param) or request.getfixturevalue("bucket")
    return Place(url, tmp_path)


def ref(manifest: Manifest) -> str:
    return layout.ref(manifest.key, str(manifest.variant))


def test_what_was_used_longest_ago_goes_until_the_limit_is_kept(place: Place) -> None:
    made = [place.put(bytes([n]) * 100, age=1000.0 - n) for n in range(4)]
    tried = place.collect(max_bytes=250, dry_run=True)
    assert (tried.before, tried.after, tried.over) == (400, 200, 0)
    assert place.there(*made) == [True] * 4
    done = place.collect(max_bytes=250)
    assert [d.candidate.key for d in done.removed] == [m.key for m in made[:2]]
    assert (done.before, done.after, done.problems) == (400, 200, ())
    assert place.there(*made) == [False, False, True, True]
    assert (place.store.usage().blobs, place.left()) == (2, [])


def test_by_age_goes_what_was_neither_used_nor_written_for_so_long(place: Place) -> None:
    old, young = place.put(b"old", age=500.0), place.put(b"young", age=50.0)
    assert [d.reason for d in place.collect(max_age=100.0).removed] == ["age"]
    assert place.there(old, young) == [False, True]


def test_pins_and_lock_files_keep_what_the_limits_would_take(place: Place) -> None:
    by_key, by_digest, locked, free = (place.put(name, age=500.0) for name in (b"1", b"2", b"3", b"4"))
    place.store.pin(by_key.key, "release")
    place.store.pin(by_digest.digest, "")
    done = place.collect(max_bytes=0, max_age=1.0, locked={locked.digest})
    assert place.there(by_key, by_digest, locked, free) == [True, True, True, False]
    assert done.over == 3
    assert sorted(d.reason for d in done.decisions) == ["age", "locked", "pinned", "pinned"]
    assert {pin.what: pin.reason for pin in place.store.pins()} == {
        by_key.key: "release",
        by_digest.digest: "",
    }
    assert place.store.unpin(by_key.key)
    assert not place.store.unpin(by_key.key)
    place.collect(max_bytes=0)
    assert place.there(by_key, by_digest, locked) == [False, True, False]


def test_a_pin_that_cannot_be_read_pins(place: Place) -> None:
    manifest = place.put(b"pinned", age=500.0)
    place.client.put(layout.pin(manifest.digest), b"\xff{", create=True)
    place.client.put("pins/notes.txt", b"", create=True)
    other = sha256(b"other")
    place.client.put(layout.pin(other), b'{"reason": "", "at": 1e999}', create=True)
    assert {pin.what: pin.at for pin in place.store.pins()} == {manifest.digest: 0.0, other: 0.0}
    assert place.store.unpin(other)
    assert [pin.what for pin in place.store.pins()] == [manifest.digest]
    place.collect(max_age=1.0)
    assert place.there(manifest) == [True]


def test_an_archive_goes_when_the_last_entry_that_names_it_does(place: Place) -> None:
    one, two = place.put(b"shared", call="one"), place.put(b"shared", call="two")
    place.aged.ages.update({ref(one): 500.0, ref(two): 5.0, layout.blob(one.digest): 600.0})
    place.collect(max_age=100.0)
    assert place.there(one, two) == [False, True]
    place.aged.ages[ref(two)] = 500.0
    place.collect(max_age=100.0)
    assert place.store.usage().blobs == 0


def test_archives_without_an_entry_and_entries_without_an_archive_go_after_a_day(place: Place) -> None:
    lone = place.put(b"lone")
    place.client.delete(ref(lone))
    gone = place.put(b"gone")
    place.client.delete(layout.blob(gone.digest))
    assert place.collect().removed == []
    place.age(lone, LONG_AGO)
    place.age(gone, LONG_AGO)
    assert sorted(d.reason for d in place.collect().removed) == ["gone", "unnamed"]
    usage = place.store.usage()
    assert (usage.refs, usage.blobs) == (0, 0)


def newer_documents(manifest: Manifest) -> list[bytes]:
    values = json.loads(manifest.to_json())
    bare = json.dumps(values | {"schema": SCHEMA + 1, "more": 1}).encode()
    packed = base64.b64encode(bare).decode()
    return [
        bare,
        json.dumps(values | {"more": 1}).encode(),
        json.dumps(
            {"payloadType": "application/vnd.aotcache.manifest+json", "payload": packed, "signatures": []}
        ).encode(),
        json.dumps(
            {"payloadType": "application/vnd.aotcache.manifest.v9", "payload": packed, "more": []}
        ).encode(),
    ]


@pytest.mark.parametrize("which", range(4))
def test_what_a_newer_release_wrote_stays_with_its_archive(place: Place, which: int) -> None:
    manifest = place.put(b"newer")
    twin = place.put(b"newer", call="the same archive")
    document = newer_documents(manifest)[which]
    place.client.put(ref(manifest), document, create=False)
    for made in (manifest, twin):
        place.age(made, LONG_AGO)
    done = place.collect(max_bytes=0, max_age=1.0)
    assert done.removed == []
    assert sorted(d.reason for d in done.decisions) == ["newer", "unclear"]
    assert [manifest.key in note for note in done.notes] == [True]
    assert place.client.get(ref(manifest)) == document
    assert place.client.get(layout.blob(manifest.digest)) == b"newer"


def test_an_object_among_the_refs_that_is_none_keeps_what_it_may_name(place: Place) -> None:
    manifest = place.put(b"named elsewhere")
    place.client.delete(ref(manifest))
    place.client.put("refs/index.json", manifest.to_json(), create=True)
    place.age(manifest, LONG_AGO)
    assert place.collect(max_bytes=0, max_age=1.0).removed == []
    assert place.store.blob_size(manifest.digest) is not None


@pytest.mark.parametrize("junk", [b"", b"{", b"\xff\xfe", b"[]"])
def test_a_broken_ref_goes_by_age_alone_and_its_archive_after_it(place: Place, junk: bytes) -> None:
    manifest = place.put(b"broken")
    place.client.put(ref(manifest), junk, create=False)
    place.aged.ages[ref(manifest)] = 500.0
    done = place.collect(max_bytes=0)
    assert done.removed == []
    assert len(done.notes) == 1
    assert [d.candidate.key for d in place.collect(max_age=100.0).removed] == [manifest.key]
    assert place.store.usage().refs == 0
    place.age(manifest, LONG_AGO)
    place.collect()
    assert place.store.usage().blobs == 0


def test_words_are_found_in_text_and_in_base64() -> None:
    one, two, three = (sha256(bytes([n])) for n in range(3))
    inner = base64.b64encode(json.dumps({"digest": two}).encode()).decode().rstrip("=")
    document = json.dumps({"a": one, "payload": inner, "longer": three + "0"}).encode()
    assert words(document) == {one, two}


# Disturbed at every step.


class Stopped(BaseException):
    """What ends a collection in the middle: nothing catches it, so it is as good as a kill."""


def disturb(place: Place, step: int, act: Callable[[], object]) -> None:
    """Do something before the given one of the changes that the next collection makes."""
    count = 0

    def before(_what: str, _path: str) -> None:
        nonlocal count
        count += 1
        if count == step:
            place.aged.before = quiet
            act()

    place.aged.before = before


def quiet(_what: str, _path: str) -> None:
    """Nothing."""


LIMIT = 4
"""Bytes that the collections of these tests leave."""


class Case:
    """Two entries that go, and one that stays."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.stays = place.put(b"stay", age=1.0)
        self.again()

    def again(self) -> None:
        self.going = [self.place.put(data, age=900.0) for data in (b"one!", b"two!")]

    def steps(self) -> range:
        """The numbers of the changes that a whole collection makes."""
        count = 0

        def counted(_what: str, _path: str) -> None:
            nonlocal count
            count += 1

        self.place.aged.before = counted
        self.place.collect(max_bytes=LIMIT)
        self.place.aged.before = quiet
        assert count > 8
        return range(1, count + 1)


def test_stopped_at_any_step_the_next_run_finishes_it(place: Place) -> None:
    def stop() -> None:
        raise Stopped

    case = Case(place)
    for step in case.steps():
        case.again()
        disturb(place, step, stop)
        with pytest.raises(Stopped):
            place.collect(max_bytes=LIMIT)
        # Whole or a miss, never a part; and what was to stay stays.
        assert place.there(*case.going, case.stays)[-1]
        place.collect(max_bytes=LIMIT)
        assert place.there(*case.going, case.stays) == [False, False, True], step
        assert (place.store.usage().blobs, place.left()) == (1, []), step


def test_named_anew_at_any_step_an_archive_is_there_afterwards(place: Place) -> None:
    """By publishers that found it stored, and by the time they have said so."""
    case = Case(place)
    for step in case.steps():
        case.again()
        contents = (b"one!", b"two!")
        new = [make_manifest(data, call=f"{step} {data!r}") for data in contents]

        def publish(new: list[Manifest] = new, contents: tuple[bytes, ...] = contents) -> None:
            for manifest, data in zip(new, contents, strict=True):
                assert place.store.publish(manifest, write_archive(place.folder, data))

        disturb(place, step, publish)
        place.collect(max_bytes=LIMIT)
        assert place.there(*new, case.stays) == [True, True, True], step
        assert place.left() == [], step
        for manifest in new:
            place.store.delete(manifest.key, manifest.variant)


def test_replaced_at_any_step_the_new_entry_is_there_afterwards(place: Place) -> None:
    case = Case(place)
    for step in case.steps():
        case.again()
        data = b"new %d" % step
        new = make_manifest(data, components=case.going[0].components, key=case.going[0].key)

        def publish(new: Manifest = new, data: bytes = data) -> None:
            assert place.store.publish(new, write_archive(place.folder, data), replace=True)

        disturb(place, step, publish)
        place.collect(max_bytes=LIMIT)
        assert place.there(new, case.stays) == [True, True], step
        place.store.delete(new.key, new.variant)


def test_what_had_lost_its_archive_and_is_published_once_more_meanwhile_stays(place: Place) -> None:
    """The very same entry, as `fetch --to` publishes it from a store that has it."""
    manifest = place.put(b"lost", age=LONG_AGO)
    place.client.delete(layout.blob(manifest.digest))
    run = Collection(ObjectStore(place.store.url, place.aged), "here", dry_run=False)
    decisions = plan(run.look(), now=time.time()).decisions
    assert [decision.reason for decision in decisions] == ["gone"]
    assert place.store.publish(manifest, write_archive(place.folder, b"lost"))
    place.age(manifest, 0.0)
    assert run.carry_out(decisions) == set()
    assert place.there(manifest) == [True]


def test_two_collections_at_every_step_of_each_other_leave_what_one_leaves(place: Place) -> None:
    case = Case(place)
    for step in case.steps():
        case.again()
        disturb(place, step, lambda: place.collect(max_bytes=LIMIT))
        place.collect(max_bytes=LIMIT)
        place.collect(max_bytes=LIMIT)
        assert place.there(*case.going, case.stays) == [False, False, True], step
        assert place.left() == [], step


def test_a_service_is_told_that_an_archive_has_just_been_collected(place: Place) -> None:
    manifest = make_manifest(b"uploaded")
    place.store.put_blob(manifest.digest, write_archive(place.folder, b"uploaded"))
    place.client.put(layout.mark(manifest.digest), b"another", create=True)
    place.store.put_ref(manifest)
    assert place.left() == []
    assert place.there(manifest) == [True]
    late = make_manifest(b"late", call="late")
    place.store.put_blob(late.digest, write_archive(place.folder, b"late"))
    publisher = ObjectStore(place.store.url, place.aged)
    place.aged.before = lambda what, path: (
        place.client.delete(layout.blob(late.digest)) if path == ref(late) else None
    )
    with pytest.raises(NotStored, match="collected"):
        publisher.put_ref(late)


# A service.


def test_a_service_collects_by_the_same_rules(service: Any, signing_key: Any, tmp_path: Path) -> None:
    """Also where the store that is named has copies in front of it: its own entries go."""
    remote = open_store(service.url, tier=False)
    copies = open_store(tmp_path / "copies")
    assert isinstance(copies, ObjectStore)
    tiered = TieredStore(copies, remote, tmp_path / "locks")
    made = [sign(make_manifest(data, call=f"{data!r}"), signing_key) for data in (b"one!", b"two!", b"three")]
    for manifest, data in zip(made, (b"one!", b"two!", b"three"), strict=True):
        assert tiered.publish(manifest, write_archive(tmp_path, data))
    assert tiered.pin(made[2].key, "release").reason == "release"
    assert [pin.what for pin in tiered.pins()] == [made[2].key]
    tried = collect(remote, max_bytes=9, dry_run=True)
    for done in (tried, collect(tiered, max_bytes=9)):
        assert (done.before, done.after, done.over, done.problems, done.notes) == (13, 9, 0, (), ())
        assert [(d.candidate.key, d.candidate.place, d.reason) for d in done.removed] == [
            (made[0].key, service.url, "size")
        ]
    assert [bool(remote.lookup(manifest.key)) for manifest in made] == [False, True, True]
    assert collect(remote, max_bytes=0, locked={made[1].digest}).over == 9
    assert tiered.unpin(made[2].key)
    assert not remote.unpin(made[2].key)
    assert collect(remote, max_bytes=0).over == 0
    # The copies are this host's business.
    assert [bool(copies.lookup(manifest.key)) for manifest in made] == [True] * 3
    assert isinstance(remote, HttpStore)
    remote.session.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"reason": "because"},
        {"reason": []},
        {"kind": 1},
        {"size": "much"},
        {"last_used": None},
        {"key": [1], "kind": {}},
    ],
)
def test_a_service_whose_decisions_make_no_sense_is_an_error(wrong: dict[str, Any]) -> None:
    row = {"kind": "entry", "key": "0" * 64, "variant": "v", "digest": "1" * 64, "size": 1, "last_used": 1.0}
    row |= {"what": None, "remove": True, "reason": "age"} | wrong
    answer = {"decisions": [row], "before": 1, "after": 0, "over": 0, "next": None, "notes": []}
    with faulty(lambda out, _: out.send(200, json.dumps(answer).encode())) as service:
        store = HttpStore(service.url)
        with pytest.raises(ServiceError, match="not of version 1"):
            collect(store, max_bytes=0)
        store.session.close()


# A directory alone.


def files(tmp_path: Path) -> Place:
    return Place((tmp_path / "store").as_uri(), tmp_path)


def test_a_directory_notes_when_an_archive_was_used(tmp_path: Path) -> None:
    place = files(tmp_path)
    manifest = place.put(b"used")
    blob = tmp_path / "store" / layout.blob(manifest.digest)
    for was in (time.time() - LONG_AGO, time.time() + LONG_AGO):
        os.utime(blob, (was, was))
        place.store.used(manifest.digest)
        assert abs(blob.stat().st_mtime - time.time()) < 60
    # Not noted anew each time.
    was = time.time() - 1800
    os.utime(blob, (was, was))
    place.store.used(manifest.digest)
    assert blob.stat().st_mtime == pytest.approx(was, abs=1)
    place.store.used(Digest("0" * 64))


def old(place: Place, data: bytes) -> Manifest:
    """An entry of a directory whose files are old."""
    manifest = place.put(data)
    for path in (ref(manifest), layout.blob(manifest.digest)):
        os.utime(place.folder / "store" / path, (time.time() - LONG_AGO,) * 2)
    return manifest


def test_what_is_used_in_a_directory_meanwhile_stays(tmp_path: Path) -> None:
    place = files(tmp_path)
    used, unused = old(place, b"used"), old(place, b"unused")
    disturb(place, 1, lambda: place.store.used(used.digest))
    done = place.collect(max_age=DAY)
    assert place.there(used, unused) == [True, False]
    assert sorted(d.reason for d in done.decisions) == ["age", "busy"]


def test_what_is_published_once_more_right_before_it_goes_from_a_directory_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = files(tmp_path)
    manifest = old(place, b"lost")
    place.client.delete(layout.blob(manifest.digest))
    move = FileClient.move

    def late(client: FileClient, path: str, to: str, *, create: bool = False) -> bool:
        if path == ref(manifest):
            assert place.store.publish(manifest, write_archive(tmp_path, b"lost"))
        return move(client, path, to, create=create)

    monkeypatch.setattr(FileClient, "move", late)
    done = collect(place.store)
    assert [d.reason for d in done.decisions] == ["busy"]
    assert place.there(manifest) == [True]


@pytest.mark.parametrize("shared", [False, True])
def test_a_full_disk_is_no_obstacle(tmp_path: Path, shared: bool) -> None:
    with mounted(tmp_path / "disk", "size=1m,mode=700") as disk:
        place = Place((disk / "store").as_uri(), tmp_path)
        made = [place.put(bytes([shared or n]) * 50_000, call=f"{n}") for n in range(4)]
        fill(disk)
        done = collect(place.store, max_bytes=0)
        assert (len(done.removed), done.after, done.problems) == (4, 0, ())
        assert place.there(*made) == [False] * 4
        assert (place.store.usage().blobs, place.left()) == (0, [])


def test_a_directory_that_others_can_write_to_is_not_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = files(tmp_path)
    place.put(b"theirs")
    (tmp_path / "store").chmod(0o777)
    with pytest.raises(StoreError, match="AOTCACHE_TRUST_SHARED_STORE"):
        collect(place.store, max_bytes=0)
    assert place.store.usage().refs == 1
    monkeypatch.setenv("AOTCACHE_TRUST_SHARED_STORE", "1")
    assert len(collect(place.store, max_bytes=0).removed) == 1


def test_a_directory_that_is_not_there_has_nothing_to_collect(tmp_path: Path) -> None:
    done = collect(open_store(tmp_path / "nowhere"), max_bytes=0)
    assert (done.decisions, done.before, done.over) == ((), 0, 0)
    assert not (tmp_path / "nowhere").exists()


def test_drafts_of_killed_writers_go_after_a_day(tmp_path: Path) -> None:
    place = files(tmp_path)
    place.put(b"bytes")
    old, young = (tmp_path / "store" / "tmp" / name for name in ("old", "young"))
    old.write_bytes(b"")
    young.write_bytes(b"")
    os.utime(old, (time.time() - LONG_AGO,) * 2)
    collect(place.store, dry_run=True)
    assert old.exists()
    collect(place.store)
    assert (old.exists(), young.exists()) == (False, True)
