"""Drafters of the requirement cases that need kernels of flex attention: one call each, on leaves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from aotcache.flex import create_block_mask, flex_attention

HEADS, LENGTH, HEAD = 4, 512, 64
KEPT = 384
"""B5: how many of the keys are looked at."""


def leaves(bucket: dict[str, int], device: Any, *, seed: int | None = None) -> Any:
    """Queries, keys and values that want gradients, and a target. `bucket["q"]` queries."""
    generator = torch.Generator()
    generator.seed() if seed is None else generator.manual_seed(seed)

    def draw(length: int) -> Tensor:
        return torch.randn(1, HEADS, length, HEAD, generator=generator).to(device)

    q, target = draw(bucket["q"]), draw(bucket["q"])
    k, v = draw(bucket["kv"]), draw(bucket["kv"])
    return (), {"q": q.requires_grad_(), "k": k.requires_grad_(), "v": v.requires_grad_(), "target": target}


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


class Sliced(nn.Module):
    """Attention to the first keys of longer leaves, without a copy of them."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, target: Tensor) -> Tensor:
        mask = create_block_mask(causal, None, None, q.shape[2], KEPT, device=q.device)
        out = flex_attention(q, k[:, :, :KEPT], v[:, :, :KEPT], block_mask=mask)
        return (out * target).sum()  # type: ignore[no-any-return]


class Whole(nn.Module):
    """The same on all keys there are."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, target: Tensor) -> Tensor:
        mask = create_block_mask(causal, None, None, q.shape[2], k.shape[2], device=q.device)
        return (flex_attention(q, k, v, block_mask=mask) * target).sum()  # type: ignore[no-any-return]


class Both(nn.Module):
    """B5: the call on all keys first, then the one on some."""

    def __init__(self) -> None:
        super().__init__()
        self.whole, self.sliced = Whole(), Sliced()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, target: Tensor) -> Tensor:
        whole = self.whole(
            q.detach().requires_grad_(), k.detach().requires_grad_(), v.detach().requires_grad_(), target
        )
        return self.sliced(q, k, v, target) + 0 * whole  # type: ignore[no-any-return]


class Scaled(nn.Module):
    """B7 (a): scores times a learned number."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.tensor(0.7), requires_grad=not frozen)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, target: Tensor) -> Tensor:
        factor = self.bias

        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return s * factor

        return (flex_attention(q, k, v, score) * target).sum()  # type: ignore[no-any-return]

    def by_definition(self, q: Tensor, k: Tensor, v: Tensor, target: Tensor) -> Tensor:
        scores = q @ k.mT / HEAD**0.5 * self.bias
        return (scores.softmax(-1) @ v * target).sum()


class Biased(nn.Module):
    """B7 (b): a learned number for each head and distance."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        table = torch.randn(HEADS, 2 * LENGTH, generator=generator)
        self.bias = nn.Parameter(table, requires_grad=not frozen)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, target: Tensor) -> Tensor:
        bias, length = self.bias, k.shape[2]

        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return s + bias[h, i - j + length]

        return (flex_attention(q, k, v, score) * target).sum()  # type: ignore[no-any-return]

    def by_definition(self, q: Tensor, k: Tensor, v: Tensor, target: Tensor) -> Tensor:
        i, j = torch.arange(q.shape[2], device=q.device), torch.arange(k.shape[2], device=q.device)
        scores = q @ k.mT / HEAD**0.5 + self.bias[:, i[:, None] - j + k.shape[2]]
        return (scores.softmax(-1) @ v * target).sum()


def build(kind: str, frozen: bool = False) -> nn.Module:
    """The factory."""
    makers: dict[str, Any] = {
        "both": Both,
        "scaled": lambda: Scaled(frozen),
        "biased": lambda: Biased(frozen),
    }
    made: nn.Module = makers[kind]()
    return made
