"""Collecting at a service: which entries go is read from the index, and each goes under its locks.

In rounds of some seconds, each of which says where the next one goes on: nothing of a store of a million entries
is ever in memory but a page. First the entries, least recently used first; then refs that the index
does not know; then archives that no entry names.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from aotcache.db.engine import Database, among, moment, now
from aotcache.db.models import ArtifactRow, BlobRow, LeaseRow, UsageRow
from aotcache.errors import BadCursor
from aotcache.service.cursors import pack, unpack
from aotcache.service.index import Index
from aotcache.service.leases import Leases
from aotcache.service.publishes import Publishes
from aotcache.store import layout
from aotcache.store.clients import Info
from aotcache.store.evict import DAY, Candidate, Decision, Limits, Planner, Protected
from aotcache.store.objects import ObjectStore
from aotcache.store.survey import is_newer
from aotcache.types import CacheKey, Digest

ROUND_SECONDS = 10.0
"""How long a round goes on before it answers: well below what a client waits for an answer."""

MOST = 1000
"""Decisions of one round."""

_PAGE = 500
_KEPT = 100
"""How many of those that only their protection keeps are told in one round."""

_SHARDS = [f"{number:02x}" for number in range(256)]
"""The folders of `refs/` and `blobs/`: the steps in which these are read."""

_CLOCKS = 2.0
"""Seconds by which two answers of a bucket for one time may differ."""

Phase = Literal["entries", "refs", "archives"]


@dataclass(frozen=True, slots=True)
class Round:
    """What one round did, or would do.

    Attributes:
        decisions: What went, and some of what only its protection kept.
        before, after: Bytes of all archives that entries name.
        over: Bytes above the size limit that are still to go, or after the last round cannot.
        next: Where the next round goes on; None after the last.
        notes: What the operator should know.
    """

    decisions: list[Decision]
    before: int
    after: int
    over: int
    next: str | None
    notes: list[str]


class Collector:
    """Collects in one store and its index. Safe for threads, processes and hosts.

    Args:
        database, index, leases: The service's.
        store: What it serves.
    """

    def __init__(self, database: Database, index: Index, leases: Leases, store: ObjectStore) -> None:
        self._database = database
        self._index = index
        self._leases = leases
        self._publishes = Publishes(database, index, store)
        self._store = store

    def round(
        self,
        limits: Limits,
        *,
        locked: Collection[str] = frozenset(),
        dry_run: bool = False,
        cursor: str | None = None,
        seconds: float = ROUND_SECONDS,
    ) -> Round:
        """One round.

        Args:
            limits: What is to be kept.
            locked: Digests that lock files name.
            dry_run: Only tell.
            cursor: `next` of the round before, which had the same limits.
            seconds: How long to go on.

        Raises:
            BadCursor: for a cursor that no round handed out.
            StoreError: if the store cannot be read or written.
        """
        place = _Place.parse(cursor)
        protected = Protected(
            frozenset(pin.what for pin in self._store.pins()), frozenset(locked), self._leased()
        )
        with self._database.session() as session:
            total = int(session.execute(select(func.coalesce(func.sum(BlobRow.size), 0))).scalar_one())
            planner = Planner(total, limits, protected, moment(session))
        planner.freed = place.freed
        work = _Work(planner, dry_run, time.monotonic() + seconds)
        if place.phase == "entries":
            place = self._entries(work, place)
        if place.phase == "refs" and not work.ended():
            place = self._refs(work, place)
        if place.phase == "archives" and not work.ended():
            place = self._archives(work, place)
        return Round(
            work.decisions,
            total,
            total - planner.freed,
            planner.over,
            None if place.phase is None else place.text(planner.freed if dry_run else 0),
            work.notes,
        )

    def remove(self, key: CacheKey, variant: str, *, planned: Candidate | None = None) -> tuple[bool, int]:
        """Remove an entry, and its archive if no other is known that names it.

        Args:
            key, variant: The entry.
            planned: What was decided on: if it is another by now, or pinned, being built or used since, it stays.

        Returns:
            Whether it is gone (without `planned`: and was there), and the bytes of the archive that went along.
        """
        store, index = self._store, self._index
        with self._database.exclusive(key, variant) as session:
            entry = store.entry(key, variant)
            digest = None if entry is None or entry.manifest is None else entry.manifest.digest
            # What cannot be read is not what the index knows: it goes by the rules for such refs.
            unreadable = entry is not None and entry.manifest is None
            if planned is not None and (unreadable or self._changed(session, planned, digest)):
                return False, 0
            if digest is None:
                # One that was killed in the middle has left the row.
                row = select(ArtifactRow.digest).where(ArtifactRow.key == key, ArtifactRow.variant == variant)
                known = session.execute(row).scalar()
                digest = None if known is None else Digest(known)
            with nullcontext() if digest is None else self._database.exclusive("archive", digest):
                gone = store.delete_ref(key, variant) or planned is not None
                indexed = index.remove(key, variant)
                # The index knows who else names it; where it did not know this entry, it may lack others.
                if digest is not None and indexed and not self._named(digest):
                    size = store.blob_size(digest)
                    store.delete_blob(digest)
                    return gone, size or 0
        return gone, 0

    def _named(self, digest: Digest) -> bool:
        """Whether an entry has this archive; holds to the end of `exclusive("archive", digest)`."""
        # In this order: a publish goes from the first to the second.
        return self._publishes.names(digest) or self._index.names(digest)

    def _changed(self, session: Session, planned: Candidate, digest: Digest | None) -> bool:
        assert planned.key is not None
        if digest is not None and digest != planned.digest:
            return True
        if self._store.is_pinned(planned.key, planned.digest):
            return True
        if self._leases.holder(session, planned.key, planned.variant) is not None:
            return True
        used = session.execute(
            select(UsageRow.last_used).where(UsageRow.key == planned.key, UsageRow.variant == planned.variant)
        ).scalar()
        return used is not None and used > planned.used

    def _leased(self) -> frozenset[tuple[str, str]]:
        with self._database.session() as session:
            rows = session.execute(select(LeaseRow.key, LeaseRow.variant).where(LeaseRow.expires > now()))
            return frozenset((key, variant) for key, variant in rows)

    def _entries(self, work: _Work, place: _Place) -> _Place:
        after = place.after
        while not work.ended():
            page = self._index.oldest(_PAGE, after)
            if not page:
                return _Place("refs")
            groups = self._groups(frozenset(row.digest for row in page))
            for row in page:
                if work.planner.reached(row.last_used):
                    return _Place("refs")
                if work.ended():
                    return _Place("entries", after)
                work.steps += 1
                after = (row.last_used, row.key, row.variant)
                group = groups[row.digest]
                found = next((c for c in group if (c.key, c.variant) == (row.key, row.variant)), None)
                # One that was used since the page was read has its turn later.
                if found is not None and found.used == row.last_used:
                    self._decide(work, found, group)
        return _Place("entries", after)

    def _decide(self, work: _Work, candidate: Candidate, group: Sequence[Candidate]) -> None:
        planner, freed = work.planner, work.planner.freed
        decisions = list(planner.decide(candidate, group))
        if work.dry_run or not any(decision.remove for decision in decisions):
            work.decided(decisions)
            return
        for decision in decisions:
            c = decision.candidate
            if not decision.remove:
                work.decided([decision])
                continue
            assert c.key is not None
            gone, size = self.remove(c.key, c.variant, planned=c)
            freed += size
            work.decided([decision if gone else Decision(c, False, "busy")])
        planner.freed = freed

    def _groups(self, digests: frozenset[Digest]) -> dict[str, list[Candidate]]:
        """All entries with these archives, by archive."""
        a, u = ArtifactRow, UsageRow
        statement = (
            select(a.key, a.variant, a.digest, a.size, a.region, a.mode, a.bucket, u.last_used)
            .join(u, (u.key == a.key) & (u.variant == a.variant))
            .order_by(a.key, a.variant)
        )
        found: dict[str, list[Candidate]] = defaultdict(list)
        with self._database.session() as session:
            for key, variant, digest, size, region, mode, bucket, used in session.execute(
                statement.where(among(session, a.digest, digests))
            ):
                sizes = ",".join(f"{name}={number}" for name, number in sorted(bucket.items()))
                what = " ".join((region or "(whole drafter)", mode, sizes))
                found[digest].append(
                    Candidate("entry", CacheKey(key), variant, Digest(digest), size, used, what=what)
                )
        return found

    def _refs(self, work: _Work, place: _Place) -> _Place:
        """Refs that the index does not know. While there are any, no archive counts as unnamed."""
        unknown = place.unknown
        for shard in _SHARDS[place.shard :]:
            if work.ended():
                return _Place("refs", shard=int(shard, 16), unknown=unknown)
            work.steps += 1
            for infos in _batches(self._store.client.list(f"{layout.REFS}/{shard}")):
                for info in self._unindexed(infos):
                    unknown += not self._unknown(work, info)
        if unknown:
            work.notes.append(
                f"{unknown} refs of {self._store.url} are not in the index as they are: archives that no entry names "
                "are left alone; run aotcache db reindex, and delete what cannot be read"
            )
            return _Place(None)
        return _Place("archives")

    def _unindexed(self, infos: Sequence[Info]) -> list[Info]:
        named = {info.path: layout.entry_of(info.path) for info in infos}
        a = ArtifactRow
        keys = {entry[0] for entry in named.values() if entry is not None}
        with self._database.session() as session:
            rows = session.execute(
                select(a.key, a.variant, a.modified).where(among(session, a.key, keys))
            ).all()
        known = {(key, variant): modified for key, variant, modified in rows}
        found = []
        for info in infos:
            entry = named[info.path]
            modified = None if entry is None else known.get((str(entry[0]), entry[1]))
            if modified is None or abs(modified - info.modified) > _CLOCKS:
                found.append(info)
        return found

    def _unknown(self, work: _Work, info: Info) -> bool:
        """What to do about one of them; whether it is no obstacle any more."""
        named = layout.entry_of(info.path)
        if named is None:
            return False
        key, variant = named
        with self._database.exclusive(key, variant):
            entry = self._store.entry(key, variant)
            if entry is None:
                return True
            if entry.usable is not None:
                # Published a moment ago: its row has come since the index was asked.
                row = [r for r in self._index.resolve([key])[key] if r.variant == variant]
                return bool(row) and row[0].digest == entry.usable.digest
            manifest = entry.manifest
            held: Any = "newer" if manifest is None and self._newer(info) else None
            candidate = Candidate(
                "entry",
                key,
                variant,
                None if manifest is None else manifest.digest,
                entry.size,
                entry.modified,
                held=held,
                problem=entry.problem,
            )
            planner = Planner(0, work.planner.limits, work.planner.protected, time.time())
            decisions = list(planner.decide(candidate, [candidate]))
            work.decided(decisions)
            if not any(decision.remove for decision in decisions):
                # One whose archive is gone names nothing that is there.
                return manifest is not None and entry.size is None
            if not work.dry_run:
                self._store.delete_ref(key, variant)
                self._index.remove(key, variant)
            return True

    def _newer(self, info: Info) -> bool:
        data = self._store.client.get(info.path)
        return data is not None and is_newer(data)

    def _archives(self, work: _Work, place: _Place) -> _Place:
        for shard in _SHARDS[place.shard :]:
            if work.ended():
                return _Place("archives", shard=int(shard, 16))
            work.steps += 1
            for infos in _batches(self._store.client.list(f"{layout.BLOBS}/{shard}")):
                for info in self._unnamed(infos):
                    self._archive(work, info)
        return _Place(None)

    def _unnamed(self, infos: Sequence[Info]) -> list[Info]:
        digests = {info.path: layout.digest_of(info.path) for info in infos}
        a = ArtifactRow
        with self._database.session() as session:
            wanted = {digest for digest in digests.values() if digest is not None}
            named = set(session.scalars(select(a.digest).where(among(session, a.digest, wanted))))
        return [i for i in infos if digests[i.path] is not None and digests[i.path] not in named]

    def _archive(self, work: _Work, info: Info) -> None:
        digest = layout.digest_of(info.path)
        assert digest is not None
        # By this host's clock: the file's time is no clock of the database's.
        planner = Planner(0, Limits(), work.planner.protected, time.time())
        candidate = Candidate("archive", None, "", digest, info.size, info.modified)
        decisions = list(planner.decide(candidate, [candidate]))
        if work.dry_run or not any(decision.remove for decision in decisions):
            work.decided(d for d in decisions if d.reason != "recent")
            return
        with self._database.exclusive("archive", digest):
            there = self._store.client.head(info.path)
            again = there is not None and time.time() - there.modified <= DAY
            if again or self._named(digest) or self._store.is_pinned(digest):
                work.decided([Decision(candidate, False, "busy")])
                return
            self._store.delete_blob(digest)
        work.decided(decisions)


@dataclass(slots=True)
class _Work:
    """One round as it goes."""

    planner: Planner
    dry_run: bool
    until: float
    decisions: list[Decision] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    kept: int = 0
    steps: int = 0

    def ended(self) -> bool:
        """Whether the rest is the next round's. Each does one step at least, however slow it is."""
        return self.steps > 0 and (len(self.decisions) >= MOST + _KEPT or time.monotonic() > self.until)

    def decided(self, decisions: Any) -> None:
        for decision in decisions:
            if not decision.remove:
                self.kept += 1
                if self.kept > _KEPT:
                    continue
            self.decisions.append(decision)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a collection is."""

    phase: Phase | None
    after: tuple[float, str, str] | None = None
    shard: int = 0
    unknown: int = 0
    freed: int = 0

    def text(self, freed: int) -> str:
        """The cursor."""
        used, key, variant = self.after or (0.0, "", "")
        return pack(self.phase, float(used), key, variant, self.shard, self.unknown, freed)

    @classmethod
    def parse(cls, cursor: str | None) -> _Place:
        """Raises BadCursor."""
        if cursor is None:
            return cls("entries")
        phase, used, key, variant, shard, unknown, freed = unpack(cursor, str, float, str, str, int, int, int)
        if phase not in ("entries", "refs", "archives") or not 0 <= shard < len(_SHARDS):
            raise BadCursor(f"cursor {cursor[:80]!r} is none that a collection handed out")
        return cls(phase, (used, key, variant) if key else None, shard, unknown, freed)


def _batches(infos: Iterator[Info]) -> Iterator[list[Info]]:
    batch: list[Info] = []
    for info in infos:
        batch.append(info)
        if len(batch) == _PAGE:
            yield batch
            batch = []
    if batch:
        yield batch


__all__ = ["MOST", "ROUND_SECONDS", "Collector", "Round"]
