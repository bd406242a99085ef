"""The index of the store: what is there, by key, by filter and by age. Rebuilt from the store at will."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, func, select, tuple_
from sqlalchemy.orm import Session

from aotcache.db.engine import Database, among, clean, now, upsert
from aotcache.db.models import (
    ArtifactRow,
    BlobRow,
    CounterRow,
    KeyComponentRow,
    UsageRow,
)
from aotcache.errors import ManifestError
from aotcache.key import KeyParts
from aotcache.manifest import Manifest
from aotcache.service import nearest as explaining
from aotcache.service import reindexing
from aotcache.service.cursors import pack, unpack
from aotcache.service.deaths import counted
from aotcache.service.nearest import Nearest
from aotcache.service.queue import artifact_arrived
from aotcache.service.reindexing import Counts
from aotcache.store.base import Store
from aotcache.types import CacheKey, Digest, sha256

MOST = 1000
"""Most rows of one page."""
_LONGEST_BUILD = 30 * 24 * 3600.0
_LONGEST_VARIANT = 250
"""A ref's file name is the variant and `.json`, and 255 bytes is what file systems take."""


@dataclass(frozen=True, slots=True)
class Reference:
    """What a client needs to know to decide whether to fetch.

    Attributes:
        variant: Target and toolchain, as text.
        digest: Of the archive.
        size: Of the archive, in bytes.
        document: sha256 of the ref document.
    """

    variant: str
    digest: Digest
    size: int
    document: Digest


@dataclass(frozen=True, slots=True)
class Artifact:
    """One row of a listing. Times are seconds since the epoch; `last_used` is None before the first hit.

    `deaths` are the workers that are known to have died with its archive.
    """

    key: CacheKey
    variant: str
    digest: Digest
    size: int
    document: Digest
    region: str
    mode: str
    bucket: dict[str, int]
    target: str
    torch: str
    created: float
    last_used: float | None
    hits: int
    deaths: int


@dataclass(frozen=True, slots=True)
class Page:
    """Part of a listing; `next` asks for the part after it, None at the end."""

    artifacts: list[Artifact]
    next: str | None


