"""transformers models run from artifacts: `attn_implementation="aotcache"`, and a callback for `Trainer`.

```python
import aotcache.integrations.transformers  # registers the name

model = AutoModelForCausalLM.from_config(config, attn_implementation="aotcache")
```

Attention and masks mean what `attn_implementation="flex_attention"` means, and are calls of
`aotcache.flex`: nothing is traced. With regions such as `model.layers.*` in the spec they
are part of the compiled layers; with `regions = []` they are all that is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask

from aotcache.errors import ArtifactMiss, CallRefused, ConfigError
from aotcache.flex import create_block_mask, flex_attention

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import (
        and_masks,
        causal_mask_function,
        packed_sequence_mask_function,
        prepare_padding_mask,
    )
except ImportError as error:
    raise ConfigError(
        f"aotcache.integrations.transformers needs transformers 5 ({error}); "
        "run: pip install 'aotcache[transformers]'"
    ) from error

from aotcache.integrations.trainer import AotcacheCallback

if TYPE_CHECKING:
    from torch import nn

    MaskFunction = Callable[..., Tensor]

NAME = "aotcache"
"""What `attn_implementation` calls it."""


def register() -> None:
    """Make `attn_implementation="aotcache"` known to transformers. Importing this module does."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, block_mask)


# -- attention ----------------------------------------------------------------


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: BlockMask | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers'. It means what transformers' flex attention means.

    Two things beyond: sinks work on every device, and a boolean mask says which keys count.

    Args:
        module: The attention layer; not looked at.
        query: `[B, Hq, Q, E]`.
        key, value: `[B, Hkv, KV, E]`, Hq a multiple of Hkv.
        attention_mask: Who sees whom, also as a tensor `[B or 1, Hq or 1, Q or 1, >= KV]`: boolean,
            or added to the scores. None: everybody sees everybody.
        scaling: Factor of the scores; default `1 / sqrt(E)`.
        dropout: Must be 0.
        softcap: Scores become `softcap * tanh(score / softcap)`.
        s_aux: Attention sinks: for each query head the score of a key without a value, `[Hq]`.
        position_bias: Added to the scores, shaped as a mask; gets gradients.
        kwargs: `kernel_options` of flex attention; all others are ignored, a sliding window too,
            which the mask holds.

    Returns:
        `[B, Q, Hq, E]`, contiguous, and no weights.

    Raises:
        CallRefused: dropout, or a mask that does not fit.
        ArtifactMiss: nothing covers the call.
    """
    if dropout:
        raise CallRefused(
            f"attn_implementation={NAME!r}: dropout is {dropout}, expected 0: flex attention has none; set "
            "config.attention_dropout = 0.0, or train with attn_implementation='sdpa'",
            input="dropout",
            expected=0.0,
            found=dropout,
        )
    mask = attention_mask if isinstance(attention_mask, BlockMask) else None
    added = [
        _added(name, table, query, key)
        for name, table in (("attention_mask", attention_mask), ("position_bias", position_bias))
        if isinstance(table, Tensor)
    ]
    score_mod = _score_mod(softcap, added) if softcap is not None or added else None
    heads = query.shape[1]
    if heads & (heads - 1) and heads != key.shape[1]:
        # Kernels of devices share keys among 1, 2, 4, ... query heads alone.
        key, value = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (key, value))
    try:
        found = flex_attention(
            query,
            key,
            value,
            score_mod,
            mask,
            scaling,
            heads != key.shape[1],
            kernel_options=kwargs.get("kernel_options"),
            return_aux=None if s_aux is None else AuxRequest(lse=True),
        )
    except ArtifactMiss as miss:
        raise _explained(miss, query.shape[-2], key.shape[-2]) from None
    out: Tensor = found if s_aux is None else _with_sinks(found[0], found[1].lse, s_aux)
    return out.transpose(1, 2).contiguous(), None


def _added(name: str, table: Tensor, query: Tensor, key: Tensor) -> Callable[..., Tensor]:
    """What a mask or a bias does to a score at a position. Sizes of 1 stand for all."""
    keys = key.shape[-2]
    wanted = (query.shape[0], query.shape[1], query.shape[2])
    fits = table.dim() == 4 and all(
        size in (1, full) for size, full in zip(table.shape, wanted, strict=False)
    )
    if not fits or table.shape[3] < keys or not (table.dtype is torch.bool or table.is_floating_point()):
        raise CallRefused(
            f"attn_implementation={NAME!r}: {name} is {table.dtype} {tuple(table.shape)}, expected a boolean or "
            f"floating-point tensor of {(*wanted, keys)}; the first three sizes may be 1, the last one larger",
            input=name,
            expected=(*wanted, keys),
            found=tuple(table.shape),
        )
    batched, headed, rowed = (size > 1 for size in table.shape[:3])
    boolean = table.dtype is torch.bool
    table = table[..., :keys]

    def add(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        here = table[b if batched else 0, h if headed else 0, q if rowed else 0, kv]
        return torch.where(here, score, -torch.inf) if boolean else score + here

    return add


def _score_mod(softcap: float | None, added: list[Callable[..., Tensor]]) -> Callable[..., Tensor]:
    steps = tuple(added)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        for step in steps:
            score = step(score, b, h, q, kv)
        return score

    return score_mod


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Attention as if each row had one key more, with the score of its head's sink and the value 0.

    The sum of the exponentials was `exp(lse)` and is `exp(lse) + exp(sink)`.
    """
    share = torch.sigmoid(lse - sinks.view(1, -1, 1).to(lse.dtype))
    return out * share.unsqueeze(-1).to(out.dtype)


