"""Sends this thread's flex attention to a function of our choice, without tracing.

Calling torch's `flex_attention` outside of `torch.compile` starts Dynamo, and with
gradients `make_fx` as well. Inside `redirect_flex` a call validates its arguments as
always and then runs a plain Python handler instead, wherever the caller got the
function from: a direct import, an alias, or a `torch.compile` wrapper made earlier.

How it reaches them all, without touching a line that Dynamo reads in other threads:

- torch has a debug switch that makes `flex_attention` call its operator directly. It is
  replaced by an object that is true in redirected threads only.
- The context manager that torch enters around that call would set process-wide flags.
  In a redirected thread it is replaced by one that intercepts the operator.
- A `torch.compile` wrapper runs its original when it is called while a fake tensor is
  being computed. In a redirected thread, that question is answered with yes.
- `torch.compile` itself, called in a redirected thread, gives back a wrapper that runs
  the original there, and compiles once it is called from elsewhere.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar

import torch
from torch.overrides import TorchFunctionMode

_F = TypeVar("_F", bound=Callable[..., Any])

# private torch names, tried on 2.13.0
_DEBUG_SWITCH = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
_ENVIRONMENT = "setup_compilation_env"
_VALIDATE_DEVICE = "_validate_device"
_WRAPPER = "compile_wrapper"  # the function that torch.compile returns, in _dynamo/eval_frame.py


def _flex_module() -> Any:
    import torch.nn.attention.flex_attention as module

    return module


def _flex_operator() -> Any:
    from torch._higher_order_ops.flex_attention import flex_attention

    return flex_attention


def _tracing_context() -> Any:
    from torch._guards import TracingContext

    return TracingContext


class FlexHandler(Protocol):
    """What a redirected call runs; the arguments and results are those of torch's operator.

    Args:
        query: `[B, Hq, Q, E]`.
        key: `[B or 1, Hkv, KV, E]`, `Hq` a multiple of `Hkv`.
        value: `[B or 1, Hkv, KV, Ev]`.
        score_mod: `(score, b, h, q, kv) -> score` on 0-d tensors.
        block_mask: `BlockMask.as_tuple()`: lengths of queries and keys, then index
            tensors, then the two block sizes and the `mask_mod`.
        scale: Factor of the scores, applied before `score_mod`.
        kernel_options: With torch's defaults filled in.

    Returns:
        The output `[B, Hq, Q, Ev]`, and the log-sum-exp and the largest score of each row,
        `[B, Hq, Q]`, both divided by `ln 2`. Empty tensors stand for what was not asked for.
    """

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        score_mod: Callable[..., torch.Tensor],
        block_mask: tuple[Any, ...],
        scale: float,
        kernel_options: dict[str, Any],
        /,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


class _Redirected(threading.local):
    """The handlers of one thread, innermost last."""

    handlers: tuple[FlexHandler, ...] = ()


_redirected = _Redirected()


@contextmanager
def redirect_flex(handler: FlexHandler) -> Iterator[None]:
    """Within it, this thread's calls of torch's `flex_attention` run `handler`.

    Callables made by `torch.compile`, earlier or inside, run their original function in
    this thread, so a compiled `create_block_mask` runs eagerly too. Other threads are not
    affected, which includes autograd's own device threads: what is recomputed there enters
    its own context. Contexts nest; the innermost handler counts. Works under
    `torch.export` and `make_fx` as well, on the tensors of the trace.

    The check that refuses CPU inputs that require gradients is lifted inside.
    """
    outer = _redirected.handlers
    _patches.acquire()
    _redirected.handlers = (*outer, handler)
    try:
        yield
    finally:
        _redirected.handlers = outer
        _patches.release()


def is_redirected() -> bool:
    """Whether this thread's flex attention is redirected now."""
    return bool(_redirected.handlers)


class _Intercept(TorchFunctionMode):
    """Runs the handler in place of the flex operator; lives for that one call only."""

    def __init__(self, handler: FlexHandler) -> None:
        super().__init__()
        self._handler = handler
        self._operator = _flex_operator()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is self._operator:
            return self._handler(*args[:7])
        return func(*args, **(kwargs or {}))


