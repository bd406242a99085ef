"""What a warm tells while it runs, and what it did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from aotcache.build.plan import Cell, Plan
from aotcache.errors import AotcacheError
from aotcache.manifest import Manifest


class Progress(Protocol):
    """What a display of a warm implements. Called from several threads, one call at a time."""

    def planned(self, plan: Plan, builds: Sequence[Cell]) -> None:
        """The plan is made; `builds` are about to be built."""

    def stage(self, cell: Cell | None, stage: str) -> None:
        """A build entered a stage; no cell while a builder starts and captures the drafter."""

    def finished(self, cell: Cell, seconds: float, error: AotcacheError | None) -> None:
        """A build ended."""


@dataclass(frozen=True, slots=True)
class Built:
    """One cell that a warm built, or failed to build.

    Attributes:
        cell: The cell.
        seconds: Wall time of the build.
        manifest: What was published; None if it failed.
        error: Why it failed.
        reused: Whether an identical graph had been compiled before.
    """

    cell: Cell
    seconds: float
    manifest: Manifest | None
    error: AotcacheError | None
    reused: bool = False


@dataclass(frozen=True, slots=True)
class WarmReport:
    """What a warm did. `ok` is whether every cell is covered now."""

    plan: Plan
    built: tuple[Built, ...]
    seconds: float
    lock: Path | None

    @property
    def failed(self) -> list[Built]:
        """The builds that failed."""
        return [b for b in self.built if b.error is not None]

    @property
    def ok(self) -> bool:
        """Whether every cell of the plan is covered."""
        return not self.failed

    def __str__(self) -> str:
        built = len(self.built) - len(self.failed)
        done = (
            f"{len(self.plan.rows)} cells: {built} built, {len(self.failed)} failed, in {self.seconds:.1f} s"
        )
        return "\n".join([done, *(f"{type(b.error).__name__}: {b.cell}: {b.error}" for b in self.failed)])
