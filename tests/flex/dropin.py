"""A drafter that changed two imports: its attention and its masks are `aotcache.flex`'s."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from aotcache.flex import create_block_mask, flex_attention

HEADS, KV_HEADS, HEAD = 4, 2, 16
HIDDEN = HEADS * HEAD


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(HIDDEN, HIDDEN)
        self.kv = nn.Linear(HIDDEN, 2 * KV_HEADS * HEAD)
        self.slope = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, HEADS, HEAD).transpose(1, 2)
        k, v = self.kv(x).view(batch, length, 2, KV_HEADS, HEAD).permute(2, 0, 3, 1, 4)
        slope = self.slope

        def penalise(score: Tensor, b: Tensor, h: Tensor, q_at: Tensor, kv_at: Tensor) -> Tensor:
            return score - slope * (q_at - kv_at)

        out = flex_attention(q, k, v, penalise, mask, enable_gqa=True)
        return x + out.transpose(1, 2).reshape(batch, length, HIDDEN)


class Drafter(nn.Module):
    """`layers` of attention, then the mean-square loss over positions of a document."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(layers))

    def forward(self, x: Tensor, documents: Tensor, target: Tensor) -> Tensor:
        mask = make_mask(documents)
        for layer in self.layers:
            x = layer(x, mask)
        real = (documents >= 0).unsqueeze(-1)
        return ((x - target).pow(2) * real).sum() / real.sum()


def make_mask(documents: Tensor, q_len: int | None = None, kv_len: int | None = None) -> Any:
    """Causal and same document, by a closure made anew at every call. Document -1 is padding, which sees nothing."""
    batch, length = documents.shape

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (documents[b, q] == documents[b, kv]) & (documents[b, q] >= 0)

    return create_block_mask(visible, batch, None, q_len or length, kv_len or length, device="cpu")


def build(layers: int = 2) -> Drafter:
    torch.manual_seed(0)
    return Drafter(layers)


def batch(bucket: dict[str, int], device: Any = "cpu", *, seed: int | None = None, padding: int = 0) -> Any:
    """Random states and targets, and two documents in each row, the last one with padding behind it."""
    generator = torch.Generator()
    generator.seed() if seed is None else generator.manual_seed(seed)
    rows, length = 2, bucket["seq"]
    x, target = torch.randn(2, rows, length, HIDDEN, generator=generator)
    cut = torch.randint(1, length, (rows, 1), generator=generator)
    documents = (torch.arange(length) >= cut).long()
    documents[-1, length - padding :] = -1
    return (), {"x": x, "documents": documents, "target": target}


def reference(model: Drafter, x: Tensor, documents: Tensor, target: Tensor) -> Tensor:
    """The same by the definition of attention: a dense boolean mask and softmax; rows that see nothing give zero."""
    at = torch.arange(x.shape[1])
    seen = (at[:, None] >= at)[None] & (documents[:, :, None] == documents[:, None])
    padding = (documents < 0)[:, None, :, None]
    for layer in model.layers:
        batch, length, _ = x.shape
        q = layer.q(x).view(batch, length, HEADS, HEAD).transpose(1, 2)
        k, v = layer.kv(x).view(batch, length, 2, KV_HEADS, HEAD).permute(2, 0, 3, 1, 4)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
        scores = q @ k.mT / HEAD**0.5 - layer.slope * (at[:, None] - at)
        weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1).masked_fill(padding, 0.0)
        x = x + (weights @ v).transpose(1, 2).reshape(batch, length, HIDDEN)
    real = (documents >= 0).unsqueeze(-1)
    return ((x - target).pow(2) * real).sum() / real.sum()
