"""A stable fingerprint of the code that would run and of the values it reads.

The walk starts at the functions a region would execute and follows what they
read: globals (by bytecode, see `code.py`), closures, defaults, attributes of
`self`, methods. It stops at torch, the standard library and built-ins, which the
toolchain part of a variant covers. It reads an attribute only where its name
occurs in some function on the way, so a rank or a logger that hangs on a module
does not split the cache. What has no stable value is an error that names it.

Two depths: functions reached by calls are followed into everything they read;
functions that merely sit in a table of a third-party package (a registry of
attention functions, say) count with their own code and their file.
"""

from __future__ import annotations

import argparse
import collections
import enum
import functools
import importlib
import importlib.util
import io
import logging
import operator
import os
import re
import sys
import threading
import types
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from aotcache.graph.code import CodeFacts, facts, file_digest
from aotcache.graph.findings import Findings
from aotcache.graph.values import (
    called_by_syntax,
    compiled_from,
    functions_of,
    holds_tensor,
    is_foreign_code,
    is_trusted_class,
    is_trusted_name,
    origin,
    plain,
    slots_of,
)

_ADDRESS = re.compile(r"\bat 0x[0-9a-f]+|<\w+ object")
# They steer nothing that a graph could show, and have no value to compare.
_HARMLESS = (logging.Logger, logging.LoggerAdapter, type(threading.Lock()), type(threading.RLock()))
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace, Mapping)
# What stands in a class and is neither code nor a value of the user's.
_DESCRIPTORS = (
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.BuiltinFunctionType,
)
# What the names of environment variables look like.
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]+\Z")
_NUMBERS_AND_TEXTS = (int, float, complex, str, bytes)
_ABSENT = object()
NO_MEMBERS = frozenset({"__dict__", "__weakref__", "__doc__", "__module__"})


