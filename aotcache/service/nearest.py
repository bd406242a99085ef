"""Explaining a miss: which stored keys share most components with it, and what differs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from aotcache.db.engine import among, clean
from aotcache.db.models import ArtifactRow, KeyComponentRow
from aotcache.key import Component, KeyParts
from aotcache.types import CacheKey

SHOWN = 5
"""How many near entries an answer has."""
DIFFERENCES = 50
"""How many differing items of one near entry are told."""
_COMPARED = 20
"""How many keys with the most equal components are compared item by item."""
_EVERYWHERE = "format"
"""A component that all keys of one release share tells nothing."""


@dataclass(frozen=True, slots=True)
class Near:
    """One stored key that comes near.

    Attributes:
        key, region, mode, bucket: Of it.
        variants: What is stored for it.
        differences: Items that differ, asked for first and stored second, as texts; not more than 50.
        differing: How many items differ.
    """

    key: CacheKey
    region: str
    mode: str
    bucket: dict[str, int]
    variants: list[str]
    differences: list[str]
    differing: int


@dataclass(frozen=True, slots=True)
class Nearest:
    """The answer to "why is this a miss": variants stored for the key itself, and what is nearest to it."""

    key: CacheKey
    stored: list[str]
    nearest: list[Near]


def find(session: Session, key: CacheKey, *, mode: str | None, given: KeyParts | None) -> Nearest:
    """See `Index.why`."""
    a = ArtifactRow
    stored = list(session.scalars(select(a.variant).where(a.key == clean(key)).order_by(a.variant)))
    parts = given if given is not None else _parts(session, [key]).get(key)
    if parts is None:
        return Nearest(key, stored, [])
    candidates = [other for other in _sharing(session, parts) if other != key]
    rows = defaultdict(list)
    for row in session.scalars(select(a).where(among(session, a.key, candidates)).order_by(a.key, a.variant)):
        if mode is None or row.mode == mode:
            rows[CacheKey(row.key)].append(row)
    theirs = _parts(session, list(rows))
    near = [_compare(parts, theirs[other], found) for other, found in rows.items() if other in theirs]
    near.sort(key=lambda entry: (entry.differing, entry.key))
    return Nearest(key, stored, near[:SHOWN])


def _sharing(session: Session, parts: KeyParts) -> list[CacheKey]:
    c = KeyComponentRow
    telling = [part for part in parts.components if part.name != _EVERYWHERE]
    if not telling:
        return []
    same = or_(*((c.name == clean(part.name)) & (c.digest == part.digest) for part in telling))
    statement = (
        select(c.key).where(same).group_by(c.key).order_by(func.count().desc(), c.key).limit(_COMPARED + 1)
    )
    return [CacheKey(key) for key in session.scalars(statement)]


def _parts(session: Session, keys: list[CacheKey]) -> dict[CacheKey, KeyParts]:
    c = KeyComponentRow
    found = defaultdict(list)
    for key, name, items in session.execute(
        select(c.key, c.name, c.items).where(among(session, c.key, keys)).order_by(c.key, c.position)
    ):
        found[CacheKey(key)].append(Component(name, tuple((str(n), str(v)) for n, v in items)))
    return {key: KeyParts(tuple(components)) for key, components in found.items()}


def _compare(ours: KeyParts, theirs: KeyParts, rows: list[ArtifactRow]) -> Near:
    differences = [str(difference) for difference in ours.diff(theirs)]
    first = rows[0]
    return Near(
        key=CacheKey(first.key),
        region=first.region,
        mode=first.mode,
        bucket=first.bucket,
        variants=[row.variant for row in rows],
        differences=differences[:DIFFERENCES],
        differing=len(differences),
    )


__all__ = ["Near", "Nearest", "find"]
