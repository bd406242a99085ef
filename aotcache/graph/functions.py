"""Regions that are functions: flex attention and the building of block masks.

Each is a module without weights, so that all that is known of regions holds for them:
how a call is described, keyed, exported, certified and dispatched. Calls of them inside
another region belong to that region; a capture records all others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask

from aotcache.errors import CallRefused
from aotcache.graph.redirect import is_redirected
from aotcache.graph.region import Region

FLEX_ATTENTION = "flex_attention"
CREATE_BLOCK_MASK = "create_block_mask"

Call = Callable[[tuple[Any, ...], dict[str, Any]], Any]

# private torch names, tried on 2.13.0
_NO_MASK_BLOCK = 1 << 30
"""The block size by which torch marks the mask that it makes where none was given."""

# end of private torch names


class FlexAttention(nn.Module):
    """torch's `flex_attention`, on masks that are longer than the input as well."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Callable[..., Tensor] | None = None,
        block_mask: BlockMask | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        kernel_options: dict[str, Any] | None = None,
        *,
        return_aux: Any = None,
    ) -> Any:
        """See `aotcache.flex.flex_attention`."""
        if block_mask is not None:
            block_mask = fit_mask(block_mask, query.size(-2), key.size(-2))
        return torch_flex.flex_attention(
            query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options,  # type: ignore[arg-type]
            return_aux=return_aux,
        )  # fmt: skip


class CreateBlockMask(nn.Module):
    """torch's `create_block_mask` as a function of tensors.

    Returns the index tensors that the mask has, by name. `anchor`, a tensor without elements,
    says on which device they are made.
    """

    def forward(
        self,
        anchor: Tensor,
        mask_mod: Callable[..., Tensor],
        batch: int | None,
        heads: int | None,
        q_len: int,
        kv_len: int,
        block_size: int | tuple[int, int],
        options: dict[str, Any],
    ) -> dict[str, Tensor]:
        """See `aotcache.flex.create_block_mask`."""
        mask = torch_flex.create_block_mask(
            mask_mod, batch, heads, q_len, kv_len, anchor.device, block_size, **options
        )
        # Several of them may lie in one memory; an artifact's results must not.
        return {
            name: value.clone(memory_format=torch.preserve_format)
            for name, value in vars(mask).items()
            if isinstance(value, Tensor)
        }


_MODULES: Mapping[str, type[nn.Module]] = {
    FLEX_ATTENTION: FlexAttention,
    CREATE_BLOCK_MASK: CreateBlockMask,
}


def run_plain(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call of a function as part of what it stands in."""
    return _MODULES[name]()(*args, **kwargs)


def function_regions(options: Mapping[str, Any]) -> dict[str, Region]:
    """The function regions by name. Takes the spec's compile options, for the key."""
    return {name: Region(name, module(), options) for name, module in _MODULES.items()}


class _Recording(threading.local):
    """Who records this thread's calls of functions, outside of any region."""

    recorders: Mapping[str, Call] | None = None


_recording = _Recording()


@contextmanager
def recording_functions(recorders: Mapping[str, Call] | None) -> Iterator[None]:
    """Within it, calls of functions by this thread go to `recorders`, by name.

    None: they run as part of what encloses them. Contexts nest; the innermost counts.
    """
    outer = _recording.recorders
    _recording.recorders = recorders
    try:
        yield
    finally:
        _recording.recorders = outer


def recorder_of(name: str) -> Call | None:
    """What records this thread's call of a function, or None."""
    recorders = _recording.recorders
    return None if recorders is None else recorders[name]


def belongs_to_another() -> bool:
    """Whether a call of a function now is part of what is being exported, compiled or run eagerly."""
    return is_redirected() or torch.compiler.is_compiling()


def fit_mask(mask: BlockMask, q_len: int, kv_len: int) -> BlockMask:
    """A mask for the first `q_len` queries and the first `kv_len` keys of one made for at least as many.

    `BlockMask._adjust` does not serve here: it takes a block's number for its position in
    the list, which holds for masks whose lists are sorted and begin at the first block alone.

    Raises:
        CallRefused: the mask is shorter than the input.
    """
    rows, columns = mask.seq_lengths
    if (rows, columns) == (q_len, kv_len) or min(mask.BLOCK_SIZE) >= _NO_MASK_BLOCK:
        return mask
    require_long_enough(mask, q_len, kv_len)
    if getattr(mask, "dq_write_order", None) is not None:
        raise CallRefused(
            f"flex_attention: block_mask is for {rows} queries and {columns} keys and fixes the order of writes for "
            f"these; the input has {q_len} and {kv_len}: make the mask for the lengths of the input",
            input="block_mask",
            expected=(q_len, kv_len),
            found=(rows, columns),
        )
    q_block, kv_block = mask.BLOCK_SIZE
    kept = -(-q_len // q_block), -(-kv_len // kv_block)
    num, indices = _crop(mask.kv_num_blocks, mask.kv_indices, *kept)
    full_num, full_indices = mask.full_kv_num_blocks, mask.full_kv_indices
    if full_num is not None and full_indices is not None:
        full_num, full_indices = _crop(full_num, full_indices, *kept)
    return BlockMask.from_kv_blocks(
        num,
        indices,
        full_num,
        full_indices,
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=mask.mask_mod,
        seq_lengths=(q_len, kv_len),
        compute_q_blocks=mask.q_indices is not None,
    )


def require_long_enough(mask: BlockMask, q_len: int, kv_len: int) -> None:
    """Refuse a mask that says nothing about some positions of the input."""
    rows, columns = mask.seq_lengths
    if rows < q_len or columns < kv_len:
        raise CallRefused(
            f"flex_attention: block_mask is for {rows} queries and {columns} keys, the input has {q_len} and "
            f"{kv_len}; make the mask for the lengths of the input, or for longer ones",
            input="block_mask",
            expected=(q_len, kv_len),
            found=(rows, columns),
        )


def _crop(num: Tensor, indices: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Lists of blocks, of which the first `num` of each row count, without those beyond a corner."""
    num, indices = num[:, :, :rows], indices[:, :, :rows]
    listed = torch.arange(indices.size(-1), device=indices.device) < num.unsqueeze(-1)
    kept = listed & (indices < columns)
    # Stable: what is kept keeps its order, and stands first.
    order = (~kept).to(torch.int32).argsort(dim=-1, stable=True)
    return kept.sum(-1, dtype=torch.int32), indices.gather(-1, order)[..., :columns].contiguous()
