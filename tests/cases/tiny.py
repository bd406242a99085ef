"""TINY and TINY-D of the requirement cases: the smallest drafter-like modules, and their reference.

Hidden 256, 4 query heads on 2 key heads of 64, fused qkv, causal-and-same-document
attention, output linear, RMSNorm, mean-square loss. `FlexBlock` uses flex attention,
`DenseBlock` a boolean mask.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

HIDDEN, HEADS, KV_HEADS, HEAD = 256, 4, 2, 64


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD)
        self.out = nn.Linear(HEADS * HEAD, HIDDEN)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, length, HEADS + 2 * KV_HEADS, HEAD).transpose(1, 2)
        return qkv[:, :HEADS], qkv[:, HEADS : HEADS + KV_HEADS], qkv[:, HEADS + KV_HEADS :]

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        return x + self.out(y.transpose(1, 2).reshape(x.shape))


class FlexBlock(Attention):
    def forward(self, x: Tensor, block_mask: BlockMask) -> Tensor:
        q, k, v = self.split(x)
        return self.join(x, flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True))


def dense(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Softmax attention under a boolean mask `[B, 1, Q, KV]`; rows that see nothing give zero."""
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
    dead = ~visible.any(-1, keepdim=True)
    scores = (q @ k.transpose(-1, -2)) / math.sqrt(HEAD)
    scores = scores.masked_fill(~visible, -math.inf).masked_fill(dead, 0.0)
    return scores.softmax(-1).masked_fill(dead, 0.0) @ v


def visible(documents: Tensor) -> Tensor:
    """Causal and same document; document -1 is padding, sees nothing and is seen by nothing."""
    length = documents.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    same = documents[:, :, None] == documents[:, None, :]
    return (causal & same & (documents >= 0)[:, :, None])[:, None]


class DenseBlock(Attention):
    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        return self.join(x, dense(*self.split(x), visible(documents)))


def block_mask(documents: Tensor) -> BlockMask:
    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (documents[b, q] == documents[b, kv]) & (documents[b, q] >= 0)

    batch, length = documents.shape
    return create_block_mask(mask, batch, None, length, length, device=str(documents.device))


class Tiny(nn.Module):
    """`blocks` of one kind, then the mean-square loss over positions of a document."""

    def __init__(self, flex: bool, blocks: int) -> None:
        super().__init__()
        self.flex = flex
        self.blocks = nn.ModuleList((FlexBlock if flex else DenseBlock)() for _ in range(blocks))

    def forward(self, x: Tensor, documents: Tensor, target: Tensor) -> Tensor:
        mask: Any = block_mask(documents) if self.flex else documents
        for block in self.blocks:
            x = block(x, mask)
        real = (documents >= 0).unsqueeze(-1)
        return ((x - target).pow(2) * real).sum() / (real.sum().clamp(min=1) * HIDDEN)


MARK = torch.arange(1024, dtype=torch.float32) * 1e-5 + 0.00123
"""4 KB that a marked drafter has in its first weight, and nothing else in the world."""


def bf16() -> AbstractContextManager[Any]:
    """A context for steps: bf16 autocast."""
    return torch.autocast("cpu", torch.bfloat16)


def build(flex: bool = False, blocks: int = 1, meta: str = "", marked: bool = False) -> Tiny:
    """The factory: on real memory, on the meta device, or inside a FakeTensorMode of its own."""
    torch.manual_seed(0)
    if marked:
        model = Tiny(flex, blocks)
        with torch.no_grad():
            model.get_parameter("blocks.0.qkv.weight").view(-1)[: MARK.numel()] = MARK
        return model
    if meta == "meta":
        with torch.device("meta"):
            return Tiny(flex, blocks)
    if meta == "fake":
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            return Tiny(flex, blocks)
    return Tiny(flex, blocks)


def batch(bucket: dict[str, int], device: Any) -> tuple[tuple[()], dict[str, Tensor]]:
    """Random hidden states and targets, and three documents in each row."""
    rows, length = bucket["batch"], bucket["seq"]
    cuts = torch.randint(1, length, (rows, 2))
    positions = torch.arange(length)
    documents = (positions >= cuts[:, :1]).long() + (positions >= cuts[:, 1:]).long()
    return (), {
        "x": torch.randn(rows, length, HIDDEN, device=device),
        "documents": documents.to(device),
        "target": torch.randn(rows, length, HIDDEN, device=device),
    }


def leaf_batch(bucket: dict[str, int], device: Any) -> tuple[tuple[()], dict[str, Tensor]]:
    """The same with hidden states that a gradient is wanted for."""
    args, kwargs = batch(bucket, device)
    kwargs["x"].requires_grad_(True)
    return args, kwargs
