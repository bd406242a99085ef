"""Rebuilding the index from the store, also while the service runs.

The store and the index are read side by side, in the order of keys, and neither is held in memory.
What differs is looked at again alone with the entry, so that a publish or a delete that happens
meanwhile is never undone: the store's answer at that moment is what counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from sqlalchemy import select

from aotcache.db.engine import Database
from aotcache.db.models import ArtifactRow
from aotcache.store.base import Entry, Store
from aotcache.types import CacheKey, Digest, sha256

if TYPE_CHECKING:
    from aotcache.service.index import Index

_PAGE = 500


@dataclass(frozen=True, slots=True)
class Counts:
    """What a reindex found.

    Attributes:
        added: Entries that the index lacked, or knew differently.
        removed: Rows whose entry the store has no more.
        kept: Rows that were right.
        unusable: Refs that no lookup would answer with; they are not indexed.
    """

    added: int
    removed: int
    kept: int
    unusable: int


def reindex(database: Database, index: Index, store: Store) -> Counts:
    """See `Index.reindex`."""
    added = removed = kept = unusable = 0
    for key, entries, documents in _side_by_side(store, database):
        usable = {entry.variant: entry for entry in entries if entry.usable is not None}
        unusable += len(entries) - len(usable)
        for variant in sorted(usable.keys() | documents.keys()):
            entry = usable.get(variant)
            if entry is not None and documents.get(variant) == _document(entry):
                kept += 1
                continue
            if _reconcile(database, index, store, key, variant, None if entry is None else entry.modified):
                added += 1
            else:
                removed += 1
    return Counts(added, removed, kept, unusable)


def _document(entry: Entry) -> Digest | None:
    return None if entry.usable is None else sha256(entry.usable.document())


def _reconcile(
    database: Database, index: Index, store: Store, key: CacheKey, variant: str, modified: float | None
) -> bool:
    """Make one row what the store says now; returns whether it has the entry."""
    with database.exclusive(key, variant):
        for manifest in store.lookup(key):
            if str(manifest.variant) == variant:
                when = modified if modified is not None else manifest.provenance.created
                index.add(manifest, manifest.document(), modified=when)
                return True
        index.remove(key, variant)
        return False


def _side_by_side(store: Store, database: Database) -> Iterator[tuple[CacheKey, list[Entry], dict[str, str]]]:
    """Every key of either: its refs in the store, and its rows in the index as {variant: document}."""
    stored = ((key, list(group)) for key, group in groupby(store.entries(), key=lambda entry: entry.key))
    indexed = _indexed(database)
    left, right = next(stored, None), next(indexed, None)
    while left is not None or right is not None:
        key = min(side[0] for side in (left, right) if side is not None)
        entries: list[Entry] = []
        documents: dict[str, str] = {}
        if left is not None and left[0] == key:
            entries, left = left[1], next(stored, None)
        if right is not None and right[0] == key:
            documents, right = right[1], next(indexed, None)
        yield key, entries, documents


def _indexed(database: Database) -> Iterator[tuple[CacheKey, dict[str, str]]]:
    a = ArtifactRow
    after = ""
    while True:
        with database.session() as session:
            keys = list(
                session.scalars(select(a.key).where(a.key > after).distinct().order_by(a.key).limit(_PAGE))
            )
            if not keys:
                return
            rows = session.execute(
                select(a.key, a.variant, a.document)
                .where(a.key > after, a.key <= keys[-1])
                .order_by(a.key, a.variant)
            ).all()
        for key, group in groupby(rows, key=lambda row: str(row[0])):
            yield CacheKey(key), {variant: document for _, variant, document in group}
        after = keys[-1]


__all__ = ["Counts", "reindex"]
