"""Lock files: which artifact every cell of a spec had when it was last warmed.

JSON, sorted, without times, so that it can be committed beside the spec and its
changes reviewed. `attach(lock=...)` accepts the digests in it alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config

from aotcache.drafts import replace_file
from aotcache.errors import ManifestError
from aotcache.types import CacheKey, Digest, Mode

FORMAT = 1

_RULES = ConfigDict(extra="forbid", strict=True)
_Hex64 = Field(pattern=r"^[0-9a-f]{64}$")
_Key = Annotated[CacheKey, _Hex64]
_Digest = Annotated[Digest, _Hex64]

_Place = tuple[str, str, tuple[tuple[str, int], ...], str, str]


@with_config(_RULES)
@dataclass(frozen=True, slots=True)
class LockedCell:
    """One artifact of one cell.

    Attributes:
        region: The region's name.
        mode: `train` or `infer`.
        bucket: Named sizes.
        target: e.g. `cpu:x86_64-avx2`.
        toolchain: As `Toolchain` prints itself.
        key: The key. A region that is called in two ways has two in one cell.
        digest: The archive.
    """

    region: str
    mode: Mode
    bucket: dict[str, int]
    target: str
    toolchain: str
    key: _Key
    digest: _Digest

    @property
    def place(self) -> _Place:
        """The cell, without what is in it."""
        return (self.region, self.mode, tuple(sorted(self.bucket.items())), self.target, self.toolchain)

    def __str__(self) -> str:
        bucket = ",".join(f"{dim}={size}" for dim, size in sorted(self.bucket.items()))
        return f"{self.region or '(drafter)'} {self.mode} {bucket or '-'} {self.target} {self.toolchain}"


@with_config(_RULES)
@dataclass(frozen=True, slots=True)
class Lock:
    """A lock file's content, sorted, each cell and key once."""

    drafter: str
    cells: list[LockedCell]
    format: int = FORMAT

    def __post_init__(self) -> None:
        unique = {(cell.place, cell.key): cell for cell in self.cells}
        object.__setattr__(self, "cells", [unique[place] for place in sorted(unique)])

    def digests(self) -> frozenset[Digest]:
        """Every archive named."""
        return frozenset(cell.digest for cell in self.cells)

    def merged(self, newer: Iterable[LockedCell]) -> Lock:
        """`newer` instead of all cells for its targets and toolchains, and the others kept.

        So a lock file can be filled machine by machine, and cells that the spec no
        longer has go away.

        Args:
            newer: Every cell of the spec for at least one target.
        """
        newer = list(newer)
        replaced = {(cell.target, cell.toolchain) for cell in newer}
        kept = [cell for cell in self.cells if (cell.target, cell.toolchain) not in replaced]
        return Lock(self.drafter, kept + newer)

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"


@dataclass(frozen=True, slots=True)
class LockChange:
    """One cell's artifact that two lock files do not share; None where one lacks it."""

    before: LockedCell | None
    after: LockedCell | None

    def __str__(self) -> str:
        cell = self.after or self.before
        old, new = (c.digest[:12] if c is not None else "(absent)" for c in (self.before, self.after))
        return f"{cell}: {old} -> {new}"


def compare(before: Lock, after: Lock) -> list[LockChange]:
    """What differs, in the order of cells. A changed key shows as one gone and one new."""
    old = {(cell.place, cell.key): cell for cell in before.cells}
    new = {(cell.place, cell.key): cell for cell in after.cells}
    changed = sorted(at for at in {*old, *new} if old.get(at) != new.get(at))
    return [LockChange(old.get(at), new.get(at)) for at in changed]


def lock_path(spec: Path) -> Path:
    """Where a spec's lock file lies: beside it, `.lock` appended to its name."""
    return spec.with_name(spec.name + ".lock")


def read_lock(path: Path) -> Lock:
    """Read and check a lock file.

    Raises:
        ManifestError: it is not there, or not a lock file of this format.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ManifestError(
            f"cannot read lock file {path}: {error.strerror}; aotcache warm writes it", path=str(path)
        ) from error
    try:
        document = json.loads(data)
        found = document.get("format") if isinstance(document, dict) else None
        if found != FORMAT:
            raise ManifestError(
                f"{path}: lock file format {found!r}, expected {FORMAT}; upgrade aotcache or warm again",
                path=str(path),
            )
        return _LOCK.validate_json(data)
    except (ValueError, ValidationError, RecursionError) as error:
        raise ManifestError(
            f"{path}: not a lock file: {error}; restore it, or delete it and warm again", path=str(path)
        ) from error


def write_lock(path: Path, lock: Lock) -> bool:
    """Write a lock file whole or not at all; leaves an equal one untouched.

    Returns:
        Whether the file changed.

    Raises:
        ManifestError: it cannot be written.
    """
    text = lock.to_json().encode()
    try:
        if path.is_file() and path.read_bytes() == text:
            return False
        replace_file(path, text)
    except OSError as error:
        raise ManifestError(f"cannot write lock file {path}: {error.strerror}", path=str(path)) from error
    return True


_LOCK = TypeAdapter(Lock)
