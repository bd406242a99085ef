"""Flex attention left as torch's operator, for devices whose compiler has kernels for both directions.

torch's Dynamo makes an operator's inputs of the tensors that a score or mask function closes
over; export without Dynamo would bake them in. So it is done here: the functions handed on
take those tensors as further arguments, and gradients reach them.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from aotcache.graph import tree

# private torch names, tried on 2.13.0


def _operator() -> Callable[..., Any]:
    from torch._higher_order_ops.flex_attention import flex_attention

    return flex_attention


def is_operators_own(function: type) -> bool:
    """Whether an autograd function is one by which torch's flex operator differentiates itself.

    Their backwards are operators too, so a joint trace keeps them.
    """
    return function.__module__ in (
        "torch._higher_order_ops.flex_attention",
        "torch._dynamo._trace_wrapped_higher_order_op",
    )


# end of private torch names


def operator_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    /,
) -> tuple[Tensor, Tensor, Tensor]:
    """The flex operator itself, see `FlexHandler` for arguments and results. For use under export."""
    score_mod, score_tensors = lift_closure(score_mod)
    mask_mod, mask_tensors = lift_closure(block_mask[-1])
    found: tuple[Tensor, Tensor, Tensor] = _operator()(
        query,
        key,
        value,
        score_mod,
        (*block_mask[:-1], mask_mod),
        scale,
        kernel_options,
        score_tensors,
        mask_tensors,
    )
    return found


def lift_closure(function: Callable[..., Tensor]) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """A function that takes what `function` closes over as further arguments, and those tensors.

    Each tensor is one argument, however often it is closed over, in nested functions,
    defaults, partials, bound methods and containers.
    """
    tensors: list[Tensor] = []
    template = _take_apart(function, tensors, {})
    if not tensors:
        return function, ()
    count = len(tensors)

    def lifted(*arguments: Tensor) -> Tensor:
        own, captured = arguments[:-count], arguments[-count:]
        result: Tensor = template.build(captured)(*own)
        return result

    return lifted, tuple(tensors)


def _take_apart(value: Any, tensors: list[Tensor], places: dict[int, int]) -> tree.Template:
    """A template of `value`; tensors of the trace are subclasses of Tensor, so any kind is taken."""
    kind = type(value)
    inner = functools.partial(_take_apart, tensors=tensors, places=places)
    if isinstance(value, Tensor):
        if id(value) not in places:
            places[id(value)] = len(tensors)
            tensors.append(value)
        return tree.TensorAt(places[id(value)])
    if kind in (tuple, list):
        return tree.Items(kind, tuple(inner(item) for item in value))
    if kind is dict:
        return _entries(value, inner)
    if kind is functools.partial:
        return tree.Partial(inner(value.func), inner(value.args), inner(value.keywords))
    if kind is types.MethodType and not isinstance(value.__self__, torch.nn.Module | type):
        return tree.Bound(inner(value.__func__), inner(value.__self__))
    if kind is types.FunctionType and (value.__closure__ or value.__defaults__ or value.__kwdefaults__):
        return tree.Closure(
            value,
            tuple(_cell(cell, inner) for cell in value.__closure__ or ()),
            inner(value.__defaults__),
            inner(value.__kwdefaults__),
            _entries(value.__dict__, inner),
        )
    if kind.__module__ != "builtins" and kind is not types.FunctionType and callable(value):
        state = getattr(value, "__dict__", None)
        if state and not isinstance(value, torch.nn.Module | type):
            return tree.State(kind, _entries(state, inner))
    return tree.Constant(value)


def _entries(value: dict[Any, Any], inner: Callable[[Any], tree.Template]) -> tree.Entries:
    return tree.Entries(tuple(value), tuple(inner(item) for item in value.values()))


def _cell(cell: types.CellType, inner: Callable[[Any], tree.Template]) -> tree.Template | None:
    try:
        return inner(cell.cell_contents)
    except ValueError:
        return None
