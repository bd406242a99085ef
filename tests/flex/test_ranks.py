"""Ranks whose stores differ in what a drop-in function needs, and that have no lock file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import aotcache
from aotcache.errors import ArtifactMiss
from aotcache.lockfile import lock_path, read_lock
from aotcache.spec import Spec
from tests.cases.support import copy_store
from tests.flex import dropin
from tests.flex.conftest import SEQ
from tests.loops import ranks


def prefetch(rank: int, spec: str, stores: list[str], homes: list[str]) -> str:
    """What a rank's prefetch says: its error, or how much it opened."""
    os.environ["AOTCACHE_HOME"] = homes[rank]
    with aotcache.attach(dropin.build(), spec, store=stores[rank]) as handle:
        try:
            return f"opened {handle.prefetch(group='world')['loads']}"
        except ArtifactMiss as error:
            return str(error)


def test_they_agree_on_functions_as_well(functions: Spec, warmed: Callable[..., str], tmp_path: Path) -> None:
    source = aotcache.open_store(warmed(functions))
    keys = {cell.key for cell in read_lock(lock_path(functions.path)).cells}
    full = [manifest for key in sorted(keys) for manifest in source.lookup(key)]
    spec = shutil.copy(functions.path, tmp_path / "unlocked.toml")
    stores = [
        copy_store(source.url, tmp_path / "full", full),
        copy_store(source.url, tmp_path / "lacking", (m for m in full if m.mode != "train")),
    ]
    homes = [str(tmp_path / f"home-{rank}") for rank in range(2)]
    found = ranks.run("tests.flex.test_ranks:prefetch", str(spec), stores, homes)
    assert found[0] == found[1]
    assert f"rank 1 lacks flex_attention train seq={SEQ} " in found[0]
    assert ranks.run("tests.flex.test_ranks:prefetch", str(spec), [stores[0]] * 2, homes) == ["opened 3"] * 2
