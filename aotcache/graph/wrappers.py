"""What trainers put around modules and classes, and what is inside.

A region is the module itself, whether a drafter was wrapped before it was attached or
after: only so are its key, its name and what runs around it the same in both orders.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

# private torch names, tried on 2.13.0
_INSIDE = {
    "DistributedDataParallel": "module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
}
"""Wrappers of torch's that call one module, by the name under which they keep it."""

_MIXED_IN = ("FSDPModule", "DDP")
"""What `fully_shard` and `replicate` put before a class in a class of their own."""

# end of private torch names


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """As `model.named_modules()`, with wrappers left out, and out of the names as well."""
    insides: dict[str, str] = {"": ""}
    for name, module in model.named_modules():
        at = name
        while at not in insides:
            at = at.rpartition(".")[0]
        plain = (insides[at] + name[len(at) :]).lstrip(".") if at else name
        cls = plain_class(module)
        inside = _INSIDE.get(cls.__name__) if _is_distributed(cls) else None
        if inside is None:
            yield plain, module
        else:
            insides[f"{name}.{inside}".lstrip(".")] = plain


def plain_class(module: nn.Module) -> type:
    """The class of a module as it was before `fully_shard` or `replicate` gave it one of theirs."""
    found = type(module).__mro__
    for i, cls in enumerate(found[:-1]):
        if cls.__name__ in _MIXED_IN and _is_distributed(cls):
            return found[i + 1]
    return found[0]


def _is_distributed(cls: type) -> bool:
    return cls.__module__.startswith(("torch.distributed.", "torch.nn.parallel."))
