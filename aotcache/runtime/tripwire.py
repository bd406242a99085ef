"""The tripwire: tracing and compiling in a worker raise, and are counted.

It stands in the functions through which every way of tracing passes: Dynamo's frame
compiler, `torch.compile` itself, FX's tracer (symbolic_trace, make_fx, AOTAutograd),
`torch.export`, AOTAutograd's entry, Inductor's lowering, and the starting of a compiler
process. Running a graph or an artifact passes through none of them, so a worker that
never traces pays nothing.

Modules that are not imported yet are not imported for this: they are fitted when they
are. What cannot be seen: functions compiled before the wire was set, which run without
tracing; a compiler started by `os.system` or by C code.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import os
import re
import subprocess
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from aotcache.errors import TracingForbidden, UnsupportedTorch

Scope = Literal["process", "thread"]

# private torch names, tried on 2.13.0: (module, attribute, what it means when it is called)
_POINTS = (
    # Before compile_frame, whose errors Dynamo wraps or, with suppress_errors, takes for a graph break.
    ("torch._dynamo.convert_frame", "_compile", "Dynamo compiles a frame"),
    ("torch._dynamo.convert_frame", "compile_frame", "Dynamo compiles a frame"),
    ("torch._dynamo.eval_frame", "_TorchDynamoContext.__call__", "torch.compile"),
    # Before Tracer.trace, out of which make_fx lets another error come while torch's trace log is on.
    ("torch.fx.experimental.proxy_tensor", "_MakefxTracer.trace", "make_fx"),
    ("torch.fx._symbolic_trace", "Tracer.trace", "FX tracing (symbolic_trace, AOTAutograd)"),
    ("torch.export._trace", "_export", "torch.export"),
    ("torch._functorch.aot_autograd", "create_aot_state", "AOTAutograd"),
    ("torch._inductor.graph", "GraphLowering.run", "Inductor"),
)

_COMPILER = re.compile(
    r"(.+-)?(g\+\+|gcc|c\+\+|cc|clang|clang\+\+|icx|icpx|hipcc|nvcc|ptxas|cicc|fatbinary|ld)(-[\d.]+)?(\.exe)?\Z"
)


@dataclass(slots=True)
class Receipt:
    """What a wire saw.

    Attributes:
        attempts: How often each thread, by `(ident, name)`, tried what.
    """

    attempts: dict[tuple[int, str], Counter[str]] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """All attempts. 0 is the proof that nothing was traced."""
        return sum(sum(counts.values()) for counts in list(self.attempts.values()))

    def thread(self, ident: int) -> int:
        """Attempts in one thread, by `threading.get_ident()`."""
        return sum(sum(c.values()) for (i, _), c in list(self.attempts.items()) if i == ident)

    def __str__(self) -> str:
        if not self.attempts:
            return "0 traces"
        lines = [
            f"{count} x {what} in thread {name} ({ident})"
            for (ident, name), counts in self.attempts.items()
            for what, count in counts.items()
        ]
        return "; ".join(lines)


class Tripwire:
    """One forbidden scope, from `install` to `close`."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.receipt = Receipt()
        self._threads = {threading.get_ident()}
        self._lock = threading.Lock()

    def covers(self, ident: int) -> bool:
        """Whether a thread lies in the scope."""
        return self.scope == "process" or ident in self._threads

    def also(self, ident: int) -> None:
        """Take another thread into a wire of scope "thread"."""
        self._threads.add(ident)

    def count(self, what: str) -> None:
        """Note an attempt of the calling thread."""
        mark = (threading.get_ident(), threading.current_thread().name)
        with self._lock:
            self.receipt.attempts.setdefault(mark, Counter())[what] += 1

    def close(self) -> None:
        """End this scope. Safe to call twice."""
        _points.remove(self)


def install(scope: Scope) -> Tripwire:
    """Forbid tracing until the returned wire is closed.

    Args:
        scope: "process" for every thread, "thread" for the calling one.
    """
    wire = Tripwire(scope)
    _points.add(wire)
    return wire


@contextmanager
def forbid_tracing(scope: Scope = "thread") -> Iterator[Receipt]:
    """Within it, an attempt to trace or compile raises TracingForbidden and is counted.

    Args:
        scope: "thread" for the calling thread, "process" for all of them.

    Yields:
        The receipt; `receipt.total` is 0 where nothing tried.
    """
    wire = install(scope)
    try:
        yield wire.receipt
    finally:
        wire.close()


