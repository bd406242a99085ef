"""`gc` and `pin` over directories, a host's copies and a service."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from aotcache.lockfile import Lock, LockedCell, write_lock
from aotcache.manifest import Manifest
from aotcache.store import ObjectStore, Store, layout
from aotcache.store.local import locked
from aotcache.store.opening import directory, tier_folder
from aotcache.types import sha256
from tests.cli.conftest import Run, publish

DAY = 24 * 3600.0


def aged(store: Store, manifest: Manifest, age: float) -> None:
    assert isinstance(store, ObjectStore)
    assert store.drafts is not None
    for path in (layout.blob(manifest.digest), layout.ref(manifest.key, str(manifest.variant))):
        os.utime(store.drafts.parent / path, (time.time() - age,) * 2)


def put(store: Store, folder: Path, content: str, age: float = 0.0, **what: Any) -> Manifest:
    manifest = publish(store, folder, content, call=f"call of {content}", **what)
    aged(store, manifest, age)
    return manifest


def keys(store: Store) -> set[str]:
    return {manifest.key for manifest in store.list()}


def test_a_dry_run_shows_what_goes_and_why_and_removes_nothing(
    run: Run, store: Store, tmp_path: Path
) -> None:
    old = put(store, tmp_path, "old", 40 * DAY)
    young = put(store, tmp_path, "young")
    pinned = put(store, tmp_path, "pinned", 50 * DAY)
    store.pin(pinned.key, "release")
    done = run("gc", "--store", store.url, "--max-age", "30d", "--dry-run")
    assert done.code == 0
    rows = done.out.splitlines()
    assert rows[0].split() == ["what", "size", "last", "used", "why"]
    assert [row.split()[:2] for row in rows[1:3]] == [["keep", pinned.key[:12]], ["remove", old.key[:12]]]
    assert "layers.0 train seq=256" in rows[2]
    assert rows[2].endswith("not used for longer than --max-age")
    assert rows[3].startswith("would remove 1 entry: ")
    assert len(rows) == 4
    assert keys(store) == {old.key, young.key, pinned.key}


def test_gc_removes_down_to_a_size_and_keeps_what_lock_files_name(
    run: Run, store: Store, tmp_path: Path
) -> None:
    kept, old, young = (
        put(store, tmp_path, name, age) for name, age in (("a", 30.0), ("b", 20.0), ("c", 10.0))
    )
    cell = LockedCell("layers.0", "train", {"seq": 256}, "cpu:x86_64-avx2", "t", kept.key, kept.digest)
    lock = tmp_path / "spec.toml.lock"
    write_lock(lock, Lock("drafter", [cell]))
    found = run(
        "gc", "--store", store.url, "--max-size", str(kept.size + young.size), "--lock", lock, "--json"
    ).json
    assert [row["key"] for row in found["removed"]] == [old.key]
    assert (found["before"], found["after"], found["over"]) == (3 * old.size, 2 * old.size, 0)
    assert {(row["key"], row["reason"]) for row in found["kept"]} == {
        (kept.key, "locked"),
        (young.key, "limits"),
    }
    assert keys(store) == {kept.key, young.key}


def test_a_lock_file_that_is_not_there_removes_nothing(run: Run, store: Store, tmp_path: Path) -> None:
    manifest = put(store, tmp_path, "a", 30.0)
    done = run("gc", "--store", store.url, "--max-size", "0", "--lock", tmp_path / "none.lock")
    assert done.code == 1
    assert "none.lock" in done.err
    assert keys(store) == {manifest.key}


def test_a_size_that_pins_exceed_is_a_failure_that_says_so(run: Run, store: Store, tmp_path: Path) -> None:
    manifest = put(store, tmp_path, "pinned", 30.0)
    put(store, tmp_path, "free", 20.0)
    store.pin(manifest.digest, "")
    done = run("gc", "--store", store.url, "--max-size", "1B")
    assert done.code == 1
    assert "more than --max-size stay" in done.err
    assert keys(store) == {manifest.key}
    assert run("gc", "--store", store.url, "--max-size", "1MB").code == 0


@pytest.mark.parametrize("option", ["--max-size=5 apples", "--max-age=1.5h", "--max-age=-1d"])
def test_limits_that_are_none_are_wrong_usage(run: Run, store: Store, option: str) -> None:
    assert run("gc", "--store", store.url, option).code == 2


def test_what_cannot_be_read_is_told_and_is_no_failure(run: Run, store: Store, tmp_path: Path) -> None:
    manifest = put(store, tmp_path, "broken")
    (tmp_path / "store" / layout.ref(manifest.key, str(manifest.variant))).write_bytes(b"{")
    done = run("gc", "--store", store.url, "--max-age", "1d")
    assert done.code == 0
    assert manifest.key in done.err
    assert "cannot be read" in done.err


def test_pin_takes_the_beginning_of_a_key_or_digest_and_lists(run: Run, store: Store, tmp_path: Path) -> None:
    one, two = put(store, tmp_path, "one"), put(store, tmp_path, "two")
    assert "nothing is pinned" in run("pin", "--store", store.url).out
    assert run("pin", one.key[:12], "--store", store.url, "--reason", "release 4").code == 0
    found = run("pin", two.digest[:12].upper(), "--store", store.url, "--json").json
    assert found["pinned"]["what"] == two.digest
    future = "0" * 64
    assert run("pin", future, "--store", store.url).code == 0
    pins = run("pin", "--store", store.url, "--json").json["pins"]
    assert {pin["what"]: pin["reason"] for pin in pins} == {one.key: "release 4", two.digest: "", future: ""}
    assert "release 4" in run("pin", "--store", store.url).out
    assert run("pin", one.key[:12], "--remove", "--store", store.url).code == 0
    assert run("pin", one.key[:12], "--remove", "--store", store.url).code == 1
    assert run("pin", "ffff", "--store", store.url).code == 1
    assert run("pin", "--remove", "--store", store.url).code == 2
    assert len(store.pins()) == 2


class Home:
    """A host with copies of two stores and unpacked libraries."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"

    def copies(self, url: str) -> ObjectStore:
        folder = tier_folder(url)
        folder.mkdir(parents=True, mode=0o700)
        store = directory(folder)
        store.mark_origin(url)
        return store

    def unpacked(self, name: str, age: float, size: int = 1000) -> Path:
        folder = self.home / "unpacked" / sha256(name.encode())
        (folder / "forward").mkdir(parents=True, mode=0o700)
        (folder / "forward" / "a.so").write_bytes(b"x" * size)
        os.utime(folder, (time.time() - age,) * 2)
        return folder


