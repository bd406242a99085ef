"""Step one: a flat call becomes an exported program, or a refusal that says where.

What no artifact can do is refused here, before anything is compiled: shapes that depend
on values, tensors that would be baked in, gradients that are made outside of the graph.
What a worker does around a graph (`effects.py`) is for the next step to judge. A
silently wrong artifact is the worst outcome there is, so what is not understood is
refused too.
"""

from __future__ import annotations

import inspect
import linecache
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from aotcache.compile.flex_operator import is_operators_own
from aotcache.compile.graphs import (
    AUTOCAST_DEVICES,
    blank,
    call_nodes,
    clean_trace,
    error_line,
    handed_on,
    is_library,
    operator_name,
    output_nodes,
    replaced,
    source_line,
    write_values,
)
from aotcache.errors import CompileFailed, UnsupportedGraph

# private torch names, tried on 2.13.0


def _data_dependent_errors() -> tuple[type[Exception], ...]:
    from torch._dynamo.exc import UserError
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return (
        UserError,
        GuardOnDataDependentSymNode,
        DataDependentOutputException,
        DynamicOutputShapeException,
    )


def _is_fake(tensor: torch.Tensor) -> bool:
    from torch._subclasses.fake_tensor import is_fake

    return bool(is_fake(tensor))


@contextmanager
def _all_user_frames() -> Iterator[None]:
    """Lets tracing record every frame of the model's source, not those named `forward` only."""
    from torch.fx.proxy import TracerBase

    def keep(self: TracerBase, summary: traceback.StackSummary) -> traceback.StackSummary:
        del self
        user = [frame for frame in summary if not is_library(frame.filename)]
        return traceback.StackSummary.from_list(user[-_FRAMES:])

    with replaced(TracerBase, "_filter_traceback_frames", keep):
        yield


@contextmanager
def _own_gradients_refused(region: str) -> Iterator[None]:
    """Refuses what would change gradients and leaves no trace in an exported program.

    The backward is made from the operators of the forward: a hook on a tensor and the
    backward of an autograd function would be left out, and where they only act now and
    then (clipping), no check on a few batches would notice.
    """
    apply = vars(torch.autograd.Function)["apply"]

    def apply_or_refuse(cls: Any, *args: Any, **kwargs: Any) -> Any:
        differentiated = any(
            isinstance(a, torch.Tensor) and a.requires_grad for a in (*args, *kwargs.values())
        )
        if torch.is_grad_enabled() and differentiated and not is_operators_own(cls):
            raise _not_in_graph(
                region, f"the autograd function {cls.__qualname__} is called", "its own backward"
            )
        return apply.__get__(None, cls)(*args, **kwargs)

    def refuse(name: str) -> Callable[..., Any]:
        def method(self: torch.Tensor, *_: Any, **__: Any) -> Any:
            raise _not_in_graph(region, f"Tensor.{name} is called", "the hook")

        return method

    with ExitStack() as stack:
        stack.enter_context(replaced(torch.autograd.Function, "apply", classmethod(apply_or_refuse)))
        for name in ("register_hook", "register_post_accumulate_grad_hook"):
            stack.enter_context(replaced(torch.Tensor, name, refuse(name)))
        yield