@dataclass(frozen=True, slots=True)
class Candidate:
    """An entry that could be collected. `last_used` is when it was stored if nobody ever asked for it."""

    key: CacheKey
    variant: str
    digest: Digest
    size: int
    last_used: float
    hits: int


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over everything.

    Attributes:
        artifacts, blobs: How many.
        bytes: Of all blobs.
        hits, misses: Since the database was made; deleted entries count too.
        saved_seconds: Build seconds that hits did not have to spend.
        deaths: Workers that died with an archive, as far as that was told; since the database was made.
    """

    artifacts: int
    blobs: int
    bytes: int
    hits: int
    misses: int
    saved_seconds: float
    deaths: int


class Index:
    """Reads and writes the index. Safe for threads and processes.

    A caller that writes a ref to the store and the row here does both inside
    `Leases.publishing` or `Database.exclusive` of the entry: `add` and `remove` join that
    transaction, and a `reindex` at the same time waits for it.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def resolve(self, keys: Sequence[CacheKey]) -> dict[CacheKey, list[Reference]]:
        """The variants of each key, in the order of their names; one statement for all keys.

        Returns:
            Every key asked for; an empty list for a miss.
        """
        found: dict[CacheKey, list[Reference]] = {key: [] for key in keys}
        a = ArtifactRow
        with self._database.session() as session:
            rows = session.execute(
                select(a.key, a.variant, a.digest, a.size, a.document).where(among(session, a.key, found))
            ).all()
        for key, variant, digest, size, document in rows:
            found[CacheKey(key)].append(Reference(variant, Digest(digest), size, Digest(document)))
        for references in found.values():
            references.sort(key=lambda reference: reference.variant)
        return found

    def page(
        self,
        *,
        cursor: str | None = None,
        limit: int = 100,
        region: str | None = None,
        mode: str | None = None,
        target: str | None = None,
        torch: str | None = None,
        key: str | None = None,
        code: str | None = None,
    ) -> Page:
        """One page in the order of (key, variant), at the same cost wherever it is.

        Args:
            cursor: `next` of the page before, asked for with the same filters.
            limit: Most rows, 1 to 1000; more or less is taken for the nearest of these.
            region, mode, target, torch, key: Only rows with this value; `torch` is the version.
            code: Only rows whose key has this digest for its component "code".

        Raises:
            BadCursor: for a cursor that no page handed out.
        """
        limit = max(1, min(limit, MOST))
        wanted = {"region": region, "mode": mode, "target": target, "torch": torch, "key": key}
        a, u = ArtifactRow, UsageRow
        names = select(a.key, a.variant).order_by(a.key, a.variant).limit(limit + 1)
        for name, value in wanted.items():
            if value is not None:
                names = names.where(getattr(a, name) == clean(value))
        if code is not None:
            k = KeyComponentRow
            of = (k.key == a.key) & (k.name == "code") & (k.digest == clean(code))
            names = names.join(k, of)
        if cursor is not None:
            after = unpack(cursor, str, str)
            names = names.where(tuple_(a.key, a.variant) > tuple_(*after))
        # The names come from an index alone; whole rows are read for this page only.
        chosen = names.subquery()
        statement = (
            select(a, u.last_used, u.hits)
            .join(chosen, (a.key == chosen.c.key) & (a.variant == chosen.c.variant))
            .join(u, (u.key == a.key) & (u.variant == a.variant))
            .order_by(a.key, a.variant)
        )
        with self._database.session() as session:
            found = session.execute(statement).all()
            deaths = counted(session, {row.digest for row, _, _ in found})
            rows = [_artifact(row, last, hits, deaths[row.digest]) for row, last, hits in found]
        more = len(rows) > limit
        rows = rows[:limit]
        return Page(rows, pack(rows[-1].key, rows[-1].variant) if more else None)

    def oldest(self, limit: int, after: tuple[float, str, str] | None = None) -> list[Candidate]:
        """The entries that were used longest ago, the oldest first.

        Args:
            limit: Most of them.
            after: Only those that come after this last use, key and variant.
        """
        a, u = ArtifactRow, UsageRow
        names = (
            select(u.last_used, u.key, u.variant, u.hits).order_by(u.last_used, u.key, u.variant).limit(limit)
        )
        if after is not None:
            names = names.where(tuple_(u.last_used, u.key, u.variant) > tuple_(*after))
        first = names.subquery()
        statement = (
            select(a.key, a.variant, a.digest, a.size, first.c.last_used, first.c.hits)
            .join(first, (a.key == first.c.key) & (a.variant == first.c.variant))
            .order_by(first.c.last_used, first.c.key, first.c.variant)
        )
        with self._database.session() as session:
            return [
                Candidate(CacheKey(key), variant, Digest(digest), size, last, hits)
                for key, variant, digest, size, last, hits in session.execute(statement)
            ]

    def add(self, manifest: Manifest, document: bytes, *, modified: float) -> None:
        """Enter one ref, or bring its row up to date; queued builds of it are done then.

        Args:
            manifest: What the ref says.
            document: The ref's own bytes.
            modified: When the ref was written, in seconds since the epoch.

        Raises:
            ManifestError: if its variant has a name that no store could hold.
        """
        key, variant = manifest.key, str(manifest.variant)
        if len(variant.encode()) > _LONGEST_VARIANT or clean(variant) != variant:
            raise ManifestError(
                f"variant {variant[:80]!r}... cannot be stored: expected at most 250 plain bytes"
            )
        row = {
            "key": key,
            "variant": variant,
            "digest": manifest.digest,
            "size": manifest.size,
            "document": sha256(document),
            "region": clean(manifest.region, 512),
            "mode": manifest.mode,
            "bucket": manifest.bucket,
            "target": clean(str(manifest.target), 64),
            "torch": clean(manifest.toolchain.torch, 64),
            "build_seconds": _build_seconds(manifest),
            "modified": modified,
        }
        with self._database.exclusive(key, variant) as session:
            before = session.execute(
                select(ArtifactRow.digest).where(ArtifactRow.key == key, ArtifactRow.variant == variant)
            ).scalar()
            _put(session, ArtifactRow, [row | {"created": now()}], kept={"created"})
            # Another archive is as young as a new entry.
            same = {"last_used"} if before == manifest.digest else set()
            _put(session, UsageRow, [_unused(key, variant)], kept={"hits"} | same)
            _put(session, KeyComponentRow, _components(key, manifest.parts), kept=set())
            blob = {"digest": manifest.digest, "size": manifest.size, "stored": now()}
            _put(session, BlobRow, [blob], kept={"stored"})
            if before is not None and before != manifest.digest:
                self._drop_blobs(session, [before])
            artifact_arrived(session, key, variant)

    def remove(self, key: CacheKey, variant: str | None = None) -> int:
        """Take out one variant of a key, or all of them; returns how many there were."""
        a = ArtifactRow
        with self._database.session(write=True) as session:
            which = [a.key == clean(key)] + ([] if variant is None else [a.variant == clean(variant)])
            digests = session.scalars(delete(a).where(*which).returning(a.digest)).all()
            if not digests:
                return 0
            left = select(a.key).where(a.key == key).limit(1)
            if session.execute(left).first() is None:
                session.execute(delete(KeyComponentRow).where(KeyComponentRow.key == key))
            self._drop_blobs(session, digests)
        return len(digests)

    def names(self, digest: Digest) -> bool:
        """Whether any entry has this archive. Holds to the end of `Database.exclusive("archive", digest)`."""
        with self._database.session() as session:
            named = select(ArtifactRow.key).where(ArtifactRow.digest == digest).limit(1)
            return session.execute(named).first() is not None

    def why(
        self, key: CacheKey, *, mode: str | None = None, components: Sequence[dict[str, Any]] | None = None
    ) -> Nearest:
        """What is stored for a key, and which entries come nearest to it and differ in what.

        Args:
            key: What was missed.
            mode: Only entries of this mode are compared.
            components: The key's components as in a manifest. Without them a key that is not
                stored can be compared with nothing.
        """
        given = KeyParts.from_json(components) if components is not None else None
        with self._database.session() as session:
            return explaining.find(session, key, mode=mode, given=given)

    def reindex(self, store: Store) -> Counts:
        """Enter what the store has, and take out what it has not; safe beside a running service.

        Raises:
            StoreError: if the store cannot be read. What was done until then is right all the same.
        """
        return reindexing.reindex(self._database, self, store)

    def totals(self) -> Totals:
        """Sums over everything; counts rows, so seconds apart rather than in every request."""
        with self._database.session() as session:
            artifacts = session.execute(select(func.count()).select_from(ArtifactRow)).scalar_one()
            blobs, size = session.execute(
                select(func.count(), func.coalesce(func.sum(BlobRow.size), 0))
            ).one()
            counters = {row.name: row.value for row in session.scalars(select(CounterRow))}
        return Totals(
            artifacts=artifacts,
            blobs=blobs,
            bytes=int(size),
            hits=counters["hits"],
            misses=counters["misses"],
            saved_seconds=counters["saved_milliseconds"] / 1000,
            deaths=counters["worker_deaths"],
        )

    @staticmethod
    def _drop_blobs(session: Session, digests: Iterable[str]) -> None:
        unused = sorted(set(digests))
        # Locked first and looked at afterwards: an entry that is being added with one of these
        # either has its row already, which the second statement sees, or waits and makes it anew.
        session.execute(
            select(BlobRow.digest)
            .where(among(session, BlobRow.digest, unused))
            .order_by(BlobRow.digest)
            .with_for_update()
        ).all()
        named = select(ArtifactRow.digest).where(ArtifactRow.digest == BlobRow.digest)
        session.execute(
            delete(BlobRow).where(among(session, BlobRow.digest, unused), ~named.exists()),
            execution_options={"synchronize_session": False},
        )


