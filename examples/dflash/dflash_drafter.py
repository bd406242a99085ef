"""A DFlash-style drafter: it drafts a whole block of tokens in one pass.

From each anchor, a position of the target's sequence, it guesses the `block - 1` tokens that
follow. A block goes in as the anchor's token and mask tokens. In every layer its queries look
at the target's hidden states before the anchor, injected into keys and values, and at their
own block in both directions. All anchors of a batch are drafted at once: the flex attention
mask keeps blocks and documents apart.

Shapes: `B` samples, `S` positions of the target, `A` anchors, `N = A * block` block tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import (
    BlockMask,
    and_masks,
    create_block_mask,
    flex_attention,
    or_masks,
)

NOWHERE = -1
"""The document of padded positions, and the anchor of padded blocks."""


@dataclass(frozen=True)
class Config:
    """Sizes of the drafter and of the target that it drafts for.

    Attributes:
        vocab: Tokens; the last one is the mask token.
        hidden, intermediate: Widths of the residual stream and of the MLP.
        layers: Decoder layers.
        heads, kv_heads, head_dim: Query heads, key and value heads, width of each.
        target_hidden, taps: Width of the target, and how many of its layers are tapped.
        block: Tokens per block, the anchor's included.
        window: Positions before the anchor that a sliding layer sees.
        sliding: Which layers slide; repeated when there are more layers.
        rope_theta: Base of the rotary frequencies.
    """

    vocab: int = 128
    hidden: int = 128
    intermediate: int = 256
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    target_hidden: int = 64
    taps: int = 3
    block: int = 8
    window: int = 48
    sliding: tuple[bool, ...] = (False, True)
    rope_theta: float = 10_000.0


SIZES = {
    "small": Config(),
    "qwen3-8b": Config(
        vocab=151_936,
        hidden=4096,
        intermediate=12_288,
        layers=5,
        heads=32,
        kv_heads=8,
        head_dim=128,
        target_hidden=4096,
        taps=5,
        block=16,
        window=2048,
        sliding=(True, True, True, True, False),
        rope_theta=1_000_000.0,
    ),
}


class Attention(nn.Module):
    """Grouped-query attention of the block tokens to the target's states and to themselves."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_width = config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden, config.heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(config.heads * config.head_dim, config.hidden, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=1e-6)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=1e-6)

    def forward(self, x: Tensor, target: Tensor, mask: BlockMask, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """From `x` `[B, N, hidden]` and `target` `[B, S, hidden]`; `rotary` covers `S + N` positions."""
        cos, sin = rotary
        seen = torch.cat([target, x], dim=1)
        n = x.size(1)
        q = rotate(self.q_norm(self._heads(self.q_proj(x))), cos[:, :, -n:], sin[:, :, -n:])
        k = rotate(self.k_norm(self._heads(self.k_proj(seen))), cos, sin)
        v = self._heads(self.v_proj(seen))
        out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    """Gated by SiLU."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.down_proj = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer: the region that is compiled."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.input_norm = nn.RMSNorm(config.hidden, eps=1e-6)
        self.attention = Attention(config)
        self.post_norm = nn.RMSNorm(config.hidden, eps=1e-6)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, target: Tensor, mask: BlockMask, rotary: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.input_norm(x), target, mask, rotary)
        return x + self.mlp(self.post_norm(x))


class Drafter(nn.Module):
    """The whole drafter; its result is the training loss."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        self.fc = nn.Linear(config.taps * config.target_hidden, config.hidden, bias=False)
        self.target_norm = nn.RMSNorm(config.hidden, eps=1e-6)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=1e-6)
        self.lm_head = nn.Linear(config.hidden, config.vocab, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02 if config.hidden > 1024 else 0.08)

    def forward(
        self, input_ids: Tensor, hidden_states: Tensor, document_ids: Tensor, anchors: Tensor
    ) -> Tensor:
        """Cross entropy over the tokens that follow valid anchors in their own document.

        Padded positions and padded anchors count neither in the sum nor in the divisor.

        Args:
            input_ids: `[B, S]`.
            hidden_states: Tapped states of the target, `[B, S, taps * target_hidden]`.
            document_ids: `[B, S]`, `NOWHERE` at padded positions.
            anchors: `[B, A]` positions, `NOWHERE` for padded blocks.
        """
        block = self.config.block
        masks = self.masks(document_ids, anchors)
        target = self.target_norm(self.fc(hidden_states.to(self.fc.weight.dtype)))

        start = anchors.clamp(min=0)
        positions = (start.unsqueeze(-1) + torch.arange(block, device=anchors.device)).flatten(1)
        tokens = torch.full_like(positions, self.config.vocab - 1)
        tokens[:, ::block] = input_ids.gather(1, start)
        x = self.embed_tokens(tokens)
        context = torch.arange(input_ids.size(1), device=positions.device).expand_as(input_ids)
        rotary = rotary_tables(self.config, torch.cat([context, positions], dim=1), x.dtype)
        for index, layer in enumerate(self.layers):
            x = layer(x, target, masks[self._slides(index)], rotary)

        logits = at_least_float32(self.lm_head(self.norm(x)))
        within = positions.clamp(max=input_ids.size(1) - 1)
        own_document = document_ids.gather(1, start).repeat_interleave(block, dim=1)
        counts = (positions < input_ids.size(1)) & (document_ids.gather(1, within) == own_document)
        counts &= (anchors >= 0).repeat_interleave(block, dim=1) & (own_document >= 0)
        counts[:, ::block] = False  # the anchor itself is given
        losses = F.cross_entropy(logits.transpose(1, 2), input_ids.gather(1, within), reduction="none")
        return losses.where(counts, 0).sum() / counts.sum().clamp(min=1)

    def masks(self, document_ids: Tensor, anchors: Tensor) -> dict[bool, BlockMask]:
        """The masks of full (False) and sliding (True) layers, made eagerly for one batch."""
        samples, length = document_ids.shape
        n = anchors.size(1) * self.config.block
        window = self.config.window
        return {
            slides: create_block_mask(
                draft_mask(document_ids, anchors, self.config.block, window if slides else None),
                B=samples,
                H=None,
                Q_LEN=n,
                KV_LEN=length + n,
                device=anchors.device,
            )
            for slides in sorted({self._slides(index) for index in range(len(self.layers))})
        }

    def _slides(self, index: int) -> bool:
        return self.config.sliding[index % len(self.config.sliding)]


