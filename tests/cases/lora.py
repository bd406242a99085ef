"""TINY-D with low-rank adapters, as adapter libraries put them in: a wrapper around a linear layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tests.cases import tiny

RANK = 4


class Lora(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(RANK, base.in_features) * 0.05)
        self.up = nn.Parameter(torch.randn(base.out_features, RANK) * 0.05)
        self.enabled = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        if self.enabled:
            y = y + (x @ self.down.T) @ self.up.T
        return y


def wrap(model: tiny.Tiny, blocks: Sequence[int]) -> tiny.Tiny:
    """Freeze everything and put trainable adapters around the fused projections of some blocks."""
    torch.manual_seed(1)
    model.requires_grad_(False)
    for index in blocks:
        model.blocks[index].qkv = Lora(model.blocks[index].qkv)
    return model


def unwrap(model: tiny.Tiny) -> tiny.Tiny:
    """Take the adapters out again."""
    for block in model.blocks:
        if isinstance(block.qkv, Lora):
            block.qkv = block.qkv.base
    return model


def build() -> tiny.Tiny:
    return wrap(tiny.build(blocks=2), (0, 1))
