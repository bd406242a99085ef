"""Rewrites without which a graph would not compile, or compile to something wrong.

Each function here answers one fault of the tools downstream, named in its docstring.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from aotcache.compile.graphs import attribute, call_nodes, target_name
from aotcache.errors import CompileFailed, UnsupportedGraph

# private torch names, tried on 2.13.0


def _is_scatter(node: fx.Node) -> bool:
    """Whether `node` is what the backward of indexing in a score function records."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.name == "flex_lib::zeros_and_scatter"


def is_flex(node: fx.Node) -> bool:
    """Whether `node` is torch's flex attention operator, forward or backward."""
    return isinstance(node.target, torch._ops.HigherOrderOperator) and target_name(node.target) in (
        "flex_attention",
        "flex_attention_backward",
    )


_KERNEL_OPTIONS = 6
"""Position of `kernel_options` among the arguments of the flex attention operator."""

# end of private torch names


def rewrite_scatters(module: fx.GraphModule) -> None:
    """Puts plain operators in place of `flex_lib::zeros_and_scatter`, in the outer graph.

    AOTInductor calls that operator through its proxy executor, which aotcache's own
    runner has not. Inside the flex backward operator it stays: Inductor knows it there.
    """
    graph = module.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or not _is_scatter(node):
            continue
        shape, indices, values = node.args
        meta = node.meta["val"]
        with graph.inserting_before(node):
            zeros = graph.call_function(
                torch.ops.aten.full.default,
                (list(shape), 0),
                {"dtype": meta.dtype, "device": meta.device, "pin_memory": False},
            )
            zeros.meta["val"] = meta
            added = graph.call_function(
                torch.ops.aten.index_put.default, (zeros, list(indices), values, True)
            )
            added.meta = node.meta.copy()
        node.replace_all_uses_with(added)
        graph.erase_node(node)


def pad_booleans_as_integers(module: fx.GraphModule) -> None:
    """Pads boolean tensors as integers, in the outer graph.

    Inductor's C++ for a padded boolean may choose between two kinds of vector masks, which does
    not compile: seen with `create_block_mask` for lengths that do not fill their last block.
    """
    graph = module.graph
    for node in list(graph.nodes):
        position = _PADDING_VALUE.get(node.target)
        if position is None or node.meta["val"].dtype != torch.bool:
            continue
        with graph.inserting_before(node):
            node.update_arg(0, _converted(graph, node.args[0], torch.int32))
        if len(node.args) > position and node.args[position] is not None:
            node.update_arg(position, int(bool(node.args[position])))
        node.meta = {**node.meta, "val": node.meta["val"].to(torch.int32)}
        with graph.inserting_after(node):
            again = _converted(graph, node, torch.bool)
        node.replace_all_uses_with(again, delete_user_cb=lambda user, own=again: user is not own)
    module.recompile()


_PADDING_VALUE = {torch.ops.aten.pad.default: 3, torch.ops.aten.constant_pad_nd.default: 2}
"""The operators that pad, and where in their arguments the value stands."""


def _converted(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    made = graph.call_function(torch.ops.aten._to_copy.default, (node,), {"dtype": dtype})
    made.meta["val"] = node.meta["val"].to(dtype)
    return made


def require_logsumexp(module: fx.GraphModule) -> None:
    """Makes every flex attention of a training graph write its log-sum-exp.

    Export under `no_grad`, and always on CPU, sets `OUTPUT_LOGSUMEXP` to False. The
    pair then compiles without a word, and the backward reads what was never written.

    Raises:
        UnsupportedGraph: for flex attention on the CPU, which has no backward there.
        CompileFailed: if the option is not where the tried versions keep it.
    """
    for node in call_nodes(module):
        if not is_flex(node):
            continue
        _require_backward(node)
        options = node.args[_KERNEL_OPTIONS] if len(node.args) > _KERNEL_OPTIONS else None
        if not isinstance(options, dict) or "OUTPUT_LOGSUMEXP" not in options:
            raise CompileFailed(
                f"the flex attention operator has no OUTPUT_LOGSUMEXP in its kernel options ({options!r}); "
                "this torch version was never tried"
            )
        node.update_arg(_KERNEL_OPTIONS, {**options, "OUTPUT_LOGSUMEXP": True})
    module.recompile()


def _require_backward(node: fx.Node) -> None:
    """Refuse what the device's compiler would refuse later, in words that help."""
    query = node.args[0]
    if isinstance(query, fx.Node) and query.meta["val"].device.type == "cpu":
        raise UnsupportedGraph(
            "flex attention has no backward on CPU; capture it as dense operations (graph.redirect)"
        )


def assert_logsumexp(module: fx.GraphModule) -> None:
    """Checks after partitioning that what `require_logsumexp` set is still there.

    Raises:
        CompileFailed: if a flex attention of the forward would not write its log-sum-exp.
    """
    for node in call_nodes(module):
        if is_flex(node) and len(node.args) > _KERNEL_OPTIONS:
            options = node.args[_KERNEL_OPTIONS]
            if isinstance(options, dict) and options.get("OUTPUT_LOGSUMEXP") is False:
                raise CompileFailed(
                    "the joint trace lost OUTPUT_LOGSUMEXP: the backward would read a log-sum-exp that the "
                    "forward never writes"
                )


def constants(module: fx.GraphModule) -> dict[str, torch.Tensor]:
    """The real tensors that a graph reads as attributes, by name."""
    found: dict[str, torch.Tensor] = {}
    for prefix, child in module.named_modules():
        if not isinstance(child, fx.GraphModule):
            continue
        for node in child.graph.find_nodes(op="get_attr"):
            value = attribute(child, str(node.target))
            if isinstance(value, torch.Tensor):
                found[f"{prefix}.{node.target}" if prefix else str(node.target)] = value
    return found


def own_constants(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """A module that AOTInductor takes although its graph holds real tensors.

    As they are, they meet the compiler's fake tensors and fail; exported once more,
    they become constants of the program. A graph without any is returned unchanged.
    """
    if not constants(module):
        return module
    with torch.no_grad():
        program = torch.export.export(module, tuple(inputs), strict=False)
    again = program.module(check_guards=False)
    assert isinstance(again, fx.GraphModule)
    return again
