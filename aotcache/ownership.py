"""Who on this host could have written a file, and where a path really leads."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from aotcache.passing import again


def private_problem(path: Path) -> str | None:
    """Why another user could have written `path`; None if only this user or root could.

    Looks at the owner and mode of this one file or directory, links followed.

    Raises:
        OSError: if it cannot be looked at.
    """
    status = again(path.stat, path)
    if status.st_uid not in (os.getuid(), 0):
        return f"{path} belongs to uid {status.st_uid}, expected uid {os.getuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{path} has mode {stat.S_IMODE(status.st_mode):04o}, expected one that others cannot write to"
    return None


def first_link(path: Path, root: Path) -> Path | None:
    """The first symbolic link on the way from `root` (itself not looked at) to `path`, or None.

    What is not there is no link. `path` must lie below `root` by its name.

    Raises:
        OSError: it cannot be looked at, so that nobody knows.
    """
    current = os.fspath(root)
    for part in path.relative_to(root).parts:
        current = os.path.join(current, part)
        try:
            mode = again(lambda place=current: os.lstat(place), current).st_mode  # type: ignore[misc]
        except (FileNotFoundError, NotADirectoryError):
            return None
        if stat.S_ISLNK(mode):
            return Path(current)
    return None


def way_out(path: Path, root: Path) -> str | None:
    """Where a path below `root` really leads, if a symbolic link on the way leads out; None if it stays within.

    Links in circles stay within nothing, and are said, too; so is a path with `..` in it.
    """
    if ".." in path.parts:
        return f"{path} has .. in it"
    link = first_link(path, root)
    if link is None:
        return None
    try:
        real = path.resolve()
        if real.is_relative_to(root.resolve()):
            return None
    except (OSError, RuntimeError):
        return f"{link} is a symbolic link that leads in circles"
    return f"{link} is a symbolic link out of {root}, to {real}"
