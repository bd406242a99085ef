"""The drafter of the loop tests, warmed once in a session; eager twins; and pairs of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import aotcache
from aotcache.runtime.attach import Handle
from aotcache.spec import Spec
from tests.cases.support import write_spec
from tests.loops import drafter


@dataclass(frozen=True)
class Warm:
    """A spec and the store that covers it."""

    spec: Spec
    store: str


@pytest.fixture(scope="session", autouse=True)
def _importable(importable: None) -> None:
    """Builders import `tests.loops`."""


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory, warmed: Callable[..., str]) -> Warm:
    spec = write_spec(
        tmp_path_factory.mktemp("loops") / "loops.toml",
        factory="tests.loops.drafter:build",
        batch_function="tests.loops.drafter:batch",
        regions=["layers.*"],
        buckets={"seq": drafter.BUCKETS},
    )
    return Warm(spec, warmed(spec))


@dataclass(frozen=True)
class Twins:
    """An attached drafter and an eager one of the same weights."""

    ours: drafter.Drafter
    eager: drafter.Drafter
    handle: Handle

    def __iter__(self) -> Iterator[drafter.Drafter]:
        return iter((self.ours, self.eager))

    def agree(self) -> None:
        """Both have the same gradients, and None in the same places."""
        assert_same(gradients(self.ours), gradients(self.eager))


@pytest.fixture
def twins(warm: Warm) -> Iterator[Twins]:
    ours, eager = drafter.build(), drafter.build()
    with aotcache.attach(ours, warm.spec, store=warm.store, lock=f"{warm.spec.path}.lock") as handle:
        yield Twins(ours, eager, handle)
        stats = handle.stats()
    assert (stats["misses"], stats["eager_calls"], stats["traces"]) == (0, 0, 0)
    assert stats["hits"] > 0


def make_batch(length: int = 16, seed: int = 0) -> dict[str, Tensor]:
    """A batch of one of the drafter's shapes."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made: dict[str, Tensor] = drafter.batch({"seq": length}, "cpu")[1]
        return made


def gradients(model: torch.nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_same(found: dict[str, Any], wanted: dict[str, Any], tolerance: float = 2e-5) -> None:
    """Equal within float32 round-off of the largest entry; what is None in one is None in both."""
    assert found.keys() == wanted.keys()
    for name, expected in wanted.items():
        assert (found[name] is None) == (expected is None), name
        if expected is not None:
            assert_close(found[name], expected, name, tolerance)


def assert_close(found: Tensor, wanted: Tensor, what: str = "", tolerance: float = 2e-5) -> None:
    """Equal within float32 round-off of the largest entry."""
    assert found.shape == wanted.shape, what
    assert found.dtype == wanted.dtype, what
    error = float((found.detach().double() - wanted.detach().double()).abs().max())
    assert error <= tolerance * max(1e-3, float(wanted.detach().abs().max())), (what, error)
