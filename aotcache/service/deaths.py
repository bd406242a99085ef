"""Deaths of workers: told by those who come after them, counted for each archive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from aotcache.db.engine import Database, among, now, upsert
from aotcache.db.models import BlobRow, CounterRow, DeathRow

MOST = 1000
"""Deaths that are kept of one archive. Anybody who may read can tell of them."""


@dataclass(frozen=True, slots=True)
class Told:
    """One death as it is told: its own id, the archive, what the worker was doing, and since when."""

    id: str
    digest: str
    stage: str
    at: float


class Deaths:
    """Writes what is told. Safe for threads and processes."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def record(self, told: Sequence[Told]) -> int:
        """Count deaths of archives that the index names; those counted before, and unknown ones, are passed over.

        Returns:
            How many were new.
        """
        with self._database.session(write=True) as session:
            asked = select(BlobRow.digest).where(among(session, BlobRow.digest, {t.digest for t in told}))
            # Held to the end: an archive that goes meanwhile takes its deaths along.
            known = set(session.scalars(asked.with_for_update(read=True, key_share=True)))
            ids = select(DeathRow.id).where(among(session, DeathRow.id, {t.id for t in told}))
            seen = set(session.scalars(ids))
            left = {digest: MOST - number for digest, number in counted(session, known).items()}
            fresh: dict[str, Told] = {}
            for death in told:
                if death.digest in known and death.id not in seen and left.get(death.digest, MOST) > 0:
                    left[death.digest] = left.get(death.digest, MOST) - 1
                    fresh[death.id] = death
                    seen.add(death.id)
            rows = [
                {"id": d.id, "digest": d.digest, "stage": d.stage, "at": d.at, "told": now()}
                for d in fresh.values()
            ]
            for row in rows:
                upsert(session, DeathRow, [row])
            if rows:
                c = CounterRow
                session.execute(update(c).where(c.name == "worker_deaths").values(value=c.value + len(rows)))
        return len(rows)


def counted(session: Session, digests: Iterable[str]) -> Counter[str]:
    """How many deaths are known of each archive."""
    d = DeathRow
    statement = select(d.digest, func.count()).where(among(session, d.digest, digests)).group_by(d.digest)
    return Counter({row[0]: row[1] for row in session.execute(statement)})


__all__ = ["MOST", "Deaths", "Told"]
