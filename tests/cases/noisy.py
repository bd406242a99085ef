"""A drafter whose layers do more than compute: dropout, statistics that they keep, results that alias."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, HIDDEN = 64, 64


class Drop(nn.Module):
    """Case E5: dropout with probability one half, and nothing else."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training)


class Statistics(nn.Module):
    """Batch normalisation, a moving average that is read before it is changed, and a counter."""

    average: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.norm = nn.BatchNorm1d(HIDDEN)
        self.register_buffer("average", torch.ones(HIDDEN))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The result, a view of it, the input, a view of that, a detached one, and the counter."""
        y = F.dropout(self.norm(self.linear(x)) * (self.average + 1), 0.25, self.training)
        with torch.no_grad():
            self.average.mul_(0.9).add_(y.mean(0), alpha=0.1)
            self.calls.add_(1)
        return y, y.view(-1)[HIDDEN:], x, x[1:].t(), y.detach(), self.calls


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = Drop()
        self.statistics = Statistics()

    def forward(self, x: Tensor) -> Tensor:
        y, part, same, rest, _, _ = self.statistics(self.drop(x))
        return y.pow(2).mean() + part.mean() + same.mean() + rest.mean()


def build() -> Noisy:
    """The factory."""
    torch.manual_seed(0)
    return Noisy()


def batch(bucket: dict[str, int], device: Any) -> tuple[tuple[()], dict[str, Tensor]]:
    """Random inputs, for which a gradient is wanted."""
    return (), {"x": torch.randn(bucket["rows"], HIDDEN, device=device).requires_grad_()}