@contextmanager
def _history_refused(region: str) -> Iterator[None]:
    """Refuses code of the model's that asks a tensor what it has been through.

    The tensors of a trace are fresh: what they answer would be answered for every call to come,
    whose key tells nothing of it.
    """
    own = {name: vars(torch.Tensor)[name] for name in _HISTORY if name in vars(torch.Tensor)}
    is_instance = type(nn.Parameter).__instancecheck__

    def refuse(what: str) -> None:
        caller = sys._getframe(2)
        if is_library(caller.f_code.co_filename):
            return
        line = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        raise UnsupportedGraph(
            f"region {region!r}: {what} at {line}, which may differ from call to call; an artifact would repeat "
            "what it was at its build. Leave this part out of the region, or pass what it decides as an argument",
            region=region,
            line=line,
        )

    def refusing(name: str) -> property:
        known = inspect.getattr_static(torch.Tensor, name)

        def read(self: torch.Tensor) -> Any:
            refuse(f"Tensor.{name} is read")
            return known.__get__(self)

        return property(
            read, lambda self, value: known.__set__(self, value), lambda self: known.__delete__(self)
        )

    def check(cls: type, instance: Any) -> bool:
        # A trace has plain tensors in the places of parameters.
        if cls is nn.Parameter and isinstance(instance, torch.Tensor):
            refuse("a tensor is asked whether it is a Parameter")
        return bool(is_instance(cls, instance))

    try:
        for name in _HISTORY:
            setattr(torch.Tensor, name, refusing(name))
        with replaced(type(nn.Parameter), "__instancecheck__", check):
            yield
    finally:
        for name in _HISTORY:
            delattr(torch.Tensor, name)
        for name, member in own.items():
            setattr(torch.Tensor, name, member)


def _not_in_graph(region: str, what: str, lost: str) -> UnsupportedGraph:
    frames = [f for f in traceback.extract_stack() if not is_library(f.filename)]
    line = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None
    return UnsupportedGraph(
        f"region {region!r}: {what} at {_at(line)}; an artifact's backward is made from the operators of "
        f"the forward and would leave {lost} out. Leave this part out of the region",
        region=region,
        line=line,
    )


_HISTORY = ("_base", "_version", "grad", "grad_fn", "is_leaf")
"""What tensors of equal keys may differ in, and code can ask for."""

# end of private torch names

_FRAMES = 4
"""How many of the innermost frames of the model's source a node keeps."""

FlatCall = Callable[..., "tuple[torch.Tensor | None, ...]"]
"""A pure function of its tensor arguments, parameters included; its result is flat."""


class _Flat(nn.Module):
    """What `torch.export` wants: a module. It owns nothing.

    Autocast is entered inside. Around the export it would shape the metadata and leave
    no trace in the program, and the next step would take everything for float32.
    """

    def __init__(self, fn: FlatCall) -> None:
        super().__init__()
        self.fn = fn
        self.autocast = [
            (device, torch.get_autocast_dtype(device))
            for device in AUTOCAST_DEVICES
            if torch.is_autocast_enabled(device)
        ]

    def forward(self, *tensors: torch.Tensor) -> Any:
        with ExitStack() as stack:
            for device, dtype in self.autocast:
                # The cache of cast weights would keep traced tensors beyond the trace.
                stack.enter_context(torch.autocast(device, dtype, cache_enabled=False))
            return self.fn(*tensors)


