"""A drafter of two layers that has everything a training loop can do to one, in the smallest size.

A layer has a frozen weight with an adapter, a weight tied inside of it, and two outputs.
Outside of the layers there are trained weights before and behind them; `tied` makes the
head's weight that of the second layer. All layers are one artifact for each mode and bucket.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, RANK, ROWS = 16, 2, 2
BUCKETS = (16, 32)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(RANK, WIDTH) * 0.2)
        self.up = nn.Parameter(torch.randn(WIDTH, RANK) * 0.2)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.again = nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.out.weight
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        """The next hidden states, and a side output that alone depends on `gain` and `again.bias`."""
        mixed = self.base(x) + (x @ self.down.T) @ self.up.T
        scores = (mixed @ mixed.transpose(1, 2)) / math.sqrt(WIDTH)
        weights = scores.masked_fill(~visible, -1e9).softmax(-1)
        found = weights @ mixed
        return x + torch.tanh(self.out(found)), torch.sigmoid(self.again(found)) * self.gain


class Drafter(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        if tied:
            self.head.weight = self.layers[1].out.weight
        self.checkpointing: bool | None = None
        """Whether layers are checkpointed: not at all, or of the reentrant kind or not."""
        self.with_sides = True
        """Whether the side outputs have a part in the loss."""

    def forward(self, x: Tensor, documents: Tensor, target: Tensor) -> Tensor:
        """The mean-square loss over positions of a document; padding is in document -1."""
        visible = see(documents)
        hidden = self.embed(x)
        sides = []
        for layer in self.layers:
            if self.checkpointing is None:
                hidden, side = layer(hidden, visible)
            else:
                hidden, side = checkpoint(layer, hidden, visible, use_reentrant=self.checkpointing)
            sides.append(side)
        found = self.head(hidden) + (sides[0] * sides[1] if self.with_sides else 0)
        real = (documents >= 0).unsqueeze(-1)
        return ((found - target).pow(2) * real).sum() / (real.sum().clamp(min=1) * WIDTH)


def see(documents: Tensor) -> Tensor:
    """`[B, Q, KV]`: causal and same document; padding sees itself, so that no row is empty."""
    length = documents.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    return causal & (documents[:, :, None] == documents[:, None, :])


def build(tied: bool = True) -> Drafter:
    torch.manual_seed(0)
    return Drafter(tied)


def batch(bucket: dict[str, int], device: Any) -> tuple[tuple[()], dict[str, Tensor]]:
    length = bucket["seq"]
    cuts = torch.randint(1, length, (ROWS, 1))
    return (), {
        "x": torch.randn(ROWS, length, WIDTH, device=device),
        "documents": (torch.arange(length) >= cuts).long().to(device),
        "target": torch.randn(ROWS, length, WIDTH, device=device),
    }


@contextmanager
def careful() -> Iterator[None]:
    """A context for steps: deterministic algorithms alone."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
