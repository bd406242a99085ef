"""Small, full, read-only and noexec file systems, where this user may mount them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path

import pytest


@contextmanager
def mounted(place: Path, options: str) -> Iterator[Path]:
    """A tmpfs with these options; the test is skipped, and says why, where it cannot be mounted."""
    place.mkdir(parents=True, exist_ok=True)
    if shutil.which("mount") is None:
        pytest.skip("there is no mount program here")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)],
        capture_output=True,
        text=True,
        timeout=30,
    )
    if done.returncode != 0:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True, timeout=30)


def remount(place: Path, options: str) -> None:
    """Change how it is mounted."""
    subprocess.run(["mount", "-o", f"remount,{options}", str(place)], check=True, timeout=30)


def fill(place: Path) -> None:
    """Leave no room there: for no block, where every file takes one at least."""
    with (place / "ballast").open("wb", 0) as ballast, pytest.raises(OSError, match="No space left"):
        ballast.writelines(repeat(bytes(4096)))
