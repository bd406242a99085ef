"""Publishes that have begun: what the index cannot know of a ref that was written just before the service died.

An archive goes with the last entry that the index has for it. Between a ref and its row the index does not
have the entry, so each publish is noted before its ref: whoever takes an archive away looks here too, and
what was broken off is entered by whichever service looks next.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from aotcache.db.engine import Database, now, upsert
from aotcache.db.models import PublishRow
from aotcache.errors import DatabaseError, ServiceUnavailable, StoreError
from aotcache.manifest import Manifest
from aotcache.service.index import Index
from aotcache.store.base import Entry
from aotcache.store.objects import ObjectStore
from aotcache.types import CacheKey, Digest, sha256

SETTLED = 120.0
"""Seconds after which a publish holds its entry, or finds its note gone and gives up."""

logger = logging.getLogger(__name__)


class Publish:
    """One publish, from before its ref is written until its row is.

    Attributes:
        writing: Whether its ref may be there by now.
    """

    def __init__(self, database: Database, manifest: Manifest) -> None:
        self._database = database
        self._id = uuid.uuid4().hex
        self._what = {"key": manifest.key, "variant": str(manifest.variant), "digest": manifest.digest}
        self.writing = False

    def note(self) -> None:
        """Write it down, or once more."""
        with self._database.session(write=True) as session:
            upsert(session, PublishRow, [{"id": self._id, **self._what, "began": now()}], update=["began"])

    def write(self, session: Session) -> None:
        """The ref is written next, in the transaction that holds the entry.

        Raises:
            DatabaseError: if that took so long to get that the note was taken for one of a publish that has ended.
        """
        if session.execute(select(PublishRow.id).where(PublishRow.id == self._id)).first() is None:
            raise DatabaseError(
                f"the entry was held by others for over {SETTLED:g} s; nothing was written, send it again"
            )
        self.writing = True

    def entered(self, session: Session) -> None:
        """Its row is written in this transaction."""
        session.execute(delete(PublishRow).where(PublishRow.id == self._id))

    def failed(self) -> None:
        """It came to nothing; where it was `writing`, the note stays until somebody has looked."""
        try:
            if self.writing:
                # Not only kept: whoever looked before the ref was there has taken it away.
                self.note()
                return
            with self._database.session(write=True) as session:
                self.entered(session)
        except DatabaseError as error:
            logger.warning("the note of a publish that failed is left as it is: %s", error)


class Publishes:
    """All of them, at one store and its index. Safe for threads, processes and hosts."""

    def __init__(self, database: Database, index: Index, store: ObjectStore) -> None:
        self._database = database
        self._index = index
        self._store = store

    @contextmanager
    def begun(self, manifest: Manifest) -> Iterator[Publish]:
        """Note that an entry is about to be published; outside of every other transaction.

        Raises:
            DatabaseError: if it cannot be written; nothing is published then.
        """
        publish = Publish(self._database, manifest)
        publish.note()
        try:
            yield publish
        except Exception:
            publish.failed()
            raise

    def names(self, digest: Digest) -> bool:
        """Whether the ref of a publish that was broken off has this archive. Costs a look at the store for each."""
        p = PublishRow
        with self._database.session() as session:
            rows = session.execute(select(p.key, p.variant).where(p.digest == digest).distinct()).all()
        return any(_has(self._store.entry(CacheKey(key), variant), digest) for key, variant in rows)

    def finish(self, *, seconds: float = SETTLED) -> int:
        """Enter what was broken off longer ago than this, and forget what left no ref.

        Returns:
            How many were entered.

        Raises:
            DatabaseError, StoreError: for what could not be looked at; all else is done all the same.
        """
        p = PublishRow
        with self._database.session() as session:
            rows = session.execute(
                select(p.key, p.variant).where(p.began < now() - seconds).distinct().order_by(p.key)
            ).all()
        entered, problem = 0, None
        for key, variant in rows:
            try:
                entered += self._finish(CacheKey(key), variant, seconds)
            except ServiceUnavailable:
                raise  # the others could only wait for it as well
            except StoreError as error:
                problem = error
        if problem is not None:
            raise problem
        return entered

    def _finish(self, key: CacheKey, variant: str, seconds: float) -> bool:
        # Looked at before anything is locked, too: on SQLite every writer would wait for a store that hangs.
        found = self._store.entry(key, variant)
        digest = None if found is None or found.usable is None else found.usable.digest
        with (
            self._database.exclusive(key, variant) as session,
            nullcontext() if digest is None else self._database.exclusive("archive", digest),
        ):
            entry = self._store.entry(key, variant)
            usable = None if entry is None else entry.usable
            if usable is not None and usable.digest != digest:
                return False  # another by now: next time
            p = PublishRow
            gone = delete(p).where(p.key == key, p.variant == variant, p.began < now() - seconds)
            if not session.execute(gone.returning(p.id)).all() or entry is None or usable is None:
                return False
            document = sha256(usable.document())
            known = {r.variant: r.document for r in self._index.resolve([key])[key]}
            if known.get(variant) == document:
                return False
            self._index.add(usable, usable.document(), modified=entry.modified)
            return True


def _has(entry: Entry | None, digest: Digest) -> bool:
    return entry is not None and entry.manifest is not None and entry.manifest.digest == digest


__all__ = ["SETTLED", "Publish", "Publishes"]
