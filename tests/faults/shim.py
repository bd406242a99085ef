"""A network file system's moods, put under the real code of a child process.

What the kernel of such a host answers now and then: ESTALE for a read, ENOENT for a name that was just
made, EBUSY while a folder is removed. The functions of `os` and `io` that the standard library and
aotcache come through are replaced in the child; below them everything is real.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOST_IN_A_ROW = 3
"""How often a thread's reads fail one after the other at most: what fails for ever is no mood."""

injected: Counter[str] = Counter()
"""What this process was told, by the name of the error."""

_mine = threading.local()


def network(root: str, stale: float, late: int, busy: int, seed: int | None = None) -> None:
    """Have everything below `root` behave like files of a network file system, in this process.

    Args:
        root: The directory; what lies in a folder `locks` of it is on a local disk, as it must be.
        stale: How likely a read answers ESTALE.
        late: For how many looks a name is not there after it was made by a rename or link.
        busy: How often the removal of each folder answers EBUSY.
        seed: For the same moods again.
    """
    _Moods(os.path.realpath(root), stale, late, busy, random.Random(seed)).install()


class _Moods:
    def __init__(self, root: str, stale: float, late: int, busy: int, chance: random.Random) -> None:
        self._root, self._stale, self._late, self._busy = root + os.sep, stale, late, busy
        self._chance = chance
        self._fresh: Counter[str] = Counter()
        self._removals: Counter[str] = Counter()
        self._lock = threading.Lock()

    def install(self) -> None:
        for name in ("stat", "lstat", "listdir", "scandir", "open", "access", "readlink"):
            setattr(os, name, self._reading(getattr(os, name)))
        # Only this one of them removes folders by path and by name below an open folder.
        for name in ("rename", "replace", "link"):
            setattr(os, name, self._naming(getattr(os, name)))
        os.rmdir = self._removing(os.rmdir)
        opened = io.open

        def open_file(file: Any, mode: str = "r", *args: Any, **named: Any) -> Any:
            if not self._below(file) or set("wxa+") & set(mode):
                return opened(file, mode, *args, **named)
            self._look(file)
            return _Moody(opened(file, mode, *args, **named), self._mood)

        io.open = builtins.open = open_file  # type: ignore[assignment]
        # It looks files up below open folders, by functions it took before; the plain way goes by path.
        shutil._use_fd_functions = False  # type: ignore[attr-defined]

    def _below(self, path: Any) -> bool:
        if isinstance(path, bytes | str | os.PathLike):
            name = os.path.abspath(os.fsdecode(path))
            return name.startswith(self._root) and "/locks" not in name
        return False

    def _reading(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def reading(path: Any = ".", *args: Any, **named: Any) -> Any:
            if self._below(path) and not (real.__name__ == "open" and args and args[0] & os.O_CREAT):
                self._look(path)
            return real(path, *args, **named)

        return reading

    def _look(self, path: Any) -> None:
        name = os.path.abspath(os.fsdecode(path))
        with self._lock:
            late = self._fresh[name] > 0
            self._fresh[name] -= late
        if late:
            injected["ENOENT"] += 1
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        self._mood(name)

    def _mood(self, name: str) -> None:
        row = getattr(_mine, "row", 0)
        if row < MOST_IN_A_ROW and self._chance.random() < self._stale:
            _mine.row = row + 1
            injected["ESTALE"] += 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), name)
        _mine.row = 0

    def _naming(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def naming(source: Any, target: Any, **named: Any) -> Any:
            answer = real(source, target, **named)
            if self._late and self._below(target):
                with self._lock:
                    self._fresh[os.path.abspath(os.fsdecode(target))] = self._late
            return answer

        return naming

    def _removing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def removing(path: Any, **named: Any) -> Any:
            if self._below(path):
                with self._lock:
                    self._removals[os.fspath(path)] += 1
                    busy = self._removals[os.fspath(path)] <= self._busy
                if busy:
                    injected["EBUSY"] += 1
                    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), os.fspath(path))
            return real(path, **named)

        return removing


class _Moody:
    """An open file whose reads can find its handle stale."""

    def __init__(self, file: Any, mood: Callable[[str], None]) -> None:
        self._file, self._mood = file, mood

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Moody:
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()

    def __iter__(self) -> Any:
        return iter(self._file)

    def read(self, *args: Any) -> Any:
        self._mood(str(self._file.name))
        return self._file.read(*args)


def below(root: Path) -> list[str]:
    """Everything that lies below a directory, for a look from outside."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))
