"""E7: keyword inputs and defaults, a dataclass with None fields and a named tuple as results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import aotcache
from aotcache.errors import CallRefused
from aotcache.manifest import Manifest
from tests.cases.conftest import Warm
from tests.cases.head_output import HeadOutput
from tests.cases.structured import ROWS, Structured, batch, build
from tests.cases.support import answers, assert_close, copy_store, start, write_spec


@pytest.fixture(scope="module")
def warm(specs: Path, warmed: Callable[..., str]) -> Warm:
    spec = write_spec(
        specs / "structured.toml",
        factory="tests.cases.structured:build",
        batch_function="tests.cases.structured:batch",
        regions=["head", "best"],
        modes=["train"],
        buckets={"rows": [ROWS]},
        axes="",
    )
    return Warm(spec, warmed(spec))


@pytest.fixture
def model(warm: Warm) -> Iterator[Structured]:
    made = build()
    with aotcache.attach(made, warm.spec, store=warm.store) as handle:
        yield made
        stats = handle.stats()
    assert stats["eager_calls"] == stats["traces"] == 0


def _given(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return batch({"rows": ROWS}, "cpu")[1]


def require_same(ours: Any, want: Any) -> None:
    """The same type, fields and None, and CLOSE tensors."""
    assert type(ours) is type(want)
    if isinstance(want, torch.Tensor):
        assert ours.requires_grad == want.requires_grad
        assert_close(ours.detach().float(), want.detach().float())
    elif isinstance(want, tuple):
        assert len(ours) == len(want)
        for a, b in zip(ours, want, strict=True):
            require_same(a, b)
    elif want is not None:
        assert [f.name for f in fields(ours)] == [f.name for f in fields(want)]
        assert list(vars(ours)) == list(vars(want))
        for name in vars(want):
            require_same(getattr(ours, name), getattr(want, name))


def test_the_dataclass_is_eagers_whatever_the_order_of_keywords(model: Structured) -> None:
    given, eager = _given(), build()
    for names in (["hidden", "scale", "target"], ["target", "hidden", "scale"], ["scale", "hidden"]):
        ours = model.head(**{n: given[n] for n in names})
        want = eager.head(**{n: given[n] for n in names})
        assert type(ours) is HeadOutput
        assert (ours.loss is None) == ("target" not in names)
        assert ours.hidden_states is None
        require_same(ours, want)
    explicit = model.head(hidden=given["hidden"], scale=given["scale"], target=None)
    require_same(explicit, eager.head(hidden=given["hidden"], scale=given["scale"]))


def test_gradients_flow_through_fields_and_the_named_tuple(model: Structured) -> None:
    found = []
    for drafter in (model, build()):
        given = _given(1)
        loss = drafter(**given)
        loss.backward()
        weight = drafter.head.out.weight.grad
        assert given["hidden"].grad is not None
        assert weight is not None
        found.append((loss.detach(), given["hidden"].grad, weight))
    for a, b in zip(*found, strict=True):
        assert_close(a, b)


def test_the_named_tuple_is_torchs_own(model: Structured) -> None:
    given, eager = _given(2), build()
    head = eager.head(hidden=given["hidden"], scale=given["scale"], target=given["target"])
    ours, want = model.best(head), eager.best(head)
    assert type(ours) is torch.return_types.topk
    assert torch.equal(ours.indices, want.indices)
    require_same(ours, want)
    require_same(model.best(head=head, count=3), want)


def test_wrong_calls_raise_as_in_eager(model: Structured) -> None:
    given, eager = _given(), build()
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((), {"hidden": given["hidden"], "scale": given["scale"], "labels": given["target"]}),
        ((given["hidden"], given["scale"]), {}),
        ((), {"hidden": given["hidden"]}),
    ]
    for args, kwargs in calls:
        with pytest.raises(TypeError):
            eager.head(*args, **kwargs)
        with pytest.raises(TypeError) as refused:
            model.head(*args, **kwargs)
        assert isinstance(refused.value, CallRefused)
        assert "expected (*, hidden" in str(refused.value)


def test_a_fresh_process_imports_the_class_or_is_told_which_is_missing(warm: Warm, tmp_path: Path) -> None:
    def renamed(manifest: Manifest) -> Manifest:
        text = json.dumps(manifest.output_tree).replace("head_output:HeadOutput", "head_output:Gone")
        return replace(manifest, output_tree=json.loads(text))

    altered = copy_store(warm.store, tmp_path / "store", warm.manifests(), renamed)
    processes = [
        start("structured_process", str(warm.spec.path), store, missing)
        for store, missing in ((warm.store, False), (warm.store, True), (altered, False))
    ]
    there, missing, gone = answers(processes)
    assert there == {
        "imported before": False,
        "class": "tests.cases.head_output:HeadOutput",
        "loss": None,
        "imported": True,
        "hits": 1,
    }
    assert missing["error"] == "ArtifactMiss"
    assert "import tests.cases.head_output.HeadOutput differs: (absent)" in missing["text"]
    # The artifact names a class that is not there: refused before it runs.
    assert gone["error"] == "RejectedArtifact"
    assert "tests.cases.head_output:Gone, which this process cannot import" in gone["text"]
    assert missing["hits"] == gone["hits"] == 0
