"""B9: anchor blocks that see no key give zero, and neither NaN nor a trace of themselves in any gradient."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import aotcache
from tests.cases import tiny
from tests.cases.conftest import Warm
from tests.cases.support import (
    assert_close,
    assert_gradients_close,
    make_batch,
    reference,
    step,
    write_spec,
)

BLOCKS, BLOCK, PADDING = 8, 16, 3


def padded_batch() -> dict[str, Tensor]:
    """Two samples of 8 anchor blocks of 16 behind 128 positions of context; in the second
    sample the last 3 blocks are padding, which sees nothing. Every block is a document."""
    batch = make_batch(seed=9)
    context = torch.zeros(2, 256 - BLOCKS * BLOCK, dtype=torch.long)
    blocks = torch.arange(1, BLOCKS + 1).repeat_interleave(BLOCK).repeat(2, 1)
    blocks[1, -PADDING * BLOCK :] = -1
    return {**batch, "documents": torch.cat([context, blocks], 1)}


def without_padding(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The two samples on their own, without the padding blocks."""
    return [
        {name: value[:1] for name, value in batch.items()},
        {name: value[1:, : 256 - PADDING * BLOCK] for name, value in batch.items()},
    ]


def removed_reference(model: tiny.Tiny, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor | None]]:
    """REF with the blocks removed. The loss is a mean over real positions of both samples."""
    singles = without_padding(batch)
    counts = [single["x"].shape[1] for single in singles]
    found = [reference(model, single) for single in singles]
    share = [count / sum(counts) for count in counts]
    loss = torch.stack([s * loss for s, (loss, _) in zip(share, found, strict=True)]).sum()
    gradients: dict[str, Tensor | None] = {}
    for name in found[0][1]:
        parts = [grads[name] for _, grads in found]
        gradients[name] = sum(s * part for s, part in zip(share, parts, strict=True) if part is not None)
    return loss, gradients


@pytest.fixture(scope="module")
def expected() -> tuple[Tensor, dict[str, Tensor | None]]:
    return removed_reference(tiny.build(blocks=2), padded_batch())


@pytest.fixture(scope="module")
def flex(specs: Path, warmed: Callable[..., str]) -> Warm:
    """TINY's training artifact for inputs that need a gradient: one for both blocks."""
    spec = write_spec(
        specs / "flex.toml",
        batch_function="tests.cases.tiny:leaf_batch",
        flex=True,
        blocks=2,
        modes=["train"],
    )
    return Warm(spec, warmed(spec))


def check(model: tiny.Tiny, expected: tuple[Tensor, dict[str, Tensor | None]]) -> None:
    batch = padded_batch()
    batch["x"].requires_grad_(True)
    loss, gradients = step(model, batch)
    assert_close(loss, expected[0])
    assert_gradients_close(gradients, expected[1])
    assert batch["x"].grad is not None
    assert torch.isfinite(batch["x"].grad).all()
    # A padding row is in no loss and in nobody's context.
    assert not batch["x"].grad[1, -PADDING * BLOCK :].any()


def test_dense_artifact(tiny_d: Warm, expected: tuple[Tensor, dict[str, Tensor | None]]) -> None:
    model = tiny.build(blocks=2)
    with aotcache.attach(model, tiny_d.spec, store=tiny_d.store) as handle:
        check(model, expected)
        stats = handle.stats()
    assert (stats["hits"], stats["misses"], stats["traces"]) == (2, 0, 0)


def test_flex_artifact(flex: Warm, expected: tuple[Tensor, dict[str, Tensor | None]]) -> None:
    model = tiny.build(flex=True, blocks=2)
    with aotcache.attach(model, flex.spec, store=flex.store) as handle:
        check(model, expected)
        stats = handle.stats()
    assert (stats["hits"], stats["misses"], stats["traces"]) == (2, 0, 0)


def test_eager_attention_that_does_not_trace(
    specs: Path, tmp_path: Path, expected: tuple[Tensor, dict[str, Tensor | None]]
) -> None:
    spec = write_spec(specs / "flex_eager.toml", flex=True, blocks=2)
    model = tiny.build(flex=True, blocks=2)
    with aotcache.attach(model, spec, store=tmp_path.as_uri(), on_miss="eager") as handle:
        check(model, expected)
        stats = handle.stats()
    assert (stats["hits"], stats["eager_calls"], stats["traces"]) == (0, 2, 0)
