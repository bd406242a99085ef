"""The recall lists that a service shows, and what it does not take or count as there because of them.

The store has them; the database has what a look-up and the queue of builds need at once, for all
servers over it. A list that the database knows and the store has lost is shown on: who wrote to
the store behind the service's back takes nothing out of force.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from aotcache.db.engine import Database, clean, upsert
from aotcache.db.models import RecalledRow, RecallListRow
from aotcache.errors import RecallConflict
from aotcache.recall_list import Recalled, SignedList, merged, signer_of, verified
from aotcache.store.base import Store
from aotcache.trust import PublicKey, TrustedKeys
from aotcache.types import CacheKey, Digest, sha256

logger = logging.getLogger(__name__)

_ROWS = 500
"""Of one statement."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What the service shows: `tag` is another one whenever the lists are; None where there are none."""

    tag: str | None
    lists: tuple[SignedList, ...]


class ServiceRecalls:
    """Reads and writes them. Safe for threads, processes and hosts.

    Args:
        database: Shared by all servers.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def tag(self) -> str | None:
        """What changes with the lists; one small statement."""
        with self._database.session() as session:
            return _tag(_known(session))

    def shown(self) -> Shown:
        """Every list."""
        r = RecallListRow
        with self._database.session() as session:
            rows = session.execute(select(r.document).order_by(r.signer, r.number, r.digest)).scalars().all()
        lists = [SignedList.from_document(row.encode(), where="the database") for row in rows]
        return Shown(_tag((x.signer, x.listed.number, sha256(x.document)) for x in lists), tuple(lists))

    def problem(self, digest: Digest, key: CacheKey) -> str | None:
        """Why an artifact is not taken: the reason of its recall, or None."""
        r = RecalledRow
        with self._database.session() as session:
            return session.execute(select(r.reason).where(r.what.in_((digest, key))).limit(1)).scalar()

    def put(self, made: SignedList, store: Store, trusted: TrustedKeys) -> bool:
        """Take a list that a trusted key signed.

        Returns:
            Whether it was stored; False if it was there.

        Raises:
            RecallConflict: a later one is there, or one that has what this one lacks.
            StoreError: it could not be stored.
        """
        with self._database.exclusive("recalls", made.signer):
            self.read(store, trusted)
            for other in self.shown().lists:
                if other.signer != made.signer:
                    continue
                if other.document == made.document:
                    return False
                if not made.listed.covers(other.listed):
                    raise RecallConflict(
                        f"recall list {other.listed.number} by ed25519:{made.signer} is here, which list "
                        f"{made.listed.number} does not follow: read GET /v1/recalls, add to what is there, and sign "
                        "that with a larger number",
                        number=other.listed.number,
                    )
            store.put_recall(made.document, made.signer)
            self.read(store, trusted)
        return True

    def read(self, store: Store, trusted: TrustedKeys) -> None:
        """Bring the database up to date with the store and with the keys that are trusted now.

        What the store has lost is put back.

        Raises:
            StoreError: the store cannot be read. What the database has stays.
        """
        keys = {signer_of(key.key): key.key for key in trusted.list()}
        stored = _of_store(store, keys) if keys else []
        with self._database.session() as session:
            lists, changed = _joined(session, stored, keys)
        if changed:
            with self._database.exclusive("recalls", "all") as session:
                lists, _ = _joined(session, stored, keys)
                _write(session, lists)
        for one in lists:
            if one not in stored:
                _put_back(store, one)


def _of_store(store: Store, keys: dict[str, PublicKey]) -> list[SignedList]:
    found = []
    for document in store.recalls(keys.__contains__):
        for key in keys.values():
            listed = verified(document, key)
            if listed is not None:
                found.append(listed)
    return found


def _put_back(store: Store, one: SignedList) -> None:
    try:
        store.put_recall(one.document, one.signer)
    except RecallConflict as error:
        # Nobody's list, or one that was made without knowing of this one: it must be in nobody's way.
        logger.warning(
            "%s than the one that the service has, which stays in force; its signer runs aotcache recall --renew",
            error,
        )


def _known(session: Session) -> list[tuple[str, int, str]]:
    r = RecallListRow
    rows = session.execute(select(r.signer, r.number, r.digest).order_by(r.signer, r.number, r.digest)).all()
    return [(signer, number, digest) for signer, number, digest in rows]


def _tag(known: Iterable[tuple[str, int, str]]) -> str | None:
    text = "".join(f"{signer} {number} {digest}\n" for signer, number, digest in known)
    return sha256(text.encode()) if text else None


def _joined(
    session: Session, stored: list[SignedList], keys: dict[str, PublicKey]
) -> tuple[list[SignedList], bool]:
    """What store and database know together, without what later lists cover; whether the database lacks that."""
    documents = session.execute(select(RecallListRow.document)).scalars().all()
    before = [SignedList.from_document(row.encode(), where="the database") for row in documents]
    # By what they are: two that were made without knowing of each other may have one number.
    known = {one.document: one for one in (*before, *stored) if one.signer in keys}
    lists = [
        one
        for one in known.values()
        if not any(
            other.signer == one.signer and other.listed != one.listed and other.listed.covers(one.listed)
            for other in known.values()
        )
    ]
    return lists, {one.document for one in lists} != {one.document for one in before}


def _write(session: Session, lists: list[SignedList]) -> None:
    session.execute(delete(RecallListRow))
    rows = [
        {
            "signer": one.signer,
            "number": one.listed.number,
            "digest": sha256(one.document),
            "document": one.document.decode(),
        }
        for one in lists
    ]
    upsert(session, RecallListRow, rows)
    session.execute(delete(RecalledRow))
    words: dict[str, str] = {}
    for signer in {one.signer for one in lists}:
        of_signer = merged(one.listed for one in lists if one.signer == signer)
        words |= {what: entry.reason for what, entry in of_signer.items() if isinstance(entry, Recalled)}
    pairs = sorted(words.items())
    for first in range(0, len(pairs), _ROWS):
        part = [{"what": what, "reason": clean(reason)} for what, reason in pairs[first : first + _ROWS]]
        upsert(session, RecalledRow, part)


__all__ = ["ServiceRecalls", "Shown"]
