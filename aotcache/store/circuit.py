"""Not asking again, for a while, what was not reached: a worker with 40 keys must not wait 40 times."""

from __future__ import annotations

import logging
import os
import threading
import time
from functools import cache

from aotcache.errors import ServiceUnavailable

logger = logging.getLogger(__name__)

_FIRST_SECONDS = 5.0
_LONGEST_SECONDS = 60.0


class Circuit:
    """What this process knows of one place's being reachable. Any number of threads may use it.

    While the circuit is open every request is refused at once. After that one request is let
    through; the others go on being refused until it has ended.

    Args:
        place: The address, for messages: without credentials or query.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._until = 0.0
        self._seconds = 0.0
        self._reason = ""
        self._announced = False

    def enter(self, seconds: float) -> bool:
        """Ask to make a request that takes `seconds` at most.

        Returns:
            Whether it is the one that finds out if the place is back; it is to be tried once only.

        Raises:
            ServiceUnavailable: while the circuit is open.
        """
        with self._lock:
            if not self._seconds:
                return False
            now = time.monotonic()
            if now >= self._until:
                self._until = now + seconds
                return True
            wait = self._until - now
        raise ServiceUnavailable(
            f"{self._place} is not asked again for {wait:.1f} s: {self._reason}",
            url=self._place,
        )

    def failed(self, reason: str, *, probe: bool) -> None:
        """Open the circuit: a request did not reach the place, nor did its retries.

        Args:
            reason: Why not, in a few words.
            probe: What `enter` said of the request; each that fails doubles the time.
        """
        with self._lock:
            longer = 2 * self._seconds if probe else self._seconds
            self._seconds = min(max(_FIRST_SECONDS, longer), _LONGEST_SECONDS)
            self._until, self._reason = time.monotonic() + self._seconds, reason

    def reached(self) -> None:
        """Close the circuit: the place answered."""
        if self._seconds or self._announced:
            with self._lock:
                self._seconds, self._announced = 0.0, False

    @property
    def unreached(self) -> str | None:
        """Why the place could not be reached when it was asked last; None if it could, or never was asked."""
        with self._lock:
            return self._reason if self._seconds else None

    def announce(self, message: str) -> None:
        """Log a warning, once until the place is reached again."""
        with self._lock:
            first, self._announced = not self._announced, True
        if first:
            logger.warning("%s", message)


@cache
def _circuit(process: int, place: str) -> Circuit:
    return Circuit(place)


def circuit_for(place: str) -> Circuit:
    """The circuit of an address, one in a process; a fork starts with new ones."""
    return _circuit(os.getpid(), place)
