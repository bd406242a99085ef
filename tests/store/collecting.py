"""What the processes of collection tests do; each is a call for `tests.faults.hatchery`."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

from aotcache.errors import NotStored
from aotcache.manifest import Manifest
from aotcache.store import ObjectStore, layout, open_store
from aotcache.store.collect import collect
from aotcache.types import sha256
from tests.faults.hatchery import acknowledge
from tests.manifests import make_manifest, write_archive

LIMIT = 10
"""Bytes that a collection of these tests leaves: one archive."""


def collect_once(url: str, max_bytes: int) -> dict[str, int]:
    """One collection."""
    done = collect(open_store(url, tier=False), max_bytes=max_bytes)
    return {"removed": len(done.removed), "problems": len(done.problems)}


def collect_until(url: str, stop: str) -> int:
    """Collect again and again until a file appears."""
    runs = 0
    while not Path(stop).exists():
        done = collect(open_store(url, tier=False), max_bytes=LIMIT)
        assert not done.problems, done.problems
        runs += 1
    return runs


def publish(url: str, who: int, rounds: int) -> None:
    """Publish entries that a collection may take, and others of the same archives that it must not.

    These are pinned before. All publishers have the same archives, each of which is free to go until
    the first of them has published what is pinned.
    """
    store = open_store(url, tier=False)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            data = b"archive %02d" % number
            archive = write_archive(Path(folder), data)
            free, kept = (make_manifest(data, call=f"{kind} {who} {number}") for kind in ("free", "kept"))
            store.publish(free, archive)
            store.pin(kept.key, "")
            if store.publish(kept, archive):
                acknowledge(key=kept.key, digest=kept.digest)


def read_until(url: str, stop: str) -> dict[str, int]:
    """Fetch whatever is listed until a file appears: the right bytes, or a miss."""
    store = open_store(url, tier=False)
    counts = {"right": 0, "missed": 0}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        while not Path(stop).exists():
            for manifest in store.list():
                try:
                    store.fetch(manifest.digest, copy)
                except NotStored:
                    counts["missed"] += 1
                    continue
                assert sha256(copy.read_bytes()) == manifest.digest
                counts["right"] += 1
    return counts


def aged(store: ObjectStore, folder: Path, data: bytes, age: float, **what: Any) -> Manifest:
    """An entry of a directory that was used some time ago."""
    manifest = make_manifest(data, **what)
    assert store.publish(manifest, write_archive(folder, data))
    assert store.drafts is not None
    for path in (layout.blob(manifest.digest), layout.ref(manifest.key, str(manifest.variant))):
        os.utime(store.drafts.parent / path, (time.time() - age,) * 2)
    return manifest
