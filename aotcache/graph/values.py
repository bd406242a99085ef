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
_COUNTED = "aotcache.integrations."
"""Of aotcache's own code, what drafters' graphs are made from: it counts as that of other packages does."""
_SITE = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), range, slice)
_TORCH_PLAIN = (torch.dtype, torch.layout, torch.memory_format)
_MODULE_INTERNALS = frozenset(vars(torch.nn.Module())) - {"training"} | {"_is_replica", "_former_parameters"}

# Methods of a class that syntax does not call, or that no result depends on.
_EXPLICIT = frozenset(
    {
        "__class_getitem__", "__copy__", "__deepcopy__", "__del__", "__dir__", "__format__", "__getnewargs__",
        "__getstate__", "__init_subclass__", "__reduce__", "__reduce_ex__", "__repr__", "__set_name__",
        "__setstate__", "__sizeof__", "__str__", "__subclasshook__",
    }
)  # fmt: skip
# What a class of an installed package does when it is built or looked into says little about a graph,
# and leads far: into whole registries.
_BOOKKEEPING = frozenset(
    {
        "__contains__", "__delattr__", "__delitem__", "__eq__", "__getattr__", "__getattribute__", "__getitem__",
        "__hash__", "__init__", "__iter__", "__len__", "__new__", "__post_init__", "__setattr__", "__setitem__",
    }
)  # fmt: skip


def is_trusted_name(module: str) -> bool:
    """Whether a module is torch's or the standard library's, by its dotted name."""
    root = module.partition(".")[0]
    return (root in _TRUSTED and not module.startswith(_COUNTED)) or root in _STDLIB


def origin(obj: Any) -> str:
    """`torch`, `stdlib`, `site` (an installed package) or `user`, by the module that defines it."""
    module = (obj.__name__ if isinstance(obj, types.ModuleType) else getattr(obj, "__module__", None)) or ""
    root = module.partition(".")[0]
    if module.startswith(_COUNTED):
        return "site"
    if root in _TRUSTED:
        return "torch"
    if root in _STDLIB:
        return "stdlib"
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site" if file.startswith(_SITE) else "user"


def compiled_from(fn: types.FunctionType) -> Any:
    """What `torch.compile` or `torch.compiler.disable` wrapped, or None for any other function.

    An artifact computes what the original does; the wrapper's own state is Dynamo's and no value.
    """
    if str(fn.__globals__.get("__name__")).startswith(("torch._dynamo.", "aotcache.graph.redirect")):
        return vars(fn).get("_torchdynamo_orig_callable")  # tried on 2.13.0
    return None


def is_trusted_class(cls: type) -> bool:
    """Whether a class and all that it inherits from are torch's or the standard library's."""
    return all(origin(base) in ("torch", "stdlib") for base in cls.__mro__)


def holds_tensor(value: Any, depth: int = 4) -> bool:
    """Whether a tensor is found in a container, at most `depth` containers deep."""
    if isinstance(value, torch.Tensor):
        return True
    if not depth or not isinstance(value, dict | list | tuple):
        return False
    items = value.values() if isinstance(value, dict) else value
    return any(holds_tensor(item, depth - 1) for item in items)


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


def called_by_syntax(cls: type) -> set[str]:
    """Functions in a class's own namespace that run where no code names them: operators and the like."""
    special = {n for n in vars(cls) if n.startswith("__") and n.endswith("__")} - _EXPLICIT
    if origin(cls) != "user":
        special -= _BOOKKEEPING
    return {n for n in special if functions_of(vars(cls)[n])}


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
