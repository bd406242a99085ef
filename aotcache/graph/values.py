"""Values, seen as a key sees them: where something comes from, and what is plain."""

from __future__ import annotations

import enum
import sys
import sysconfig
import types
from typing import Any

import torch

_STDLIB = frozenset(sys.stdlib_module_names) | {"__future__", "builtins", "typing_extensions"}
_TRUSTED = frozenset({"torch", "numpy", "aotcache", "functorch"})
_SITE = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), range, slice)
_TORCH_PLAIN = (torch.dtype, torch.layout, torch.memory_format)
_MODULE_INTERNALS = frozenset(vars(torch.nn.Module())) - {"training"}


def is_trusted_name(module: str) -> bool:
    """Whether a module is torch's or the standard library's, by its dotted name."""
    root = module.partition(".")[0]
    return root in _TRUSTED or root in _STDLIB


def origin(obj: Any) -> str:
    """`torch`, `stdlib`, `site` (an installed package) or `user`, by the module that defines it."""
    module = getattr(obj, "__module__", None) or ""
    root = module.partition(".")[0]
    if root in _TRUSTED:
        return "torch"
    if root in _STDLIB:
        return "stdlib"
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site" if file.startswith(_SITE) else "user"


def plain(value: Any) -> str | None:
    """The text of a value that is immutable and means the same in every process, or None."""
    kind = type(value)
    if kind in _PLAIN:
        return f"{kind.__name__}:{value!r}"
    if isinstance(value, _TORCH_PLAIN):
        return repr(value)
    if isinstance(value, torch.device):
        return f"device:{value.type}"
    if isinstance(value, torch.Size):
        return f"size:{tuple(value)}"
    if isinstance(value, enum.Enum):
        inner = plain(value.value)
        return f"{kind.__module__}.{kind.__qualname__}.{value.name}" + (f"={inner}" if inner else "")
    return None


def is_foreign_code(value: Any) -> bool:
    """Whether somebody put code of their own where torch's or the standard library's stood."""
    if isinstance(value, types.BuiltinFunctionType | type) or not callable(value):
        return False
    return origin(value) in ("user", "site") and getattr(value, "__module__", None) is not None


def functions_of(member: Any) -> list[types.FunctionType]:
    """The Python functions behind a member of a class: methods, properties, wrapped ones."""
    if isinstance(member, types.FunctionType):
        return [member]
    if isinstance(member, staticmethod | classmethod):
        return functions_of(member.__func__)
    if isinstance(member, property):
        return [f for f in (member.fget,) if isinstance(f, types.FunctionType)]
    wrapped = getattr(member, "__wrapped__", None) or getattr(member, "func", None)
    return [wrapped] if isinstance(wrapped, types.FunctionType) else []


def slots_of(cls: type) -> list[str]:
    """Names of the slots of a class and its bases."""
    names: list[str] = []
    for base in cls.__mro__:
        slots = getattr(base, "__slots__", ())
        names.extend([slots] if isinstance(slots, str) else slots)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def module_internals() -> frozenset[str]:
    """Names in a module's `__dict__` that torch itself keeps there."""
    return _MODULE_INTERNALS
