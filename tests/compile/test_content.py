"""The content key tells graphs apart by what they compute, and by nothing else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx
from torch.nn.attention.flex_attention import flex_attention

from aotcache.compile.content import content_key
from aotcache.compile.export import export_flat
from aotcache.compile.pair import infer_graph
from aotcache.errors import UnsupportedGraph
from aotcache.manifest import InputSlot, OutputSlot, PairContract
from aotcache.types import Target, Toolchain

SLOT = InputSlot("parameter", "layers.0.weight", "float32", (3, 4), (4, 1), True)
REST: dict[str, Any] = {
    "mode": "train",
    "inputs": (SLOT,),
    "outputs": (OutputSlot("float32", (3, 4), (4, 1), True),),
    "pair": PairContract((0,), 1, (0,), (0,)),
    "target": Target("cpu", "x86_64-avx2"),
    "toolchain": Toolchain("2.13.0", "0" * 40, None),
    "options": {"memory_budget": 1.0, "max_autotune": False},
}


def _graph(fn: Callable[..., Any], *examples: torch.Tensor) -> fx.GraphModule:
    given = examples or (torch.zeros(3, 4),)
    return infer_graph(export_flat(fn, given, region="r", train=False)).forward


def _key(fn: Callable[..., Any], *examples: torch.Tensor) -> str:
    return content_key([_graph(fn, *examples)], **REST)


def _scaled(factor: float) -> Callable[..., Any]:
    def attention(q, k, v):
        return (flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s * factor),)

    return attention


def test_score_functions_that_differ_in_a_constant_differ() -> None:
    q = torch.zeros(1, 1, 16, 16)
    keys = [_key(_scaled(f), q, q.clone(), q.clone()) for f in (2.0, 3.0, 2.0)]
    assert keys[0] == keys[2] != keys[1]


@pytest.mark.parametrize(
    "other",
    [
        lambda x: (x * 2.0 + torch.tensor([1.0, 2.0, 3.0, 4.5]),),
        lambda x: (x * 2 + torch.tensor([1.0, 2.0, 3.0, 4.0]),),
        lambda x: (x * 2.0 - torch.tensor([1.0, 2.0, 3.0, 4.0]),),
        lambda x: (torch.tensor([1.0, 2.0, 3.0, 4.0]) + x * 2.0,),
        lambda x: ((x * 2.0 + torch.tensor([1.0, 2.0, 3.0, 4.0])).double(),),
    ],
    ids=["constant's bytes", "int for float", "operator", "operands swapped", "dtype"],
)
def test_a_change_of_the_graph_changes_the_key(other: Callable[..., Any]) -> None:
    assert _key(lambda x: (x * 2.0 + torch.tensor([1.0, 2.0, 3.0, 4.0]),)) != _key(other)


def test_strides_of_a_value_are_in_the_key() -> None:
    assert _key(lambda x: (x + 1,), torch.zeros(3, 4)) != _key(lambda x: (x + 1,), torch.zeros(4, 3).t())


@pytest.mark.parametrize(
    "change",
    [
        {"mode": "infer"},
        {"inputs": (replace(SLOT, requires_grad=False),)},
        {"inputs": (replace(SLOT, stride=(1, 3)),)},
        {"outputs": (OutputSlot("float32", (3, 4), (4, 1), False),)},
        {"pair": PairContract((0,), 1, (0,), (0,), (0,))},
        {"pair": None},
        {"target": Target("cpu", "x86_64-avx512")},
        {"toolchain": Toolchain("2.13.1", "0" * 40, None)},
        {"toolchain": Toolchain("2.13.0", "1" * 40, None)},
        {"options": {"memory_budget": 0.5, "max_autotune": False}},
    ],
    ids=lambda change: "-".join(change),
)
def test_all_that_an_archive_depends_on_is_in_the_key(change: dict[str, Any]) -> None:
    graph = _graph(lambda x: (x + 1,))
    assert content_key([graph], **REST) != content_key([graph], **(REST | change))


def test_names_of_nodes_and_slots_are_not_in_the_key() -> None:
    graph = _graph(lambda x: (x.sin() + 1,))
    before = content_key([graph], **REST)
    for index, node in enumerate(graph.graph.nodes):
        node.name = f"renamed_{index}"
    renamed = REST | {"inputs": (replace(SLOT, name="layers.7.weight"),)}
    assert content_key([graph], **renamed) == before


@pytest.mark.slow
def test_the_key_is_the_same_in_another_process() -> None:
    code = (
        "import torch\n"
        "from tests.compile.test_content import _key, _scaled\n"
        "q = torch.zeros(1, 1, 16, 16)\n"
        "print(_key(_scaled(2.0), q, q.clone(), q.clone()))\n"
    )
    # Another hash seed than this process has, whichever that is: sets and ids order differently.
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ".", "PYTHONHASHSEED": "1", "HOME": "/nonexistent", "PATH": "/usr/bin:/bin"},
    ).stdout.split()[-1]
    q = torch.zeros(1, 1, 16, 16)
    assert found == _key(_scaled(2.0), q, q.clone(), q.clone())


def test_what_has_no_stable_value_is_refused() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(_own, (x,)),))
    with pytest.raises(UnsupportedGraph, match=r"_own.*custom operator"):
        content_key([fx.GraphModule(torch.nn.Module(), graph)], **REST)


def _own(x: torch.Tensor) -> torch.Tensor:
    return x
