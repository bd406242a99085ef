"""An EAGLE-3-style drafter, trained as it is used: on its own outputs (test-time training).

One decoder layer guesses the token after next from the target's hidden state at a position
and the embedding of the token after it. Step 0 sees the target's states; each later step gets
the layer's output of the step before and the next token, one position further on.

Keys and values are twice as long as queries: the inputs of step 0 at all positions, then the
inputs of this step. A position sees the first part causally, and of the second part only its
own entry. All steps share one compiled layer: shapes are equal, and the mask reads the step
from a tensor. From the third step on, the entries of the steps between are left out.

Shapes: `B` samples, `S` positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention, or_masks

NOWHERE = -1
"""The document of padded positions."""


@dataclass(frozen=True)
class Config:
    """Sizes of the drafter and of the target that it drafts for.

    Attributes:
        vocab: Tokens.
        hidden, intermediate: Widths of the residual stream and of the MLP.
        heads, kv_heads, head_dim: Query heads, key and value heads, width of each.
        target_hidden, taps: Width of the target, and how many of its layers are tapped.
        steps: Test-time training steps.
        decay: Weight of a step's loss, relative to the step before.
        rope_theta: Base of the rotary frequencies.
    """

    vocab: int = 128
    hidden: int = 96
    intermediate: int = 192
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 24
    target_hidden: int = 64
    taps: int = 3
    steps: int = 2
    decay: float = 0.8
    rope_theta: float = 10_000.0


SIZES = {
    "small": Config(),
    "llama-8b": Config(
        vocab=128_256,
        hidden=4096,
        intermediate=14_336,
        heads=32,
        kv_heads=8,
        head_dim=128,
        target_hidden=4096,
        steps=7,
        rope_theta=500_000.0,
    ),
}


class Attention(nn.Module):
    """Grouped-query attention to the inputs of step 0 and of this step."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width, kv_width = 2 * config.hidden, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(width, config.heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(width, kv_width, bias=False)
        self.v_proj = nn.Linear(width, kv_width, bias=False)
        self.o_proj = nn.Linear(config.heads * config.head_dim, config.hidden, bias=False)

    def forward(self, inputs: Tensor, mask: BlockMask, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """From `inputs` `[B, 2 * S, 2 * hidden]` to `[B, S, hidden]`."""
        cos, sin = rotary
        length = inputs.size(1) // 2
        q = self._heads(self.q_proj(inputs[:, length:]))
        q = rotate(q, cos[:, :, length:], sin[:, :, length:])
        k = rotate(self._heads(self.k_proj(inputs)), cos, sin)
        v = self._heads(self.v_proj(inputs))
        out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class Layer(nn.Module):
    """The decoder layer: the region that is compiled."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.post_norm = nn.RMSNorm(config.hidden, eps=1e-6)
        self.gate_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.down_proj = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, x: Tensor, inputs: Tensor, mask: BlockMask, rotary: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(inputs, mask, rotary)
        y = self.post_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class Drafter(nn.Module):
    """The whole drafter; its result is the training loss."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        self.fc = nn.Linear(config.taps * config.target_hidden, config.hidden, bias=False)
        self.token_norm = nn.RMSNorm(config.hidden, eps=1e-6)
        self.hidden_norm = nn.RMSNorm(config.hidden, eps=1e-6)
        self.layer = Layer(config)
        self.norm = nn.RMSNorm(config.hidden, eps=1e-6)
        self.lm_head = nn.Linear(config.hidden, config.vocab, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02 if config.hidden > 1024 else 0.08)

    def forward(self, input_ids: Tensor, hidden_states: Tensor, document_ids: Tensor) -> Tensor:
        """Weighted sum of each step's mean cross entropy.

        At step `t`, a position counts if the token it guesses, `t + 2` further on, is in its
        document. Padded positions count neither in the sums nor in the divisors.

        Args:
            input_ids: `[B, S]`.
            hidden_states: Tapped states of the target, `[B, S, taps * target_hidden]`.
            document_ids: `[B, S]`, `NOWHERE` at padded positions.
        """
        x = self.fc(hidden_states.to(self.fc.weight.dtype))
        memory: Tensor | None = None
        losses = []
        for step in range(self.config.steps):
            tokens, _ = shifted(input_ids, document_ids, 1 + step)
            now = torch.cat([self.token_norm(self.embed_tokens(tokens)), self.hidden_norm(x)], dim=-1)
            memory = now if memory is None else memory
            rotary = rotary_tables(self.config, document_ids, step, x.dtype)
            x = self.layer(x, torch.cat([memory, now], dim=1), step_mask(document_ids, step), rotary)

            labels, counts = shifted(input_ids, document_ids, 2 + step)
            logits = at_least_float32(self.lm_head(self.norm(x)))
            each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
            mean = each.where(counts, 0).sum() / counts.sum().clamp(min=1)
            losses.append(self.config.decay**step * mean)
        return torch.stack(losses).sum()


def shifted(input_ids: Tensor, document_ids: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """Token `by` positions further on, and whether it is in the same document; 0 where it is not."""
    ahead = F.pad(input_ids, (0, by))[:, by:]
    same = F.pad(document_ids, (0, by), value=NOWHERE)[:, by:] == document_ids
    same &= document_ids != NOWHERE
    return ahead.where(same, 0), same


def step_mask(document_ids: Tensor, step: int) -> BlockMask:
    """The mask of one step, `S` queries by `2 * S` keys, made eagerly for one batch."""
    samples, length = document_ids.shape
    # At step 0 a position's own entry is in both parts: it is seen in the second alone.
    own = torch.tensor(int(step == 0), device=document_ids.device)

    def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        key = kv.clamp(max=length - 1)
        same = (document_ids[b, q] == document_ids[b, key]) & (document_ids[b, q] >= 0)
        return (kv < length) & (kv <= q - own) & same

    def diagonal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv - length == q) & (document_ids[b, q] >= 0)

    return create_block_mask(
        or_masks(causal, diagonal), samples, None, length, 2 * length, device=document_ids.device
    )


def rotary_tables(config: Config, like: Tensor, step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine `[1, 1, 2 * S, head_dim]`; this step's entries are `step` positions further on."""
    positions = torch.arange(like.size(1), device=like.device)
    positions = torch.cat([positions, positions + step])
    exponents = torch.arange(0, config.head_dim, 2, device=like.device) / config.head_dim
    angles = positions.unsqueeze(-1) / config.rope_theta**exponents
    angles = torch.cat([angles, angles], dim=-1)[None, None]
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
    return Drafter(replace(SIZES[size], **changes))


def batch(
    bucket: dict[str, int], device: torch.device | str, *, generator: torch.Generator | None = None
) -> tuple[tuple[()], dict[str, Tensor]]:
    """The spec's batches for size "small": fresh documents at every call.

    Args:
        bucket: Size `seq`, and `batch` (2 if absent).
        device: Where the tensors go.
        generator: A CPU generator to draw from; by default torch's own.
    """
    return (), make_batch(SIZES["small"], bucket, device, generator)


def batch_llama_8b(bucket: dict[str, int], device: torch.device | str) -> tuple[tuple[()], dict[str, Tensor]]:
    """As `batch`, for size "llama-8b"."""
    return (), make_batch(SIZES["llama-8b"], bucket, device, None)


def make_batch(
    config: Config, bucket: dict[str, int], device: torch.device | str, generator: torch.Generator | None
) -> dict[str, Tensor]:
    """Documents that count upwards in steps of their own, and what a target would see in them."""
    samples, length = bucket.get("batch", 2), bucket["seq"]
    begins = torch.rand(samples, length, generator=generator) < 3.0 / length
    begins[:, 0] = True
    document_ids = begins.cumsum(1) - 1
    index = torch.arange(length)
    offsets = index - torch.where(begins, index, 0).cummax(1).values
    first = torch.randint(0, config.vocab, (samples, length), generator=generator)
    stride = torch.randint(1, 4, (samples, length), generator=generator)
    input_ids = (first.gather(1, document_ids) + stride.gather(1, document_ids) * offsets) % config.vocab

    frequencies = torch.randn(config.taps * config.target_hidden, generator=torch.Generator().manual_seed(0))
    made = {
        "input_ids": input_ids,
        "hidden_states": torch.cos(input_ids.unsqueeze(-1) * frequencies),
        "document_ids": document_ids,
    }
    return {name: tensor.to(device) for name, tensor in made.items()}
