"""A second model to precompile: twenty layers with keys of their own and one and the same graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

LAYERS = 20


class Layer(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        if self.depth >= LAYERS:
            return x
        return torch.tanh(self.linear(x)) + x


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(depth) for depth in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


def build() -> Stack:
    return Stack()


def batch(bucket: dict[str, int], device: Any) -> tuple[tuple[()], dict[str, Tensor]]:
    return (), {"x": torch.randn(bucket["rows"], 16, device=device)}
