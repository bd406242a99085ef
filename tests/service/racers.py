"""What the processes of a race do. Each has a clock of its own that is minutes off."""

from __future__ import annotations

import json
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from aotcache.db.engine import Database
from aotcache.errors import LeaseLost, NotStored
from aotcache.service.builds import Builds
from aotcache.service.gc import Collector
from aotcache.service.index import Index
from aotcache.service.leases import Lease, Leases
from aotcache.store import ObjectStore, open_store
from aotcache.store.evict import Limits
from aotcache.types import CacheKey
from tests.manifests import make_manifest

LEASE_SECONDS = 0.05


def set_clock_off(minutes: float) -> None:
    """This process's clock tells another time from now on; the database's does not ask it."""
    real = time.time
    time.time = lambda: real() + 60 * minutes


def publish_under_leases(url: str, folder: str, rounds: int, who: int) -> dict[str, int]:
    """In each round: take the lease, pause for as long as it lasts or so, and publish if it is held still.

    What is published is a file for each round: it is opened so that a second one is an error,
    and says under which token it was written.
    """
    set_clock_off((-7, 11)[who % 2])
    random.seed(who)
    database = Database(url)
    leases = Leases(database, seconds=LEASE_SECONDS)
    done = {"published": 0, "lost": 0, "held": 0}
    for number in range(rounds):
        key, variant = CacheKey(f"{number:064x}"), "cpu-x86_64-avx2+torch2.13.0-cccccccc-cpu"
        ref = Path(folder) / f"{number}.json"
        while not ref.exists():
            lease = leases.acquire(key, variant, f"builder {who}")
            if not isinstance(lease, Lease):
                done["held"] += 1
                time.sleep(min(lease.expires_in, 0.005))
                continue
            time.sleep(random.choice((0, 0, LEASE_SECONDS * 0.5, LEASE_SECONDS * 1.2)))
            try:
                with leases.publishing(key, variant, (lease.id, lease.token)):
                    _write_slowly(ref, who, lease.token)
                    done["published"] += 1
            except LeaseLost:
                done["lost"] += 1
    database.close()
    return done


def _write_slowly(ref: Path, who: int, token: int) -> None:
    """As a store without conditional writes would: look, pause, write."""
    there = json.loads(ref.read_text()) if ref.exists() else []
    time.sleep(random.choice((0, LEASE_SECONDS * 0.2, LEASE_SECONDS * 1.5)))
    with ref.with_suffix(f".{who}").open("w") as file:
        json.dump([*there, {"who": who, "token": token}], file)
    os.replace(file.name, ref)


def build_and_die(url: str, ready: str) -> None:
    """Take a build, and be killed in the middle of it."""
    database = Database(url)
    claim = Builds(database, Leases(database, seconds=1.0)).claim(
        ["drafter"], [str(make_manifest().variant)], "mortal"
    )
    assert claim is not None
    Path(ready).write_text(claim.build.id)
    time.sleep(60)


def collect_until(url: str, folder: str, stop: str) -> None:
    """Two threads collect down to a few archives again and again, until a file appears."""
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(_collect_until, url, folder, stop) for _ in range(2)]:
            done.result()


def _collect_until(url: str, folder: str, stop: str) -> None:
    database = Database(url)
    store = open_store(Path(folder) / "store")
    assert isinstance(store, ObjectStore)
    collector = Collector(database, Index(database), Leases(database), store)
    while not Path(stop).exists():
        cursor = collector.round(Limits(max_bytes=40)).next
        while cursor is not None:
            cursor = collector.round(Limits(max_bytes=40), cursor=cursor).next
        time.sleep(0.02)  # publishers are to have most of the processor
    database.close()


def publish_shared(url: str, folder: str, who: int, rounds: int) -> None:
    """Publish entries of a few archives that other publishers have too, as the service does; pin the last."""
    database = Database(url)
    index, leases = Index(database), Leases(database)
    store = open_store(Path(folder) / "store")
    assert isinstance(store, ObjectStore)
    own = Path(folder) / f"publisher {who}"
    own.mkdir()
    for number in range(rounds):
        data = b"archive %02d" % (number % 5)
        manifest = make_manifest(data, call=f"{who} {number}")
        if number == rounds - 1:
            store.pin(manifest.key, "the last")
        while True:
            file = own / "draft"
            file.write_bytes(data)
            store.put_blob(manifest.digest, file)
            try:
                with (
                    leases.publishing(manifest.key, str(manifest.variant), None),
                    database.exclusive("archive", manifest.digest),
                ):
                    assert store.put_ref(manifest)
                    entry = store.entry(manifest.key, manifest.variant)
                    assert entry is not None
                    assert entry.usable is not None
                    index.add(manifest, manifest.document(), modified=entry.modified)
                break
            except NotStored:
                continue  # the archive was collected in between: as a client does, it is sent again
    database.close()


def publish_both(url: str, folder: str, rounds: int) -> None:
    """Two publishers at once, by a clock that is an hour off."""
    set_clock_off(-60)
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(publish_shared, url, folder, who, rounds) for who in range(2)]:
            done.result()


def build_all(url: str, who: int) -> int:
    """Take builds and publish them until none is left; returns how many that were."""
    set_clock_off(5 * who)
    database = Database(url)
    index, leases = Index(database), Leases(database)
    builds = Builds(database, leases)
    built = 0
    while (claim := builds.claim(["drafter"], [str(make_manifest().variant)], f"builder {who}")) is not None:
        build, lease = claim.build, claim.lease
        builds.progress(build.id, lease.id, lease.token, stage="compile", expected_seconds=1.0)
        with leases.publishing(build.key, build.variant, (lease.id, lease.token)):
            index.add(replace(make_manifest(), key=build.key), b"{}", modified=1.0)
        assert builds.finish(build.id, lease.id, lease.token, error=None, log="").state == "done"
        built += 1
    database.close()
    return built
