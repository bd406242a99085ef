"""Who on this host could have written a file."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def private_problem(path: Path) -> str | None:
    """Why another user could have written `path`; None if only this user or root could.

    Looks at the owner and mode of this one file or directory, links followed.

    Raises:
        OSError: if it cannot be looked at.
    """
    status = path.stat()
    if status.st_uid not in (os.getuid(), 0):
        return f"{path} belongs to uid {status.st_uid}, expected uid {os.getuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{path} has mode {stat.S_IMODE(status.st_mode):04o}, expected one that others cannot write to"
    return None
