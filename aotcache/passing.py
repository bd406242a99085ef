"""What a network file system refuses for a moment: tried again, and counted.

A handle is stale while a file is being replaced on another host; a name that another host has just made is
not there yet; a folder is busy while somebody has a file of it open. All of it passes. What was tried again
is counted for the process (`retried`, shown by `handle.stats()`), and logged at debug level.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from aotcache.errors import StoreError

logger = logging.getLogger(__name__)

T = TypeVar("T")

WAITS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
"""Seconds before each further try. As many as it takes where one access in ten fails by chance, and reading
a file is two of them."""

REMOVING = ".removing-"
"""How the names of folders begin that are being removed; what stays of them is removed by `aotcache gc`."""

LATE_WAITS = (0.02, 0.1)
"""Seconds before looking again for what is there by all that is known."""

_BUSY = (errno.EBUSY, errno.ENOTEMPTY, errno.ESTALE)


class _Counts:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: Counter[str] = Counter()

    def add(self, name: str) -> None:
        with self._lock:
            self._found[name] += 1

    def copy(self) -> dict[str, int]:
        with self._lock:
            return dict(sorted(self._found.items()))


@cache
def _counts(process: int) -> _Counts:
    return _Counts()


def retried() -> dict[str, int]:
    """How often this process tried again after each error, by its name: `{"ESTALE": 3}`."""
    return _counts(os.getpid()).copy()


def note(number: int, path: object) -> None:
    """Count that something is tried again after the error of this number."""
    name = errno.errorcode.get(number, str(number))
    _counts(os.getpid()).add(name)
    logger.debug("%s: %s (%s), tried again", path, os.strerror(number), name)


def again(action: Callable[[], T], path: object, errors: tuple[int, ...] = (errno.ESTALE,)) -> T:
    """What `action` returns, tried again for a moment after these errors.

    Raises:
        OSError: another one, or one of these that does not pass.
    """
    for wait in WAITS:
        try:
            return action()
        except OSError as error:
            if error.errno not in errors:
                raise
            note(error.errno, path)
            time.sleep(wait)
    return action()


def late(look: Callable[[], T | None], path: object) -> T | None:
    """What is there by all that is known: looked for again for a moment. None if it is not there at all.

    Another host can see a new name before what it leads to.
    """
    found = look()
    for wait in LATE_WAITS:
        if found is not None:
            break
        time.sleep(wait)
        found = look()
        if found is not None:
            note(errno.ENOENT, path)
    return found


def remove_tree(folder: Path) -> None:
    """Remove a folder and all in it, as far as that is possible; never raises.

    A folder can be busy, or not be empty yet, while a file in it is still open somewhere.
    """

    # Out of the way at once: whatever stays, the name is free.
    away = folder.with_name(f"{REMOVING}{uuid.uuid4().hex}")
    try:
        os.rename(folder, away)
    except FileNotFoundError:
        return
    except OSError:
        away = folder

    def once_more(function: Callable[..., Any], path: str, failure: tuple[Any, BaseException, Any]) -> None:
        error = failure[1]
        if isinstance(error, FileNotFoundError):
            return  # somebody else removes it, too
        # What only looks is done anew with the whole walk.
        if isinstance(error, OSError) and error.errno in _BUSY and function in (os.rmdir, os.unlink):
            note(error.errno, path)
            again(lambda: function(path), path, _BUSY)
        else:
            raise error

    try:
        again(lambda: shutil.rmtree(away, onerror=once_more), away, _BUSY)
    except OSError as error:
        shutil.rmtree(away, ignore_errors=True)
        if os.path.lexists(away):
            logger.debug("%s stays: %s", away, error)


@contextmanager
def scratch(prefix: str, folder: Path | None = None) -> Iterator[Path]:
    """A new folder for this user alone, removed at the end.

    Args:
        prefix: How its name begins.
        folder: Where to make it; default: the system's temporary directory.

    Raises:
        StoreError: it cannot be made.
    """
    made = new_folder(prefix, folder)
    try:
        yield made
    finally:
        remove_tree(made)


def new_folder(prefix: str, folder: Path | None = None) -> Path:
    """A new folder, see `scratch`, for the caller to remove.

    Raises:
        StoreError: it cannot be made.
    """
    try:
        return Path(tempfile.mkdtemp(prefix=prefix, dir=folder))
    except OSError as error:
        where = "the temporary directory (TMPDIR)" if folder is None else folder
        raise StoreError(
            f"cannot make a folder in {where}: {error.strerror}; make room there, or set "
            f"{'TMPDIR' if folder is None else 'AOTCACHE_HOME'} to a place that this user can write to",
            path=None if folder is None else str(folder),
        ) from error