def draft_mask(document_ids: Tensor, anchors: Tensor, block: int, window: int | None) -> Any:
    """Who sees whom: queries are block tokens, keys are the target's positions, then block tokens."""
    length = document_ids.size(1)

    def before_anchor(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        anchor = anchors[b, q // block]
        document = document_ids[b, anchor.clamp(min=0)]
        return (kv < anchor) & (document_ids[b, kv.clamp(max=length - 1)] == document)

    def in_window(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return kv >= anchors[b, q // block] - window

    def in_block(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        same = (kv >= length) & ((kv - length) // block == q // block)
        return same & (anchors[b, q // block] >= 0)

    if window is None:
        return or_masks(before_anchor, in_block)
    return or_masks(and_masks(before_anchor, in_window), in_block)


def rotary_tables(config: Config, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine `[B, 1, L, head_dim]` for `positions` `[B, L]`."""
    exponents = torch.arange(0, config.head_dim, 2, device=positions.device) / config.head_dim
    angles = positions.unsqueeze(-1) / config.rope_theta**exponents
    angles = torch.cat([angles, angles], dim=-1).unsqueeze(1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding: the two halves of each head are the two coordinates."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32 if it has half precision, else as it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def build(size: str = "small", **changes: Any) -> Drafter:
    """The spec's factory.

    Args:
        size: One of `SIZES`.
        changes: Fields of `Config` that differ from it.
    """
    if "sliding" in changes:
        changes["sliding"] = tuple(changes["sliding"])
    return Drafter(replace(SIZES[size], **changes))


def batch(
    bucket: dict[str, int], device: torch.device | str, *, generator: torch.Generator | None = None
) -> tuple[tuple[()], dict[str, Tensor]]:
    """The spec's batches for size "small": fresh documents and anchors at every call.

    Args:
        bucket: Sizes `seq` and `anchors`, and `batch` (2 if absent).
        device: Where the tensors go.
        generator: A CPU generator to draw from; by default torch's own.
    """
    return (), make_batch(SIZES["small"], bucket, device, generator)


def batch_qwen3_8b(bucket: dict[str, int], device: torch.device | str) -> tuple[tuple[()], dict[str, Tensor]]:
    """As `batch`, for size "qwen3-8b"."""
    return (), make_batch(SIZES["qwen3-8b"], bucket, device, None)


def make_batch(
    config: Config, bucket: dict[str, int], device: torch.device | str, generator: torch.Generator | None
) -> dict[str, Tensor]:
    """Documents that count upwards in steps of their own, and what a target would see in them.

    Anchors are drawn among the positions that have a successor in their document; samples
    have different numbers of them, so some blocks are padding already.
    """
    samples, length, wanted = bucket.get("batch", 2), bucket["seq"], bucket["anchors"]
    index = torch.arange(length)
    begins = torch.rand(samples, length, generator=generator) < 3.0 / length
    begins[:, 0] = True
    document_ids = begins.cumsum(1) - 1
    offsets = index - torch.where(begins, index, 0).cummax(1).values
    first = torch.randint(0, config.vocab - 1, (samples, length), generator=generator)
    step = torch.randint(1, 4, (samples, length), generator=generator)
    input_ids = (first.gather(1, document_ids) + step.gather(1, document_ids) * offsets) % (config.vocab - 1)

    frequencies = torch.randn(config.taps * config.target_hidden, generator=torch.Generator().manual_seed(0))
    hidden_states = torch.cos(input_ids.unsqueeze(-1) * frequencies)

    eligible = torch.zeros(samples, length, dtype=torch.bool)
    eligible[:, :-1] = document_ids[:, 1:] == document_ids[:, :-1]
    score = torch.rand(samples, length, generator=generator).masked_fill(~eligible, -1.0)
    best, chosen = score.topk(min(wanted, length), dim=1)
    counts = torch.randint(max(1, wanted // 2), wanted + 1, (samples, 1), generator=generator)
    keep = (best >= 0) & (torch.arange(best.size(1)) < counts)
    anchors = F.pad(chosen.where(keep, NOWHERE), (0, wanted - best.size(1)), value=NOWHERE)
    made = {
        "input_ids": input_ids,
        "hidden_states": hidden_states,
        "document_ids": document_ids,
        "anchors": anchors,
    }
    return {name: tensor.to(device) for name, tensor in made.items()}