class _Switch:
    """torch's debug switch, on in redirected threads and as it was in all others."""

    __slots__ = ("_elsewhere",)

    def __init__(self, elsewhere: object) -> None:
        self._elsewhere = elsewhere

    def __bool__(self) -> bool:
        return bool(_redirected.handlers) or bool(self._elsewhere)


def _environment(original: Callable[[], AbstractContextManager[Any]]) -> Callable[[], Any]:
    @contextmanager
    def environment() -> Iterator[Any]:
        if not _redirected.handlers:
            with original() as backend:
                yield backend
            return
        with _Intercept(_redirected.handlers[-1]):
            yield None

    return environment


def _validate_device(original: Callable[..., None]) -> Callable[..., None]:
    def validate_device(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        # Dynamo in another thread inlines this function: it must see nothing but the original.
        if torch.compiler.is_dynamo_compiling() or not _redirected.handlers:
            return original(query, key, value)
        if query.device.type not in ("cpu", "mps"):
            original(query, key, value)
        return None

    return validate_device


_RUN_THE_ORIGINAL = SimpleNamespace(fake_mode=SimpleNamespace(in_kernel_invocation=True))


def _try_get(original: Callable[[], Any]) -> Callable[[], Any]:
    def try_get() -> Any:
        if _redirected.handlers and sys._getframe(1).f_code.co_name == _WRAPPER:
            return _RUN_THE_ORIGINAL
        return original()

    return try_get


def _compile(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def deferring(model: Any = None, **options: Any) -> Any:
        if not _redirected.handlers or isinstance(model, (torch.nn.Module, type)):
            return original(model, **options)
        if model is None:
            return functools.partial(deferring, **options)
        return _compile_elsewhere(model, functools.partial(original, model, **options))

    return deferring


def _compile_elsewhere(function: _F, make: Callable[[], _F]) -> _F:
    """`function` itself in redirected threads, and compiled on first use in others.

    Callers keep such wrappers for good (transformers has one per process), so one that is
    made inside a redirect must not stay eager for threads outside.
    """
    compiled: list[_F] = []
    lock = threading.Lock()

    @functools.wraps(function)
    def either(*args: Any, **kwargs: Any) -> Any:
        if _redirected.handlers:
            return function(*args, **kwargs)
        with lock:
            if not compiled:
                compiled.append(make())
        return compiled[0](*args, **kwargs)

    # The marks by which torch and others find the original of a compiled function.
    either._torchdynamo_orig_callable = function  # type: ignore[attr-defined]
    either._torchdynamo_inline = function  # type: ignore[attr-defined]
    return either  # type: ignore[return-value]


@dataclass(slots=True)
class _Patches:
    """The process-wide replacements: in place while any thread is redirected.

    Torch offers no per-thread hook for any of these names. Each replacement asks for the
    calling thread and does what the original does in threads that are not redirected.
    """

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _users: int = 0
    _undo: list[tuple[Any, str, Any, Any]] = field(default_factory=list)

    def acquire(self) -> None:
        with self._lock:
            if self._users == 0:
                self._install()
            self._users += 1

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._uninstall()

    def _install(self) -> None:
        flex, context = _flex_module(), _tracing_context()
        self._put(flex, _DEBUG_SWITCH, _Switch)
        self._put(flex, _ENVIRONMENT, _environment)
        self._put(flex, _VALIDATE_DEVICE, _validate_device)
        self._put(torch, "compile", _compile)
        self._put(context, "try_get", lambda original: staticmethod(_try_get(original.__func__)))

    def _put(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = vars(owner)[name]
        ours = make(original)
        setattr(owner, name, ours)
        self._undo.append((owner, name, original, ours))

    def _uninstall(self) -> None:
        while self._undo:
            owner, name, original, ours = self._undo.pop()
            # Somebody else may have wrapped ours meanwhile; it is transparent, so let it be.
            if vars(owner)[name] is ours:
                setattr(owner, name, original)


_patches = _Patches()

__all__ = ["FlexHandler", "is_redirected", "redirect_flex"]
