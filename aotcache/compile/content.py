"""The content key: which graphs are the same, whatever drafter they come from.

The text of a graph does not tell two score functions apart that differ in a nested
graph or in the bytes of a constant, and does tell apart two that differ in the names
of nodes. So a graph is written down here as a plain value: nodes by position, operators
by registered name, every value's metadata, every constant's bytes, nested graphs whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import fx

from aotcache.compile.graphs import attribute, source_line, target_name
from aotcache.errors import UnsupportedGraph
from aotcache.manifest import Alias, InputSlot, Mutation, OutputSlot, PairContract
from aotcache.types import Digest, Mode, Target, Toolchain, sha256

FORMAT = 2
"""Version of the serialisation; part of every content key."""

_PLAIN = (torch.dtype, torch.layout, torch.memory_format)


def content_key(
    graphs: Sequence[fx.GraphModule],
    *,
    mode: Mode,
    inputs: Sequence[InputSlot],
    outputs: Sequence[OutputSlot],
    pair: PairContract | None,
    mutations: Sequence[Mutation] = (),
    aliases: Sequence[Alias] = (),
    target: Target,
    toolchain: Toolchain,
    options: Mapping[str, Any],
) -> Digest:
    """The sha256 of all that an archive's bytes depend on, and of what is done around its graphs.

    It is the same in every process. Names of slots stay out, so that equal layers of a
    drafter share one artifact; so do sources, which only name lines. Shapes are static,
    so there are no range constraints to put in.

    Raises:
        UnsupportedGraph: for a graph that holds something without a stable value.
    """
    whole = {
        "format": FORMAT,
        "graphs": [canonical(graph) for graph in graphs],
        "mode": mode,
        "inputs": [
            [s.dtype, s.shape, s.stride, s.requires_grad, None if s.draw is None else asdict(s.draw)]
            for s in inputs
        ],
        "outputs": [asdict(s) for s in outputs],
        "pair": None if pair is None else asdict(pair),
        "mutations": [asdict(m) for m in mutations],
        "aliases": [asdict(a) for a in aliases],
        "target": str(target),
        "toolchain": [toolchain.torch, toolchain.git, toolchain.cuda],
        "options": {name: repr(value) for name, value in options.items()},
    }
    return sha256(json.dumps(whole, sort_keys=True, separators=(",", ":")).encode())


def canonical(module: fx.GraphModule) -> list[Any]:
    """One entry per node, in order: what it does, to what, and what comes out."""
    position = {node: index for index, node in enumerate(module.graph.nodes)}
    return [_node(module, node, position) for node in module.graph.nodes]


def _node(module: fx.GraphModule, node: fx.Node, position: Mapping[fx.Node, int]) -> list[Any]:
    if node.op == "placeholder":
        what: Any = None
    elif node.op == "get_attr":
        what = _attribute(node, attribute(module, str(node.target)))
    elif node.op == "output":
        what = None
    elif node.op == "call_function":
        what = _target(node)
    else:
        raise _unstable(node, f"a {node.op} of {node.target}")
    return [
        node.op,
        what,
        _value(node, node.args, position),
        _value(node, node.kwargs, position),
        _metadata(node.meta.get("val")),
    ]


def _target(node: fx.Node) -> list[str]:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return ["operator", target_name(target)]
    if isinstance(target, torch._ops.HigherOrderOperator):
        if target_name(target).startswith("triton_kernel_wrapper"):
            raise _unstable(node, "a Triton kernel, which the graph holds by a number only")
        return ["higher order", target_name(target)]
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    if module in ("_operator", "math", "builtins") or str(module).startswith("torch"):
        return ["function", str(module), str(name)]
    raise _unstable(node, f"a call of {module}.{name}")


def _attribute(node: fx.Node, value: Any) -> list[Any]:
    if isinstance(value, fx.GraphModule):
        return ["graph", canonical(value)]
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return ["tensor", _metadata(value), hashlib.sha256(data).hexdigest()]
    raise _unstable(node, f"an attribute of type {type(value).__name__}")


def _value(node: fx.Node, value: Any, position: Mapping[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        return ["node", position[value]]
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float, complex)):
        # As text: JSON has no NaN, and 1 and 1.0 are different arguments.
        return [type(value).__name__, repr(value)]
    if isinstance(value, (tuple, list)):
        return ["items", [_value(node, item, position) for item in value]]
    if isinstance(value, slice):
        return ["slice", [_value(node, v, position) for v in (value.start, value.stop, value.step)]]
    if isinstance(value, Mapping):
        return ["map", sorted([str(k), _value(node, v, position)] for k, v in value.items())]
    if isinstance(value, torch.device):
        return ["device", value.type]
    if isinstance(value, _PLAIN):
        return ["constant", str(value)]
    raise _unstable(node, f"an argument of type {type(value).__name__}")


def _metadata(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return [
            str(value.dtype),
            [int(s) for s in value.shape],
            [int(s) for s in value.stride()],
            int(value.storage_offset()),
            value.device.type,
        ]
    if isinstance(value, (tuple, list)):
        return [_metadata(v) for v in value]
    return None if value is None else [type(value).__name__, repr(value)]


def _unstable(node: fx.Node, what: str) -> UnsupportedGraph:
    return UnsupportedGraph(
        f"the graph holds {what} (node {node.name}, {source_line(node) or 'no source line'}), which has no "
        "value that is stable between processes; wrap it in a custom operator",
        line=source_line(node),
    )