# Nothing listens there: whether a store can be reached is not asked.
AWAY, OTHER = "http://127.0.0.1:9", "https://127.0.0.1:9/other"


@pytest.fixture
def home(run: Run, tmp_path: Path) -> Home:
    return Home(tmp_path)


def test_home_collects_copies_and_unpacked_folders_together(run: Run, home: Home, tmp_path: Path) -> None:
    one, other = home.copies(AWAY), home.copies(OTHER)
    old, young = put(one, tmp_path, "old", 9 * DAY), put(one, tmp_path, "young")
    aging = put(other, tmp_path, "aging", 8 * DAY)
    used, unused = home.unpacked("used", 60.0), home.unpacked("unused", 10 * DAY)
    found = run("gc", "--home", "--max-age", "7d", "--json").json
    assert [(row["kind"], row["key"] or row["digest"]) for row in found["removed"]] == [
        ("unpacked", unused.name),
        ("entry", old.key),
        ("entry", aging.key),
    ]
    assert {row["place"] for row in found["removed"]} == {"unpacked", AWAY, OTHER}
    assert (keys(one), keys(other)) == ({young.key}, set())
    assert (used.exists(), unused.exists()) == (True, False)
    # The size is that of all of it.
    found = run("gc", "--home", "--max-size", str(young.size), "--json").json
    assert [row["kind"] for row in found["removed"]] == ["unpacked"]
    assert (found["after"], keys(one)) == (young.size, {young.key})
    assert one.own is False


