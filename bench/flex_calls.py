"""What `bench.flex` measures: one call of flex attention under a mask of documents drawn anew."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from aotcache.flex import flex_attention

HEADS, HEAD = 2, 16


def masked(documents: Tensor) -> BlockMask:
    """Causal and same document: a closure of its own for every batch, over a tensor of its own."""

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (documents[b, q] == documents[b, kv])

    length = documents.shape[1]
    return create_block_mask(visible, 1, None, length, length, device=str(documents.device))


class OneCall(nn.Module):
    """A drafter that is one call."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
        """Attention `[1, 2, seq, 16]`."""
        return flex_attention(q, k, v, block_mask=masked(documents))  # type: ignore[no-any-return]


def build() -> OneCall:
    """The factory."""
    return OneCall()


def batch(bucket: dict[str, int], device: Any = "cpu") -> tuple[tuple[()], dict[str, Tensor]]:
    """Random queries, keys and values, two documents."""
    length = bucket["seq"]
    q, k, v = torch.randn(3, 1, HEADS, length, HEAD, device=device)
    cut = int(torch.randint(1, length, ()))
    documents = (torch.arange(length, device=device) >= cut).long()[None]
    return (), {"q": q, "k": k, "v": v, "documents": documents}
