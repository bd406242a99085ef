"""Structured values: named tuples, torch's own result tuples, dataclasses, and dataclasses that
are dictionaries as well (`ModelOutput` of transformers, which is not imported here).

They are taken apart into fields and put together again without their constructor, so
that what it would derive or check is neither done twice nor needed.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from aotcache.errors import RejectedArtifact, UnsupportedGraph

Form = Literal["namedtuple", "returned", "dataclass"]

_RETURNED = "torch.return_types"
"""The module of the tuples that torch's own functions return, such as `topk`."""


@dataclass(frozen=True, slots=True)
class Structure:
    """All of a structured value but the values in it.

    Attributes:
        kind: Its class.
        form: How it is put together.
        fields: Names of what it holds, in order; of a dataclass, also of attributes that are no
            fields.
        keys: Of a dataclass that is a dictionary, its keys, each of which is a field with that value.
    """

    kind: type
    form: Form
    fields: tuple[str, ...]
    keys: tuple[str, ...] | None = None

    def values(self, value: Any) -> list[Any]:
        """What a value of this structure holds, by field."""
        if self.form == "dataclass":
            return [object.__getattribute__(value, field) for field in self.fields]
        return list(value)

    def build(self, values: Sequence[Any]) -> Any:
        """A value of this structure."""
        if self.form == "namedtuple":
            return tuple.__new__(self.kind, values)
        if self.form == "returned":
            return self.kind(values)
        made: Any = _new(self.kind)
        for field, value in zip(self.fields, values, strict=True):
            object.__setattr__(made, field, value)
        if self.keys:
            put = OrderedDict.__setitem__ if isinstance(made, OrderedDict) else dict.__setitem__
            held = dict(zip(self.fields, values, strict=True))
            for key in self.keys:
                put(made, key, held[key])
        return made


def _new(kind: type) -> Any:
    if issubclass(kind, OrderedDict):
        return OrderedDict.__new__(kind)
    return dict.__new__(kind) if issubclass(kind, dict) else object.__new__(kind)


def structure_of(value: Any) -> Structure | None:
    """The structure of a value, or None if it is none of those that can be put together again."""
    kind = type(value)
    if isinstance(value, tuple):
        if kind.__iter__ is not tuple.__iter__ or kind.__getitem__ is not tuple.__getitem__:
            return None
        if kind.__module__ == _RETURNED:
            return _returned(kind)
        fields = getattr(kind, "_fields", None)
        named = type(fields) is tuple and len(fields) == len(value) and not getattr(value, "__dict__", None)
        return Structure(kind, "namedtuple", fields) if named and type(fields) is tuple else None
    if not dataclasses.is_dataclass(kind) or isinstance(value, type):
        return None
    if not isinstance(value, dict) and not _plain_object(kind):
        return None
    fields = tuple(f.name for f in dataclasses.fields(kind) if _has(value, f.name))
    more = tuple(name for name in getattr(value, "__dict__", {}) if name not in fields)
    keys: tuple[Any, ...] | None = None
    if isinstance(value, dict):
        keys = tuple(value)
        if any(not _has(value, key) or _attribute(value, key) is not dict.get(value, key) for key in keys):
            return None
    return Structure(kind, "dataclass", (*fields, *more), keys)


def _returned(kind: type) -> Structure | None:
    count = getattr(kind, "n_fields", None)
    if type(count) is not int or count != getattr(kind, "n_sequence_fields", None):
        return None
    return Structure(kind, "returned", tuple(str(i) for i in range(count)))


def _plain_object(kind: type) -> bool:
    """Whether `object` alone can make an instance: not so with a built-in base, such as list."""
    try:
        object.__new__(kind)
    except TypeError:
        return False
    return True


def _attribute(value: Any, name: str) -> Any:
    return object.__getattribute__(value, name)


def _has(value: Any, name: Any) -> bool:
    """Whether the object itself holds an attribute, and not its class."""
    if name in getattr(value, "__dict__", ()):
        return True
    if type(name) is not str or (hasattr(value, "__dict__") and not _slot(type(value), name)):
        return False
    try:
        _attribute(value, name)
    except AttributeError:
        return False
    return True


def _slot(kind: type, name: str) -> bool:
    return any(name in vars(base).get("__slots__", ()) for base in kind.__mro__)


def class_name(kind: type, region: str) -> str:
    """`module:qualname` of a class that every process finds by it.

    Raises:
        UnsupportedGraph: a local class, one of the main program, or one that is not where it says.
    """
    name = f"{kind.__module__}:{kind.__qualname__}"
    why = None
    if "<locals>" in kind.__qualname__:
        why = "is defined inside a function, where no other process finds it"
    elif kind.__module__ == "__main__":
        why = "is defined in the main program, which is another one in every process"
    else:
        try:
            found: Any = find_class(name)
        except RejectedArtifact:
            found = None
        if found is not kind:
            why = "is not what is found under that name"
    if why is not None:
        raise UnsupportedGraph(
            f"region {region!r} returns a {name}, which {why}; define the class at the top of a module",
            region=region,
        )
    return name


def find_class(name: str) -> type:
    """The class of a `module:qualname`, importing its module.

    Raises:
        RejectedArtifact: there is no such class in this process.
    """
    module, _, qualname = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in qualname.split("."):
            found = getattr(found, part)
        if not isinstance(found, type):
            raise TypeError(f"{name} is a {type(found).__qualname__}")
    except Exception as error:
        raise rejected(name, f"{type(error).__name__}: {error}") from error
    return found


def require_fits(structure: Structure, name: str) -> None:
    """Check that a class found by `name` still is what a structure was recorded of.

    Raises:
        RejectedArtifact: it is of another form, or has other fields.
    """
    kind = structure.kind
    if structure.form == "namedtuple":
        fits = issubclass(kind, tuple) and getattr(kind, "_fields", None) == structure.fields
    elif structure.form == "returned":
        fits = kind.__module__ == _RETURNED and _returned(kind) == structure
    else:
        fits = dataclasses.is_dataclass(kind) and (structure.keys is not None) == issubclass(kind, dict)
    if not fits:
        raise rejected(name, f"it is no {structure.form} of {structure.fields} any more")


def rejected(name: str, why: str) -> RejectedArtifact:
    """What to raise where a result's class is not there, or is another."""
    return RejectedArtifact(
        f"the artifact returns a {name}, which this process cannot import ({why}); expected the class that the "
        "drafter returned when it was warmed: put its module on the path, or warm anew",
        wanted=name,
    )


def same(one: Any, other: Any) -> bool:
    """Whether two results are alike: types, fields, order, and the very same tensors and plain values."""
    if type(one) is not type(other):
        return False
    structure = structure_of(one)
    if structure is not None:
        return structure == structure_of(other) and all(
            same(a, b) for a, b in zip(structure.values(one), structure.values(other), strict=True)
        )
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    return one is other or bool(type(one) in (int, float, str) and repr(one) == repr(other))
