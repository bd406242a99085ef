"""What the steps of the compile half ask of a graph: source lines, views, storages.

Nothing here changes a graph. Lines come from the stack traces that tracing leaves
on nodes; storages from running the graph on fake tensors, which is exact where the
schemas of operators only promise.
"""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import fx

# private torch names, tried on 2.13.0


def _fake_mode() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors that lie in one piece of memory. A mapped tensor (vmap) lies in that of all its parts."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return int(tensor.untyped_storage()._cdata)


def _version(tensor: torch.Tensor) -> int:
    return int(tensor._version)


def is_block(target: Any) -> bool:
    """Whether a target runs a nested graph as it stands, under another grad mode or autocast."""
    return isinstance(target, torch._ops.HigherOrderOperator) and target_name(target) in (
        "wrap_with_set_grad_enabled",
        "wrap_with_autocast",
    )


@contextmanager
def _unannotated() -> Iterator[None]:
    from torch.fx.traceback import current_meta

    left = current_meta.pop("custom", None)
    try:
        yield
    finally:
        if left is not None:
            current_meta["custom"] = left


# end of private torch names

AUTOCAST_DEVICES = ("cpu", "cuda")
"""Device types whose autocast a region may run under."""

_STATISTICS = {
    "aten.batch_norm.default": (3, 4, 5),
    "aten.native_batch_norm.default": (3, 4, 5),
    "aten.instance_norm.default": (3, 4, 5),
}
"""Positions of running mean, running variance and of the flag by which an operator writes them."""

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


def is_library(path: str) -> bool:
    """Whether a source file is torch's or aotcache's own, not the model's."""
    roots = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
    return path.startswith(roots) or path.startswith("<")


def source_line(node: fx.Node) -> str | None:
    """`file:line` of the model's source that made `node`; None if tracing left no trace.

    A node that only wraps others (a `no_grad` block, for one) is asked for theirs.
    """
    frames = [
        (m["file"], m["line"])
        for m in _FRAME.finditer(str(node.meta.get("stack_trace") or ""))
        if not is_library(m["file"])
    ]
    if frames:
        return ":".join(frames[-1])
    for inner in nested(node):
        for child in inner.graph.nodes:
            if (line := source_line(child)) is not None:
                return line
    return None


def error_line(error: BaseException) -> str | None:
    """`file:line` of the model's source nearest to where `error` was raised."""
    seen: BaseException | None = error
    while seen is not None:
        tb: TracebackType | None = seen.__traceback__
        frames = [f for f in traceback.extract_tb(tb) if not is_library(f.filename)]
        if frames:
            return f"{frames[-1].filename}:{frames[-1].lineno}"
        seen = seen.__cause__ or seen.__context__
    return None


def nested(node: fx.Node) -> Iterator[fx.GraphModule]:
    """The graph modules that `node` takes as arguments."""
    owner = node.graph.owning_module
    for argument in node.all_input_nodes:
        if argument.op == "get_attr" and owner is not None:
            value = attribute(owner, str(argument.target))
            if isinstance(value, fx.GraphModule):
                yield value


def maker(node: fx.Node) -> fx.Node:
    """The node that computes what `node` hands on out of nested blocks."""
    if node.op == "call_function" and _callable_name(node.target) == "getitem":  # type: ignore[arg-type]
        block, index = node.args
        if isinstance(block, fx.Node) and isinstance(index, int) and is_block(block.target):
            for inner in nested(block):
                return maker(output_nodes(inner.graph)[index])
    return node


def handed_on(block: fx.Node, operand: fx.Node) -> fx.Node | None:
    """What stands for `operand` inside a nested block that takes it; None if `block` is no block."""
    if not is_block(block.target):
        return None
    (inner,) = nested(block)
    placeholders: list[fx.Node] = list(inner.graph.find_nodes(op="placeholder"))
    operands = block.args[len(block.args) - len(placeholders) :]
    return next(p for p, given in zip(placeholders, operands, strict=True) if given is operand)