class Walker(Findings):
    """Walks values and collects what it finds. See `Findings` for its arguments."""

    def visit(self, path: str, value: Any, *, deep: bool = True) -> None:
        """Fingerprint `value`, reached by `path`."""
        text = plain(value)
        if text is not None:
            self.add(path, text)
            if type(value) is str:
                self.texts.add(value)
            if isinstance(value, enum.Enum) and origin(type(value)) not in ("torch", "stdlib"):
                self._enum(path, value, deep)
            return
        for base in _NUMBERS_AND_TEXTS:
            if isinstance(value, base) and origin(type(value)) in ("user", "site"):
                self.add(path, f"{base.__name__}:{base.__repr__(value)}")
        if isinstance(value, torch.Tensor):
            raise self.fail(
                path,
                value,
                "a tensor that export would bake in",
                "pass it as an input or register it as a buffer",
            )
        mark = self._seen.get(id(value))
        if mark is not None:
            self.add(path, f"same as {mark}")
            return
        self._seen[id(value)] = path
        self._keep.append(value)
        self._visit_new(path, value, deep)

    def _visit_new(self, path: str, value: Any, deep: bool) -> None:
        kind = type(value)
        if id(value) in self.modules:
            self.add(path, f"module:{self.modules[id(value)]}")
        elif value is os.environ or value is os.getenv:
            self.environment = True
            self.add(path, "environment")
        elif isinstance(value, types.FunctionType):
            self.function(path, value, deep=deep)
        elif isinstance(value, types.MethodType):
            self.visit(f"{path}.__func__", value.__func__, deep=deep)
            self.visit(f"{path}.__self__", value.__self__, deep=deep)
        elif isinstance(value, functools.partial):
            self.add(path, "partial")
            self.visit(f"{path}.func", value.func, deep=deep)
            self.visit(f"{path}.args", value.args, deep=deep)
            self.visit(f"{path}.keywords", value.keywords, deep=deep)
        elif isinstance(value, type):
            self.klass(path, value, deep=deep)
        elif isinstance(value, types.ModuleType):
            self._module(path, value)
        elif isinstance(value, dict | types.MappingProxyType):
            self._mapping(path, value, deep)
            self._beyond_builtin(path, value, deep)
        elif isinstance(value, list | tuple):
            self._sequence(path, value, deep)
            self._beyond_builtin(path, value, deep)
        elif isinstance(value, set | frozenset):
            self._set(path, value)
            self._beyond_builtin(path, value, deep)
        elif isinstance(value, weakref.ref):
            self.add(path, "weak reference")
            self.visit(f"{path}()", value(), deep=deep)
        elif hasattr(value, "__wrapped__") and callable(value):
            self.add(path, f"wrapper:{kind.__qualname__}")
            self.visit(f"{path}.__wrapped__", value.__wrapped__, deep=deep)
            self._beyond_builtin(path, value, deep)
        elif callable(value) and hasattr(value, "__qualname__") and hasattr(value, "__module__"):
            self.add(path, f"builtin:{value.__module__}.{value.__qualname__}")
        elif isinstance(value, _HARMLESS):
            self.add(path, f"opaque:{kind.__qualname__}")
        elif isinstance(value, torch.nn.Module):
            raise self.fail(
                path,
                value,
                "a module outside the region whose weights export would bake in",
                "register it as a submodule of the region, or choose a larger region",
            )
        elif origin(kind) in ("torch", "stdlib") and not isinstance(value, _NAMESPACES):
            self._trusted_object(path, value)
        else:
            self.object(path, value, deep=deep)

    def _beyond_builtin(self, path: str, value: Any, deep: bool) -> None:
        """What a class of the user's adds to a built-in one that it derives from."""
        if origin(type(value)) in ("user", "site"):
            self.object(path, value, deep=deep)
        elif isinstance(value, collections.defaultdict):
            self.visit(f"{path}.default_factory", value.default_factory, deep=deep)

    def _module(self, path: str, module: types.ModuleType) -> None:
        """A module that is handed around: all that code on the way names in it."""
        self.add(path, f"python module:{module.__name__}")
        if self._is_trusted_module(module):
            return
        for name in sorted(self.named(vars(module)) - NO_MEMBERS):
            self._of_module(path, module, name)
        self._module_getattr(path, module)

    def _of_module(self, path: str, module: types.ModuleType, name: str) -> None:
        value = vars(module)[name]
        if isinstance(value, types.ModuleType) and origin(module) == "site":
            return  # the packages that a package imports
        self.checks.item(vars(module), name, value)
        if id(value) not in self._seen:
            self.visit(f"{path}.{name}", value)

    def _module_getattr(self, path: str, module: types.ModuleType) -> None:
        getter = vars(module).get("__getattr__")
        if isinstance(getter, types.FunctionType) and id(getter) not in self._seen:
            self.visit(f"{path}.__getattr__", getter)

    def _enum(self, path: str, value: enum.Enum, deep: bool) -> None:
        if id(value) not in self._seen:
            self._seen[id(value)] = path
            self._keep.append(value)
            self.visit(f"{path}.__class__", type(value), deep=deep)
            self.attributes(path, value, deep=deep, skip=frozenset({"_name_", "_value_", "__objclass__"}))

    def _trusted_object(self, path: str, value: Any) -> None:
        """An object of torch's or the standard library's: by its text, where that is a value."""
        kind = type(value)
        if kind.__module__.partition(".")[0] == "numpy" and kind.__hash__ is None:
            raise self.fail(
                path, value, "an array that export would bake in", "pass it as a tensor, or register a buffer"
            )
        if isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            self.add(path, f"operator:{value}")
        elif (
            "__repr__" in {n for base in kind.__mro__[:-1] for n in vars(base)}
            and not _ADDRESS.search(repr(value))
            and not isinstance(value, io.IOBase | torch.Generator)
        ):
            self.add(path, f"object:{kind.__qualname__}:{value!r}")
            if kind.__hash__ is None or getattr(value, "__dict__", None) or hasattr(kind, "__next__"):
                self.checks.text(value, repr(value))
            if holds_tensor(getattr(value, "__dict__", None)):
                raise self.fail(
                    path,
                    value,
                    "which holds tensors that export would bake in",
                    "pass it, or what it is made of, as an argument",
                )
            if isinstance(value, operator.attrgetter | operator.methodcaller):
                for text in value.__reduce__()[1]:
                    self.names.update(str(text).split("."))
        else:
            raise self.fail(
                path,
                value,
                "which has no value that is the same in every process",
                "keep it out of what forward reads",
            )

    def _mapping(self, path: str, value: Any, deep: bool) -> None:
        self.add(path, f"{type(value).__name__} of {len(value)}")
        self.checks.keys(value)
        for key, item in value.items():
            label = plain(key)
            if label is None:
                label = getattr(key, "__qualname__", None) or type(key).__qualname__
                self.visit(f"{path} key {label}", key, deep=False)
            self.checks.item(value, key, item)
            if type(key) in (str, int):
                label = repr(key)
            self.visit(f"{path}[{label}]", item, deep=deep)

    def _sequence(self, path: str, value: list[Any] | tuple[Any, ...], deep: bool) -> None:
        self.add(path, f"{type(value).__name__} of {len(value)}")
        if isinstance(value, list):
            self.checks.length(value)
        for i, item in enumerate(value):
            if isinstance(value, list):
                self.checks.item(value, i, item)
            self.visit(f"{path}[{i}]", item, deep=deep)

    def _set(self, path: str, value: set[Any] | frozenset[Any]) -> None:
        texts = [plain(item) for item in value]
        if None in texts:
            raise self.fail(path, value, "a set of objects without a stable order", "use a tuple")
        self.add(path, f"{type(value).__name__}:{sorted(str(t) for t in texts)}")
        if isinstance(value, set):
            self.checks.equal(value, frozenset(value))

    def read_environment(self) -> None:
        """Where some code on the way reads the environment: the variables that are set and whose
        names stand in the code. Call it last, when all names are known."""
        if not self.environment:
            return
        table = os.environ._data  # type: ignore[attr-defined]  # what os.environ is a view of
        for name in sorted(n for n in self.names if _VARIABLE.match(n)):
            encoded = os.environ.encodekey(name)
            self.checks.item(table, encoded, table.get(encoded))
            if name in os.environ:
                self.add(f"environment {name}", plain(os.environ[name]) or "")

    # -- code ---------------------------------------------------------------

    def function(
        self, path: str, fn: types.FunctionType, *, deep: bool = True, per_call: bool = False
    ) -> None:
        """One Python function: its code, defaults, closure and the globals it reads.

        With `per_call` the function was handed in with a call and lives no longer than
        that: its cells and defaults belong to the call layout, and no check may hold it.
        """
        original = compiled_from(fn)
        if original is not None:
            self.visit(f"{path}.<compiled>", original, deep=deep)
            return
        where = origin(fn)
        if where in ("torch", "stdlib"):
            # Its code belongs to the toolchain; only what it closes over is the caller's.
            self.add(path, f"function:{fn.__module__}.{fn.__qualname__}")
            if fn.__closure__ is not None and not per_call:
                self._function_state(path, fn, deep)
            return
        found = facts(fn.__code__)
        self.add(path, f"code:{fn.__module__}.{fn.__qualname__}:{found.digest}")
        self.note_code(found)
        if not per_call:
            self._function_state(path, fn, deep)
            for name in sorted(self.named(vars(fn))):
                self.checks.item(vars(fn), name, vars(fn)[name])
                self.visit(f"{path}.{name}", vars(fn)[name], deep=deep)
        if deep:
            self._globals(path, fn, found)
            self._imports(fn, found)

    def _function_state(self, path: str, fn: types.FunctionType, deep: bool) -> None:
        self.checks.attribute(fn, "__code__", fn.__code__)
        self.checks.attribute(fn, "__defaults__", fn.__defaults__)
        self.checks.attribute(fn, "__kwdefaults__", fn.__kwdefaults__)
        if fn.__defaults__:
            self.visit(f"{path}.__defaults__", fn.__defaults__, deep=deep)
        if fn.__kwdefaults__:
            self.visit(f"{path}.__kwdefaults__", fn.__kwdefaults__, deep=deep)
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:
                self.add(f"{path}.<{name}>", "empty cell")
                continue
            self.checks.cell(cell, content)
            self.visit(f"{path}.<{name}>", content, deep=deep)

    def _globals(self, path: str, fn: types.FunctionType, found: CodeFacts) -> None:
        scope = fn.__globals__
        for chain in found.chains:
            name = chain[0]
            if name not in scope:
                self.checks.absent(scope, name)
                continue
            value = scope[name]
            self.checks.item(scope, name, value)
            label = f"{fn.__module__}:{name}"
            # A name read through a module is that module's attribute: follow to the end.
            for attribute in chain[1:]:
                # torch.ops fills itself as operators are asked for; whether a worker has one, and of
                # which signature, is the verdict's business.
                if not isinstance(value, types.ModuleType) or value is torch.ops:
                    break
                inner = vars(value).get(attribute, _ABSENT)
                if inner is _ABSENT:
                    if not self._is_trusted_module(value):
                        self.checks.absent(vars(value), attribute)
                        self._module_getattr(label, value)
                    break
                self.checks.item(vars(value), attribute, inner)
                if self._is_trusted_module(value) and not isinstance(inner, types.ModuleType):
                    # torch's own belongs to the toolchain; what somebody put in its place does not.
                    if is_foreign_code(inner):
                        value, label = inner, f"{label}.{attribute}"
                    break
                value, label = inner, f"{label}.{attribute}"
            if id(value) not in self._seen:
                self.visit(f"global {label}", value)
        if found.by_table:
            # Globals read through `globals()`, by a text in the code.
            for name in sorted(found.names & scope.keys()):
                self.checks.item(scope, name, scope[name])
                if id(scope[name]) not in self._seen:
                    self.visit(f"global {fn.__module__}:{name}", scope[name])

    def _imports(self, fn: types.FunctionType, found: CodeFacts) -> None:
        """What an `import` inside the function brings, as if it stood at the head of the file."""
        for name, wanted in found.imports:
            label = f"import {name}"
            try:
                absolute = importlib.util.resolve_name(name, fn.__globals__.get("__package__"))
                module = importlib.import_module(absolute)
            except ImportError as error:
                self.add(label, f"fails:{type(error).__name__}")
                continue
            if self._is_trusted_module(module):
                continue
            self.checks.item(sys.modules, absolute, module)
            if not wanted:
                # This leaves open which attributes are read: all that the code names count.
                if id(module) not in self._seen:
                    self.visit(label, module)
                continue
            for attribute in wanted:
                value = vars(module).get(attribute, _ABSENT)
                if value is _ABSENT:
                    self._module_getattr(label, module)
                    continue
                self.checks.item(vars(module), attribute, value)
                if id(value) not in self._seen:
                    self.visit(f"{label}.{attribute}", value)

    @staticmethod
    def _is_trusted_module(module: types.ModuleType) -> bool:
        return is_trusted_name(module.__name__)

    def klass(self, path: str, cls: type, *, deep: bool = True) -> None:
        """A class: its name, bases, and those of its functions that code on the way names."""
        self.add(path, f"class:{cls.__module__}.{cls.__qualname__}")
        if is_trusted_class(cls):
            return
        file = getattr(sys.modules.get(cls.__module__), "__file__", None)
        if file is not None and (digest := file_digest(file)) is not None:
            self.files.setdefault(digest, file)
        if deep:
            self.methods(path, cls)

    def methods(self, path: str, cls: type, *, leave_out: frozenset[str] = frozenset()) -> None:
        """The members of a class, inherited ones included, that code on the way names or syntax calls."""
        self.checks.attribute(cls, "__mro__", cls.__mro__)
        before: list[type] = []
        for base in cls.__mro__:
            if origin(base) in ("torch", "stdlib"):
                continue
            for name in sorted(self._members_of(base) - leave_out):
                member = vars(base)[name]
                member_path = f"{path}.{name}" if base is cls else f"{path}({base.__qualname__}).{name}"
                for nearer in before:
                    if name not in vars(nearer):
                        self.checks.absent(vars(nearer), name)
                self.checks.item(vars(base), name, member)
                self._member(member_path, member, deep=origin(base) == "user")
            before.append(base)
        for name in ("__call__", "__getattr__"):
            for base in before:
                if name not in vars(base):
                    self.checks.absent(vars(base), name)
        if origin(type(cls)) not in ("torch", "stdlib"):
            self.visit(f"{path}.__class__", type(cls))

    def _members_of(self, cls: type) -> set[str]:
        members = vars(cls).keys() - NO_MEMBERS
        special = {n for n in members if n.startswith("__") and n.endswith("__")}
        more = self.counts(members - special) if origin(cls) == "user" else self.named(members - special)
        named = self.named(special)
        if origin(cls) != "user":
            # The `__init__` of every dataclass names it; transformers' registers classes in a table.
            named -= {"__post_init__"}
        return called_by_syntax(cls) | named | more

    def _member(self, path: str, member: Any, *, deep: bool) -> None:
        functions = functions_of(member)
        for fn in functions:
            self.visit(path, fn)
        if isinstance(member, dict | list | tuple):
            self.visit(path, member, deep=deep)
        elif not functions and not isinstance(member, _DESCRIPTORS):
            self.visit(path, member)

    def object(self, path: str, value: Any, *, deep: bool = True) -> None:
        """Any other object: its class, and the attributes that code on the way names."""
        cls = type(value)
        state = getattr(value, "__dict__", None)
        if state is None and not hasattr(cls, "__slots__"):
            raise self.fail(
                path,
                value,
                "which has no value that is the same in every process",
                "keep it out of what forward reads",
            )
        self.visit(f"{path}.__class__", cls, deep=deep)
        self.add(path, f"object:{cls.__module__}.{cls.__qualname__}")
        self.attributes(
            path, value, deep=deep and origin(cls) == "user", every=isinstance(value, _NAMESPACES[:2])
        )
        if isinstance(value, Mapping):
            self._registry(path, value)

    def _registry(self, path: str, value: Mapping[Any, Any]) -> None:
        """Entries of a table of functions that a text in the code or in a configuration selects."""
        keys = {k for k in value if type(k) is str}
        self.unread |= keys - self.texts - self.names
        for key in sorted(keys & (self.texts | self.names)):
            entry = value[key]
            self.checks.item(value, key, entry)
            self.visit(f"{path}[{key!r}]", entry)

    def attributes(
        self, path: str, value: Any, *, deep: bool, skip: frozenset[str] = frozenset(), every: bool = False
    ) -> None:
        """The attributes of an object whose names some code on the way mentions.

        Args:
            path: How the object was reached.
            value: The object.
            deep: Whether functions found there are followed into their globals.
            skip: Names to leave out.
            every: Take all public plain attributes, named or not (for torch's own modules).
        """
        for name in slots_of(type(value)):
            if every or self.counts((name,)):
                inner = getattr(value, name, _ABSENT)
                if inner is _ABSENT:
                    self.checks.no_attribute(value, name)
                    continue
                self.checks.attribute(value, name, inner)
                self.visit(f"{path}.{name}", inner, deep=deep)
        state = getattr(value, "__dict__", None)
        if state is None:
            return
        self.checks.length(state)
        counted = self.counts(state)
        for name in sorted(state):
            if name in skip or not (name in counted or (every and not name.startswith("_"))):
                continue
            self.checks.item(state, name, state[name])
            self.visit(f"{path}.{name}", state[name], deep=deep)
