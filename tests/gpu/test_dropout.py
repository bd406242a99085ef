"""E5 on the device: one mask for forward and backward, and seeds that repeat."""

from __future__ import annotations

import math
import threading
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
    for tensor in (out.detach(), ones.grad):
        assert ((tensor == 0) | (tensor == 2)).all()
    require_half(out.detach() != 0)
    return out.detach() != 0, ones.grad != 0


def require_half(kept: Tensor) -> None:
    """Half of it is true, within four standard deviations of a fair coin."""
    assert abs(int(kept.sum()) - kept.numel() / 2) <= 4 * math.sqrt(kept.numel() / 4)


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
            later = torch.rand(ROWS, HIDDEN, device=DEVICE) < 0.5
        stats = handle.stats()
    assert not stats["misses"] + stats["eager_calls"] + stats["traces"]
    for forward, backward in (*runs[0], *runs[1]):
        assert torch.equal(forward, backward)
    seen = [forward for forward, _ in runs[0]]
    assert all(torch.equal(a, b) for a, (b, _) in zip(seen, runs[1], strict=True))
    assert not any(torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])
    require_half(torch.stack(seen))
    # What is drawn later is no mask again, neither as it is nor turned round.
    for forward in seen:
        require_half(forward == later)


def test_eval_has_no_dropout_and_draws_nothing(spec: Spec) -> None:
    model = build().to(DEVICE).eval()
    x = torch.randn(ROWS, HIDDEN, device=DEVICE)
    with aotcache.attach(model, spec) as handle, torch.no_grad():
        torch.manual_seed(5)
        assert torch.equal(model.drop(x), x)
        after = torch.rand(ROWS, device=DEVICE)
        assert not handle.stats()["misses"]
    torch.manual_seed(5)
    assert torch.equal(torch.rand(ROWS, device=DEVICE), after)


def test_threads_with_own_seeds_have_the_masks_that_eager_has_alone(spec: Spec) -> None:
    models = [build().to(DEVICE) for _ in range(4)]
    eager = build().to(DEVICE)
    alone = []
    for seed in range(4 * 20):
        torch.manual_seed(seed)
        alone.append(masks(eager, plain)[0])
    handles = [aotcache.attach(model, spec) for model in models]
    drawing = threading.Lock()  # threads on one device share its generator: a seed holds as long as one draws

    def train(thread: int) -> None:
        for seed in range(20 * thread, 20 * (thread + 1)):
            call = (plain, reentrant, recomputed)[seed % 3]
            ones = torch.ones(ROWS, HIDDEN, device=DEVICE, requires_grad=True)
            with drawing:
                torch.manual_seed(seed)
                out = call(models[thread].drop, ones)
                if call is not plain:
                    out.backward(torch.ones_like(out))  # recomputes, so it draws as well
            if call is plain:
                out.backward(torch.ones_like(out))  # while others draw
            assert torch.equal(out.detach() != 0, alone[seed])
            assert torch.equal(ones.grad, out.detach())

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(train, range(4)))
    for handle in handles:
        stats = handle.stats()
        assert not stats["misses"] + stats["eager_calls"] + stats["traces"]
        handle.detach()


def test_threads_have_masks_of_their_own(spec: Spec) -> None:
    models = [build().to(DEVICE) for _ in range(4)]
    handles = [aotcache.attach(model, spec) for model in models]
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda model: [masks(model, plain) for _ in range(20)], models):
            assert all(torch.equal(forward, backward) for forward, backward in found)
    for handle in handles:
        assert not handle.stats()["misses"]
        handle.detach()
