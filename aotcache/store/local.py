"""What only makes sense on one host: private directories, locks, single flight."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from aotcache.errors import RejectedArtifact, StoreError
from aotcache.ownership import private_problem, way_out
from aotcache.passing import again

T = TypeVar("T")

UNPACKED = "unpacked"
"""Folder of AOTCACHE_HOME: the members of archives, one folder for each digest."""


def make_dirs(path: Path, mode: int = 0o755) -> None:
    """Create a directory and its parents so that they outlast a crash.

    Parents that are created get the mode too, whatever the umask would add: a
    group-writable folder inside a private store would make it less than private.

    Raises:
        StoreError: naming the path and the reason.
    """
    # What cannot be looked at is found out by making something in it, which says why.
    if os.path.isdir(path):
        return
    if path.parent != path:
        make_dirs(path.parent, mode)
    try:
        path.mkdir(mode=mode)
        sync_dir(path.parent)
    except FileExistsError:
        if not is_dir(path):
            raise StoreError(f"{path} is a file, expected a directory; move it", path=str(path)) from None
    except OSError as error:
        raise StoreError(
            f"cannot create directory {path}: {error.strerror}; set AOTCACHE_HOME or the store to a place "
            "that this user can write to",
            path=str(path),
        ) from error


def is_dir(path: Path) -> bool:
    """Whether there is such a directory, for all that this user can see."""
    try:
        return again(path.is_dir, path)
    except OSError:
        return False


def sync_dir(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = again(lambda: os.open(path, os.O_RDONLY), path)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_private(path: Path, root: Path) -> None:
    """Check `path` and every folder between it and `root`, `root` included, also of what links lead to.

    Folders above `root` are not looked at: who can rename them is the business of
    whoever chose the place. `root` itself may be a link.

    Raises:
        RejectedArtifact: if another user of this host could have written there, or a symbolic
            link leads out of `root`.
        OSError: if something on the way is gone.
    """
    path.stat()
    astray = way_out(path, root)
    if astray is not None:
        raise RejectedArtifact(
            f"{path} is not opened: {astray}, and who can write there is not known; put the files themselves there, "
            "or name the place that the link leads to (--store, AOTCACHE_STORE or AOTCACHE_HOME)",
            path=str(path),
        )
    ways = {(path, root), (path.resolve(), root.resolve())}
    for current in dict.fromkeys(place for way in sorted(ways) for place in _between(*way)):
        problem = private_problem(current)
        if problem is not None:
            raise RejectedArtifact(
                f"{path} is not opened, because opening an artifact runs its code and other users could have "
                f"changed it: {problem}; take it over (chown, chmod go-w), use a store of your own, or set "
                "AOTCACHE_TRUST_SHARED_STORE=1 if you trust everyone who can write there",
                path=str(path),
            )


def _between(path: Path, root: Path) -> Iterator[Path]:
    """`path` and the folders above it up to `root`."""
    yield path
    for parent in path.parents if path != root else ():
        yield parent
        if parent == root:
            return


@contextmanager
def locked(locks: Path, name: str, seconds: float) -> Iterator[None]:
    """Hold the lock `name` among all processes and threads of this host.

    The lock is the operating system's: it ends with the process, however that ends.
    It is not reentrant.

    Args:
        locks: The directory of lock files; must be on a local disk.
        name: Any text.
        seconds: How long to wait.

    Raises:
        StoreError: if it was not free in time, or cannot be made.
    """
    make_dirs(locks, 0o700)
    path = locks / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.lock"
    lock = FileLock(path, timeout=seconds, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        raise StoreError(
            f"lock {path} ({name}) was not free within {seconds:g} s; another process holds it: "
            "wait for it, end it, or raise AOTCACHE_LOCK_SECONDS",
            path=str(path),
        ) from None
    except OSError as error:
        raise StoreError(
            f"cannot lock {path} ({name}): {error.strerror}; AOTCACHE_HOME must be a directory "
            "that this user can write to",
            path=str(path),
        ) from error
    try:
        yield
    finally:
        lock.release()


def once(
    locks: Path, name: str, seconds: float, *, ready: Callable[[], T | None], make: Callable[[], T]
) -> T:
    """Single flight on this host: make a thing unless it is there, one maker at a time.

    Args:
        locks: The directory of lock files.
        name: What is made; makers of the same name wait for each other.
        seconds: How long to wait for another maker.
        ready: Answers the thing if it is there. Called without the lock first, so
            that the common case takes none, and again once the lock is held.
        make: Makes it. If it raises, the next one who waits tries for itself.

    Raises:
        StoreError: if the lock was not free in time.
    """
    found = ready()
    if found is not None:
        return found
    with locked(locks, name, seconds):
        found = ready()
        return make() if found is None else found
