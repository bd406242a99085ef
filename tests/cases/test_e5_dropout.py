"""E5: the mask of a backward is that of its forward, seeds repeat, and masks are eager's own."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import aotcache
from tests.cases.conftest import Warm
from tests.cases.noisy import HIDDEN, ROWS, Noisy, build

SHAPE = (ROWS, HIDDEN)
CELLS = ROWS * HIDDEN


@pytest.fixture
def model(noisy: Warm) -> Iterator[Noisy]:
    made = build()
    with aotcache.attach(made, noisy.spec, store=noisy.store) as handle:
        yield made
        stats = handle.stats()
    assert stats["misses"] == stats["eager_calls"] == stats["traces"] == 0
    assert stats["hits"] > 0


def plain(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return function(x)


def reentrant(function: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    return checkpoint(function, x, use_reentrant=True)


def recomputed(function: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    return checkpoint(function, x, use_reentrant=False)


def masks(model: Noisy, call: Callable[..., Any] = plain) -> tuple[Tensor, Tensor]:
    """What the forward kept, by its output, and what the backward let through, by the gradient."""
    ones = torch.ones(SHAPE, requires_grad=True)
    out = call(model.drop, ones)
    out.backward(torch.ones(SHAPE))
    assert ones.grad is not None
    for tensor in (out.detach(), ones.grad):
        assert ((tensor == 0) | (tensor == 2)).all()
    return out.detach() != 0, ones.grad != 0


def require_half(kept: Tensor) -> None:
    """Half is kept, within four standard deviations of a fair coin."""
    assert abs(int(kept.sum()) - kept.numel() / 2) <= 4 * math.sqrt(kept.numel() / 4)


@pytest.mark.parametrize("call", [plain, reentrant, recomputed])
def test_forward_and_backward_have_one_mask_in_each_of_twenty_calls(
    model: Noisy, call: Callable[..., Any]
) -> None:
    seen = []
    for _ in range(20):
        forward, backward = masks(model, call)
        assert torch.equal(forward, backward)
        require_half(forward)
        assert not any(torch.equal(forward, before) for before in seen)
        seen.append(forward)
    require_half(torch.stack(seen))


@pytest.mark.parametrize("call", [plain, reentrant, recomputed])
def test_the_mask_is_eagers_own_under_the_same_seed_and_so_is_what_is_drawn_later(
    model: Noisy, call: Callable[..., Any]
) -> None:
    runs = []
    for drop in (model, build(), model):
        torch.manual_seed(7)
        first, second = masks(drop, call), masks(drop, call)
        runs.append((*first, *second, torch.rand(CELLS)))
    for artifact, eager, again in zip(*runs, strict=True):
        assert torch.equal(artifact, eager)
        assert torch.equal(artifact, again)
    assert not torch.equal(runs[0][0], runs[0][2])
    later = runs[0][4].view(SHAPE) < 0.5
    for drawn in (later, ~later):
        assert abs(int((drawn == runs[0][0]).sum()) - CELLS / 2) <= 4 * math.sqrt(CELLS / 4)


def test_four_threads_have_masks_of_their_own(model: Noisy) -> None:
    found: list[list[Tensor]] = []
    failed: list[BaseException] = []
    start = threading.Barrier(4)

    def train() -> None:
        try:
            start.wait(60)
            mine = []
            for call in (plain, recomputed) * 10:
                forward, backward = masks(model, call)
                if call is plain:
                    # Recomputation sets the state of the process's one generator, in eager as well:
                    # beside other threads that draw, only what is not recomputed has a sure mask.
                    assert torch.equal(forward, backward)
                require_half(forward)
                mine.append(forward)
            found.append(mine)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failed
    assert len(found) == 4


def test_four_threads_with_own_seeds_have_the_masks_that_eager_has_alone(model: Noisy) -> None:
    calls: list[Callable[..., Any]] = [plain, reentrant, recomputed]
    eager = build()
    alone: dict[int, Tensor] = {}
    for seed in range(4 * 20):
        torch.manual_seed(seed)
        alone[seed] = masks(eager)[0]
    drawing = (
        threading.Lock()
    )  # all CPU threads share one generator: a seed holds as long as one of them draws
    start = threading.Barrier(4)

    def train(thread: int) -> int:
        torch.get_num_threads()
        start.wait(60)
        for step in range(20):
            seed = 20 * thread + step
            call = calls[step % 3]
            ones = torch.ones(SHAPE, requires_grad=True)
            with drawing:
                torch.manual_seed(seed)
                out = call(model.drop, ones)
                if call is not plain:
                    out.backward(torch.ones(SHAPE))  # recomputes, so it draws as well
            if call is plain:
                out.backward(torch.ones(SHAPE))  # while others draw
            assert torch.equal(out.detach() != 0, alone[seed])
            assert ones.grad is not None
            assert torch.equal(ones.grad, out.detach())
        return thread

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(train, range(4))) == [0, 1, 2, 3]


def test_eval_has_no_dropout_and_draws_nothing(model: Noisy) -> None:
    model.eval()
    eager = build().eval()
    x = torch.randn(SHAPE)
    state = torch.get_rng_state()
    with torch.no_grad():
        assert model.drop(x) is x
        assert eager.drop(x) is x
    assert torch.equal(torch.get_rng_state(), state)
