"""Hits and misses: counted in memory, written together."""

from __future__ import annotations

import threading
from collections import Counter

from sqlalchemy import bindparam, case, select, update
from sqlalchemy.orm import Session

from aotcache.db.engine import Database, among, clean, now
from aotcache.db.models import ArtifactRow, CounterRow, UsageRow
from aotcache.types import CacheKey


class Usage:
    """Counts for one server process. Safe for threads; what was not flushed is lost with the process."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._hits: Counter[tuple[str, str]] = Counter()
        self._misses = 0

    def hit(self, key: CacheKey, variant: str) -> None:
        """One client was told of this entry."""
        with self._lock:
            self._hits[key, variant] += 1

    def miss(self, key: CacheKey) -> None:
        """One client was told that there is nothing. Which key it was is not kept: anybody can make up any number."""
        with self._lock:
            self._misses += 1

    def flush(self) -> None:
        """Write what was counted since the last time; call it every few seconds and at the end.

        Raises:
            DatabaseError: if it could not be written; it is kept for the next time then.
        """
        with self._lock:
            hits, misses = self._hits, self._misses
            self._hits, self._misses = Counter(), 0
        if not hits and not misses:
            return
        try:
            with self._database.session(write=True) as session:
                _write(session, hits, misses)
        except BaseException:
            with self._lock:
                self._hits.update(hits)
                self._misses += misses
            raise


def _write(session: Session, hits: Counter[tuple[str, str]], misses: int) -> None:
    u = UsageRow
    counted = (
        update(u)
        .where(u.key == bindparam("of_key"), u.variant == bindparam("of_variant"))
        .values(hits=u.hits + bindparam("more"), last_used=now())
    )
    # In one order everywhere: two servers that write at once wait for each other, and not in a circle.
    rows = [
        {"of_key": clean(key), "of_variant": clean(variant), "more": number}
        for (key, variant), number in sorted(hits.items())
    ]
    if rows:
        session.connection().execute(counted, rows)
    added = {
        "hits": hits.total(),
        "misses": misses,
        "saved_milliseconds": round(1000 * _saved(session, hits)),
    }
    c = CounterRow
    session.execute(update(c).where(c.name.in_(added)).values(value=c.value + case(added, value=c.name)))


def _saved(session: Session, hits: Counter[tuple[str, str]]) -> float:
    """Build seconds of the entries, as often as they were hit; nothing for those that are gone by now."""
    a = ArtifactRow
    keys = {key for key, _ in hits}
    rows = session.execute(select(a.key, a.variant, a.build_seconds).where(among(session, a.key, keys)))
    return float(sum(hits[key, variant] * seconds for key, variant, seconds in rows))


__all__ = ["Usage"]
