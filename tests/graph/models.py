"""Small regions whose keys are compared, and how their calls are described."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, flex_attention

from aotcache.graph.region import Call, Region


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Layer(nn.Module):
    """One attention layer with things around it that must, or must not, count."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.scale = 0.5
        self.rank = 0
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.norm = Norm(width)

    def attend(self, x: Tensor, block_mask: BlockMask | None) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = flex_attention(q, k, v, block_mask=block_mask, scale=self.scale)
        return y.transpose(1, 2).reshape(batch, length, width)

    def forward(self, x: Tensor, block_mask: BlockMask | None = None, *, residual: bool = True) -> Tensor:
        y = self.out(self.attend(self.norm(x), block_mask))
        return x + y if residual else y


def document_mask(documents: Tensor, window: int = 64) -> BlockMask:
    """A mask whose functions hold a tensor and a constant, one level down."""

    def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (q - kv < window)

    def same(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return documents[b, q] == documents[b, kv]

    batch, length = documents.shape
    return create_block_mask(and_masks(causal, same), batch, None, length, length, device="cpu")


def make_layer() -> Layer:
    torch.manual_seed(0)
    return Layer()


def describe(layer: nn.Module, *args: Any, options: dict[str, Any] | None = None, **kwargs: Any) -> Call:
    return Region("layers.0", layer, options or {}).describe(args, kwargs)


def documents(seed: int = 0) -> Tensor:
    return torch.randint(0, 3, (2, 128), generator=torch.Generator().manual_seed(seed))


def base_call(layer: Layer) -> Call:
    return describe(layer, torch.ones(2, 128, 64), document_mask(documents()))


def components_that_differ(a: Call, b: Call) -> set[str]:
    return {d.component for d in a.parts.diff(b.parts)}
