"""A drafter of many layers with one graph: each has a number, which is in its key and in no graph.

Any number of keys so costs one compile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 16


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.number < 0:
            raise ValueError("a layer has a number")
        return x + torch.tanh(self.inner(x)) * self.gain


class Drafter(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList(Layer(number) for number in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale  # so that the first layer's input wants a gradient, as those of the others do
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def build(layers: int) -> Drafter:
    torch.manual_seed(0)
    return Drafter(layers)


def batch(bucket: dict[str, int], device: Any) -> tuple[tuple[()], dict[str, Tensor]]:
    return (), {"x": torch.randn(bucket["rows"], WIDTH, device=device)}
