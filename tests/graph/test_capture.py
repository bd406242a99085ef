"""Recording refuses what a forward does besides computing its result."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from aotcache.errors import UnsupportedGraph
from aotcache.graph.capture import recording
from aotcache.graph.region import Call, Region


class Keeps(nn.Module):
    """Its forward is what a test gives it."""

    def __init__(self, compute: Callable[..., Tensor]) -> None:
        super().__init__()
        self.compute = compute
        self.register_buffer("mean", torch.ones(4))
        self.last = torch.zeros(2, 4)

    def forward(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        return self.compute(self, x, cache)


def _running_mean(self: Any, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
    self.mean = self.mean * 0.9 + x.mean(0) * 0.1
    return x * self.mean


def _last_result(self: Any, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
    self.last = x * 2
    return self.last + 1


def _cache(self: Any, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
    cache["keys"] = x * 2
    return x * cache["keys"]


def _layer_drop(self: Any, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
    return x * 2 if random.random() < 0.9 else x + 0


def _noise(self: Any, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
    return x * float(np.random.rand())


@pytest.mark.parametrize(
    ("compute", "what"),
    [
        (_running_mean, "mean is another tensor"),
        (_last_result, "last is another tensor"),
        (_cache, "cache.keys is another tensor"),
        (_layer_drop, "draws random numbers"),
        (_noise, "draws random numbers"),
    ],
)
def test_what_an_artifact_could_not_do_is_refused(compute: Callable[..., Tensor], what: str) -> None:
    module, calls = Keeps(compute), list[Call]()
    with recording([Region("keeps", module, {})], calls.append), pytest.raises(UnsupportedGraph) as refused:
        module(torch.randn(2, 4), {"keys": torch.zeros(2, 4)})
    assert "'keeps'" in str(refused.value)
    assert what in str(refused.value)
    assert not calls