def attribute(module: torch.nn.Module, path: str) -> Any:
    """The attribute at a dotted path."""
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    return value


def call_nodes(module: fx.GraphModule) -> Iterator[fx.Node]:
    """Every call in `module` and in the graph modules inside it."""
    for child in module.modules():
        if isinstance(child, fx.GraphModule):
            yield from (n for n in child.graph.nodes if n.op in ("call_function", "call_method"))


def operator_name(node: fx.Node) -> str:
    """How to name what `node` calls to a user, e.g. `aten.add_.Tensor`."""
    return str(node.target) if not callable(node.target) else _callable_name(node.target)


def target_name(target: torch._ops.OperatorBase) -> str:
    """The registered name of an operator, overload included."""
    return str(target.name())  # type: ignore[no-untyped-call]


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` for the length of the block, for every thread."""
    original = inspect.getattr_static(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def clean_trace() -> Iterator[None]:
    """A trace that takes on nothing of what it is called under.

    Autocast is off: what it casts is in the graph once the graph is exported. Applied
    again, it would cast in the backward, which eager autograd runs without it. And no
    annotation is on: torch keeps them in one place for all threads, and two threads that
    build block masks at once leave one there for good, by which Inductor would compile
    nothing of any later graph.
    """
    with ExitStack() as stack:
        for device in AUTOCAST_DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.amp.autocast(device, enabled=False))
        stack.enter_context(_unannotated())
        yield


def _callable_name(target: Callable[..., Any]) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return str(getattr(target, "__name__", target))


def argument_of(node: fx.Node, name: str, default: Any = None) -> Any:
    """The value that `node` passes for a named argument of its operator's schema."""
    if name in node.kwargs:
        return node.kwargs[name]
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == name:
            return node.args[position] if position < len(node.args) else argument.default_value
    return default


def view_source(node: fx.Node) -> fx.Node | None:
    """The tensor that `node` is a view of, or None if it makes one of its own.

    Goes by the schema of functional ATen graphs: an operator whose first argument
    carries an alias annotation returns views of it, also inside a list.
    """
    if node.op != "call_function":
        return None
    if _callable_name(node.target) == "getitem":  # type: ignore[arg-type]
        source = node.args[0]
        return source if isinstance(source, fx.Node) and view_source(source) is not None else None
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    schema = node.target._schema
    first = node.args[0] if node.args else None
    if not isinstance(first, fx.Node) or not schema.arguments:
        return None
    # `_unsafe_view` returns a view and does not say so.
    if schema.name == "aten::_unsafe_view":
        return first
    info = schema.arguments[0].alias_info
    return first if info is not None and not info.is_write else None


def view_root(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """Follows views up: the node that owns the memory, and the views down to `node`."""
    chain: list[fx.Node] = []
    while (source := view_source(node)) is not None:
        chain.append(node)
        node = source
    return node, chain[::-1]


def output_nodes(graph: fx.Graph) -> tuple[Any, ...]:
    """What the graph returns, flat."""
    (returned,) = next(iter(graph.find_nodes(op="output"))).args
    return tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)


def blank(like: torch.Tensor, *, device: torch.device | str | None = None) -> torch.Tensor:
    """A fresh tensor, no view of any other, with the sizes, strides and dtype of `like`.

    Its values are undefined; expanded (stride 0) dimensions stay expanded.
    """
    return torch.empty_strided(
        tuple(like.shape), tuple(like.stride()), dtype=like.dtype, device=device or like.device
    )


def write_values(to: torch.Tensor, values: torch.Tensor | None) -> None:
    """Fills a tensor with values of its own sizes, or with zeros.

    Expanded dimensions are written once; `copy_` refuses to write them at all.
    """
    for dim, stride in enumerate(to.stride()):
        if stride == 0 and to.shape[dim] > 1:
            to = to.narrow(dim, 0, 1)
            values = None if values is None else values.narrow(dim, 0, 1)
    if values is None:
        to.zero_()
    else:
        to.copy_(values)


@dataclass(slots=True)
class MemoryUse:
    """What a graph does to memory, found by running it on fake tensors.

    Attributes:
        written: `(input position, node)` for the first write to each input.
        output_of_input: Output position to the position of the input it shares memory with.
        output_of_output: Output position to that of an earlier output sharing memory.
        late: Positions of inputs whose last write comes after all that is saved for a backward.
        inputs, results: The fake tensors that the graph was run on and that it returned.
    """

    written: list[tuple[int, fx.Node]] = field(default_factory=list)
    output_of_input: dict[int, int] = field(default_factory=dict)
    output_of_output: dict[int, int] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    inputs: tuple[torch.Tensor, ...] = field(default=(), repr=False)
    results: tuple[Any, ...] = field(default=(), repr=False)


def _written(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """What an operator writes; those on lists of tensors do not count up the versions of fake ones."""
    if isinstance(target, torch._ops.OpOverload):
        for position, argument in enumerate(target._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[position] if position < len(args) else kwargs.get(argument.name)
                tensors = given if isinstance(given, (tuple, list)) else (given,)
                yield from (t for t in tensors if isinstance(t, torch.Tensor))
    # Statistics that a normalisation keeps are written without a word in its schema.
    statistics = _STATISTICS.get(str(target))
    if statistics is not None and args[statistics[2]]:
        yield from (t for i in statistics[:2] if isinstance(t := args[i], torch.Tensor))


class _Watch(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, inputs: Sequence[torch.Tensor], use: MemoryUse) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._inputs = inputs
        self._use = use
        self._versions = [_version(t) for t in inputs]
        self._untold: set[int] = set()

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._untold = {storage_key(t) for t in _written(target, args, kwargs)}
        if is_block(target):
            # Watched from inside, so that the operator that writes is found, not its block.
            args = tuple(
                _Watch(a, self._inputs, self._use).run if isinstance(a, fx.GraphModule) else a for a in args
            )
        return super().call_function(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        self._untold = set()
        result = super().run_node(n)
        for position, tensor in enumerate(self._inputs):
            if _version(tensor) != self._versions[position] or storage_key(tensor) in self._untold:
                self._versions[position] = _version(tensor)
                self._use.late.add(position)
                if all(position != seen for seen, _ in self._use.written):
                    self._use.written.append((position, n))
        return result


def memory_use(
    module: fx.GraphModule, requires_grad: Sequence[bool] | None = None, *, grad: bool = False
) -> MemoryUse:
    """Runs `module` on fake tensors made from its placeholders' metadata.

    Every placeholder must be a tensor of static shape.

    Args:
        module: The graph.
        requires_grad: Of each placeholder; nowhere, if left out.
        grad: Whether to run it with gradients.
    """
    use = MemoryUse()
    placeholders = list(module.graph.find_nodes(op="placeholder"))
    wanted = requires_grad or [False] * len(placeholders)

    def saved(tensor: torch.Tensor) -> torch.Tensor:
        use.late.clear()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor)
    with _fake_mode(), torch.set_grad_enabled(grad), hooks:
        inputs = [blank(n.meta["val"]).requires_grad_(w) for n, w in zip(placeholders, wanted, strict=True)]
        results = _Watch(module, inputs, use).run(*inputs)
        use.inputs, use.results = tuple(inputs), tuple(results)
        owners: dict[int, int] = {storage_key(t): i for i, t in enumerate(inputs)}
        makers: dict[int, int] = {}
        for position, value in enumerate(results):
            if not isinstance(value, torch.Tensor):
                continue
            key = storage_key(value)
            if key in owners:
                use.output_of_input[position] = owners[key]
            elif key in makers:
                use.output_of_output[position] = makers[key]
            else:
                makers[key] = position
    return use
