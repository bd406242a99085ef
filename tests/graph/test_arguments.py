"""What is among the arguments of a call: tensors wherever they hide, functions, and what these read."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aotcache.errors import CallRefused
from aotcache.graph.region import Region
from tests.graph.models import (
    base_call,
    describe,
    make_layer,
)


class Pair(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b


def test_the_same_tensor_twice_is_another_layout() -> None:
    x, y = torch.ones(3), torch.ones(3)
    same, different = describe(Pair(), x, x), describe(Pair(), x, y)
    assert same.parts.key != different.parts.key
    assert (len(same.tensors), len(different.tensors)) == (1, 2)
    flatten = same.flattener.compile()
    assert flatten((y, y), {}, []) is not None
    assert flatten((x, y), {}, []) is None


class Reads:
    """A mask as a bound method of an object that holds tensors."""

    def __init__(self, table: Tensor, limit: int) -> None:
        self.table = table
        self.limit = limit
        self.label = "not read"

    def mask(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (self.table[q] == self.table[kv]) & (kv < self.limit)


class Apply(nn.Module):
    """Calls a function that was handed in."""

    def forward(self, function: Callable[..., Tensor], x: Tensor) -> Tensor:
        zero = torch.zeros((), dtype=torch.long)
        return x + function(zero, zero, torch.tensor(1), torch.tensor(2))


def in_closure(table: Tensor, limit: int) -> Callable[..., Tensor]:
    def outer(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        def inner() -> Tensor:
            return (table[q] == table[kv]) & (kv < limit)

        return inner()

    return outer


def nested(table: Tensor, limit: int) -> Callable[..., Tensor]:
    first = in_closure(table, limit)
    functions = (first, lambda b, h, q, kv: q < kv)
    return lambda b, h, q, kv: functions[0](b, h, q, kv) & functions[1](b, h, q, kv)


def in_defaults(table: Tensor, limit: int) -> Callable[..., Tensor]:
    def function(
        b: Tensor, h: Tensor, q: Tensor, kv: Tensor, table: Tensor = table, *, limit: int = limit
    ) -> Tensor:
        return (table[q] == table[kv]) & (kv < limit)

    return function


def read_table(table: Tensor, limit: int, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (table[q] == table[kv]) & (kv < limit)


SHAPES_OF_FUNCTIONS: dict[str, Callable[[Tensor, int], Callable[..., Tensor]]] = {
    "closure": in_closure,
    "nested functions in a tuple": nested,
    "defaults": in_defaults,
    "partial": lambda table, limit: functools.partial(read_table, table, limit),
    "bound method": lambda table, limit: Reads(table, limit).mask,
}


@pytest.mark.parametrize("shape", SHAPES_OF_FUNCTIONS)
def test_tensors_are_lifted_out_of_functions_and_put_back(shape: str) -> None:
    make, module, x = SHAPES_OF_FUNCTIONS[shape], Apply(), torch.zeros(3)
    equal, different = torch.tensor([0, 5, 5]), torch.tensor([0, 5, 6])
    region = Region("apply", module, {})
    call = region.describe((make(equal, 9), x), {})
    assert any(torch.equal(t, equal) for t in call.tensors)
    # Another batch's tensor in the place of the captured one, through the rebuilt function.
    moved = [different if torch.equal(t, equal) else t for t in call.tensors]
    assert region.run(call, call.tensors).tolist() == [1, 1, 1]
    assert region.run(call, moved).tolist() == [0, 0, 0]
    # A later call with a fresh function is taken apart without being described.
    flatten = call.flattener.compile()
    later = flatten((make(different, 9), x), {}, [])
    assert later is not None
    assert any(t is different for t in later)
    assert flatten((make(different, 2), x), {}, []) is None, "another constant is another layout"
    assert region.describe((make(equal, 2), x), {}).parts.key != call.parts.key


class Options:
    pass


class Given(nn.Module):
    """Hands what it is given, and what it holds, to a function that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.held = types.SimpleNamespace()
        self.kept = Options()

    def forward(self, x: Tensor, options: Any, function: Callable[..., Tensor], **terms: Tensor) -> Tensor:
        for term in terms.values():
            x = torch.tanh(x * term + 1)
        return function(x, options, self.kept) * function.factor  # type: ignore[attr-defined]


def later(x: Tensor, options: Any, kept: Any) -> Tensor:
    return x * options.deep * getattr(kept, "deeper", 1.0)


def given(**changes: Any) -> tuple[Given, tuple[Any, ...], dict[str, Tensor]]:
    def function(x: Tensor, options: Any, kept: Any) -> Tensor:
        return later(x, options, kept)

    module, options = Given(), Options()
    function.factor = changes.get("factor", 1.0)  # type: ignore[attr-defined]
    options.deep = changes.get("deep", 1.0)  # type: ignore[attr-defined]
    module.kept.deeper = changes.get("deeper", 1.0)  # type: ignore[attr-defined]
    terms = {name: torch.full((3,), float(i)) for i, name in enumerate(("first", "second"))}
    return module, (torch.ones(3), options, function), dict(sorted(terms.items(), reverse="order" in changes))


