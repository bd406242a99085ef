"""The smallest drafter whose regions read, capture and receive everything that guards must see.

`Probe` reads constants in every way that code can; two of them differ in an attribute
that no graph shows. `Scored` is flex attention with a learned bias in its score function
and documents in its mask.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

ROWS, WIDTH, LENGTH, HEADS = 4, 8, 32, 2

GAIN = 1.25
BY_DTYPE = {torch.float32: 0.5, torch.float64: 0.5}
FLAGS = {"shift"}


@dataclass
class Settings:
    weight: float = 2.0


class Constants:
    bias = 0.25


def helper(x: Tensor) -> Tensor:
    return torch.tanh(x) * GAIN


def transform(shift: Tensor, factor: float) -> Callable[[Tensor], Tensor]:
    def apply(x: Tensor) -> Tensor:
        return x * factor * OUTSIDE + shift

    return apply


OUTSIDE = 1.0


class Probe(nn.Module):
    constants = Constants()

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.lin.weight
        self.register_buffer("offset", torch.randn(WIDTH))
        self.table = torch.randn(WIDTH)
        self.scale0 = 1.5
        self.options = argparse.Namespace(gain=0.75)

    def grow(self, x: Tensor) -> Tensor:
        return x * getattr(self, f"scale{0}") * self.options.gain

    def forward(
        self, x: Tensor, y: Tensor, *, settings: Settings, function: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        if self.index < 0:
            raise ValueError("a probe has an index")
        hidden = helper(self.lin(x)) + self.grow(self.tied(y)) * BY_DTYPE[x.dtype] + self.table
        if "shift" in FLAGS:
            hidden = hidden + self.offset
        if not self.training:
            hidden = hidden * 2
        hidden = function(hidden) * settings.weight + self.constants.bias
        return hidden, torch.softmax(hidden * y, -1)


class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, 3 * HEADS * WIDTH)

    def forward(self, x: Tensor, mask: BlockMask, score: Callable[..., Tensor]) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.proj(x).view(batch, length, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
        return (
            flex_attention(q, k, v, score_mod=score, block_mask=mask)
            .transpose(1, 2)
            .reshape(batch, length, -1)
        )


def block_mask(documents: Tensor) -> BlockMask:
    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (documents[b, q] == documents[b, kv])

    batch, length = documents.shape
    return create_block_mask(mask, batch, None, length, length, device="cpu", BLOCK_SIZE=16)


def biased(bias: Tensor, factor: float = 1.0) -> Callable[..., Tensor]:
    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return s * factor + bias[h, kv]

    return score


class Drafter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.probes = nn.ModuleList([Probe(0), Probe(1)])
        self.scored = Scored()
        self.bias = nn.Parameter(torch.randn(HEADS, LENGTH))
        self.shift = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, y: Tensor, states: Tensor, documents: Tensor) -> Tensor:
        for probe in self.probes:
            x, soft = probe(x, y, settings=Settings(), function=transform(self.shift, 0.5))
            y = y + soft.detach()
        out = self.scored(states, block_mask(documents), biased(self.bias))
        return x.pow(2).mean() + (soft * y).sum() + out.pow(2).mean()


def build() -> Drafter:
    torch.manual_seed(0)
    return Drafter()


def build_meta() -> Drafter:
    with torch.device("meta"):
        return Drafter()


def build_fake() -> Drafter:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return Drafter()


def batch(bucket: dict[str, int], device: Any) -> tuple[tuple[()], dict[str, Tensor]]:
    rows, length = bucket["batch"], LENGTH
    cuts = torch.randint(1, length, (2, 1))
    return (), {
        "x": torch.randn(rows, WIDTH, requires_grad=True),
        "y": torch.randn(rows, WIDTH, requires_grad=True),
        "states": torch.randn(2, length, WIDTH, requires_grad=True),
        "documents": (torch.arange(length) >= cuts).long(),
    }