def _alarm(what: str) -> None:
    ident = threading.get_ident()
    covering = [wire for wire in _points.wires if wire.covers(ident)]
    if not covering:
        return
    for wire in covering:
        wire.count(what)
    raise TracingForbidden(
        f"{what} was attempted in thread {threading.current_thread().name} ({ident}), where tracing is "
        "forbidden; compile this before training with aotcache warm, or keep it out of the worker "
        "(forbid_tracing='thread' narrows the scope to one thread)",
        what=what,
        thread=ident,
    )


def _wrapped(original: Callable[..., Any], what: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        _alarm(what)
        return original(*args, **kwargs)

    return guarded


def _compiler_of(args: Any) -> str | None:
    """The compiler that a command starts, or None."""
    if isinstance(args, bytes):
        args = os.fsdecode(args)
    words = args.split() if isinstance(args, str) else [args] if isinstance(args, os.PathLike) else list(args)
    for word in words[:2] if not isinstance(args, str) else words:
        name = os.path.basename(os.fsdecode(word))
        if _COMPILER.match(name):
            return name
        if not isinstance(args, str) and name not in ("env", "ccache", "sccache", "nice"):
            return None
    return None


def _wrapped_popen(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def guarded(self: Any, args: Any, *rest: Any, **kwargs: Any) -> None:
        compiler = _compiler_of(args)
        if compiler is not None:
            _alarm(f"starting the compiler {compiler}")
        original(self, args, *rest, **kwargs)

    return guarded


class _LateModules(importlib.abc.MetaPathFinder):
    """Fits modules that are imported while a wire is set."""

    def __init__(self, arrived: Callable[[types.ModuleType], None]) -> None:
        self._arrived = arrived

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in {module for module, _, _ in _POINTS}:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            find = getattr(finder, "find_spec", None)
            spec: importlib.machinery.ModuleSpec | None = find(name, path, target) if find else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self._arrived)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, arrived: Callable[[types.ModuleType], None]) -> None:
        self._loader = loader
        self._arrived = arrived

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        made: types.ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        # The module keeps its own loader: inspect and linecache ask it for the source.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._arrived(module)


@dataclass(frozen=True, slots=True)
class _Place:
    """One wrapped function: where it is, what was there, and what is there now."""

    owner: Any
    name: str
    original: Any
    wrapper: Any

    def restore(self) -> None:
        # Who has wrapped it again since keeps that; with no wire set, ours only passes on.
        if vars(self.owner).get(self.name) is self.wrapper:
            setattr(self.owner, self.name, self.original)


class _Points:
    """The wrapped functions: in place while any wire is set, the exact originals after."""

    def __init__(self) -> None:
        self.wires: tuple[Tripwire, ...] = ()
        self._lock = threading.RLock()
        self._places: dict[tuple[int, str], _Place] = {}
        self._late = _LateModules(self._fit)

    def add(self, wire: Tripwire) -> None:
        with self._lock:
            self.wires = (*self.wires, wire)
            if self._late not in sys.meta_path:
                sys.meta_path.insert(0, self._late)
            self._put(subprocess.Popen, "__init__", _wrapped_popen)
        try:
            for name in dict.fromkeys(name for name, _, _ in _POINTS):
                # Not under the lock: another thread may be in the middle of importing the module,
                # and its import may need the lock before it ends.
                if name in sys.modules:
                    self._fit(importlib.import_module(name))
        except BaseException:
            self.remove(wire)
            raise

    def remove(self, wire: Tripwire) -> None:
        with self._lock:
            if wire not in self.wires:
                return
            self.wires = tuple(w for w in self.wires if w is not wire)
            if self.wires:
                return
            if self._late in sys.meta_path:
                sys.meta_path.remove(self._late)
            for place in self._places.values():
                place.restore()
            self._places.clear()

    def _fit(self, module: types.ModuleType) -> None:
        with self._lock:
            if not self.wires:
                return
            for name, path, what in _POINTS:
                if name == module.__name__:
                    *parents, attribute = path.split(".")
                    owner: Any = module
                    for parent in parents:
                        owner = getattr(owner, parent, None)
                    if owner is None or attribute not in vars(owner):
                        raise UnsupportedTorch(
                            f"{name} of this torch has no {path}, by which the tripwire sees {what}; pass "
                            "forbid_tracing=None to run without a tripwire, or use a torch that aotcache was "
                            "tried with",
                            name=f"{name}.{path}",
                        )
                    self._put(owner, attribute, functools.partial(_wrapped, what=what))

    def _put(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        mark = (id(owner), name)
        if mark not in self._places:
            original = vars(owner)[name]
            place = self._places[mark] = _Place(owner, name, original, wrap(original))
            setattr(owner, name, place.wrapper)


_points = _Points()

__all__ = ["Receipt", "Tripwire", "forbid_tracing", "install"]
