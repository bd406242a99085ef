"""A store that is away: a miss with its reason, told at once. The store is a real address where nobody listens."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from aotcache import host
from aotcache.errors import ArtifactMiss, ServiceUnavailable
from aotcache.graph.functions import function_regions
from aotcache.graph.region import Call, Region
from aotcache.lockfile import LockedCell
from aotcache.runtime.prefetch import prefetch
from aotcache.runtime.resolve import Resolver, explain
from aotcache.runtime.stats import Stats
from aotcache.spec import CompileOptions
from aotcache.store import open_store
from aotcache.store.base import Store
from aotcache.types import Miss
from tests.manifests import make_manifest

WARM = "aotcache warm drafter.toml"


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An address that refuses connections: it is bound, and nobody listens."""
    monkeypatch.setenv("AOTCACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AOTCACHE_CONFIG_HOME", str(tmp_path / "config"))
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture(params=["with copies in front", "alone"])
def store(request: pytest.FixtureRequest, url: str) -> Store:
    return open_store(url, tier=request.param != "alone")


def resolver(store: Store, tmp_path: Path) -> Resolver:
    return Resolver(store, tmp_path / "home", host.host_facts(), None, Stats())


def flex_call() -> Call:
    x = torch.ones(1, 1, 8, 4)
    call: Call = function_regions(CompileOptions().for_key())["flex_attention"].describe((x, x, x), {})
    return call


def cell() -> LockedCell:
    m = make_manifest()
    return LockedCell(m.region, m.mode, m.bucket, str(m.target), str(m.toolchain), m.key, m.digest)


def test_a_call_is_a_miss_that_says_so(store: Store, tmp_path: Path) -> None:
    answer = resolver(store, tmp_path).resolve(flex_call())
    assert isinstance(answer, Miss)
    assert "refused" in answer.reason
    assert "no entry" not in answer.reason


def test_a_second_miss_waits_for_nothing(store: Store, tmp_path: Path) -> None:
    asking = resolver(store, tmp_path)
    asking.resolve(flex_call())
    started = time.monotonic()
    for call in ("a", "b", "c"):
        assert isinstance(asking.by_key(make_manifest(call=call).key), Miss)
    assert time.monotonic() - started < 2.0


def test_the_text_of_the_miss_is_told_without_what_is_nearest(store: Store) -> None:
    text = explain(flex_call(), "the reason", store, WARM)
    assert text.startswith("no artifact for region")
    assert "the reason" in text
    assert WARM in text


def test_a_store_alone_says_why_nothing_nearest_is_told(url: str) -> None:
    text = explain(flex_call(), "the reason", open_store(url, tier=False), WARM)
    assert "what is nearest to it cannot be told" in text


def test_prefetch_of_a_lock_file_leaves_it_to_on_miss(store: Store, tmp_path: Path) -> None:
    asking = resolver(store, tmp_path)
    prefetch(asking, [], [cell()], on_miss="eager", warm_line=WARM)
    assert isinstance(asking.by_key(cell().key), Miss)
    with pytest.raises(ArtifactMiss, match="refused"):
        prefetch(asking, [], [cell()], on_miss="raise", warm_line=WARM)


def test_prefetch_without_a_lock_file_opens_what_it_can_see(url: str, tmp_path: Path) -> None:
    asking, region = (
        resolver(open_store(url, tier=False), tmp_path),
        Region("layer", torch.nn.Linear(2, 2), {}),
    )
    prefetch(asking, [region], None, on_miss="eager", warm_line=WARM)
    with pytest.raises(ServiceUnavailable):
        prefetch(asking, [region], None, on_miss="raise", warm_line=WARM)
