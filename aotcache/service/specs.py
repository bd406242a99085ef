"""The specs that builds may name: those of `aotcache serve --spec`, and those that builders bring."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from sqlalchemy import func, select

from aotcache.db.engine import Database, clean, now, upsert
from aotcache.db.models import SpecRow

KEPT_SECONDS = 30 * 24 * 3600.0
"""How long a spec may be named after somebody last had it."""
MOST = 10_000
"""Names beyond these are not taken."""
_AGAIN_SECONDS = 60.0
"""How often one process writes down that a spec is still there."""


class Specs:
    """Names of specs, kept in the database: a restart, or another server beside this one, knows them too.

    Threads may share it.

    Args:
        database: Where they are kept.
        own: Names that are known from the start, and written by `flush`.
    """

    def __init__(self, database: Database, own: Iterable[str] = ()) -> None:
        self._database = database
        self._own = dict.fromkeys(own, time.time())
        self._noted: dict[str, float] = {}
        self._lock = threading.Lock()

    def register(self, names: Iterable[str]) -> None:
        """Let builds name these. Said again with every claim of a builder; written now and then."""
        due = time.monotonic() - _AGAIN_SECONDS
        with self._lock:
            new = {clean(name, 256) for name in names}
            new = {name for name in new if self._noted.get(name, due) <= due}
        if not new:
            return
        with self._database.session(write=True) as session:
            room = MOST - session.execute(select(func.count()).select_from(SpecRow)).scalar_one()
            known = set(session.scalars(select(SpecRow.name).where(SpecRow.name.in_(sorted(new)[:MOST]))))
            taken = sorted(known) + sorted(new - known)[: max(0, room)]
            rows = [{"name": name, "registered": now(), "seen": now()} for name in taken]
            upsert(session, SpecRow, rows, update=["seen"])
        with self._lock:
            self._noted.update(dict.fromkeys(taken, time.monotonic()))

    def flush(self) -> None:
        """Write down that the own names are there, now and then. Raises DatabaseError."""
        self.register(self._own)

    def known(self) -> dict[str, float]:
        """Every name, and since when, in seconds since the epoch."""
        with self._database.session() as session:
            rows = session.execute(
                select(SpecRow.name, SpecRow.registered)
                .where(SpecRow.seen > now() - KEPT_SECONDS)
                .order_by(SpecRow.name)
            )
            return self._own | {row.name: row.registered for row in rows}
