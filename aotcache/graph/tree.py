"""Trees: what is left of nested Python values once their tensors are taken out.

A template remembers how to put a value together again from a flat list of
tensors. Templates of arguments keep live functions and classes and never leave
the process; templates of results are plain and travel in the manifest as JSON.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from aotcache.errors import ManifestError, UnsupportedGraph
from aotcache.graph import structures


class Template(Protocol):
    """Builds a value from the flat list of tensors of a call."""

    def build(self, tensors: Sequence[Any]) -> Any:
        """The value, with `tensors` in its places."""


@dataclass(frozen=True, slots=True)
class TensorAt:
    """The tensor in slot `index`."""

    index: int

    def build(self, tensors: Sequence[Any]) -> Any:
        return tensors[self.index]


@dataclass(frozen=True, slots=True)
class Constant:
    """A value without tensors in it."""

    value: Any

    def build(self, tensors: Sequence[Any]) -> Any:
        return self.value


@dataclass(frozen=True, slots=True)
class Items:
    """A tuple or a list."""

    kind: type
    items: tuple[Template, ...]

    def build(self, tensors: Sequence[Any]) -> Any:
        return self.kind(item.build(tensors) for item in self.items)


@dataclass(frozen=True, slots=True)
class Entries:
    """A dict, in order."""

    keys: tuple[Any, ...]
    items: tuple[Template, ...]

    def build(self, tensors: Sequence[Any]) -> Any:
        return {k: item.build(tensors) for k, item in zip(self.keys, self.items, strict=True)}


@dataclass(frozen=True, slots=True)
class Structured:
    """A named tuple or a dataclass."""

    structure: structures.Structure
    items: tuple[Template, ...]

    def build(self, tensors: Sequence[Any]) -> Any:
        return self.structure.build([item.build(tensors) for item in self.items])


@dataclass(frozen=True, slots=True)
class State:
    """An object put together again from its attributes, without its constructor."""

    kind: type
    attributes: Entries

    def build(self, tensors: Sequence[Any]) -> Any:
        value: Any = object.__new__(self.kind)
        value.__dict__.update(self.attributes.build(tensors))
        return value


@dataclass(frozen=True, slots=True)
class Closure:
    """A function over new cells, defaults and attributes."""

    function: types.FunctionType
    cells: tuple[Template | None, ...]
    defaults: Template
    kwdefaults: Template
    attributes: Entries

    def build(self, tensors: Sequence[Any]) -> Any:
        old = self.function
        cells = tuple(types.CellType() if c is None else types.CellType(c.build(tensors)) for c in self.cells)
        new = types.FunctionType(
            old.__code__, old.__globals__, old.__name__, self.defaults.build(tensors), cells or None
        )
        new.__kwdefaults__ = self.kwdefaults.build(tensors)
        new.__dict__.update(self.attributes.build(tensors))
        new.__module__ = old.__module__
        new.__qualname__ = old.__qualname__
        return new


@dataclass(frozen=True, slots=True)
class Partial:
    """A `functools.partial`."""

    function: Template
    arguments: Template
    keywords: Template

    def build(self, tensors: Sequence[Any]) -> Any:
        return functools.partial(
            self.function.build(tensors), *self.arguments.build(tensors), **self.keywords.build(tensors)
        )


@dataclass(frozen=True, slots=True)
class Bound:
    """A bound method of an object that holds tensors."""

    function: Template
    owner: Template

    def build(self, tensors: Sequence[Any]) -> Any:
        return types.MethodType(self.function.build(tensors), self.owner.build(tensors))


_PLAIN = (type(None), bool, int, float, str)


def flatten_output(value: Any, tensors: list[torch.Tensor], region: str) -> Template:
    """Take the tensors out of what a region returned; the same tensor twice gets one slot.

    Raises:
        UnsupportedGraph: for a container that cannot travel in a manifest.
    """
    if isinstance(value, torch.Tensor):
        for i, known in enumerate(tensors):
            if known is value:
                return TensorAt(i)
        tensors.append(value)
        return TensorAt(len(tensors) - 1)
    if type(value) in _PLAIN:
        return Constant(value)
    if type(value) in (tuple, list):
        return Items(type(value), tuple(flatten_output(v, tensors, region) for v in value))
    if type(value) is dict and all(isinstance(k, str) for k in value):
        return Entries(tuple(value), tuple(flatten_output(v, tensors, region) for v in value.values()))
    structure = structures.structure_of(value)
    if structure is not None:
        structures.class_name(structure.kind, region)
        items = tuple(flatten_output(v, tensors, region) for v in structure.values(value))
        return Structured(structure, items)
    raise UnsupportedGraph(
        f"region {region!r} returns a {type(value).__module__}.{type(value).__qualname__}; an artifact can "
        "return tensors, None, numbers, text, and tuples, lists, dicts, named tuples and dataclasses of them: "
        "return one of these, or choose a smaller region",
        region=region,
    )


def require_rebuilds(value: Any, template: Template, tensors: Sequence[Any], region: str) -> None:
    """Check that a worker would make `value` of its template, as it travels in a manifest.

    Raises:
        UnsupportedGraph: it would not.
    """
    again = from_json(to_json(template)).build(tensors)
    if not structures.same(value, again):
        raise UnsupportedGraph(
            f"region {region!r} returns a {type(value).__module__}.{type(value).__qualname__} that is another once "
            "it is put together again of its fields; return plain tuples or dicts, or choose a smaller region",
            region=region,
        )


def positions(template: Template) -> set[int]:
    """The slots that a result template takes its tensors from."""
    match template:
        case TensorAt(index):
            return {index}
        case Items(_, items) | Entries(_, items) | Structured(_, items):
            return set().union(*(positions(item) for item in items))
    return set()


def to_json(template: Template) -> Any:
    """A result template as JSON: {"t": slot}, {"c": constant}, {"tuple": [...]}, ..."""
    match template:
        case TensorAt(index):
            return {"t": index}
        case Constant(value):
            return {"c": value}
        case Items(kind, items):
            return {kind.__name__: [to_json(i) for i in items]}
        case Entries(keys, items):
            return {"dict": [[k, to_json(i)] for k, i in zip(keys, items, strict=True)]}
        case Structured(structure, items):
            return {
                "structure": {
                    "class": f"{structure.kind.__module__}:{structure.kind.__qualname__}",
                    "form": structure.form,
                    "fields": [[f, to_json(i)] for f, i in zip(structure.fields, items, strict=True)],
                    "keys": None if structure.keys is None else list(structure.keys),
                }
            }
    raise TypeError(f"{template!r} is not the template of a result")


def from_json(data: Any) -> Template:
    """The inverse of `to_json`.

    Raises:
        ManifestError: for anything else.
        RejectedArtifact: a class in it cannot be imported in this process.
    """
    if isinstance(data, dict) and len(data) == 1:
        ((kind, value),) = data.items()
        if kind == "t" and type(value) is int:
            return TensorAt(value)
        if kind == "c" and type(value) in _PLAIN:
            return Constant(value)
        if kind in ("tuple", "list") and isinstance(value, list):
            return Items(tuple if kind == "tuple" else list, tuple(from_json(v) for v in value))
        if (
            kind == "dict"
            and isinstance(value, list)
            and all(isinstance(p, list) and len(p) == 2 for p in value)
        ):
            return Entries(tuple(k for k, _ in value), tuple(from_json(v) for _, v in value))
        if kind == "structure" and isinstance(value, dict):
            return _structured(value)
    raise ManifestError(f"output tree {data!r} is none of tensor, constant, tuple, list, dict, structure")


def _structured(data: dict[str, Any]) -> Structured:
    name, form, fields, keys = (data.get(part) for part in ("class", "form", "fields", "keys"))
    named = isinstance(fields, list) and all(
        isinstance(f, list) and len(f) == 2 and type(f[0]) is str for f in fields
    )
    if (
        len(data) != 4
        or type(name) is not str
        or form not in ("namedtuple", "returned", "dataclass")
        or not named
        or not (keys is None or (isinstance(keys, list) and {*keys} <= {f for f, _ in fields or ()}))
    ):
        raise ManifestError(f"output tree {data!r} is no structure")
    kind = structures.find_class(name)
    structure = structures.Structure(
        kind, form, tuple(f for f, _ in fields or ()), None if keys is None else tuple(keys)
    )
    structures.require_fits(structure, name)
    return Structured(structure, tuple(from_json(item) for _, item in fields or ()))
