"""What is fixed about a region between its calls: code, module tree, attributes, where tensors live."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from aotcache.errors import UnsupportedGraph
from aotcache.graph.code import facts
from aotcache.graph.findings import NOTHING, Items, Reads
from aotcache.graph.fingerprint import Walker
from aotcache.graph.patches import tensor_methods, torch_function
from aotcache.graph.values import is_trusted_class, module_internals, origin
from aotcache.graph.wrappers import plain_class
from aotcache.key import Component

SlotKind = Literal["parameter", "buffer", "input", "lifted"]

ATTACHED = "_aotcache"
"""Name in a module's `__dict__` under which the worker half keeps its state."""

# private torch names, tried on 2.13.0
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
)
_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


@dataclass(frozen=True, slots=True)
class Holder:
    """Where one tensor of a region lives: `holder[name]`, read anew at every call."""

    kind: SlotKind
    qualname: str
    holder: dict[str, Any]
    name: str


@dataclass(frozen=True, slots=True)
class Static:
    """What is fixed between calls as long as `still_true()` holds.

    Attributes:
        code: The code component of the key.
        structure: Items of the structure component, tensors excepted.
        holders: Every parameter, buffer and lifted attribute, in order.
        reads: What the code reads.
        passed_over: Whether something was left out that counts where more is read.
        still_true: Whether nothing this was made from has been exchanged.
    """

    code: Component
    structure: tuple[tuple[str, str], ...]
    holders: tuple[Holder, ...]
    reads: Reads
    passed_over: Callable[[Reads], bool]
    still_true: Callable[[], bool]

    def holds_tensors(self) -> bool:
        """Whether every holder still holds a tensor, and not None or a number by now."""
        return all(isinstance(h.holder.get(h.name), torch.Tensor) for h in self.holders)


