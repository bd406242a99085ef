"""C2: a call of another shape, rank, dtype or arity never runs the artifact."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import aotcache
from aotcache.errors import ArtifactMiss, CallRefused
from aotcache.runtime.attach import Handle
from tests.cases import tiny
from tests.cases.conftest import Warm
from tests.cases.places import REMOTE, Places
from tests.cases.support import assert_close, copy_store, make_batch


@pytest.fixture(scope="module")
def alone(levels: Warm, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store that holds the artifact for batch 4 and S 256 and no other, which an error could name."""
    return copy_store(levels.store, tmp_path_factory.mktemp("c2"), levels.manifests())


@pytest.fixture
def attached(levels: Warm, alone: str) -> Iterator[tuple[tiny.DenseBlock, Handle]]:
    """One block, whose calls are the region's own, and its handle."""
    model = tiny.build()
    with aotcache.attach(model, levels.spec, store=alone) as handle:
        with torch.no_grad():
            yield model.blocks[0], handle


def valid() -> dict[str, torch.Tensor]:
    batch = make_batch(rows=4, seed=4)
    return {"x": batch["x"], "documents": batch["documents"]}


def passes(block: tiny.DenseBlock, handle: Handle) -> None:
    before = handle.stats()
    call = valid()
    assert_close(block(**call), tiny.build().blocks[0](**call))
    after = handle.stats()
    assert after["hits"] == before["hits"] + 1
    assert after["misses"] == before["misses"]


def cut(batch: dict[str, torch.Tensor], rows: int, length: int) -> dict[str, torch.Tensor]:
    return {name: value[:rows, :length].contiguous() for name, value in batch.items()}


WRONG: dict[str, tuple[Any, str, str, str]] = {
    "batch 8": (
        {name: torch.cat([value, value]) for name, value in valid().items()},
        "x", "(4, 256, 256)", "(8, 256, 256)",
    ),
    "batch 3": (cut(valid(), 3, 256), "x", "(4, 256, 256)", "(3, 256, 256)"),
    "S 255": (cut(valid(), 4, 255), "x", "(4, 256, 256)", "(4, 255, 256)"),
    "float64": ({**valid(), "x": valid()["x"].double()}, "x", "float32", "float64"),
    "int32 ids": ({**valid(), "documents": valid()["documents"].int()}, "documents", "int64", "int32"),
    "bfloat16": ({**valid(), "x": valid()["x"].bfloat16()}, "x", "float32", "bfloat16"),
}  # fmt: skip


def refused(block: tiny.DenseBlock, case: str) -> None:
    """The miss names the input, what the artifact has, and what came."""
    call, name, expected, found = WRONG[case]
    with pytest.raises(ArtifactMiss) as refusal:
        block(**call)
    line = next(line for line in str(refusal.value).splitlines() if f"{name} differs" in line)
    assert expected in line
    assert found in line


@pytest.mark.parametrize("case", WRONG)
def test_wrong_metadata_is_refused_by_name(attached: tuple[tiny.DenseBlock, Handle], case: str) -> None:
    block, handle = attached
    passes(block, handle)
    refused(block, case)
    passes(block, handle)


@pytest.mark.parametrize("kind", REMOTE)
def test_wrong_calls_are_refused_whichever_store_the_artifact_is_from(
    levels: Warm, places: Places, tmp_path: Path, kind: str
) -> None:
    model, wrong = tiny.build(), valid()["x"]
    with places.place(kind, tmp_path, levels.store, levels.manifests()) as place:
        with aotcache.attach(model, levels.spec, store=place.url) as handle, torch.no_grad():
            block = model.blocks[0]
            for case in WRONG:
                refused(block, case)
            for arguments in ((wrong,), (wrong, valid()["documents"], wrong)):
                with pytest.raises(CallRefused):
                    block(*arguments)
            with pytest.raises(ArtifactMiss, match=r"\(4, 256, 256, 1\)"):
                block(wrong.unsqueeze(-1), valid()["documents"])
            passes(block, handle)


def test_an_extra_trailing_dimension_is_refused(attached: tuple[tiny.DenseBlock, Handle]) -> None:
    block, handle = attached
    call = valid()
    with pytest.raises(ArtifactMiss) as refusal:
        block(call["x"].unsqueeze(-1), call["documents"])
    assert "(4, 256, 256, 1)" in str(refusal.value)
    assert "(4, 256, 256)" in str(refusal.value)
    passes(block, handle)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((valid()["x"],), "documents"),
        ((valid()["x"], valid()["documents"], valid()["x"]), "too many"),
    ],
    ids=["missing", "extra"],
)
def test_wrong_arity_is_refused(
    attached: tuple[tiny.DenseBlock, Handle], arguments: tuple[torch.Tensor, ...], name: str
) -> None:
    block, handle = attached
    with pytest.raises(CallRefused, match=name) as refusal:
        block(*arguments)
    assert isinstance(refusal.value, TypeError)  # what eager raises
    assert "expected (x: 'Tensor', documents: 'Tensor')" in str(refusal.value)
    passes(block, handle)


def test_an_unknown_keyword_is_refused(attached: tuple[tiny.DenseBlock, Handle]) -> None:
    block, handle = attached
    with pytest.raises(CallRefused, match="mask"):
        block(**valid(), mask=valid()["x"])
    passes(block, handle)


def test_training_refuses_the_same(tiny_d: Warm) -> None:
    model = tiny.build()
    with aotcache.attach(model, tiny_d.spec, store=tiny_d.store):
        block, batch = model.blocks[0], make_batch()
        for wrong in (
            {"x": batch["x"][:, :255].contiguous(), "documents": batch["documents"][:, :255].contiguous()},
            {"x": batch["x"].double(), "documents": batch["documents"]},
            {"x": batch["x"], "documents": batch["documents"].int()},
        ):
            with pytest.raises(ArtifactMiss, match="differs"):
                block(**wrong)
        assert_close(model(**batch).detach(), tiny.build()(**batch).detach())


def test_a_shorter_batch_is_padded_into_the_bucket(levels: Warm) -> None:
    model, batch = tiny.build(), make_batch(rows=4, length=255)
    padded = aotcache.Buckets.from_spec(levels.spec).pad(batch)
    assert padded.batch["x"].shape == (4, 256, 256)
    with aotcache.attach(model, levels.spec, store=levels.store) as handle, torch.no_grad():
        assert_close(model(**padded.batch), tiny.build()(**batch))
    assert handle.stats()["hits"] == 1
