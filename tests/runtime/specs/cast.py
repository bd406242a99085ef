"""A drafter of one layer that is run under autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

ROWS, WIDTH = 4, 16


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lin(x)) * x


class Drafter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out.float().pow(2).mean()


def build() -> Drafter:
    torch.manual_seed(0)
    return Drafter()


def batch(bucket: dict[str, int], device: Any) -> tuple[tuple[()], dict[str, Tensor]]:
    return (), {"x": torch.randn(bucket["rows"], WIDTH, device=device)}


def context() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)