def original_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward that a module had before aotcache put its own in place."""
    attached = module.__dict__.get(ATTACHED)
    forward: Callable[..., Any] = module.forward if attached is None else attached.original
    return forward


def fingerprint_module(
    name: str,
    module: nn.Module,
    forward: Callable[..., Any],
    reads: Reads = NOTHING,
) -> Static:
    """Fingerprint a region: the code its calls would run, its structure and its plain attributes.

    Args:
        name, module: The region.
        forward: What a call runs.
        reads: What code outside of the region reads: functions among the arguments.
    """
    modules = {id(m): n for n, m in module.named_modules()}
    while True:
        # What is read decides what counts, and what counts may read more: until nothing is new.
        walker = Walker(name, modules, reads)
        structure, holders = _walk(walker, name, module, forward)
        tensor_methods(walker)
        reads = walker.reads()
        if not walker.passed_over(reads):
            break
    walker.read_environment()
    code = Component("code", (*walker.items, *files_of(walker)))
    return Static(code, tuple(structure), tuple(holders), reads, walker.passed_over, walker.checks.compile())


def files_of(walker: Walker) -> list[tuple[str, str]]:
    return [(f"file {i}", digest) for i, digest in enumerate(sorted(walker.files))]


def _walk(
    walker: Walker, name: str, root: nn.Module, forward: Callable[..., Any]
) -> tuple[Items, list[Holder]]:
    structure: Items = []
    holders: list[Holder] = []
    for hooks in _GLOBAL_HOOKS:
        registry = getattr(nn.modules.module, hooks)
        walker.checks.length(registry)
        if registry:
            raise UnsupportedGraph(
                f"region {name!r}: a global module hook is registered ({hooks[1:]}); it would be baked into "
                "the artifact. Remove it before warming and training",
                region=name,
            )
    for label, module in root.named_modules():
        where = label or "(root)"
        cls = plain_class(module)
        structure.append((where, f"{cls.__module__}.{cls.__qualname__}"))
        walker.checks.attribute(module, "__class__", type(module))
        for table in ("_modules", "_parameters", "_buffers"):
            walker.checks.item(module.__dict__, table, module.__dict__[table])
        _refuse_hooks(walker, name, label, module, root)
        for child, sub in module._modules.items():
            walker.checks.item(module._modules, child, sub)
        walker.checks.keys(module._modules)
        _code(walker, where, module, forward if module is root else None)
        _plain_attributes(walker, structure, where, module, holders, label)
    # Parameters and buffers come last so that their slots are numbered in one order.
    tensors: list[Holder] = []
    for label, module in root.named_modules():
        tables: tuple[tuple[SlotKind, Any], ...] = (
            ("parameter", module._parameters),
            ("buffer", module._buffers),
        )
        for kind, table in tables:
            walker.checks.keys(table)
            for key, value in table.items():
                qualname = f"{label}.{key}" if label else key
                if value is None:
                    walker.checks.item(table, key, None)
                    structure.append((qualname, f"{kind} None"))
                else:
                    tensors.append(Holder(kind, qualname, table, key))
    return structure, tensors + holders


def _refuse_hooks(walker: Walker, name: str, label: str, module: nn.Module, root: nn.Module) -> None:
    if module is root:
        return
    for hooks in _HOOKS:
        registry = module.__dict__.get(hooks)
        if registry is None:
            continue
        walker.checks.item(module.__dict__, hooks, registry)
        walker.checks.length(registry)
        if registry:
            first = next(iter(registry.values()))
            raise UnsupportedGraph(
                f"region {name!r}: submodule {label!r} has a hook in {hooks[1:]} "
                f"({getattr(first, '__qualname__', first)!r}); inside a region it would be baked in or skipped. "
                "Put the hook on the region itself, where it runs as always, or choose a smaller region",
                region=name,
                submodule=label,
            )


def _code(walker: Walker, where: str, module: nn.Module, forward: Callable[..., Any] | None) -> None:
    """What runs when the module is called."""
    cls = plain_class(module)
    own = module.__dict__
    if forward is None:
        forward = original_forward(module)
        if "forward" in own and ATTACHED not in own:
            walker.checks.item(own, "forward", own["forward"])
    function = forward.__func__ if isinstance(forward, types.MethodType) else forward
    for base in cls.__mro__:
        if "forward" in vars(base):
            walker.checks.item(vars(base), "forward", vars(base)["forward"])
            break
        walker.checks.absent(vars(base), "forward")
    if is_trusted_class(cls) and origin(function) in ("torch", "stdlib"):
        walker.add(where, f"class:{cls.__module__}.{cls.__qualname__}")
        torch_function(walker, function)
        return
    walker.visit(f"{where}.forward", function)
    # A module is not built in a call, and how the region itself is called (under a checkpoint, say) is its caller's
    # business: what is compiled begins with its forward.
    outside = {"__init__", "__new__"} | ({"__call__"} if where == "(root)" else set())
    walker.methods(where, cls, leave_out=frozenset(outside))


def _plain_attributes(
    walker: Walker, structure: Items, where: str, module: nn.Module, holders: list[Holder], label: str
) -> None:
    trusted = is_trusted_class(plain_class(module))
    own = module.__dict__
    reads_training = "training" in (
        facts(type(module).forward.__code__).names
        if trusted and hasattr(type(module).forward, "__code__")
        else walker.counts(("training",))
    )
    if reads_training:
        walker.checks.item(own, "training", module.training)
        structure.append((f"{where}.training", str(module.training)))
    skip = set(module_internals()) | {"training", "forward", ATTACHED}
    for key, value in own.items():
        if key not in skip and isinstance(value, torch.Tensor):
            skip.add(key)
            if trusted or walker.counts((key,)):
                holders.append(Holder("lifted", f"{label}.{key}" if label else key, own, key))
    before = len(walker.items)
    walker.attributes(where, module, deep=True, skip=frozenset(skip), every=trusted)
    structure += walker.items[before:]
    del walker.items[before:]
