"""B1's drafter: attention under a mask that is longer than the input, as EAGLE-3 trainers build it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from aotcache.flex import flex_attention
from tests.cases import tiny

REAL = 200
BUCKET = 256


def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Causal over the first REAL keys; of those appended in the second step, the query's own."""
    return ((kv < REAL) & (q >= kv)) | (kv == q + REAL)


def mask(q_len: int = BUCKET, kv_len: int = 2 * BUCKET, device: str = "cpu") -> BlockMask:
    """The mask for the bucket."""
    return create_block_mask(visible, None, None, q_len, kv_len, device=device)


class Attention(nn.Module):
    """The mean of attention weighted by a target, so that gradients differ from row to row."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(tiny.HEAD))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        out = flex_attention(q * self.scale, k, v, block_mask=mask(device=q.device.type), enable_gqa=True)
        return out, (out * target).sum()


def build() -> Attention:
    """The factory."""
    return Attention()


def batch(bucket: dict[str, int], device: Any = "cpu", *, seed: int | None = None) -> Any:
    """Leaf queries, keys and values of the real lengths."""
    generator = torch.Generator()
    generator.seed() if seed is None else generator.manual_seed(seed)

    def draw(heads: int, length: int) -> Tensor:
        return torch.randn(2, heads, length, tiny.HEAD, generator=generator).to(device)

    q, k, v = draw(tiny.HEADS, REAL), draw(tiny.KV_HEADS, 2 * REAL), draw(tiny.KV_HEADS, 2 * REAL)
    tensors = {"q": q.requires_grad_(), "k": k.requires_grad_(), "v": v.requires_grad_()}
    return (), {**tensors, "target": draw(tiny.HEADS, REAL)}
