"""Masks that are longer than the input, against the dense mask cut to its corner."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from aotcache.errors import CallRefused
from aotcache.graph.functions import fit_mask


def eagle(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """EAGLE-3's second step: causal over the first half of the keys, the diagonal of the second."""
    return ((kv < 64) & (q >= kv)) | (kv == q + 64)


def late(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Sees no first block, so that a block's number and its place in the list differ."""
    return (kv >= 40) & (kv - q > 20 * b)


@pytest.mark.parametrize("mask_mod", [eagle, late])
@pytest.mark.parametrize("lengths", [(50, 100), (64, 128), (17, 90), (1, 41), (64, 65)])
def test_a_longer_mask_is_cut_to_its_corner(mask_mod: object, lengths: tuple[int, int]) -> None:
    long = create_block_mask(mask_mod, 2, 1, 64, 128, device="cpu", BLOCK_SIZE=16)  # type: ignore[arg-type]
    cut = fit_mask(long, *lengths)
    assert cut.seq_lengths == lengths
    rows, columns = (-(-n // 16) for n in lengths)
    dense = create_mask(mask_mod, 2, 1, 64, 128, device="cpu")[..., : rows * 16, : columns * 16]  # type: ignore[arg-type]
    blocks = dense.unflatten(-1, (-1, 16)).unflatten(-3, (-1, 16)).any(-1).any(-2)
    # Blocks that hold anything visible, and no others, are listed, by rows and by columns.
    assert torch.equal(cut.to_dense().bool(), blocks)
    assert cut.q_num_blocks is not None
    assert cut.full_q_num_blocks is not None
    assert torch.equal(cut.q_num_blocks + cut.full_q_num_blocks, blocks.sum(-2, dtype=torch.int32))


def test_a_mask_of_the_right_length_is_left_alone() -> None:
    mask = create_block_mask(eagle, None, None, 64, 128, device="cpu", BLOCK_SIZE=16)
    assert fit_mask(mask, 64, 128) is mask


@pytest.mark.parametrize("lengths", [(65, 128), (64, 129)])
def test_a_shorter_mask_is_refused(lengths: tuple[int, int]) -> None:
    mask = create_block_mask(eagle, None, None, 64, 128, device="cpu", BLOCK_SIZE=16)
    with pytest.raises(CallRefused, match="64 queries and 128 keys") as refused:
        fit_mask(mask, *lengths)
    assert refused.value.details["expected"] == lengths
