"""What is measured: one layer of the bundled DFlash drafter, and sixteen small tensors.

Dense attention stands in for flex attention because torch.compile cannot differentiate flex
attention on a CPU; every side runs this same module. Hidden size 128, batch 2, `seq` target
positions, 8 queries for each of the `anchors`.
"""

from __future__ import annotations

from typing import Any

import dflash_drafter as dflash
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_mask

CONFIG = dflash.SIZES["small"]


class DenseAttention(dflash.Attention):
    """The drafter's attention with its mask as a tensor of booleans, `[B, 1, N, S + N]`."""

    def forward(self, x: Tensor, target: Tensor, mask: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """See `Attention.forward`."""
        cos, sin = rotary
        seen = torch.cat([target, x], dim=1)
        n = x.size(1)
        q = dflash.rotate(self.q_norm(self._heads(self.q_proj(x))), cos[:, :, -n:], sin[:, :, -n:])
        k = dflash.rotate(self.k_norm(self._heads(self.k_proj(seen))), cos, sin)
        v = self._heads(self.v_proj(seen))
        k, v = (t.repeat_interleave(q.size(1) // t.size(1), dim=1) for t in (k, v))
        scores = torch.where(mask, q @ k.transpose(-2, -1) * self.head_dim**-0.5, -1e9)
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class OneLayer(nn.Module):
    """A drafter of one layer, with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.region = dflash.Layer(CONFIG)
        self.region.attention = DenseAttention(CONFIG)

    def forward(self, **inputs: Any) -> Tensor:
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


def batch(bucket: dict[str, int], device: Any = "cpu") -> tuple[tuple[()], dict[str, Any]]:
    """Random hidden states under the mask of real documents and anchors."""
    _, real = dflash.batch(bucket, device)
    samples, seq = real["document_ids"].shape
    n = real["anchors"].size(1) * CONFIG.block
    mask_mod = dflash.draft_mask(real["document_ids"], real["anchors"], CONFIG.block, None)
    positions = torch.arange(seq + n, device=device).expand(samples, -1)
    inputs = {
        "x": torch.randn(samples, n, CONFIG.hidden, device=device).requires_grad_(),
        "target": torch.randn(samples, seq, CONFIG.hidden, device=device).requires_grad_(),
        "mask": create_mask(mask_mod, samples, 1, n, seq + n, device=str(device)),
        "rotary": dflash.rotary_tables(CONFIG, positions, torch.float32),
    }
    return (), inputs


def build_sixteen() -> nn.Module:
    """Sixteen small tensors."""
    torch.manual_seed(0)
    return AroundSixteen()


def batch_sixteen(bucket: dict[str, int], device: Any = "cpu") -> tuple[tuple[()], dict[str, Tensor]]:
    """Four random vectors."""
    return (), {name: torch.rand(bucket["size"], device=device) for name in "abcd"}
