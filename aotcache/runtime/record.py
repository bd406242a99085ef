"""Recording: what a run calls is written down while it runs, eagerly and without tracing.

Masks are closures that a drafter makes inside its forward, so a region's own call cannot be put on
disk. What is kept are the calls of the drafter itself: of each set of keys that a call of it
leads to, some examples. Warming makes them again and arrives at the same keys.
"""

from __future__ import annotations

import atexit
import json
import logging
import multiprocessing.util
import os
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from aotcache.config import Settings
from aotcache.errors import AotcacheError, CallRefused, CaptureError, Unfingerprintable, UnsupportedGraph
from aotcache.graph import ambient, generators
from aotcache.graph.examples import tensors_of, write_example
from aotcache.recorded import (
    EXAMPLES,
    Example,
    Index,
    RecordedCall,
    RecordedKey,
    add,
    calls_folder,
    source_of,
)
from aotcache.types import CacheKey, Digest, Mode

if TYPE_CHECKING:
    from aotcache.graph.region import Call, Region
    from aotcache.spec import Spec

logger = logging.getLogger(__name__)

_TRIES = 3
"""Examples of one call that may fail to be written before no more are tried."""

_PAUSE = 1.0
"""Seconds at least between two writes of the record while a run goes on. Counts are added at its end."""

_SHARE = 20
"""How much longer than a write the pause after it is: a long record must not slow the run down."""