def test_copies_that_somebody_copied_are_collected_as_well(run: Run, home: Home, tmp_path: Path) -> None:
    one = home.copies(AWAY)
    put(one, tmp_path, "old", 9 * DAY)
    again = tier_folder(AWAY).with_name("saved")
    shutil.copytree(tier_folder(AWAY), again)
    put(directory(again), tmp_path, "older", 10 * DAY)
    found = run("gc", "--home", "--max-age", "7d", "--json").json
    assert sorted(row["place"] for row in found["removed"]) == sorted([AWAY, str(again), str(again)])
    assert (keys(one), keys(directory(again))) == (set(), set())


def test_home_with_a_store_collects_its_copies_alone(run: Run, home: Home, tmp_path: Path) -> None:
    one, other = home.copies(AWAY), home.copies(OTHER)
    put(one, tmp_path, "one")
    put(other, tmp_path, "two")
    folder = home.unpacked("three", 10 * DAY)
    done = run("gc", "--home", "--store", AWAY, "--max-size", "0")
    assert (done.code, done.out.split(":")[0]) == (0, "removed 1 entry")
    assert (len(keys(one)), len(keys(other)), folder.exists()) == (0, 1, True)
    assert run("gc", "--home", "--store", tmp_path / "store").code == 1


def test_a_home_without_anything_has_nothing_to_collect(run: Run, home: Home) -> None:
    found = run("gc", "--home", "--max-size", "0", "--json").json
    assert (found["removed"], found["before"]) == ([], 0)
    assert not home.home.exists()


def test_what_killed_processes_left_in_unpacked_goes_and_what_is_at_work_stays(run: Run, home: Home) -> None:
    folder = home.unpacked("a", 0.0).parent
    dead, alive, removing = (
        folder / name for name in (f".unpacking-{'0' * 64}", f".unpacking-{'1' * 64}", ".removing-x")
    )
    for path in (dead, alive, removing):
        (path / "forward").mkdir(parents=True)
    with locked(home.home / "locks", f"unpack {'1' * 64}", 1):
        assert run("gc", "--home", "--dry-run").code == 0
        assert dead.exists()
        assert run("gc", "--home").code == 0
        assert (dead.exists(), alive.exists(), removing.exists()) == (False, True, False)
        # Nor does a folder go that is being made anew.
        busy = home.unpacked("busy", 10 * DAY)
        with locked(home.home / "locks", f"unpack {busy.name}", 1):
            found = run("gc", "--home", "--max-age", "1d", "--json").json
        assert (found["kept"][0]["digest"], found["kept"][0]["reason"]) == (busy.name, "busy")
        assert busy.exists()


def test_links_in_a_home_are_not_followed(run: Run, home: Home, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "refs").mkdir(parents=True)
    (elsewhere / "precious").write_bytes(b"x")
    home.unpacked("a", 0.0)
    (home.home / "unpacked" / ("2" * 64)).symlink_to(elsewhere)
    (home.home / "tiers").mkdir(mode=0o700)
    (home.home / "tiers" / "x").symlink_to(elsewhere)
    assert run("gc", "--home", "--max-size", "0").code == 0
    assert (elsewhere / "precious").exists()


def test_a_home_that_others_can_write_to_is_not_collected(run: Run, home: Home) -> None:
    folder = home.unpacked("a", 10 * DAY)
    folder.parent.chmod(0o777)
    done = run("gc", "--home", "--max-size", "0")
    assert done.code == 1
    assert "chmod go-w" in done.err
    assert folder.exists()
