"""Publishes that have begun: what the index cannot know of a ref that was written just before the service died.

An archive goes with the last entry that the index has for it. Between a ref and its row the index does not
have the entry, so each publish is written down before its ref: whoever takes an archive away looks here too,
and what was broken off is entered by whichever service looks next.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from aotcache.db.engine import Database, now
from aotcache.db.models import PublishRow
from aotcache.manifest import Manifest
from aotcache.service.index import Index
from aotcache.store.objects import ObjectStore
from aotcache.types import CacheKey, Digest

SETTLED = 120.0
"""Seconds after which a publish either holds its entry or never will: more than both of its locks are waited for."""


class Publish:
    """One publish, from before its ref is written until its row is.

    Attributes:
        writing: Whether its ref may be there by now.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._id = uuid.uuid4().hex
        self.writing = False

    def begin(self, manifest: Manifest) -> None:
        """Write it down."""
        row = {"key": manifest.key, "variant": str(manifest.variant), "digest": manifest.digest}
        with self._database.session(write=True) as session:
            session.add(PublishRow(id=self._id, began=now(), **row))

    def entered(self, session: Session) -> None:
        """Its row is written in this transaction."""
        session.execute(delete(PublishRow).where(PublishRow.id == self._id))

    def refused(self) -> None:
        """It came to nothing; one that was `writing` stays until somebody has looked."""
        if not self.writing:
            with self._database.session(write=True) as session:
                self.entered(session)


class Publishes:
    """All of them, at one store and its index. Safe for threads, processes and hosts."""

    def __init__(self, database: Database, index: Index, store: ObjectStore) -> None:
        self._database = database
        self._index = index
        self._store = store

    @contextmanager
    def begun(self, manifest: Manifest) -> Iterator[Publish]:
        """Write down that an entry is about to be published; outside of every other transaction.

        Raises:
            DatabaseError: if it cannot be written; nothing is published then.
        """
        publish = Publish(self._database)
        publish.begin(manifest)
        try:
            yield publish
        except Exception:
            publish.refused()
            raise

    def names(self, digest: Digest) -> bool:
        """Whether the ref of a publish that was broken off has this archive. Costs a look at the store for each."""
        with self._database.session() as session:
            rows = session.execute(
                select(PublishRow.key, PublishRow.variant).where(PublishRow.digest == digest).distinct()
            ).all()
        return any(self._there(CacheKey(key), variant, digest) for key, variant in rows)

    def finish(self, *, seconds: float = SETTLED) -> int:
        """Enter what was broken off longer ago than this, and forget what left no ref.

        Returns:
            How many were entered.

        Raises:
            DatabaseError, StoreError: what was done until then is right all the same.
        """
        entered = 0
        with self._database.session() as session:
            began = select(PublishRow).where(PublishRow.began < now() - seconds)
            rows = [(row.id, CacheKey(row.key), row.variant) for row in session.scalars(began)]
        for name, key, variant in rows:
            with self._database.exclusive(key, variant) as session:
                entry = self._store.entry(key, variant)
                if entry is not None and entry.usable is not None:
                    self._index.add(entry.usable, entry.usable.document(), modified=entry.modified)
                    entered += 1
                session.execute(delete(PublishRow).where(PublishRow.id == name))
        return entered

    def _there(self, key: CacheKey, variant: str, digest: Digest) -> bool:
        entry = self._store.entry(key, variant)
        return entry is not None and entry.manifest is not None and entry.manifest.digest == digest


__all__ = ["SETTLED", "Publish", "Publishes"]
