"""Counters of an attached drafter."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from aotcache.passing import retried


class Stats:
    """Counts per region. Thread-safe; a hit costs one dictionary update."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hits: dict[int, Counter[str]] = {}
        self._misses: Counter[str] = Counter()
        self._eager: Counter[str] = Counter()
        self._loads: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._seconds = 0.0
        self._runners: dict[str, str] = {}
        self._requests = (0, 0, 0)
        self._verified = 0
        self._deaths: dict[str, int] = {}

    def hit(self, region: str) -> None:
        """A call was run by an artifact."""
        # One counter for each thread: no lock on the hot path, and no lost update.
        ident = threading.get_ident()
        own = self._hits.get(ident)
        if own is None:
            own = self._hits.setdefault(ident, Counter())
        own[region] += 1

    def miss(self, region: str) -> None:
        """A call was covered by no artifact."""
        with self._lock:
            self._misses[region] += 1

    def eager(self, region: str) -> None:
        """A call was run without an artifact."""
        with self._lock:
            self._eager[region] += 1

    def served(self, region: str, runner: str) -> None:
        """An artifact was chosen for calls of a region, opened now or by somebody before."""
        with self._lock:
            self._runners[region] = runner

    def loaded(self, region: str, seconds: float, size: int, runner: str) -> None:
        """An artifact was opened: seconds it took, bytes of its archive, who runs it."""
        with self._lock:
            self._loads[region] += 1
            self._seconds += seconds
            self._bytes[region] += size
            self._runners[region] = runner

    def verified(self) -> None:
        """The first call of an artifact was compared with eager, and agreed."""
        with self._lock:
            self._verified += 1

    def died(self, digest: str, count: int) -> None:
        """So many processes of this host are known to have died with an archive that is in use."""
        with self._lock:
            self._deaths[digest] = count

    def requests(self, requested: int, pending: int, failed: int) -> None:
        """How many keys were asked of the service so far, are on their way, and cannot be had."""
        with self._lock:
            self._requests = (requested, pending, failed)

    def snapshot(self, *, traces: int) -> dict[str, Any]:
        """A copy of all counters."""
        with self._lock:
            hits: Counter[str] = Counter()
            for own in list(self._hits.values()):
                hits.update(dict(own))
            names = sorted({*hits, *self._misses, *self._eager, *self._loads})
            return {
                "hits": sum(hits.values()),
                "misses": sum(self._misses.values()),
                "eager_calls": sum(self._eager.values()),
                "loads": sum(self._loads.values()),
                "load_seconds": self._seconds,
                "bytes": sum(self._bytes.values()),
                "traces": traces,
                "requested": self._requests[0],
                "pending": self._requests[1],
                "failed": self._requests[2],
                "verified": self._verified,
                "deaths": sum(self._deaths.values()),
                "file_retries": retried(),
                "regions": {
                    name: {
                        "hits": hits[name],
                        "misses": self._misses[name],
                        "eager_calls": self._eager[name],
                        "loads": self._loads[name],
                        "bytes": self._bytes[name],
                        "runner": self._runners.get(name),
                    }
                    for name in names
                },
            }
