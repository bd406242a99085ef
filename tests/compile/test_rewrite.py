"""Each rewrite against the fault that it answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._dynamo import _trace_wrapped_higher_order_op  # noqa: F401  # registers flex_lib's operators
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import flex_attention

from aotcache.compile import rewrite
from aotcache.compile.export import export_flat
from aotcache.compile.pair import infer_graph
from aotcache.errors import CompileFailed, UnsupportedGraph


def test_a_scatter_becomes_plain_operators_with_the_same_sums() -> None:
    shape, indices = [3, 4], [torch.tensor([0, 2, 0]), torch.tensor([1, 3, 1])]
    values = torch.tensor([1.0, 2.0, 4.0])
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in ("i", "j", "v")]
    node = graph.call_function(torch.ops.flex_lib.zeros_and_scatter.default, (shape, inputs[:2], inputs[2]))
    node.meta["val"] = torch.empty(shape)
    graph.output((node,))
    module = fx.GraphModule(torch.nn.Module(), graph)
    rewrite.rewrite_scatters(module)
    module.recompile()
    assert {str(n.target) for n in module.graph.nodes if n.op == "call_function"} == {
        "aten.full.default",
        "aten.index_put.default",
    }
    want = torch.zeros(3, 4)
    want[0, 1], want[2, 3] = 5.0, 2.0
    assert torch.equal(module(*indices, values)[0], want)


def _flex_graph(device: str, options: Any = None) -> fx.GraphModule:
    """A graph with torch's flex attention operator, on a device that need not be there."""
    q = torch.zeros(1, 1, 16, 16)
    module = infer_graph(
        export_flat(
            lambda q, k, v: (flex_attention(q, k, v),),
            [q, q.clone(), q.clone()],
            region="r",
            train=False,
        )
    ).forward
    with FakeTensorMode():
        for node in module.graph.find_nodes(op="placeholder"):
            node.meta["val"] = torch.empty(1, 1, 16, 16, device=device)
    if options is not None:
        for node in module.graph.nodes:
            if rewrite.is_flex(node):
                node.update_arg(6, options)
    return module


def _kernel_options(module: fx.GraphModule) -> list[Any]:
    return [n.args[6] for n in module.graph.nodes if rewrite.is_flex(n)]


def test_a_training_graph_writes_its_logsumexp() -> None:
    module = _flex_graph("cuda")
    assert [o["OUTPUT_LOGSUMEXP"] for o in _kernel_options(module)] == [False]
    with pytest.raises(CompileFailed, match="OUTPUT_LOGSUMEXP"):
        rewrite.assert_logsumexp(module)
    rewrite.require_logsumexp(module)
    assert [o["OUTPUT_LOGSUMEXP"] for o in _kernel_options(module)] == [True]
    rewrite.assert_logsumexp(module)


def test_flex_attention_in_a_training_graph_for_the_cpu_is_refused() -> None:
    with pytest.raises(UnsupportedGraph, match="no backward on CPU"):
        rewrite.require_logsumexp(_flex_graph("cpu"))


def test_an_operator_without_the_option_is_refused() -> None:
    with pytest.raises(CompileFailed, match="never tried"):
        rewrite.require_logsumexp(_flex_graph("cuda", options={}))


def test_a_graph_with_constants_is_exported_again_and_one_without_is_not() -> None:
    x = torch.randn(3)
    with_one = infer_graph(
        export_flat(lambda x: (x + torch.tensor([1.0, 2.0, 3.0]),), [x], region="r", train=False)
    ).forward
    assert [t.tolist() for t in rewrite.constants(with_one).values()] == [[1.0, 2.0, 3.0]]
    again = rewrite.own_constants(with_one, [x])
    assert again is not with_one
    assert torch.equal(again(x)[0], x + torch.tensor([1.0, 2.0, 3.0]))
    without = infer_graph(export_flat(lambda x: (x + 1,), [x], region="r", train=False)).forward
    assert rewrite.own_constants(without, [x]) is without
