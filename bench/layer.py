"""What is measured: one DFlash decoder layer with dense attention, and sixteen small tensors.

Dense attention stands in for flex attention because torch.compile cannot differentiate flex
attention on a CPU; every side runs this same module. Hidden size 128, batch 2, `seq` draft
tokens over `seq` tokens of context.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

HIDDEN = 128
HEADS = 4
KV_HEADS = 2
HEAD_DIM = HIDDEN // HEADS
BATCH = 2


class RMSNorm(nn.Module):
    """Root mean square norm over the last axis."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Any shape that ends in `size`."""
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class DecoderLayer(nn.Module):
    """Attention of draft tokens to context and to each other, and a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.q_norm, self.k_norm = RMSNorm(HEAD_DIM), RMSNorm(HEAD_DIM)
        self.norm, self.mlp_norm = RMSNorm(HIDDEN), RMSNorm(HIDDEN)
        self.gate = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.up = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.down = nn.Linear(3 * HIDDEN, HIDDEN, bias=False)

    def forward(self, hidden: Tensor, target: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`[batch, seq, hidden]` twice, a mask `[batch, 1, seq, 2 * seq]`, angles `[2 * seq, head]`."""
        batch, seq, _ = hidden.shape
        x = self.norm(hidden)
        context = torch.cat([target, x], dim=1)
        q = self.q_norm(self.q_proj(x).view(batch, seq, HEADS, HEAD_DIM)).transpose(1, 2)
        k = self.k_norm(self.k_proj(context).view(batch, -1, KV_HEADS, HEAD_DIM)).transpose(1, 2)
        v = self.v_proj(context).view(batch, -1, KV_HEADS, HEAD_DIM).transpose(1, 2)
        q, k = _rotate(q, cos[-seq:], sin[-seq:]), _rotate(k, cos, sin)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
        scores = torch.where(mask, q @ k.transpose(-2, -1) * HEAD_DIM**-0.5, -torch.inf)
        attended = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, seq, -1)
        hidden = hidden + self.o_proj(attended)
        x = self.mlp_norm(hidden)
        return hidden + self.down(functional.silu(self.gate(x)) * self.up(x))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class OneLayer(nn.Module):
    """A drafter of one layer, with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.region = DecoderLayer()

    def forward(self, **inputs: Tensor) -> Tensor:
        """The loss, a scalar."""
        return loss(self.region(**inputs))


class Sixteen(nn.Module):
    """Twelve parameters and four arguments of a few numbers each."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.rand(size)) for _ in range(12)])

    def forward(self, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        """Four vectors of `size`."""
        total = a * b + c * d
        for weight in self.weights:
            total = total * weight
        return total


class AroundSixteen(nn.Module):
    """A drafter around `Sixteen`, with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.region = Sixteen()

    def forward(self, **inputs: Tensor) -> Tensor:
        """The loss, a scalar."""
        return loss(self.region(**inputs))


def loss(hidden: Tensor) -> Tensor:
    """The mean square."""
    return hidden.square().mean()


def build() -> nn.Module:
    """One layer."""
    torch.manual_seed(0)
    return OneLayer()


def batch(bucket: dict[str, int], device: Any = "cpu") -> tuple[tuple[()], dict[str, Tensor]]:
    """Random hidden states, about half of the keys masked."""
    seq = bucket["seq"]
    angles = torch.rand(2 * seq, HEAD_DIM) * 6.28
    mask = torch.rand(BATCH, 1, seq, 2 * seq) > 0.5
    mask[..., 0] = True  # no row without a key
    inputs = {
        "hidden": torch.randn(BATCH, seq, HIDDEN).requires_grad_(),
        "target": torch.randn(BATCH, seq, HIDDEN),
        "mask": mask,
        "cos": angles.cos(),
        "sin": angles.sin(),
    }
    return (), {
        name: value.detach().to(device).requires_grad_(value.requires_grad) for name, value in inputs.items()
    }


def build_sixteen() -> nn.Module:
    """Sixteen small tensors."""
    torch.manual_seed(0)
    return AroundSixteen()


def batch_sixteen(bucket: dict[str, int], device: Any = "cpu") -> tuple[tuple[()], dict[str, Tensor]]:
    """Four random vectors."""
    return (), {name: torch.rand(bucket["size"], device=device) for name in "abcd"}
