"""Counting a process's operations, and killing it between two of them.

A profile function sees every call of the interpreter into C. Those that reach the kernel or
another program count: files, sockets, locks, SQLite, obstore. psycopg's own calls are none that it
sees, so for PostgreSQL the function counts in which psycopg waits for an answer. So a process can be
ended right before its n-th operation, in any of its threads, without a change to what it runs.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import BuiltinFunctionType, FrameType
from typing import Any

NEVER = 1 << 62

_MODULES = frozenset({"posix", "_io", "io", "fcntl", "_socket", "_ssl", "_sqlite3", "sqlite3", "shutil"})
_NOT = frozenset({"fspath", "getpid", "getuid", "urandom", "register_at_fork", "scandir", "text_encoding"})


class Slots:
    """Two numbers that a process shares with the one that watches it: when to die, and how far it is.

    Attributes:
        path: The file that is mapped.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._map = mmap.mmap(descriptor, 16)
        os.close(descriptor)
        self._view = memoryview(self._map).cast("q")

    @classmethod
    def create(cls, path: Path) -> Slots:
        """For the process that watches."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        os.ftruncate(descriptor, 16)
        return cls(path, descriptor)

    @classmethod
    def open(cls, path: Path) -> Slots:
        """For the process that is watched."""
        return cls(path, os.open(path, os.O_RDWR))

    def arm(self, at: int) -> None:
        """Count from now on, and die before the `at`-th operation."""
        self._view[1] = 0
        self._view[0] = at

    @property
    def count(self) -> int:
        """Operations since it was armed."""
        return self._view[1]

    @property
    def view(self) -> memoryview:
        """The two numbers."""
        return self._view

    def close(self) -> None:
        """Remove the file."""
        self._view.release()
        self._map.close()
        self.path.unlink(missing_ok=True)


@contextmanager
def watched(slots: Slots) -> Iterator[None]:
    """Count what this process does in the block, in this thread and those begun in it."""
    hook = _hook(slots.view)
    threading.setprofile(hook)
    sys.setprofile(hook)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def _hook(view: memoryview) -> Any:
    known: dict[Any, bool] = {}
    bucket, database = _bucket(), _database()

    def seen(frame: FrameType, event: str, called: Any) -> None:
        if not view[0]:
            return
        if event == "call":
            counts = id(frame.f_code) in database
        elif event == "c_call":
            own = called.__self__
            # Methods of one class share an answer; functions of one module do not.
            mark = called if type(own).__name__ == "module" or own is None else (type(own), called.__name__)
            found = known.get(mark)
            if found is None:
                found = known[mark] = id(called) in bucket or _counts(called)
            counts = found
        else:
            return
        if counts:
            view[1] = done = view[1] + 1
            if done >= view[0]:
                os.kill(os.getpid(), signal.SIGKILL)

    return seen


def _bucket() -> frozenset[int]:
    """The functions of obstore, which do not say of which module they are."""
    module = sys.modules.get("obstore._obstore")
    functions = () if module is None else vars(module).values()
    return frozenset(id(one) for one in functions if isinstance(one, BuiltinFunctionType))


def _database() -> frozenset[int]:
    """The code of psycopg's functions in which it waits for what it has asked of a server."""
    psycopg = sys.modules.get("psycopg")
    if psycopg is None:
        return frozenset()
    return frozenset({id(psycopg.Connection.wait.__code__), id(psycopg.waiting.wait_conn.__code__)})


def _counts(called: Any) -> bool:
    own = called.__self__
    if called.__name__ in _NOT or (called.__name__.startswith("__") and called.__name__ != "__exit__"):
        return False
    if own is None or type(own).__name__ == "module":
        module = called.__module__ or getattr(own, "__name__", "")
    elif isinstance(own, type):
        module = own.__module__
    else:
        module = type(own).__module__
    return module in _MODULES
