"""The two parts together: what a builder gets from them for a manifest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.fx.traceback import current_meta

from aotcache.compile import pipeline
from aotcache.errors import CompileFailed
from aotcache.host import host_toolchain
from aotcache.types import Target
from tests.compile.flat import BLOCK_NAMES, block, block_examples


def _prepare(*, train: bool = True, **changed: Any) -> pipeline.Prepared:
    examples = block_examples(train=train)
    program = pipeline.export(block, examples, BLOCK_NAMES, region="r", train=train)
    given: dict[str, Any] = {
        "names": BLOCK_NAMES,
        "kinds": ["input", "parameter", "parameter", "parameter", "lifted"],
        "region": "r",
        "mode": "train" if train else "infer",
        "target": Target("cpu", "x86_64-avx2"),
        "toolchain": host_toolchain(),
        "options": {"memory_budget": 1.0, "max_autotune": False},
    }
    return pipeline.prepare(program, examples, **(given | changed))


def test_slots_say_what_the_call_was_made_with() -> None:
    prepared = _prepare()
    assert [s.name for s in prepared.inputs] == list(BLOCK_NAMES)
    assert [s.kind for s in prepared.inputs] == ["input", "parameter", "parameter", "parameter", "lifted"]
    assert [s.requires_grad for s in prepared.inputs] == [True] * 4 + [False]
    assert prepared.inputs[0].stride == (32, 64, 1)
    assert prepared.inputs[4].dtype == "bool"
    assert [s.differentiable for s in prepared.outputs] == [True, True, False]
    assert prepared.pair is not None
    assert prepared.pair.tangents == (0, 1)
    assert prepared.pair.gradients == (0, 1, 2, 3)
    assert not any(s.requires_grad for s in _prepare(train=False).inputs)


def test_an_annotation_that_another_thread_left_does_not_reach_the_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What two threads that build block masks at once leave behind: Inductor compiles no node that has it.
    monkeypatch.setitem(current_meta, "custom", {"fallback_to_eager": True})
    prepared = _prepare()
    assert prepared.backward is not None
    nodes = [*prepared.forward.graph.nodes, *prepared.backward.graph.nodes]
    assert [n for n in nodes if "fallback_to_eager" in n.meta.get("custom", {})] == []
    assert current_meta["custom"] == {"fallback_to_eager": True}


@pytest.mark.slow
def test_twenty_traces_of_one_call_have_one_content() -> None:
    # Case A1: what is asked for again is found again, and compiled once.
    assert len({_prepare().content for _ in range(20)}) == 1


def test_equal_layers_share_an_archive_and_other_graphs_do_not() -> None:
    one = _prepare()
    other = _prepare(names=[f"layers.3.{n}" for n in BLOCK_NAMES])
    assert one.content == other.content
    assert one.content != _prepare(train=False).content
    finished = SimpleNamespace(
        content=one.content,
        pair=one.pair,
        region="r",
        digest="0" * 64,
        size=1,
        members={},
        host=None,
        runner="native",
    )
    assert pipeline.reuse(other, cast(Any, finished)).digest == "0" * 64
    with pytest.raises(CompileFailed, match="other graphs"):
        pipeline.reuse(_prepare(train=False), cast(Any, finished))


def test_parameters_from_another_fake_mode_are_prepared_like_real_ones() -> None:
    # Case A3: what a factory left fake shapes the graph, and its values are not asked for.
    from torch._subclasses.fake_tensor import FakeTensorMode

    real = [torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)]
    with FakeTensorMode():
        fake = [torch.empty(4, 4, requires_grad=True) for _ in range(2)]
    keys = set()
    meta = [torch.empty(4, 4, device="meta", requires_grad=True) for _ in range(2)]
    for examples in (real, fake, meta):
        program = pipeline.export(lambda x, w: (x @ w,), examples, "xw", region="r", train=True)
        keys.add(
            pipeline.prepare(
                program, examples, names="xw", kinds=["input"] * 2, region="r", mode="train",
                target=Target("cpu", "x86_64-avx2"), toolchain=host_toolchain(), options={},
            ).content
        )  # fmt: skip
    assert len(keys) == 1