def _build_seconds(manifest: Manifest) -> float:
    """What a builder says that it took, which may be no number that can be added up."""
    seconds = sum(manifest.provenance.seconds.values())
    return min(max(seconds, 0.0), _LONGEST_BUILD) if math.isfinite(seconds) else 0.0


def _put(session: Session, model: Any, rows: list[dict[str, Any]], *, kept: set[str]) -> None:
    """Insert, or overwrite all but the primary key and what is `kept`."""
    own = {column.name for column in model.__table__.primary_key}
    columns = [column.name for column in model.__table__.columns]
    upsert(session, model, rows, update=[name for name in columns if name not in own | kept])


def _unused(key: CacheKey, variant: str) -> dict[str, Any]:
    return {"key": key, "variant": variant, "hits": 0, "last_used": now()}


def _components(key: CacheKey, parts: KeyParts) -> list[dict[str, Any]]:
    return [
        {
            "key": key,
            "position": position,
            "name": clean(part.name, 64),
            "digest": part.digest,
            "items": [list(item) for item in part.items],
        }
        for position, part in enumerate(parts.components)
    ]


def _artifact(row: ArtifactRow, last_used: float, hits: int, deaths: int) -> Artifact:
    return Artifact(
        key=CacheKey(row.key),
        variant=row.variant,
        digest=Digest(row.digest),
        size=row.size,
        document=Digest(row.document),
        region=row.region,
        mode=row.mode,
        bucket=row.bucket,
        target=row.target,
        torch=row.torch,
        created=row.created,
        last_used=last_used if hits else None,
        hits=hits,
        deaths=deaths,
    )


__all__ = ["Artifact", "Candidate", "Counts", "Index", "Nearest", "Page", "Reference", "Totals"]
