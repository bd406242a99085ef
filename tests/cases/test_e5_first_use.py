"""E5: what is compared on first use draws, updates and aliases as if it had run once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import aotcache
from aotcache.errors import DisagreesWithEager
from aotcache.manifest import Draw, Manifest
from aotcache.runtime import registry
from tests.cases.conftest import Warm
from tests.cases.noisy import HIDDEN, ROWS, batch, build
from tests.cases.support import copy_store


@pytest.fixture(autouse=True)
def _nothing_compared_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_opened", {})


def trained(noisy: Warm, verify: Any, how: str) -> list[Tensor]:
    """Two steps: losses, gradients, buffers, and what is drawn afterwards."""
    torch.manual_seed(5)
    given = batch({"rows": ROWS}, "cpu")[1]
    model, losses = build(), []
    with aotcache.attach(model, noisy.spec, store=noisy.store, verify=verify) as handle:
        for _ in range(2):
            if how == "plain":
                loss = model(given["x"])
            elif how == "recomputed":
                loss = checkpoint(model, given["x"], use_reentrant=False)
            else:
                loss = (
                    model.statistics(checkpoint(model.drop, given["x"], use_reentrant=True))[0].pow(2).mean()
                )
            loss.backward()
            losses.append(loss.detach())
    stats = handle.stats()
    assert stats["misses"] == stats["eager_calls"] == stats["traces"] == 0
    assert stats["verified"] >= (2 if verify else 0)
    assert given["x"].grad is not None
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*losses, *gradients, given["x"].grad, *(b.clone() for b in model.buffers()), torch.rand(8)]


@pytest.mark.parametrize("how", ["plain", "recomputed", "reentrant"])
def test_draws_buffers_and_gradients_are_those_of_one_run(noisy: Warm, how: str) -> None:
    without = trained(noisy, None, how)
    registry._opened.clear()
    for found, expected in zip(trained(noisy, "first-use", how), without, strict=True):
        assert torch.equal(found, expected)


def test_draws_of_other_threads_are_no_part_of_the_comparison(noisy: Warm) -> None:
    """On a CPU all threads draw from one generator."""
    ended = False

    def draw() -> None:
        while not ended:
            torch.rand(1000)

    def work(_: int) -> int:
        model = build()
        with aotcache.attach(model, noisy.spec, store=noisy.store, verify="first-use") as handle:
            model(torch.ones(ROWS, HIDDEN, requires_grad=True)).backward()
        return int(handle.stats()["verified"])

    with ThreadPoolExecutor(4) as pool:
        drawing = [pool.submit(draw) for _ in range(2)]
        try:
            for _ in range(10):
                registry._opened.clear()
                assert sum(pool.map(work, range(2))) == 2
        finally:
            ended = True
        for future in drawing:
            future.result(60)


def _fewer(manifest: Manifest) -> Manifest:
    """The same artifact, said to drop a quarter where eager drops half."""
    slots = [
        replace(slot, draw=Draw(slot.draw.operator, (0.25,))) if slot.draw is not None else slot
        for slot in manifest.inputs
    ]
    return replace(manifest, inputs=tuple(slots))


def _one_less(manifest: Manifest) -> Manifest:
    """The same artifact, said to write one buffer's new value where another's goes afterwards."""
    written = sorted(manifest.mutations, key=lambda m: m.late)
    shapes = [manifest.inputs[m.input].shape for m in written]
    last = next(i for i in reversed(range(len(written))) if shapes[i] in shapes[:i])
    first = written[shapes.index(shapes[last])]
    moved = replace(first, input=written[last].input)
    return replace(manifest, mutations=tuple(moved if m == first else m for m in manifest.mutations))


def test_a_buffer_that_the_artifact_leaves_as_it_was_is_refused(noisy: Warm, tmp_path: Path) -> None:
    kept = [m for m in noisy.manifests("train") if m.region == "statistics"]
    store = copy_store(noisy.store, tmp_path / "less", kept, _one_less)
    model = build()
    with aotcache.attach(model, noisy.spec, store=store, verify="first-use"):
        with pytest.raises(DisagreesWithEager, match="the new value of"):
            model.statistics(batch({"rows": ROWS}, "cpu")[1]["x"])


@pytest.fixture
def fewer(noisy: Warm, tmp_path: Path) -> str:
    drops = [m for m in noisy.manifests("train") if m.region == "drop"]
    return copy_store(noisy.store, tmp_path / "fewer", drops, _fewer)


def test_another_dropout_than_eagers_is_refused(noisy: Warm, fewer: str) -> None:
    model = build()
    with aotcache.attach(model, noisy.spec, store=fewer, verify="first-use"):
        with pytest.raises(DisagreesWithEager, match="output 0 differs"):
            model.drop(torch.ones(ROWS, HIDDEN, requires_grad=True))
