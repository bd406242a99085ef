"""Padded booleans, which Inductor's C++ does not take."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional

from aotcache.compile.export import export_flat
from aotcache.compile.pair import infer_graph
from aotcache.compile.rewrite import pad_booleans_as_integers


@pytest.mark.parametrize("value", [None, True, 0.5])
@pytest.mark.parametrize("core", [False, True])
def test_booleans_are_padded_as_integers_and_come_back_as_booleans(value: float | None, core: bool) -> None:
    """The result is used twice, and both users see what torch's own padding gives."""

    def used(x: Tensor) -> tuple[Tensor, ...]:
        wide = functional.pad(x > 0, (1, 2, 0, 3), value=value)
        return wide.logical_not(), wide.sum(0), functional.pad(x, (1, 1))

    x = torch.randn(4, 5)
    module = infer_graph(export_flat(used, [x], region="r", train=False)).forward
    if core:
        _as_core_operators(module)
    pad_booleans_as_integers(module)
    module.graph.lint()
    padded = [n for n in module.graph.nodes if "pad" in str(n.target)]
    assert [n.args[0].meta["val"].dtype for n in padded] == [torch.int32, torch.float32]
    for got, want in zip(module(x), used(x), strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)


def _as_core_operators(module: fx.GraphModule) -> None:
    """What the graphs of a training pair hold in its place."""
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.pad.default):
        node.target = torch.ops.aten.constant_pad_nd.default
        node.args = (*node.args[:2], *node.args[3:])
    module.recompile()
