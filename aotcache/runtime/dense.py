"""Flex attention as plain tensor operations: nothing to trace, gradients by autograd.

Used where no artifact covers a call, and by the builder where a device has no flex
backward. It gives what torch's compiled kernels give: the block map decides which blocks
are looked at, `mask_mod` counts in partial blocks, and rows that see no key give zero
output and zero gradients. The full matrix of scores is held in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from aotcache.errors import CallRefused
from aotcache.graph.redirect import redirect_flex

_LN2 = math.log(2.0)


# private torch names, tried on 2.13.0
def _is_identity(score_mod: Callable[..., Tensor]) -> bool:
    from torch.nn.attention import flex_attention

    return score_mod is flex_attention._identity


def _is_noop(mask_mod: Callable[..., Tensor]) -> bool:
    from torch.nn.attention import flex_attention

    return mask_mod is flex_attention.noop_mask


def eager_without_tracing() -> AbstractContextManager[None]:
    """Within it, this thread's flex attention runs `dense_attention`, and nothing is traced.

    See `redirect_flex` for what it reaches and which threads it concerns.
    """
    return redirect_flex(dense_attention)


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    /,
) -> tuple[Tensor, Tensor, Tensor]:
    """The flex operator, see `FlexHandler` for arguments and results.

    Half precision accumulates in float32; under autocast the inputs are cast as torch's
    operator casts them. The output has the stride order of `query`. Gradients reach query,
    key, value and every tensor that `score_mod` captures. Safe in any thread, and under
    `torch.export` and `make_fx`.

    Raises:
        CallRefused: when key and query batches do not broadcast.
    """
    if key.size(0) not in (1, query.size(0)):
        raise CallRefused(
            f"flex attention: query has batch {query.size(0)} and key has batch {key.size(0)}; "
            "the key's batch must be equal or 1",
            expected=(1, query.size(0)),
            found=key.size(0),
        )
    device = query.device.type
    if not torch.is_autocast_enabled(device):
        return _attention(query, key, value, score_mod, block_mask, scale, kernel_options)
    dtype = torch.get_autocast_dtype(device)
    query, key, value = (t if t.dtype == torch.float64 else t.to(dtype) for t in (query, key, value))
    with torch.autocast(device, enabled=False):
        return _attention(query, key, value, score_mod, block_mask, scale, kernel_options)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, length, _ = query.shape
    kv_heads, kv_length = key.shape[1:3]
    key = key.expand(batch, -1, -1, -1)
    value = value.expand(batch, -1, -1, -1)
    working = torch.float64 if query.dtype == torch.float64 else torch.float32

    # The query heads of one group share their keys: side by side they are one longer query,
    # which spares a copy of keys and values per query head.
    grouped = query.to(working).reshape(batch, kv_heads, heads // kv_heads * length, -1)
    scores = grouped @ key.to(working).transpose(-2, -1)
    scores = scores.reshape(batch, heads, length, kv_length) * scale

    grids = [torch.arange(n, device=query.device) for n in scores.shape]
    with _IndexByTensor():
        if not _is_identity(score_mod):
            scores = _over_grid(score_mod, (0,))(scores, *grids).to(working)
        allowed = _allowed(block_mask, grids)
    if allowed is not None:
        scores = torch.where(allowed, scores, -math.inf)

    # Softmax of a row of -inf is NaN and so is its gradient. Such rows get other scores
    # first and are cleared at the end: both steps give them a gradient of exactly zero.
    dead = (scores == -math.inf).all(dim=-1, keepdim=True)
    scores = scores.masked_fill(dead, 0.0)
    weights = scores.softmax(dim=-1).to(query.dtype)
    weights = weights.reshape(batch, kv_heads, heads // kv_heads * length, kv_length)
    out = (weights @ value.to(query.dtype)).reshape(batch, heads, length, -1)
    out = _in_order_of(out.masked_fill(dead, 0.0), query)

    lse = largest = scores.new_empty(0)
    if kernel_options.get("OUTPUT_LOGSUMEXP", True):
        lse = scores.logsumexp(dim=-1).masked_fill(dead.squeeze(-1), -math.inf) / _LN2
    if kernel_options.get("OUTPUT_MAX", False):
        largest = scores.detach().amax(dim=-1).masked_fill(dead.squeeze(-1), -math.inf) / _LN2
    return out, lse, largest


def _over_grid(function: Callable[..., Tensor], prefix: tuple[int, ...] = ()) -> Callable[..., Tensor]:
    """`function` of single positions, mapped over all of `b`, `h`, `q` and `kv`.

    Mapping, not broadcasting index grids: a function may reduce over what it reads, as in
    `table[q].sum()`, and that must go over the table's axes alone.
    """
    for axis in (3, 2, 1, 0):
        dims = tuple(0 if position == axis else None for position in range(4))
        function = torch.vmap(function, in_dims=prefix + dims)
    return function


def _allowed(block_mask: tuple[Any, ...], grids: list[Tensor]) -> Tensor | None:
    """Which positions count, broadcastable to `[B, H, Q, KV]`; None if all do."""
    kv_num, kv_indices, full_num, full_indices = block_mask[2:6]
    q_block, kv_block, mask_mod = block_mask[-3:]
    length, kv_length = len(grids[2]), len(grids[3])
    trivial = _is_noop(mask_mod)
    if trivial and q_block >= length and kv_block >= kv_length and kv_indices.numel() == 1:
        return None  # what torch makes up where the caller gave no mask
    columns = -(-kv_length // kv_block)

    def spread(num: Tensor, indices: Tensor) -> Tensor:
        blocks = _listed(num, indices, columns)
        return blocks.index_select(2, grids[2] // q_block).index_select(3, grids[3] // kv_block)

    allowed = spread(kv_num, kv_indices)
    if not trivial:
        allowed = allowed & _over_grid(mask_mod)(*grids)
    if full_num is not None:
        allowed = allowed | spread(full_num, full_indices)
    return allowed


def _listed(num: Tensor, indices: Tensor, columns: int) -> Tensor:
    """Lists of blocks `[B, H, rows, n]`, of which the first `num` count, as `[B, H, rows, columns]`."""
    num, indices = num[(None,) * (3 - num.dim())], indices[(None,) * (4 - indices.dim())]
    counts = torch.arange(indices.size(-1), device=indices.device) < num.unsqueeze(-1)
    is_column = indices.unsqueeze(-1) == torch.arange(columns, device=indices.device)
    return (is_column & counts.unsqueeze(-1)).any(dim=-2)


def _in_order_of(out: Tensor, query: Tensor) -> Tensor:
    """`out` with its axes in memory as those of `query`, the last one innermost.

    Callers rely on it: after a transpose back they take a view.
    """
    strides = query.stride()
    order = sorted(range(3), key=lambda axis: strides[axis], reverse=True)
    if order == [0, 1, 2]:
        return out.contiguous()
    order.append(3)
    return out.permute(order).contiguous().permute([order.index(axis) for axis in range(4)])


class _IndexByTensor(TorchFunctionMode):
    """Makes `table[q, 0]` with tensors of one number an index operation.

    Plain indexing would ask such a tensor for its number, which a mapped or traced tensor
    does not have. The operation's own gradient is used, which every backend compiles.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__getitem__:
            table, index = args
            parts = index if isinstance(index, tuple) else (index,)
            if _has_positions(parts):
                return _index(table, parts)
        return func(*args, **(kwargs or {}))


