"""Small files that appear whole or not at all, and leave nothing when their writer is killed."""

from __future__ import annotations

import errno
import fcntl
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def draft(path: Path, mode: int = 0o666) -> Iterator[tuple[Path, IO[bytes]]]:
    """An empty file beside `path`, to be written and then given its name by the caller; removed at the end.

    Its name is always the same, so that what a killed process left is written anew and not left for
    ever: it may be a private key. Whoever finds it in use takes a name of their own.

    Args:
        path: Where the file is to be; its folder is there.
        mode: Of the file, less the umask.

    Raises:
        OSError: it cannot be made.
    """
    shared = _shared(path)
    for place in (shared, path.with_name(f".{path.name}.{uuid.uuid4().hex}")):
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            descriptor = os.open(place, flags if place == shared else flags | os.O_EXCL, mode)
        except PermissionError:
            if place == shared:
                continue  # another user's
            raise
        with os.fdopen(descriptor, "r+b") as file:
            if place == shared and not _ours(place, descriptor):
                continue
            try:
                os.ftruncate(descriptor, 0)
                os.fchmod(descriptor, os.fstat(descriptor).st_mode & mode)
                yield place, file
            finally:
                # Once it was renamed the name may be the next one's draft already.
                if _there(place, descriptor):
                    place.unlink(missing_ok=True)
            return


def clear(path: Path) -> None:
    """Remove the draft that a killed process left of a file which is there: it may be a second name of it."""
    place = _shared(path)
    try:
        descriptor = os.open(place, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        if _ours(place, descriptor):
            place.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _shared(path: Path) -> Path:
    return path.with_name(f".{path.name}.draft")


def _ours(place: Path, descriptor: int) -> bool:
    """Whether a draft that may have been there before is this process's alone now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    status = os.fstat(descriptor)
    # Whoever held it may have given it its name meanwhile, and others may read what they own.
    if not _there(place, descriptor) or status.st_uid != os.getuid():
        return False
    if status.st_nlink > 1:
        # Killed when it had its second, final name: writing here would write there.
        place.unlink(missing_ok=True)
        return False
    return True


def _there(place: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), place.lstat())
    except OSError:
        return False


def replace_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file in the place of what is there, durable and whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    with draft(path, mode) as (place, file):
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        os.replace(place, path)


def name_new(place: Path, path: Path) -> None:
    """Give a file its name unless that is taken; where there are no hard links, in two steps.

    Raises:
        FileExistsError: it is taken.
    """
    try:
        os.link(place, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        if path.exists():
            raise FileExistsError from error
        os.replace(place, path)