@dataclass(slots=True)
class _Frame:
    """One call of the drafter that is under way."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grad: bool
    drawn: dict[str, Any]
    handling: BaseException | None
    versions: list[tuple[str, Tensor, int]]
    keys: set[CacheKey] = field(default_factory=set)
    refused: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Calls:
    """Calls of the drafter that lead to one set of keys."""

    mode: Mode
    count: int = 0
    taken: int = 0
    failed: int = 0
    problem: str | None = None
    examples: list[Example] = field(default_factory=list)


@dataclass(slots=True)
class _News:
    """What was called since the record was last added to."""

    counts: Counter[tuple[CacheKey, str]] = field(default_factory=Counter)
    outside: Counter[CacheKey] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)


class _Stacks(threading.local):
    """The calls of the drafter that one thread is in, innermost last."""

    def __init__(self) -> None:
        self.frames: list[_Frame] = []


class Recorder:
    """Records the calls of one attached drafter, and of its deep copies. Thread-safe.

    Every handle has its own; the file that they add to makes one record of all replicas, threads
    and processes. It is written at each new call, at `close`, and when the interpreter ends.

    Nothing that goes wrong here reaches the run: it is told once in the log and in the record.
    """

    def __init__(self, spec: Spec, output: Path, settings: Settings) -> None:
        self.output = output
        self._spec = spec
        self._seconds = settings.lock_seconds
        self._run = settings.record_run
        self._source = source_of(spec)
        self._folder = calls_folder(output)
        self._stacks = _Stacks()
        self._hooks: list[Any] = []
        self._keys: dict[CacheKey, tuple[Mode, list[Digest]]] = {}
        self._components: dict[Digest, dict[str, Any]] = {}
        self._ignored: frozenset[str] = frozenset()
        self._told: set[str] = set()
        self._due = 0.0
        self._unwritten = False
        self._open = False
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._news = _News()
        self._calls: dict[frozenset[CacheKey], _Calls] = {}

    def start(self, model: nn.Module) -> None:
        """Record from now on, until `close` or the end of the interpreter."""
        self._open = True
        self._hooks = [
            # What is registered later may change the arguments once more; warming would notice.
            model.register_forward_pre_hook(_Hook(self, "before"), with_kwargs=True),
            model.register_forward_hook(_Hook(self, "after"), with_kwargs=True, always_call=True),
        ]
        atexit.register(self.close)
        # A rank that multiprocessing forked ends without the handlers of atexit.
        self._at_end = multiprocessing.util.Finalize(None, self.close, exitpriority=1)
        if self._run is not None:
            try:
                note = {"spec": str(self._spec.path), "output": str(self.output)}
                (self._run / f"{uuid.uuid4().hex}.json").write_text(json.dumps(note))
            except OSError:
                pass  # a rank on another host: the record itself is what counts

    def leave_out(self, name: str) -> None:
        """Keep a keyword argument of the drafter out of the record, because no region gets it in this run."""
        self._ignored |= {name}

    # -- what is called -------------------------------------------------------

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The drafter is about to be called."""
        kwargs = {name: value for name, value in kwargs.items() if name not in self._ignored}
        tensors = [*tensors_of("args", args), *tensors_of("", kwargs)]
        versions = [(name, t, t._version) for name, t in tensors if not t.is_inference()]
        grad = torch.is_grad_enabled()
        frame = _Frame(args, kwargs, grad, generators.read(), sys.exc_info()[1], versions)
        self._stacks.frames.append(frame)

    def after(self, model: nn.Module) -> None:
        """A call of the drafter ended, in one way or the other."""
        frames = self._stacks.frames
        if not frames:
            return
        frame = frames.pop()
        if sys.exc_info()[1] is not frame.handling:
            return  # it failed
        if frame.refused:
            with self._mine():
                self._news.left_out.update(set(frame.refused))
        elif frame.keys:
            self._ended(model, frame)
        if self._unwritten and time.monotonic() >= self._due:
            self.write()

    def region(self, region: Region, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """A region, or a drop-in function, is about to be called."""
        frame = self._stacks.frames[-1] if self._stacks.frames else None
        try:
            mode = ambient.foreign_mode()
            if mode is not None:
                raise CallRefused(f"region {region.name!r} is called under {mode}", region=region.name)
            call = region.describe(args, kwargs)
        except (CallRefused, Unfingerprintable, UnsupportedGraph) as refusal:
            self._tell(str(refusal))
            if frame is not None:
                frame.refused.append(str(refusal))
            else:
                with self._mine():
                    self._news.left_out[str(refusal)] += 1
            return
        key = call.parts.key
        with self._mine():
            self._know(key, call)
            self._news.counts[key, region.name] += 1
            if frame is None:
                self._news.outside[key] += 1
        if frame is not None:
            frame.keys.add(key)

    def _know(self, key: CacheKey, call: Call) -> None:
        if key not in self._keys:
            for part, plain in zip(call.parts.components, call.parts.to_json(), strict=True):
                self._components[part.digest] = plain
            self._keys[key] = (call.mode, [part.digest for part in call.parts.components])

    def _ended(self, model: nn.Module, frame: _Frame) -> None:
        with self._mine():
            mode: Mode = "train" if frame.grad else "infer"
            calls = self._calls.setdefault(frozenset(frame.keys), _Calls(mode))
            calls.count += 1
            if calls.taken >= EXAMPLES or calls.failed >= _TRIES:
                return
            calls.taken += 1
        try:
            _require_unchanged(frame)
            example = write_example(
                self._folder, model, frame.args, frame.kwargs, grad=frame.grad, drawn=frame.drawn
            )
        except Exception as error:  # noqa: BLE001 - the run goes on, whatever it is
            text = str(error) if isinstance(error, AotcacheError) else f"{type(error).__name__}: {error}"
            self._tell(text)
            with self._mine():
                calls.taken -= 1
                calls.failed += 1
                calls.problem = text
            return
        with self._mine():
            calls.examples.append(example)
            self._unwritten = True

    def _mine(self) -> threading.Lock:
        """The lock on what is counted. A forked process counts from nothing, its parent keeps the rest."""
        if self._pid != os.getpid():
            self._begin()
        return self._lock

    # -- what is written ------------------------------------------------------

    def write(self) -> Index | None:
        """Add what is new to the record; None where that failed, which is told in the log."""
        self._mine()  # a forked process has locks of its own
        with self._writing:
            with self._mine():
                news, self._news = self._news, _News()
                newer = self._index(news)
                self._unwritten = False
            started = time.monotonic()
            try:
                return add(self._spec, self.output, newer, seconds=self._seconds)
            except BaseException as error:
                # Ctrl-C as well: the end of the interpreter writes it then.
                with self._mine():
                    self._return(news, newer)
                if not isinstance(error, AotcacheError):
                    raise
                self._tell(str(error))
                return None
            finally:
                now = time.monotonic()
                self._due = now + max(_PAUSE, _SHARE * (now - started))

    def _index(self, news: _News) -> Index:
        """What is new as a record, taken out of what is counted. Under the lock."""
        calls = []
        for keys, own in self._calls.items():
            if own.count:
                calls.append(RecordedCall(own.mode, sorted(keys), own.count, own.examples, own.problem))
                own.count, own.examples = 0, []
        wanted = {key for key, _ in news.counts} | {key for call in calls for key in call.keys}
        regions: dict[CacheKey, dict[str, int]] = {key: {} for key in sorted(wanted)}
        for (key, name), count in news.counts.items():
            regions[key][name] = count
        keys_ = {key: RecordedKey(self._keys[key][0], regions[key], self._keys[key][1]) for key in regions}
        used = {digest for key in keys_.values() for digest in key.components}
        return Index(
            self._source,
            None if self._run is None else self._run.name,
            calls,
            keys_,
            {digest: self._components[digest] for digest in sorted(used)},
            dict(news.outside),
            dict(news.left_out),
        )

    def _return(self, news: _News, newer: Index) -> None:
        self._news.counts.update(news.counts)
        self._news.outside.update(news.outside)
        self._news.left_out.update(news.left_out)
        for call in newer.calls:
            own = self._calls[frozenset(call.keys)]
            own.count += call.count
            own.examples = call.examples + own.examples

    def close(self) -> None:
        """Write what is not written yet, and record no more."""
        if not self._open:
            return
        self._open = False
        for hook in self._hooks:
            hook.remove()
        atexit.unregister(self.close)
        self._at_end.cancel()
        index = self.write()
        if index is None:
            return
        if not index.numbers():
            logger.warning("nothing that could be built was recorded in %s", self.output)
        else:
            logger.info(
                "recorded %d calls in %s; to build them: aotcache warm %s",
                len(index.numbers()),
                self.output,
                self.output,
            )
        for problem in index.problems():
            logger.warning("not in the record %s: %s", self.output, problem)

    @property
    def is_open(self) -> bool:
        """Whether calls are still recorded."""
        return self._open

    def _tell(self, text: str) -> None:
        with self._mine():
            new = text not in self._told
            self._told.add(text)
        if new:
            logger.warning("a call is not recorded: %s", text)

    def __deepcopy__(self, memo: dict[int, Any]) -> Recorder:
        return self


def _require_unchanged(frame: _Frame) -> None:
    for name, tensor, version in frame.versions:
        if tensor._version != version:
            raise CaptureError(
                f"argument {name} of the drafter is changed in place by its forward, so it cannot be kept as it "
                "was; let the forward change a copy",
                argument=name,
            )


class _Hook:
    """A hook on the drafter. Copies of a drafter are recorded too, and pickles of it know nothing of this."""

    def __init__(self, recorder: Recorder, when: str) -> None:
        self._recorder = recorder
        self._when = when

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, *_: Any) -> None:
        recorder = self._recorder
        if not recorder.is_open:
            return
        try:
            if self._when == "before":
                recorder.before(module, args, kwargs)
            else:
                recorder.after(module)
        except Exception:
            logger.exception("a call is not recorded; the run goes on")

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return self

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return (_no_hook, ())


def _no_hook() -> Callable[..., None]:
    """What a hook becomes in a pickle."""
    return _nothing


def _nothing(*_: Any) -> None:
    return None


__all__ = ["Recorder"]
