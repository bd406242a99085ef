"""Building under a lease: one builder for an entry among all hosts that publish to one service."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable

from aotcache.errors import AotcacheError, LeaseHeld, LeaseLost, ServiceError, ServiceUnavailable, StoreError
from aotcache.store.builds import BuildService, Lease
from aotcache.types import CacheKey

logger = logging.getLogger(__name__)

_ASK_SECONDS = 2.0
"""Between looks at an entry that somebody else builds."""


def holder() -> str:
    """Who this process is to others that wait for it."""
    return f"{socket.gethostname()}:{os.getpid()}"


class Heartbeat:
    """Keeps a lease alive in a thread, for as long as the block lasts.

    A service that is away for less than the lease lasts is nothing; after that the lease counts
    as lost, because somebody else may have taken it.

    Args:
        beat: Renews. Raises LeaseLost, or what else is to end the work.
        seconds: How long the lease holds after a beat.
        end: Ends the work at once; called from the thread when the lease is lost.
    """

    def __init__(self, beat: Callable[[], None], seconds: float, end: Callable[[], None]) -> None:
        self._beat = beat
        self._seconds = seconds
        self._end = end
        self._wake = threading.Event()
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="aotcache-lease", daemon=True)
        self.lost: AotcacheError | None = None
        """Why the work was ended; None while all is well."""

    def wake(self) -> None:
        """Beat now: there is something to tell."""
        self._wake.set()

    def _run(self) -> None:
        alive = time.monotonic()
        while True:
            self._wake.wait(self._seconds / 3)
            self._wake.clear()
            if self._closed:
                return
            began = time.monotonic()
            try:
                self._beat()
                alive = began
            except ServiceError as error:
                if time.monotonic() - alive > self._seconds or not isinstance(error, ServiceUnavailable):
                    self.lost = LeaseLost(f"the lease could not be renewed: {error}")
            except AotcacheError as error:
                self.lost = error
            if self.lost is not None:
                with self._closing:
                    if not self._closed:
                        self._end()
                return

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # A beat that hangs ends by the limits of its request; what it finds out concerns nobody then.
        with self._closing:
            self._closed = True
        self._wake.set()


def take(
    service: BuildService,
    key: CacheKey,
    variant: str,
    *,
    there: Callable[[], bool],
    waiting: Callable[[str], None],
    stopped: threading.Event,
    seconds: float,
) -> Lease | None:
    """Take the lease of an entry, after whoever has it; None once the entry is there.

    Args:
        service: Where leases are.
        key, variant: The entry.
        there: Whether there is nothing to build any more.
        waiting: Told who has it, whenever that changes.
        stopped: Set to end the wait.
        seconds: Longest wait.

    Raises:
        LeaseHeld: somebody else still has it after that time, or the wait was ended.
    """
    deadline = time.monotonic() + seconds
    known: str | None = None
    while True:
        try:
            lease = service.acquire(key, variant, holder())
        except LeaseHeld as held:
            whom = str(held.details.get("holder"))
            if stopped.is_set() or time.monotonic() > deadline:
                raise
            if whom != known:
                known = whom
                waiting(whom)
        else:
            try:
                found = there()
            except BaseException:
                give_back(service, lease)
                raise
            if not found:
                return lease
            give_back(service, lease)
            return None
        stopped.wait(_ASK_SECONDS)
        if there():
            return None


def give_back(service: BuildService, lease: Lease) -> None:
    """Release a lease. One that cannot be released now ends by itself."""
    try:
        service.release(lease)
    except StoreError as error:
        logger.warning("lease %s was not given back, and ends in %.0f s: %s", lease.id, lease.seconds, error)
