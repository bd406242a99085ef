"""torch's `flex_attention` and `create_block_mask`, run from artifacts.

A function has no module that `attach` could find, so a call asks for the thread's handle:
the one that this thread attached last, else the one that the process attached last, else
one on the configured store that stands for a program which attaches nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask

from aotcache.errors import CallRefused
from aotcache.graph.functions import (
    CREATE_BLOCK_MASK,
    FLEX_ATTENTION,
    belongs_to_another,
    recorder_of,
    require_long_enough,
    run_plain,
)

if TYPE_CHECKING:
    from aotcache.runtime.attach import Handle

# private torch names, tried on 2.13.0
_BLOCK = torch_flex._DEFAULT_SPARSE_BLOCK_SIZE


def _plain_mask() -> Callable[..., BlockMask]:
    """torch's own function as it is now: a thread may redirect what it calls."""
    return torch_flex.create_block_mask


# end of private torch names


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """Attention with a mask and a score function of your own, in place of `torch.compile(flex_attention)`.

    Takes and gives what torch's function does. Runs an artifact, forward and backward;
    inside a region that is itself compiled, it is part of that region. Tensors that
    `score_mod` and the mask close over are inputs; those of `score_mod` get gradients.

    Args:
        query: `[B, Hq, Q, E]`.
        key: `[B, Hkv, KV, E]`, or with a batch of 1.
        value: `[B, Hkv, KV, Ev]`, likewise.
        score_mod: `(score, b, h, q, kv) -> score` on 0-d tensors.
        block_mask: For Q queries and KV keys or for more; of longer ones the upper left corner counts.
        scale: Factor of the scores; default `1 / sqrt(E)`.
        enable_gqa: Allows Hq to be a multiple of Hkv.
        return_lse: Also return the log-sum-exp, `[B, Hq, Q]`.
        kernel_options: See torch's function.
        return_aux: An `AuxRequest`: also return an `AuxOutput`.

    Returns:
        `[B, Hq, Q, Ev]`, alone or in a tuple with what was asked for besides.

    Raises:
        ArtifactMiss: nothing covers the call (with `on_miss="raise"`).
        CallRefused: the mask is shorter than the input.
    """
    if block_mask is not None:
        require_long_enough(block_mask, query.size(-2), key.size(-2))
    args = (query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options)
    return _call(FLEX_ATTENTION, args, {"return_aux": return_aux})


def create_block_mask(
    mask_mod: Callable[..., Tensor],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | int | None = None,
    BLOCK_SIZE: int | tuple[int, int] = _BLOCK,
    _compile: bool = False,
    **options: Any,
) -> BlockMask:
    """The mask of a mask function, in place of `torch.compile(create_block_mask)`.

    Runs an artifact in which everything that `mask_mod` closes over and that is a tensor
    is an input; numbers in its closure are constants, each of which needs an artifact.

    Args:
        mask_mod: `(b, h, q, kv) -> bool` on 0-d tensors.
        B, H: Batch size and heads that the mask tells apart; None where it tells none.
        Q_LEN, KV_LEN: Lengths of queries and keys.
        device: Where the mask is made; torch's default is the accelerator, if there is one.
        BLOCK_SIZE: Positions of a block, for queries and keys.
        _compile: Ignored: this is compiled.
        options: Further ones of torch's function, all but `compute_dq_write_order`.

    Returns:
        A `BlockMask` of torch's.

    Raises:
        ArtifactMiss: nothing covers the call (with `on_miss="raise"`).
        CallRefused: an option that no artifact can take.
    """
    del _compile
    if belongs_to_another() and recorder_of(CREATE_BLOCK_MASK) is None:
        return _plain_mask()(mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE, **options)
    if options.get("compute_dq_write_order"):
        raise CallRefused(
            "create_block_mask: compute_dq_write_order=True is not supported, expected False; make this mask with "
            "torch's own function, flex_attention takes it",
            input="compute_dq_write_order",
        )
    where = torch.device(device) if device is not None else _default_device()
    size = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else (BLOCK_SIZE[0], BLOCK_SIZE[1])
    anchor = torch.empty(0, device=where)
    with torch.no_grad():
        made = _call(CREATE_BLOCK_MASK, (anchor, mask_mod, B, H, Q_LEN, KV_LEN, size, options), {})
    fields = dict.fromkeys(_FIELDS) | made
    return BlockMask((Q_LEN, KV_LEN), BLOCK_SIZE=size, mask_mod=mask_mod, **fields)


_FIELDS = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
    "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices",
)  # fmt: skip
"""What `BlockMask` wants to be told, also where it is None."""


def _default_device() -> torch.device:
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def _call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    recorder = recorder_of(name)
    if recorder is not None:
        return recorder(args, kwargs)
    if belongs_to_another():
        return run_plain(name, args, kwargs)
    return _handles.current().functions[name].call(args, kwargs)


class _OfThread(threading.local):
    """The handles that one thread attached, the last one last."""

    attached: tuple[Handle, ...] = ()


class _Handles:
    """Which handle a call of a function belongs to. Tuples are replaced whole: readers need no lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attached: tuple[Handle, ...] = ()
        self._own = _OfThread()
        self._alone: Handle | None = None

    def current(self) -> Handle:
        own = self._own.attached
        while own and not own[-1].attached:
            # Another thread detached it.
            own = self._own.attached = own[:-1]
        attached = own or self._attached
        return attached[-1] if attached else self._unattached()

    def _unattached(self) -> Handle:
        with self._lock:
            if self._alone is None:
                from aotcache.runtime.attach import unattached

                self._alone = unattached()
            return self._alone

    def add(self, handle: Handle) -> None:
        self._own.attached = (*self._own.attached, handle)
        with self._lock:
            self._attached = (*self._attached, handle)

    def remove(self, handle: Handle) -> None:
        self._own.attached = tuple(h for h in self._own.attached if h is not handle)
        with self._lock:
            self._attached = tuple(h for h in self._attached if h is not handle)


_handles = _Handles()

add_handle = _handles.add
"""From now on, calls of functions by the calling thread belong to this handle."""

remove_handle = _handles.remove
"""The handle was detached."""
