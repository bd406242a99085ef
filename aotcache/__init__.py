"""Compile drafter regions before training; train on threads that never trace.

Everything public is listed in `__all__` and imported on first use, so that
`import aotcache` costs nothing and loads neither torch nor any optional extra.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aotcache.buckets import Buckets
    from aotcache.build import warm
    from aotcache.errors import AotcacheError
    from aotcache.runtime.attach import attach
    from aotcache.runtime.tripwire import forbid_tracing
    from aotcache.spec import load_spec
    from aotcache.store import open_store

__all__ = [
    "AotcacheError",
    "Buckets",
    "attach",
    "forbid_tracing",
    "load_spec",
    "open_store",
    "warm",
]

_HOMES = {
    "AotcacheError": "aotcache.errors",
    "Buckets": "aotcache.buckets",
    "attach": "aotcache.runtime.attach",
    "forbid_tracing": "aotcache.runtime.tripwire",
    "load_spec": "aotcache.spec",
    "open_store": "aotcache.store",
    "warm": "aotcache.build",
}


def __getattr__(name: str) -> Any:
    try:
        home = _HOMES[name]
    except KeyError:
        raise AttributeError(f"module 'aotcache' has no attribute {name!r}") from None
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