def _has_positions(parts: tuple[Any, ...]) -> bool:
    known = all(part is None or isinstance(part, (Tensor, int, slice, EllipsisType)) for part in parts)
    return known and any(isinstance(p, Tensor) and p.dtype in (torch.int64, torch.int32) for p in parts)


def _index(table: Tensor, parts: tuple[Any, ...]) -> Tensor:
    if not all(isinstance(part, Tensor) for part in parts):
        # Slices, numbers, None and ... first; the tensors then find their axes in the result.
        table = table[tuple(slice(None) if isinstance(part, Tensor) else part for part in parts)]
        parts = _remaining(parts, table.dim())
    indices = [part if isinstance(part, Tensor) else None for part in parts]
    return torch.ops.aten.index.Tensor(table, indices)  # type: ignore[no-any-return]


def _remaining(parts: tuple[Any, ...], dims: int) -> tuple[Any, ...]:
    """One entry per axis that is left after the basic part of an index was applied."""
    kept = [part for part in parts if not isinstance(part, int)]
    if Ellipsis in [part for part in kept if not isinstance(part, Tensor)]:
        at = next(i for i, part in enumerate(kept) if part is Ellipsis)
        kept[at : at + 1] = [slice(None)] * (dims - len(kept) + 1)
    return tuple(kept)


__all__ = ["dense_attention", "eager_without_tracing"]
