"""Homes of their own for tests that build: they share what every home would otherwise compile again."""

from __future__ import annotations

import os
from pathlib import Path


def new_home(home: Path) -> Path:
    """A home, made if it is not there, whose builders use the precompiled headers of this run.

    They take some ten seconds to make, and are the same for all: torch's, for the compiler's flags.
    """
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    shared = Path(os.environ["AOTCACHE_HOME"]) / "headers"
    if not (home / "headers").exists():
        (home / "headers").symlink_to(shared.resolve())
    return home
