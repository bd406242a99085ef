from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from aotcache.db.engine import Database
from aotcache.service.builds import Builds
from aotcache.service.leases import Leases
from aotcache.types import CacheKey
from tests.manifests import make_manifest
from tests.service import racers

ROUNDS = 200


@pytest.fixture
def processes() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.slow
def test_two_builders_with_pauses_and_clocks_that_are_off_never_publish_twice(
    database_url: str, processes: ProcessPoolExecutor, tmp_path: Path
) -> None:
    racing = [
        processes.submit(racers.publish_under_leases, database_url, str(tmp_path), ROUNDS, who)
        for who in (0, 1)
    ]
    done = sum((Counter(race.result(timeout=240)) for race in racing), Counter())
    written = [json.loads((tmp_path / f"{number}.json").read_text()) for number in range(ROUNDS)]
    # A publish that began after another had ended finds its file and goes on after it; two that
    # ran beside each other would both have found nothing, and one would be lost from the list.
    assert sum(map(len, written)) == done["published"]
    for entries in written:
        tokens = [entry["token"] for entry in entries]
        assert tokens == sorted(set(tokens)), "published out of order, or twice under one lease"
    # It was a race: leases were lost in pauses, and holders met.
    assert done["lost"] > 10
    assert done["held"] > 10


def test_several_builders_build_everything_once(
    database: Database, database_url: str, processes: ProcessPoolExecutor
) -> None:
    builds = Builds(database)
    variant = str(make_manifest().variant)
    for number in range(12):
        builds.request("drafter", CacheKey(f"{number:064x}"), variant)
    racing = [processes.submit(racers.build_all, database_url, who) for who in (1, 2)]
    assert sum(race.result(timeout=120) for race in racing) == 12
    found = builds.page(limit=100).builds
    assert [(build.state, build.attempts) for build in found] == [("done", 1)] * 12


def test_a_builder_that_is_killed_is_taken_over_once(
    database: Database, database_url: str, tmp_path: Path
) -> None:
    builds = Builds(database, Leases(database, seconds=30))
    variant = str(make_manifest().variant)
    build = builds.request("drafter", CacheKey("ab" * 32), variant)
    ready = tmp_path / "ready"
    builder = multiprocessing.get_context("spawn").Process(
        target=racers.build_and_die, args=(database_url, str(ready))
    )
    builder.start()
    try:
        _until(lambda: ready.exists() and ready.read_text() == build.id)
    finally:
        assert builder.pid is not None
        os.kill(builder.pid, signal.SIGKILL)
        builder.join(20)
        builder.close()
    takeovers = []
    _until(
        lambda: takeovers.append(builds.claim(["drafter"], [variant], "heir")) or takeovers[-1] is not None
    )
    assert takeovers[-1].build.id == build.id
    assert takeovers[-1].build.attempts == 2
    assert builds.claim(["drafter"], [variant], "another") is None


def _until(condition) -> None:
    ends = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.02)
