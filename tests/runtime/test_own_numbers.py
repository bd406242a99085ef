"""Numbers of a generator of their own: the same in two runs, and torch's generator is not touched."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from aotcache.errors import RejectedArtifact
from aotcache.runtime.own_numbers import OwnNumbers

X = torch.ones(64, 64)

DRAWS: dict[str, Callable[[], Tensor]] = {
    "dropout": lambda: F.dropout(X, 0.5, True),
    "dropout in place": lambda: F.dropout(X.clone(), 0.5, True, inplace=True),
    "dropout of channels": lambda: F.dropout1d(X, 0.5, True),
    "native dropout": lambda: torch.native_dropout(X, 0.5, True)[0],
    "alpha dropout": lambda: F.alpha_dropout(X, 0.5, True),
    "bernoulli": lambda: torch.bernoulli(X * 0.5),
    "rand": lambda: torch.rand(64, 64),
    "randn": lambda: torch.randn(64, 64),
    "randint": lambda: torch.randint(5, 100, (64, 64)),
    "randperm": lambda: torch.randperm(64),
    "rand_like": lambda: torch.rand_like(X),
    "randn_like": lambda: torch.randn_like(X),
    "normal": lambda: torch.normal(0.0, 2.0, (64, 64)),
    "uniform": lambda: torch.empty(64, 64).uniform_(-1, 1),
    "exponential": lambda: torch.empty(64, 64).exponential_(),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("what", DRAWS)
def test_two_runs_draw_alike_and_leave_torchs_generator_alone(what: str, mode: Callable[..., object]) -> None:
    state, found = torch.get_rng_state(), []
    with mode():  # type: ignore[attr-defined]
        for seed in (1, 1, 2):
            with OwnNumbers(seed, "layers.0"):
                found.append([DRAWS[what](), DRAWS[what]()])
    assert torch.equal(torch.get_rng_state(), state)
    first, again, other = found
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])


def test_dropout_keeps_half_and_scales_it() -> None:
    with OwnNumbers(1, "layers.0"):
        for drop in (F.dropout(X, 0.5, True), torch.native_dropout(X, 0.5, True)[0]):
            assert set(drop.unique().tolist()) == {0.0, 2.0}
            assert 0.4 < float((drop == 0).float().mean()) < 0.6


def test_what_other_threads_draw_is_no_part_of_it() -> None:
    def draw() -> None:
        for _ in range(200):
            torch.rand(1000)

    other = threading.Thread(target=draw)
    with OwnNumbers(3, "layers.0"):
        alone = [torch.rand(100) for _ in range(50)]
    other.start()
    with OwnNumbers(3, "layers.0"):
        beside = [torch.rand(100) for _ in range(50)]
    other.join()
    assert all(map(torch.equal, alone, beside))


def test_a_generator_that_was_given_is_used() -> None:
    with OwnNumbers(3, "layers.0"):
        found = torch.rand(8, generator=torch.Generator().manual_seed(9))
    assert torch.equal(found, torch.rand(8, generator=torch.Generator().manual_seed(9)))


def test_a_checkpoint_that_would_draw_again_is_refused() -> None:
    x = torch.ones(8, 8, requires_grad=True)
    numbers = OwnNumbers(1, "layers.0")
    with numbers:
        out = checkpoint(lambda t: F.dropout(t, 0.5, True) * t, x, use_reentrant=False)
        numbers.close()
        with pytest.raises(RejectedArtifact, match="draws again in the backward"):
            torch.autograd.grad(out.sum(), x)
