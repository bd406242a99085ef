"""Random operators that are drawn outside of a graph, and how.

A compiled graph has no generator that torch could seed. So a random operator whose
randomness depends on no tensor's values becomes an input, which is drawn eagerly, by
that very operator, before the graph runs: the numbers, the seeds and the order of a
thread's draws are those of eager. The builder finds such operators in a graph with
this table; a worker draws by it, and by nothing that a manifest could name besides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch

from aotcache.manifest import Draw, InputSlot

Form = Literal["factor", "like", "fill", "sizes", "count"]


@dataclass(frozen=True, slots=True)
class Drawn:
    """How one random operator is drawn.

    Attributes:
        operator: The operator.
        form: `factor`: what it does to ones is what its operand is multiplied with.
            `like`: it returns a tensor like its operand, whose values it does not read.
            `fill`: the same in place. `sizes`: it takes sizes. `count`: it takes a length.
        numbers: Names of its number arguments, in the order in which it takes them.
    """

    operator: Any
    form: Form
    numbers: tuple[str, ...]

    def draw(self, numbers: Sequence[Any], like: torch.Tensor) -> torch.Tensor:
        """Draw, for an operand of the memory layout, dtype and device of `like`."""
        made: Any
        if self.form == "sizes":
            made = self.operator(*numbers, list(like.shape), dtype=like.dtype, device=like.device)
        elif self.form == "count":
            made = self.operator(*numbers, dtype=like.dtype, device=like.device)
        elif self.form == "factor":
            made = self.operator(like.fill_(1), *numbers, True)
        else:
            made = self.operator(like, *numbers)
        drawn: torch.Tensor = made[0] if isinstance(made, tuple) else made
        return drawn

    def put(self, noise: torch.Tensor, operand: torch.Tensor | None) -> Any:
        """What the operator returns for `operand`, given what was drawn."""
        name = str(self.operator)
        if self.form == "factor":
            assert operand is not None
            if name == "aten.native_dropout.default":
                return operand * noise, noise != 0
            return operand.mul_(noise) if "_." in name else operand * noise
        if self.form == "fill":
            assert operand is not None
            return operand.copy_(noise)
        return noise


@cache
def table() -> Mapping[str, Drawn]:
    """Every operator that can be drawn outside of a graph, by the name that manifests use."""
    found: dict[str, Drawn] = {}
    for form, operators in _OPERATORS.items():
        for name, numbers in operators.items():
            packet, _, overload = name.removeprefix("aten.").partition(".")
            operator = getattr(getattr(torch.ops.aten, packet, None), overload, None)
            if operator is not None:
                found[name] = Drawn(operator, form, numbers)
    return found


_OPERATORS: dict[Form, dict[str, tuple[str, ...]]] = {
    "factor": {
        "aten.dropout.default": ("p",),
        "aten.dropout_.default": ("p",),
        "aten.feature_dropout.default": ("p",),
        "aten.feature_dropout_.default": ("p",),
        "aten.native_dropout.default": ("p",),
    },
    "like": {
        "aten.rand_like.default": (),
        "aten.randn_like.default": (),
        "aten.randint_like.default": ("high",),
        "aten.randint_like.low_dtype": ("low", "high"),
        "aten.bernoulli.p": ("p",),
        "aten.uniform.default": ("from", "to"),
        "aten.normal_functional.default": ("mean", "std"),
        "aten.exponential.default": ("lambd",),
        "aten.geometric.default": ("p",),
        "aten.log_normal.default": ("mean", "std"),
        "aten.cauchy.default": ("median", "sigma"),
        "aten.random.default": (),
        "aten.random.to": ("to",),
    },
    "fill": {
        "aten.bernoulli_.float": ("p",),
        "aten.uniform_.default": ("from", "to"),
        "aten.normal_.default": ("mean", "std"),
        "aten.exponential_.default": ("lambd",),
        "aten.geometric_.default": ("p",),
        "aten.log_normal_.default": ("mean", "std"),
        "aten.cauchy_.default": ("median", "sigma"),
        "aten.random_.default": (),
        "aten.random_.to": ("to",),
    },
    "sizes": {
        "aten.rand.default": (),
        "aten.randn.default": (),
        "aten.randint.default": ("high",),
        "aten.randint.low": ("low", "high"),
        "aten.normal.float_float": ("mean", "std"),
    },
    "count": {"aten.randperm.default": ("n",)},
}


def argument(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str, default: Any) -> Any:
    """The value passed for a named argument of an operator's schema, or `default` if it has none such."""
    if name in kwargs:
        return kwargs[name]
    for position, known in enumerate(operator._schema.arguments):
        if known.name == name:
            return args[position] if position < len(args) else known.default_value
    return default


def is_random(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call takes numbers from a generator: dropout that is off does not."""
    if (
        not isinstance(operator, torch._ops.OpOverload)
        or torch.Tag.nondeterministic_seeded not in operator.tags
    ):
        return False
    if any(argument(operator, args, kwargs, off, True) is False for off in ("train", "training")):
        return False
    if any(argument(operator, args, kwargs, name, 1.0) == 0.0 for name in ("p", "dropout_p")):
        return "dropout" not in str(operator) and "attention" not in str(operator)
    return True


def recipe(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Draw | None:
    """How the numbers of a random call are drawn outside of the graph; None if they cannot be."""
    known = table().get(str(operator))
    if known is None or argument(operator, args, kwargs, "generator", None) is not None:
        return None
    numbers = tuple(argument(operator, args, kwargs, name, None) for name in known.numbers)
    if not all(n is None or (type(n) in (int, float) and abs(n) < float("inf")) for n in numbers):
        return None
    return Draw(str(operator), numbers)


def operand(operator: Any, args: Sequence[Any]) -> Any:
    """The tensor that a random call is made on, or None."""
    return args[0] if table()[str(operator)].form in ("factor", "like", "fill") else None


def is_known(slot: InputSlot) -> bool:
    """Whether the slot says how it is drawn, by an operator of the table."""
    known = table().get(slot.draw.operator) if slot.draw is not None else None
    return slot.draw is not None and known is not None and len(slot.draw.numbers) == len(known.numbers)


def asks_generator(slot: InputSlot) -> bool:
    """Whether drawing a slot takes numbers from the generator: dropout of everything gives zeros."""
    assert slot.draw is not None
    return not (table()[slot.draw.operator].form == "factor" and slot.draw.numbers == (1.0,))


def draw(slot: InputSlot, device: torch.device) -> torch.Tensor:
    """Draw the numbers of a slot that `is_known`, from the calling thread's generator."""
    assert slot.draw is not None
    known = table()[slot.draw.operator]
    like = torch.empty_strided(slot.shape, slot.stride, dtype=getattr(torch, slot.dtype), device=device)
    return known.draw(slot.draw.numbers, like)
