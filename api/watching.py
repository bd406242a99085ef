"""What is new of the builds that somebody watches: one look at the database for all watchers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from aotcache.service.builds import Builds


@dataclass
class Watched:
    """One build while it is watched.

    Attributes:
        sequence: The number of its last event, as it was when somebody looked last.
        ended: Whether it has ended, or is there no more.
        watchers: How many there are.
    """

    sequence: int = 0
    ended: bool = False
    watchers: int = 0


class Watching:
    """The builds that are watched. Threads may share it."""

    def __init__(self, builds: Builds) -> None:
        self._builds = builds
        self._lock = threading.Lock()
        self._watched: dict[str, Watched] = {}

    @contextmanager
    def of(self, build: str) -> Iterator[Watched]:
        """Watch a build; what is yielded is brought up to date by every `look`."""
        with self._lock:
            watched = self._watched.setdefault(build, Watched())
            watched.watchers += 1
        try:
            yield watched
        finally:
            with self._lock:
                watched.watchers -= 1
                if not watched.watchers:
                    del self._watched[build]

    def look(self) -> None:
        """See what is new; to be called every so many seconds. Raises DatabaseError."""
        with self._lock:
            watched = dict(self._watched)
        if not watched:
            return
        found = self._builds.standing(list(watched))
        for build, entry in watched.items():
            entry.sequence, entry.ended = found.get(build, (entry.sequence, True))
