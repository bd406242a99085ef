"""The call layout: what is static in a call, and where its tensors are.

`Flattener` walks the arguments of one call. In one pass it makes the items that
go into the key, the template that puts the arguments together again around other
tensors (for tracing), and the source of a function that takes a later call of the
same layout apart in about a microsecond (for the worker). Tensors are taken out of
block masks, `mask_mod` and `score_mod` wherever they hide: nested functions,
defaults, partials, bound methods, callable objects. A tensor that stayed in a
closure would be baked into the artifact, and later batches would use the old mask.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from aotcache.errors import CallRefused, Unfingerprintable
from aotcache.graph import tree
from aotcache.graph.findings import Items
from aotcache.graph.fingerprint import Walker
from aotcache.graph.structures import Structure, structure_of
from aotcache.graph.values import holds_tensor, origin, plain, slots_of

EXACT = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
"""Types of tensors whose memory is all there is to them."""


class Flattener:
    """Walks one call's arguments.

    Args:
        region: The region's name, for errors.
        walker: Fingerprints the code of functions found in arguments.
        slots: Tensors that already have a slot (parameters, buffers), by id.
    """

    def __init__(self, region: str, walker: Walker, slots: dict[int, int]) -> None:
        self.region = region
        self.walker = walker
        self.items: Items = []
        self.tensors: list[torch.Tensor] = []
        self.names: list[str] = []
        self.lifted: list[bool] = []
        self.env: dict[str, Any] = {"MISSING": object()}
        self.lines: list[str] = []
        self._slots = dict(slots)
        self._known = len(slots and set(slots.values()))
        self._variables = 0
        self._active: set[int] = set()

    # -- emitting the fast function ------------------------------------------

    def _env(self, value: Any) -> str:
        name = f"c{len(self.env)}"
        self.env[name] = value
        return name

    def _let(self, expr: str | None) -> str | None:
        """A local variable that holds `expr`."""
        if expr is None:
            return None
        self._variables += 1
        name = f"x{self._variables}"
        self.lines.append(f"{name} = {expr}")
        return name

    def _require(self, var: str | None, test: str) -> None:
        if var is not None:
            self.lines.append(f"if not ({test}): return None")

    def require_order(self, names: tuple[str, ...]) -> None:
        """A later call gives these keyword arguments in this order: forward may go through them."""
        if len(names) > 1:
            given = f"tuple(k for k in kwargs if k in {self._env(frozenset(names))})"
            self.lines.append(f"if {given} != {self._env(names)}: return None")

    # -- walking --------------------------------------------------------------

    def visit(self, name: str, value: Any, expr: str | None, *, inside: bool = False) -> tree.Template:
        """Take `value` apart.

        Args:
            name: Its path in the call.
            value: The value.
            expr: Source of an expression that reads it in a later call, or None where
                a later call needs no check (a default of the region's own forward).
            inside: Whether it was found inside a mask or a function (a lifted tensor).
        """
        if isinstance(value, torch.Tensor):
            return self._tensor(name, value, expr, inside)
        text = plain(value)
        if text is not None:
            self.items.append((name, text))
            self._constant(value, expr)
            return tree.Constant(value)
        if id(value) in self._active:
            raise Unfingerprintable(
                f"region {self.region!r}: argument {name} contains itself; an artifact cannot be keyed on it",
                region=self.region,
                path=name,
            )
        self._active.add(id(value))
        try:
            return self._container(name, value, expr, inside)
        finally:
            self._active.discard(id(value))

    def _tensor(self, name: str, value: torch.Tensor, expr: str | None, inside: bool) -> tree.Template:
        if type(value) not in EXACT:
            raise CallRefused(
                f"region {self.region!r}: {name} is a {type(value).__module__}.{type(value).__qualname__}, "
                "expected a plain torch.Tensor; aotcache cannot run tensor subclasses",
                region=self.region,
                input=name,
            )
        if value.layout is not torch.strided:
            raise CallRefused(
                f"region {self.region!r}: {name} has layout {value.layout}, expected torch.strided",
                region=self.region,
                input=name,
            )
        slot = self._slots.get(id(value))
        if slot is not None:
            if expr is not None:
                own = slot - self._known
                self._require(expr, f"{expr} is {f't{own}' if own >= 0 else f'params[{slot}]'}")
            self.items.append((name, f"same tensor as slot {slot}"))
            return tree.TensorAt(slot)
        own = len(self.tensors)
        slot = self._known + own
        self._slots[id(value)] = slot
        self.tensors.append(value)
        self.names.append(name)
        self.lifted.append(inside)
        self.items.append((name, f"tensor {slot}"))
        if expr is not None:
            self.lines.append(f"t{own} = {expr}")
        else:
            self.lines.append(f"t{own} = {self._env(value)}")
        return tree.TensorAt(slot)

    def _constant(self, value: Any, expr: str | None) -> None:
        if expr is None:
            return
        if value is None or value is True or value is False or value is Ellipsis:
            self._require(expr, f"{expr} is {value!r}")
            return
        var = self._let(expr)
        kind, const = self._env(type(value)), self._env(value)
        same = f"{var} is {const} or (type({var}) is {kind} and {var} == {const})"
        if isinstance(value, float | complex) and value == 0:
            same = f"type({var}) is {kind} and repr({var}) == repr({const})"
        self._require(var, same)

    def _container(self, name: str, value: Any, expr: str | None, inside: bool) -> tree.Template:
        kind = type(value)
        if kind in (tuple, list):
            return self._items(name, value, expr, inside)
        if kind is dict:
            return self._entries(name, value, expr, inside)
        if kind is types.FunctionType:
            return self._function(name, value, expr)
        if kind is functools.partial:
            return self._partial(name, value, expr)
        if kind is types.MethodType:
            return self._method(name, value, expr)
        if _is_block_mask(kind):
            return self._state(name, value, expr, named_only=False)
        structure = structure_of(value)
        if structure is not None and (isinstance(value, tuple | dict) or slots_of(kind)):
            return self._structure(name, value, structure, expr, inside)
        if isinstance(value, type) or (origin(kind) in ("torch", "stdlib") and not holds_tensor(value)):
            self.walker.visit(name, value)
            self._require(expr, f"{expr} is {self._env(value)}")
            return tree.Constant(value)
        if isinstance(value, tuple | list | dict | set | int | float | complex | str | bytes):
            raise CallRefused(
                f"region {self.region!r}: {name} is a {kind.__module__}.{kind.__qualname__}, expected a plain "
                f"{next(base for base in kind.__mro__ if base.__module__ == 'builtins').__name__}; pass its parts, "
                "or what it stands for, as arguments of their own",
                region=self.region,
                input=name,
            )
        if isinstance(value, torch.nn.Module):
            raise CallRefused(
                f"region {self.region!r}: {name} is a module; its weights would be baked into the artifact. "
                "Choose a region that contains it",
                region=self.region,
                input=name,
            )
        if hasattr(value, "__dict__"):
            return self._state(name, value, expr, named_only=True)
        raise Unfingerprintable(
            f"region {self.region!r}: argument {name} is a {kind.__module__}.{kind.__qualname__}, which has no "
            "value that is the same in every process; pass plain values or tensors",
            region=self.region,
            path=name,
        )

    def _items(self, name: str, value: Any, expr: str | None, inside: bool) -> tree.Template:
        kind = type(value)
        self.items.append((name, f"{kind.__name__} of {len(value)}"))
        var = self._let(expr)
        self._require(var, f"type({var}) is {self._env(kind)} and len({var}) == {len(value)}")
        return tree.Items(
            kind,
            tuple(
                self.visit(f"{name}[{i}]", item, var and f"{var}[{i}]", inside=inside)
                for i, item in enumerate(value)
            ),
        )

    def _entries(self, name: str, value: dict[Any, Any], expr: str | None, inside: bool) -> tree.Entries:
        keys = tuple(value)
        texts = [plain(key) for key in keys]
        if None in texts:
            raise Unfingerprintable(
                f"region {self.region!r}: a key of the dict {name} is not a plain value",
                region=self.region,
                path=name,
            )
        self.items.append((name, f"dict {texts}"))
        var = self._let(expr)
        self._require(var, f"type({var}) is dict and tuple({var}) == {self._env(keys)}")
        return tree.Entries(
            keys,
            tuple(
                self.visit(
                    f"{name}.{key}" if isinstance(key, str) else f"{name}[{key!r}]",
                    value[key],
                    var and f"{var}[{self._env(key)}]",
                    inside=inside,
                )
                for key in keys
            ),
        )

    def _structure(
        self, name: str, value: Any, structure: Structure, expr: str | None, inside: bool
    ) -> tree.Template:
        """A named tuple, a dataclass that is a dict, or one with slots: all of its fields."""
        kind, fields, keys = structure.kind, structure.fields, structure.keys
        self.walker.visit(f"{name}.__class__", kind)
        self.items.append(
            (name, f"{structure.form} {kind.__module__}.{kind.__qualname__} of {fields} {keys}")
        )
        var = self._let(expr)
        self._require(var, f"type({var}) is {self._env(kind)}")
        if keys is not None:
            self._require(var, f"tuple({var}) == {self._env(keys)} and len({var}.__dict__) == {len(fields)}")
        items: list[tree.Template] = []
        for i, (field, item) in enumerate(zip(fields, structure.values(value), strict=True)):
            read = var and (f"{var}[{i}]" if structure.form != "dataclass" else f"{var}.{field}")
            items.append(self.visit(f"{name}.{field}", item, read, inside=inside))
        for key in keys or ():
            self._require(var, f"dict.get({var}, {key!r}) is {var}.{key}")
        return tree.Structured(structure, tuple(items))

    def _function(self, name: str, fn: types.FunctionType, expr: str | None) -> tree.Template:
        self.walker.function(name, fn, per_call=True)
        before = len(self.tensors)
        slots_before = len(self._slots)
        var = self._let(expr)
        self._require(
            var,
            f"type({var}) is {self._env(types.FunctionType)} and {var}.__code__ is {self._env(fn.__code__)}"
            f" and {var}.__globals__ is {self._env(fn.__globals__)}",
        )
        names = fn.__code__.co_freevars
        cells = self._let(f"{var}.__closure__" if var and names else None)
        made: list[tree.Template | None] = []
        for i, cell_name in enumerate(names):
            assert fn.__closure__ is not None
            try:
                content = fn.__closure__[i].cell_contents
            except ValueError:
                self.items.append((f"{name}.{cell_name}", "empty cell"))
                made.append(None)
                continue
            made.append(
                self.visit(
                    f"{name}.{cell_name}", content, cells and f"{cells}[{i}].cell_contents", inside=True
                )
            )
        defaults = self.visit(
            f"{name}.__defaults__", fn.__defaults__, var and f"{var}.__defaults__", inside=True
        )
        kwdefaults = self.visit(
            f"{name}.__kwdefaults__", fn.__kwdefaults__, var and f"{var}.__kwdefaults__", inside=True
        )
        attributes = self._named_attributes(name, fn, var and f"{var}.__dict__")
        if len(self.tensors) == before and len(self._slots) == slots_before and not _has_tensor(made):
            return tree.Constant(fn)
        return tree.Closure(fn, tuple(made), defaults, kwdefaults, attributes)

    def _partial(self, name: str, value: functools.partial[Any], expr: str | None) -> tree.Template:
        self.items.append((name, "partial"))
        var = self._let(expr)
        self._require(var, f"type({var}) is {self._env(functools.partial)}")
        return tree.Partial(
            self.visit(f"{name}.func", value.func, var and f"{var}.func", inside=True),
            self.visit(f"{name}.args", value.args, var and f"{var}.args", inside=True),
            self.visit(f"{name}.keywords", value.keywords, var and f"{var}.keywords", inside=True),
        )

    def _method(self, name: str, value: types.MethodType, expr: str | None) -> tree.Template:
        if isinstance(value.__self__, torch.nn.Module | type):
            self.walker.visit(name, value)
            var = self._let(expr)
            self._require(var, f"{var} == {self._env(value)}")
            return tree.Constant(value)
        self.items.append((name, "method"))
        var = self._let(expr)
        self._require(var, f"type({var}) is {self._env(types.MethodType)}")
        return tree.Bound(
            self.visit(f"{name}.__func__", value.__func__, var and f"{var}.__func__", inside=True),
            self.visit(f"{name}.__self__", value.__self__, var and f"{var}.__self__", inside=True),
        )

    def _state(self, name: str, value: Any, expr: str | None, *, named_only: bool) -> tree.Template:
        kind = type(value)
        self.walker.visit(f"{name}.__class__", kind)
        if any(hasattr(value, slot) for slot in slots_of(kind)):
            raise CallRefused(
                f"region {self.region!r}: {name} is a {kind.__module__}.{kind.__qualname__} with __slots__, expected "
                "an object whose attributes are all in its __dict__; pass its parts as arguments of their own",
                region=self.region,
                input=name,
            )
        self.items.append((name, f"object {kind.__module__}.{kind.__qualname__}"))
        var = self._let(expr)
        self._require(var, f"type({var}) is {self._env(kind)}")
        state = var and f"{var}.__dict__"
        return tree.State(kind, self._named_attributes(name, value, state, every=not named_only))

    def _named_attributes(
        self, name: str, value: Any, expr: str | None, *, every: bool = False
    ) -> tree.Entries:
        """The attributes of an object that code on the way names; names that come up later are for
        `Walker.passed_over` to notice."""
        state = value.__dict__
        counted = set(state) if every else self.walker.counts(state)
        keys = tuple(key for key in state if key in counted)
        inner = self._let(expr)
        if len(keys) == len(state):
            self._require(inner, f"len({inner}) == {len(state)}")
        else:
            # One that is not counted may make room for one that is.
            self._require(inner, f"tuple({inner}) == {self._env(tuple(state))}")
        return tree.Entries(
            keys,
            tuple(
                self._attribute(
                    f"{name}.{key}", state[key], inner and f"{inner}.get({key!r}, MISSING)", type(value)
                )
                for key in keys
            ),
        )

    def _attribute(self, name: str, value: Any, expr: str | None, owner: type) -> tree.Template:
        if value is None and _is_block_mask(owner):
            # Left out of the key: newer versions of torch add fields to BlockMask that are None.
            # Elsewhere one that is None is not one that is missing, for which a class may stand in.
            self._require(expr, f"{expr} is None")
            return tree.Constant(None)
        return self.visit(name, value, expr, inside=True)

    def compile(self) -> Callable[[tuple[Any, ...], dict[str, Any], list[Any]], list[Any] | None]:
        """The function that takes a later call apart.

        It takes `(args, kwargs, params)`, `params` being the current tensors of the slots
        known beforehand, and returns the call's own tensors in slot order, or None where
        the call is of another layout.
        """
        tensors = ", ".join(f"t{i}" for i in range(len(self.tensors)))
        body = "\n      ".join([*self.lines, f"return [{tensors}]"])
        source = (
            f"def make({', '.join(self.env)}):\n"
            "  def flatten(args, kwargs, params):\n"
            "    try:\n"
            f"      {body}\n"
            "    except (AttributeError, KeyError, IndexError, TypeError, ValueError):\n"
            "      return None\n"
            "  return flatten\n"
        )
        scope: dict[str, Any] = {}
        exec(source, scope)
        made: Callable[[tuple[Any, ...], dict[str, Any], list[Any]], list[Any] | None] = scope["make"](
            *self.env.values()
        )
        return made


def _has_tensor(templates: list[tree.Template | None]) -> bool:
    return any(t is not None and not isinstance(t, tree.Constant) and _deep_tensor(t) for t in templates)


def _deep_tensor(template: tree.Template) -> bool:
    match template:
        case tree.TensorAt():
            return True
        case tree.Items(_, items) | tree.Entries(_, items) | tree.Structured(_, items):
            return any(_deep_tensor(i) for i in items)
        case tree.State(_, attributes):
            return _deep_tensor(attributes)
        case tree.Partial(a, b, c):
            return any(_deep_tensor(i) for i in (a, b, c))
        case tree.Bound(a, b):
            return _deep_tensor(a) or _deep_tensor(b)
        case tree.Closure():
            return True
    return False


def _is_block_mask(kind: type) -> bool:
    return kind.__module__ == "torch.nn.attention.flex_attention" and kind.__name__ == "BlockMask"
