"""A custom operator that fails when its input says so."""

from __future__ import annotations

import torch


@torch.library.custom_op("aotcache_tests::positive", mutates_args=())
def positive(x: torch.Tensor) -> torch.Tensor:
    """A copy of `x`; an error where its first entry is negative."""
    if x.flatten()[0] < 0:
        raise ValueError("the first entry is negative")
    return x.clone()


@positive.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)