# -- masks --------------------------------------------------------------------

# private name of transformers', tried on 5.19: what marks a mask of packed sequences
_PACKED = packed_sequence_mask_function(torch.empty(0)).__code__


def block_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> BlockMask:
    """A mask function of transformers'. It means what transformers' mask for flex attention means.

    What differs from batch to batch are tensors, so that batches of one shape have one key:
    padding is looked at whenever a padding mask is given, even if nothing is padded; sequences
    count as packed even if there is but one; and offsets are tensors.

    Args:
        batch_size, q_length, kv_length: Of the mask.
        q_offset, kv_offset: Positions of the first query and of the first key.
        mask_function: `(b, h, q, kv) -> bool` on positions.
        attention_mask: Which positions are no padding, boolean, `[B, any]`.
        device: Where the mask is made.
        kwargs: What transformers tells other attentions; ignored.

    Raises:
        ArtifactMiss: nothing covers the call.
    """
    shifted = any(isinstance(offset, Tensor) or offset != 0 for offset in (q_offset, kv_offset))
    if attention_mask is None and not shifted and q_length == kv_length and not _is_packed(mask_function):
        # As `create_causal_mask` does where position_ids tell of several sequences in a row.
        one = torch.zeros(batch_size, kv_length, dtype=torch.int64, device=device)
        mask_function = and_masks(mask_function, packed_sequence_mask_function(one))
    if shifted:
        # Clones: a static cache counts on in its own tensor, and the mask is read after that.
        first_q, first_kv = (_as_tensor(offset, device) for offset in (q_offset, kv_offset))
        mask_function = _shifted(mask_function, first_q, first_kv)
    if attention_mask is not None:
        mask_function = _padded(
            mask_function, _real_keys(attention_mask, kv_length, kv_offset if shifted else 0)
        )
    try:
        return create_block_mask(mask_function, batch_size, None, q_length, kv_length, device)
    except ArtifactMiss as miss:
        raise _explained(miss, q_length, kv_length) from None


def _is_packed(mask_function: Callable[..., Any]) -> bool:
    """Whether transformers found packed sequences. If that is overlooked, a mask gets another key."""
    cells = [cell.cell_contents for cell in getattr(mask_function, "__closure__", None) or ()]
    parts = [part for cell in cells if isinstance(cell, tuple) for part in cell]
    return any(getattr(part, "__code__", None) is _PACKED for part in parts)


def _as_tensor(offset: int | Tensor, device: torch.device | str) -> Tensor:
    if isinstance(offset, Tensor):
        return offset.to(device=device, dtype=torch.int64, copy=True).reshape(())
    return torch.tensor(offset, dtype=torch.int64, device=device)


def _shifted(mask: MaskFunction, first_q: Tensor, first_kv: Tensor) -> MaskFunction:
    def shifted(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return mask(b, h, q + first_q, kv + first_kv)

    return shifted


def _padded(mask: MaskFunction, real: Tensor) -> MaskFunction:
    def padded(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return mask(b, h, q, kv) & real[b, kv]

    return padded


def _real_keys(attention_mask: Tensor, kv_length: int, kv_offset: int | Tensor) -> Tensor:
    """Which keys are no padding, `[B, kv_length]`: of one size however long the past is."""
    first = int(kv_offset)
    real = prepare_padding_mask(attention_mask.to(torch.bool), kv_length, first)
    assert real is not None
    return real[:, first : first + kv_length].contiguous()


def _explained(miss: ArtifactMiss, queries: int, keys: int) -> ArtifactMiss:
    """A miss, with what is particular to transformers."""
    return ArtifactMiss(
        f"{miss}\n"
        f"transformers made this call, for {queries} queries and {keys} keys. Every length is a key of its own, and "
        "a cache grows by one with each token: to generate or evaluate at lengths that nothing was built for, use "
        "aotcache.attach(..., on_miss='eager'), or after detach() model.set_attn_implementation('sdpa'). To train, "
        "pad batches to a bucket (aotcache.Buckets) and give the model the same inputs as batch() of the spec does, "
        "attention_mask or none",
        **miss.details,
    )


register()

__all__ = ["NAME", "AotcacheCallback", "attention", "block_mask", "register"]
