"""E5 on the device: one mask for forward and backward, and seeds that repeat."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import aotcache
from aotcache.spec import Spec
from tests.cases.noisy import HIDDEN, ROWS, Noisy, build
from tests.gpu.conftest import DEVICE


@pytest.fixture(scope="module")
def spec(warm_gpu: Callable[..., Spec]) -> Spec:
    return warm_gpu(
        "noisy",
        factory="tests.cases.noisy:build",
        batch_function="tests.cases.noisy:batch",
        regions=["drop"],
        buckets={"rows": [ROWS]},
        axes="",
    )


def masks(model: Noisy, call: Callable[..., Any]) -> tuple[Tensor, Tensor]:
    ones = torch.ones(ROWS, HIDDEN, device=DEVICE, requires_grad=True)
    out = call(model.drop, ones)
    out.backward(torch.ones_like(out))
    assert ones.grad is not None
    kept = out.detach() != 0
    assert abs(int(kept.sum()) - kept.numel() / 2) <= 4 * math.sqrt(kept.numel() / 4)
    return kept, ones.grad != 0


def plain(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return function(x)


def reentrant(function: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    return checkpoint(function, x, use_reentrant=True)


def recomputed(function: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    return checkpoint(function, x, use_reentrant=False)


@pytest.mark.parametrize("call", [plain, reentrant, recomputed])
def test_one_mask_both_ways_and_seeds_repeat(spec: Spec, call: Callable[..., Any]) -> None:
    model = build().to(DEVICE)
    with aotcache.attach(model, spec) as handle:
        runs = []
        for _ in range(2):
            torch.manual_seed(5)
            runs.append([masks(model, call) for _ in range(20)])
        assert not handle.stats()["misses"]
    for forward, backward in runs[0]:
        assert torch.equal(forward, backward)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(*runs, strict=True))
    assert not any(torch.equal(a[0], b[0]) for a, b in zip(runs[0], runs[0][1:], strict=False))


def test_threads_have_masks_of_their_own(spec: Spec) -> None:
    models = [build().to(DEVICE) for _ in range(4)]
    handles = [aotcache.attach(model, spec) for model in models]
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda model: [masks(model, plain) for _ in range(20)], models):
            assert all(torch.equal(forward, backward) for forward, backward in found)
    for handle in handles:
        assert not handle.stats()["misses"]
        handle.detach()
