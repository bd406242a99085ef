"""What a spec asks for: one cell per region, mode, bucket and target, and what the store has of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from aotcache.config import Settings
from aotcache.key import KeyParts
from aotcache.manifest import Manifest
from aotcache.recall import Recalls
from aotcache.store.base import Store
from aotcache.store.refusal import refusal
from aotcache.types import CacheKey, Digest, Mode, Target, Toolchain, Variant

_MOST_ELSEWHERE = 200


@dataclass(frozen=True, slots=True)
class Cell:
    """One thing to build: a captured call layout for one target.

    Several regions with the same key (the identical layers of a drafter) are several
    cells and one build.
    """

    region: str
    mode: Mode
    bucket: tuple[tuple[str, int], ...]
    target: Target
    parts: KeyParts

    @property
    def key(self) -> CacheKey:
        """The cache key."""
        return self.parts.key

    def __str__(self) -> str:
        sizes = ",".join(f"{name}={size}" for name, size in self.bucket)
        return f"{self.region or '(whole drafter)'} {self.mode} {sizes} {self.target}"


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a plan.

    Attributes:
        cell: The cell.
        state: Whether the store covers it.
        digest: Of the artifact that covers it.
        seconds: What a build is expected to take, from like builds in the store.
        shared: Whether an earlier row of the plan has the same key and target.
        untrusted: Why this host would not open the artifact that covers it, as far as trust goes.
        recalled: Why what is stored for it does not cover it.
    """

    cell: Cell
    state: Literal["covered", "missing"]
    digest: Digest | None
    seconds: float | None
    shared: bool
    untrusted: str | None = None
    recalled: str | None = None

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "region": self.cell.region,
            "mode": self.cell.mode,
            "bucket": dict(self.cell.bucket),
            "target": str(self.cell.target),
            "key": self.cell.key,
            "state": self.state,
            "digest": self.digest,
            "expected_seconds": self.seconds,
            "shared": self.shared,
            "untrusted": self.untrusted,
            "recalled": self.recalled,
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """All rows, in the order of regions, modes and buckets as the drafter called them."""

    rows: tuple[Row, ...]

    @property
    def missing(self) -> list[Cell]:
        """One cell for each build that is missing."""
        return [row.cell for row in self.rows if row.state == "missing" and not row.shared]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)


def make_plan(cells: Iterable[Cell], store: Store, toolchain: Toolchain) -> Plan:
    """Look every cell up in the store.

    What nobody trusted signed covers a cell, and the row says so; what was recalled covers none.

    Raises:
        StoreError: the store, or what was recalled in it, cannot be read.
    """
    cells, config = list(cells), Settings()
    found = store.resolve({cell.key for cell in cells})
    recalls = Recalls(config.home)
    recalls.learn(store)
    known = known_builds(store) if any(not found[c.key] for c in cells) else []
    rows: list[Row] = []
    seen: set[tuple[CacheKey, Target]] = set()
    for cell in cells:
        variant = Variant(cell.target, toolchain)
        hit = next((m for m in found[cell.key] if m.variant == variant), None)
        recalled = None if hit is None else recalls.problem(hit)
        hit = hit if recalled is None else None
        mark = (cell.key, cell.target)
        rows.append(
            Row(
                cell,
                "missing" if hit is None else "covered",
                None if hit is None else hit.digest,
                expected_seconds(cell, known) if hit is None else None,
                mark in seen,
                None if hit is None else refusal(store, hit, config),
                recalled,
            )
        )
        seen.add(mark)
    return Plan(tuple(rows))


def known_builds(store: Store) -> list[Manifest]:
    """What tells how long builds take. Of a store elsewhere, where each costs a request, some."""
    known = (entry.manifest for entry in store.entries() if entry.manifest is not None)
    return list(known if store.own else islice(known, _MOST_ELSEWHERE))


def expected_seconds(cell: Cell, known: Iterable[Manifest]) -> float | None:
    """Seconds of the like build that resembles the cell most: same mode, then region, then bucket."""
    alike = [
        m
        for m in known
        if m.mode == cell.mode
        and m.target.device == cell.target.device
        and "compile" in m.provenance.seconds  # not taken from an identical graph
    ]
    if not alike:
        return None
    nearest = max(
        alike, key=lambda m: (m.region == cell.region, m.bucket == dict(cell.bucket), m.provenance.created)
    )
    return sum(nearest.provenance.seconds.values())
