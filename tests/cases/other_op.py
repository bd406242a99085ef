"""An operator of the same name with another signature."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("aotcache_cases::soften", mutates_args=())
def soften(x: Tensor, scale: float, offset: float = 0.0) -> Tensor:
    """x / (scale + |x|) + offset."""
    return x / (scale + x.abs()) + offset


@soften.register_fake
def _(x: Tensor, scale: float, offset: float = 0.0) -> Tensor:
    return torch.empty_like(x)