def fresh_examples(examples: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Copies that are views of nothing, with the same values, sizes and strides.

    A view would make its base's sizes symbolic. Fake tensors and tensors on the meta
    device become real ones with undefined values, since only their metadata is used.
    """
    fresh = []
    for example in examples:
        virtual = example.is_meta or _is_fake(example)
        with torch.no_grad():
            copy = blank(example, device="cpu" if example.is_meta else example.device)
            write_values(copy, None if virtual else example.detach())
        fresh.append(copy.requires_grad_(example.requires_grad))
    return tuple(fresh)


def export_flat(
    fn: FlatCall, examples: Sequence[torch.Tensor], *, region: str, train: bool
) -> ExportedProgram:
    """Exports a flat call with static shapes.

    Runs `fn` once, under export. The caller holds what the call runs under: autocast
    becomes part of the program, the rest acts on the trace. Only the grad mode is set
    here, from `train`.

    Args:
        fn: The call. Its result may hold None, which gets no output slot.
        examples: One tensor per argument; those with `requires_grad` get a gradient
            when `train`, and say so to code that asks. No two may be the same tensor.
        region: The region's name, for messages.
        train: Whether a backward is to follow.

    Returns:
        A program whose user inputs are the arguments in order.

    Raises:
        UnsupportedGraph: if the region does what an artifact cannot, naming the
            operator and the line of the model's source.
        CompileFailed: if export fails for any other reason.
    """
    inputs = fresh_examples(examples)
    where = f"region {region!r}"
    try:
        flat = _Flat(fn)
        with ExitStack() as stack:
            for held in (torch.set_grad_enabled(train), clean_trace(), _all_user_frames()):
                stack.enter_context(held)
            for refused in (_own_gradients_refused(region), _history_refused(region)):
                stack.enter_context(refused)
            program = torch.export.export(flat, inputs, strict=False)
    except UnsupportedGraph:
        raise
    except _data_dependent_errors() as error:
        raise UnsupportedGraph(
            f"{where}: control flow or a shape depends on a tensor's values, at {_at(error_line(error))}: "
            f"{_first_line(error)}. Make it a constant of the call, or compute with masks instead",
            region=region,
            line=error_line(error),
        ) from error
    except Exception as error:
        if "in-place operation" in str(error):
            # Autograd itself refuses some writes to inputs, before there is a graph to look at.
            raise UnsupportedGraph(
                f"{where}: an input that needs a gradient is changed in place at {_at(error_line(error))}"
                f"{_source(error_line(error))}. "
                f"Compute a new tensor instead, or leave this part out of the region",
                region=region,
                line=error_line(error),
            ) from error
        raise CompileFailed(
            f"{where}: torch.export failed at {_at(error_line(error))}: "
            f"{type(error).__name__}: {_first_line(error)}",
            region=region,
            line=error_line(error),
        ) from error
    _refuse_unsupported(program, region)
    return program


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _at(line: str | None) -> str:
    return line or "a line that tracing did not record"


def _source(line: str | None) -> str:
    """What stands there: autograd's error names no operator."""
    path, _, number = (line or "").rpartition(":")
    text = linecache.getline(path, int(number)).strip() if number.isdigit() else ""
    return f", in `{text}`" if text else ""


def refusal(region: str, node: fx.Node | None, what: str, advice: str) -> UnsupportedGraph:
    """What to raise for `what` is done by `node`, naming operator and line."""
    line = source_line(node) if node is not None else None
    operator = operator_name(node) if node is not None and node.op == "call_function" else None
    by = f" by {operator} at {_at(line)}" if operator else ""
    return UnsupportedGraph(
        f"region {region!r}: {what}{by}. {advice}", region=region, operator=operator, line=line
    )


def _refuse_unsupported(program: ExportedProgram, region: str) -> None:
    module = program.graph_module
    for node in call_nodes(module):
        _refuse_symbolic(node, region)
    users = set(program.graph_signature.user_inputs)
    for position, value in enumerate(output_nodes(module.graph)):
        if value is not None and not isinstance(value, fx.Node):
            raise UnsupportedGraph(
                f"region {region!r}: output {position} is {type(value).__name__} {value!r}, expected a "
                "tensor or None. Return tensors only",
                region=region,
            )
    for node in call_nodes(module):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            raise refusal(
                region,
                node,
                f"a tensor of layout {value.layout} is made",
                "Use dense tensors, or leave this part out of the region",
            )
    for placeholder in module.graph.find_nodes(op="placeholder"):
        if placeholder.name not in users:
            _refuse_baked(placeholder, region)


def _refuse_baked(constant: fx.Node, region: str) -> None:
    """Refuses a tensor that was there before the call and is no slot of it.

    A tensor that the call itself makes of numbers is copied before it is used.
    """
    for node in constant.users:
        inner = handed_on(node, constant)
        if inner is not None:
            _refuse_baked(inner, region)
        elif node.target not in (torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift_fresh.default):
            raise refusal(
                region,
                node,
                "a tensor that is no parameter, no buffer and no input is read, and would be baked in,",
                "Register it as a buffer, or pass it as an input",
            )


def _refuse_symbolic(node: fx.Node, region: str) -> None:
    values = node.meta.get("val")
    for value in values if isinstance(values, (tuple, list)) else (values,):
        symbolic = isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) or (
            isinstance(value, torch.Tensor)
            and any(not isinstance(s, int) for s in (*value.shape, *value.stride()))
        )
        if symbolic:
            raise refusal(
                region,
                node,
                "a shape or a number that depends on a tensor's values is computed",
                "Use a fixed size with a mask instead",
            )
