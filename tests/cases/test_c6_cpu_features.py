"""C6: an artifact that uses what this processor lacks is never opened, and a humbler one is taken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import aotcache
from aotcache import compat, host
from aotcache.errors import ArtifactMiss
from tests.cases import tiny
from tests.cases.conftest import Warm
from tests.cases.places import KINDS, Places
from tests.cases.support import assert_close, make_batch

pytestmark = pytest.mark.skipif(
    not host.cpu_features().issuperset(compat.CPU_LEVELS["x86_64-avx512"]),
    reason="an avx512 artifact can be built and checked only where avx512 is",
)


def lacking_avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    features = frozenset(f for f in host.cpu_features() if not f.startswith("avx512"))
    monkeypatch.setattr(host, "cpu_features", lambda: features)


def test_builds_for_a_stated_level_record_what_they_need(levels: Warm) -> None:
    needs = {str(m.target): set(m.host.cpu_features) for m in levels.manifests()}
    assert {"avx512f", "avx512vl"} <= needs["cpu:x86_64-avx512"]
    assert "avx2" in needs["cpu:x86_64-avx2"]
    assert not any(feature.startswith("avx512") for feature in needs["cpu:x86_64-avx2"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("on_miss", ["raise", "eager"])
def test_without_the_feature_it_is_refused_unopened(
    levels: Warm,
    places: Places,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    opened: list[str],
    kind: str,
    on_miss: str,
) -> None:
    only = [m for m in levels.manifests() if m.target.arch == "x86_64-avx512"]
    lacking_avx512(monkeypatch)
    model, batch = tiny.build(), make_batch(rows=4)
    with places.place(kind, tmp_path, levels.store, only) as place:
        with aotcache.attach(model, levels.spec, store=place.url, on_miss=on_miss) as handle, torch.no_grad():
            if on_miss == "eager":
                assert_close(model(**batch), tiny.build()(**batch))
            else:
                for load in (lambda: model(**batch), handle.prefetch):
                    with pytest.raises(ArtifactMiss, match=r"that this host lacks: avx512bw.*avx512vl"):
                        load()
            assert handle.stats()["loads"] == 0
        assert opened == []
        assert place.left() == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_avx2_variant_is_picked_there(
    levels: Warm,
    places: Places,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    opened: list[str],
    kind: str,
) -> None:
    lacking_avx512(monkeypatch)
    model, batch = tiny.build(), make_batch(rows=4)
    with places.place(kind, tmp_path, levels.store, levels.manifests()) as place:
        with aotcache.attach(model, levels.spec, store=place.url) as handle, torch.no_grad():
            assert_close(model(**batch), tiny.build()(**batch))
            assert handle.stats()["hits"] == 1
    digests = {m.target.arch: m.digest for m in levels.manifests()}
    assert len(opened) == 1
    assert digests["x86_64-avx2"] in opened[0]


def test_with_the_feature_the_avx512_variant_is_picked(levels: Warm) -> None:
    manifests = levels.manifests()
    assert compat.best(manifests, host.host_facts()) == max(manifests, key=lambda m: "512" in m.target.arch)