@pytest.mark.parametrize("change", ["factor", "deep", "deeper", "order"])
def test_what_a_function_among_the_arguments_reads_and_is_counts(change: str) -> None:
    module, args, terms = given()
    region = Region("given", module, {})
    call = region.describe(args, terms)
    flatten, holds = call.flattener.compile(), call.flattener.walker.checks.compile()
    assert flatten(args, terms, []) is not None
    assert torch.equal(region.run(call, call.tensors), module(*args, **terms))
    other, other_args, other_terms = given(**{change: 3.0})
    assert not torch.equal(other(*other_args, **other_terms), module(*args, **terms))
    module.kept = other.kept
    assert region.describe(other_args, other_terms).parts.key != call.parts.key
    assert not (call.static.still_true() and holds() and flatten(other_args, other_terms, []) is not None)


def test_numbers_of_a_class_of_the_users_and_slots_are_refused_as_arguments() -> None:
    class Number(float):
        pass

    class Slotted:
        __slots__ = ("scale",)

    class Both(Slotted):
        pass

    both = Both()
    both.scale = 2.0
    for value in (Number(2.0), both):
        with pytest.raises(CallRefused, match=r"options is a .*(Number|Both)"):
            describe(Given(), torch.ones(3), value, later)


def test_flattening_keeps_no_tensor_of_the_described_call_alive() -> None:
    import gc
    import weakref

    table = torch.arange(3)
    gone = weakref.ref(table)
    call = Region("apply", Apply(), {}).describe((in_closure(table, 9), torch.zeros(3)), {})
    flatten, still_true = call.flattener.compile(), call.flattener.walker.checks.compile()
    del call, table
    gc.collect()
    assert gone() is None
    assert flatten((in_closure(torch.arange(3), 9), torch.zeros(3)), {}, []) is not None
    assert still_true()


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.weight.requires_grad else x + 0


def test_whether_a_weight_is_trained_counts_without_gradients_where_code_asks() -> None:
    asks, layer = Asks(), make_layer()
    with torch.no_grad():
        before, other = describe(asks, torch.ones(3)), base_call(layer)
        assert before.requires_grad() == [True, False]
        asks.requires_grad_(False)
        layer.requires_grad_(False)
        assert describe(asks, torch.ones(3)).parts.key != before.parts.key
        assert base_call(layer).parts.key == other.parts.key


class Applies(nn.Module):
    """Runs what it is given, and asks for nothing itself."""

    def forward(self, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return function(x)


def doubles_for_gradients(x: Tensor) -> Tensor:
    return x * 2 if torch.is_grad_enabled() else x + 0


def doubles_if_trained(bias: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: x * 2 + bias if bias.requires_grad else x + bias


def test_grad_mode_counts_where_a_function_among_the_arguments_asks() -> None:
    module, x = Applies(), torch.ones(3)
    with torch.no_grad():
        without = describe(module, x, doubles_for_gradients)
        trained = describe(module, x, doubles_if_trained(torch.ones(3, requires_grad=True)))
        frozen = describe(module, x, doubles_if_trained(torch.ones(3)))
    within = describe(module, x, doubles_for_gradients)
    assert (without.mode, within.mode) == ("infer", "infer")
    assert without.parts.key != within.parts.key
    assert trained.parts.key != frozen.parts.key
    with torch.no_grad():
        # As the builder runs calls without gradients.
        assert within.region.run(within, [x]).tolist() == [2, 2, 2]
        assert without.region.run(without, [x]).tolist() == [1, 1, 1]


class Scaled:
    factor: float | None = 3.0

    def __init__(self, **attributes: Any) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)

    def __call__(self, x: Tensor) -> Tensor:
        return x + 0 if self.factor is None else x * self.factor * getattr(self, "more", 1.0)


def test_an_attribute_that_is_none_is_not_one_that_is_missing() -> None:
    module, x = Applies(), torch.ones(3)
    assert module(x, Scaled(factor=None)).tolist() != module(x, Scaled()).tolist()
    assert describe(module, x, Scaled(factor=None)).parts.key != describe(module, x, Scaled()).parts.key


def test_as_many_attributes_of_other_names_are_another_layout() -> None:
    module, x = Applies(), torch.ones(3)
    call = describe(module, x, Scaled(unread=5.0))
    flatten = call.flattener.compile()
    assert flatten((x, Scaled(unread=6.0)), {}, []) is not None
    assert flatten((x, Scaled(more=5.0)), {}, []) is None
