"""Tensors in the memory layout that a graph was compiled for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_CUDA_ALIGNMENT = 16
"""Bytes. Triton kernels are compiled for inputs aligned to this."""


def relayout(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """A copy of `tensor` with the given strides (elements); gradients flow back through it."""
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether compiled code may read the tensor where it lies; on a CPU it may anywhere."""
    return tensor.device.type != "cuda" or tensor.data_ptr() % _CUDA_ALIGNMENT == 0


# private torch names, tried on 2.13.0
def is_materialised(tensor: torch.Tensor) -> bool:
    """Whether its memory holds its values: not so under a neg or conj bit, or for zeros without memory."""
    return not (tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor())
