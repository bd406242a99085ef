"""Memory layouts as a key records them, in elements."""

from __future__ import annotations

import torch

from aotcache.types import Mode


def canonical_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides in elements, as the key records them.

    Those of dimensions of size 1 mean nothing and become what a contiguous tensor
    would have. An expanded tensor (stride 0) counts as contiguous: graphs are compiled
    for memory of its own, and the dispatcher copies.
    """
    shape = tuple(tensor.shape)
    strides = list(tensor.stride())
    if any(stride == 0 and size > 1 for stride, size in zip(strides, shape, strict=True)):
        return contiguous_strides(shape)
    if 1 not in shape:
        return tuple(strides)
    step = 1
    for i in range(len(shape) - 1, -1, -1):
        if shape[i] == 1:
            strides[i] = step
        step = max(step, strides[i] * shape[i])
    return tuple(strides)


def describe_tensor(tensor: torch.Tensor, mode: Mode, strides: tuple[int, ...] | None = None) -> str:
    """A tensor as the key sees it, with its own strides unless others are given."""
    grad = "grad" if mode == "train" and tensor.requires_grad else "no grad"
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {tuple(tensor.shape)} strides {strides or canonical_strides(tensor)} {grad}"


def has_strides(tensor: torch.Tensor, strides: tuple[int, ...]) -> bool:
    """Whether memory is laid out by `strides` (elements), dimensions of size 1 aside."""
    return all(
        size == 1 or own == other
        for size, own, other in zip(tensor.shape, tensor.stride(), strides, strict=True)
    )


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a contiguous tensor."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
