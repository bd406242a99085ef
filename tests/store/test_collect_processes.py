"""Collections as processes of their own: killed anywhere, and beside publishers, readers and each other."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from aotcache.store import ObjectStore, layout, open_store
from aotcache.store.collect import collect
from tests.faults.hatchery import Hatchery, hatchery
from tests.store import collecting

ROUNDS = 20


@pytest.fixture(scope="module")
def hatched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hatchery]:
    folder = tmp_path_factory.mktemp("hatchery")
    with hatchery(folder, environment={"AOTCACHE_HOME": str(folder / "home")}) as found:
        yield found


def files(folder: Path) -> ObjectStore:
    store = open_store(folder / "store", tier=False)
    assert isinstance(store, ObjectStore)
    return store


def test_killed_before_any_of_its_operations_the_next_run_finishes_it(
    hatched: Hatchery, tmp_path: Path
) -> None:
    store = files(tmp_path)
    stays = collecting.aged(store, tmp_path, b"stay", 1.0, call="stays")
    killed, at = 0, 1
    while True:
        going = [
            collecting.aged(store, tmp_path, data, 900.0, call=f"{data!r}") for data in (b"one!", b"two!")
        ]
        ended = hatched.run(
            "tests.store.collecting:collect_once", {"url": store.url, "max_bytes": 4}, kill_at=at
        )
        if not ended.killed:
            break
        killed += 1
        # Whatever can be found can be fetched and is right.
        for manifest in store.list():
            store.fetch(manifest.digest, tmp_path / "copy")
        assert store.lookup(stays.key) == [stays]
        done = collect(store, max_bytes=4)
        assert (done.after, done.problems) == (4, ())
        assert [bool(store.lookup(m.key)) for m in (*going, stays)] == [False, False, True], at
        assert store.usage().blobs == 1
        assert list(store.client.list(layout.COLLECTING)) == []
        at += 23
    assert ended.answer == {"removed": 2, "problems": 0}
    assert killed > 10


def test_publishers_readers_and_collections_that_die_lose_nothing(hatched: Hatchery, tmp_path: Path) -> None:
    store, draw = files(tmp_path), random.Random(5)
    stop = tmp_path / "stop"
    begin = hatched.begin
    publishers = [
        begin(
            "tests.store.collecting:publish", {"url": store.url, "who": who, "rounds": ROUNDS}, counted=False
        )
        for who in range(3)
    ]
    until = {"url": store.url, "stop": str(stop)}
    reader = begin("tests.store.collecting:read_until", until, counted=False)
    steady = begin("tests.store.collecting:collect_until", until, counted=False)
    acknowledged, deaths = [], 0
    waiting = list(publishers)
    while waiting:
        mortal = begin("tests.store.collecting:collect_until", until, kill_at=draw.randrange(50, 2000))
        while (ended := mortal.poll(0.1)) is None and waiting:
            done = waiting[0].poll(0.1)
            if done is not None:
                assert done.status == 0, done.log
                acknowledged += done.acknowledged
                waiting.pop(0)
        if ended is None:
            mortal.kill()
            ended = mortal.wait()
        deaths += ended.killed
        assert ended.status == -9, ended.log
    stop.touch()
    runs, read = steady.wait().answer, reader.wait().answer
    assert min(runs, deaths, read["right"]) > 0
    collect(store, max_bytes=collecting.LIMIT)
    # All that was pinned is there and right, and nothing is there of which a part is missing.
    assert len(acknowledged) == 3 * ROUNDS
    found = {entry.key: entry for entry in store.entries()}
    assert [entry.problem for entry in found.values() if entry.problem is not None] == []
    assert {line["key"]: line["digest"] for line in acknowledged}.items() <= {
        key: entry.manifest.digest for key, entry in found.items() if entry.manifest is not None
    }.items()
    for manifest in store.list():
        store.fetch(manifest.digest, tmp_path / "copy")
    # A marker that a killed one left may stay for an hour, nothing that it had put aside.
    left = [info.path for info in store.client.list(layout.COLLECTING)]
    assert [path for path in left if layout.aside_of(path) is not None or layout.is_ref_aside(path)] == []
