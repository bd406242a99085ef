"""What an operator does in a soak: pins, collections, recalls, by what the commands of that name call."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from aotcache.config import settings
from aotcache.recall import publish_list
from aotcache.store.circuit import circuit_for
from aotcache.store.collect import collect
from aotcache.store.copies import collect_copies
from aotcache.store.evict import Collected
from aotcache.store.http import HttpStore
from aotcache.trust import SigningKey, sign, signing_key_path
from tests.faults.soak_process import Process
from tests.faults.soak_world import LIMIT, PINNED, Journal, World, archive, manifest, notes

MAX_AGE = 20.0
"""Seconds without use after which a collection by age takes an entry."""

MAX_BYTES = 2 << 20
"""To which a collection by size goes."""

_DAY = 24 * 3600.0


def pin(world: World, config_home: Path) -> None:
    """Publish what is pinned, and pin it."""
    journal = Journal(Path(world.folder), "before")
    signing = SigningKey.load(config_home / "signing.pem")
    store = HttpStore(world.url)
    for number in PINNED:
        file = Path(world.folder) / f"pinned-{number}.pt2"
        file.write_bytes(archive(number, 0))
        began = time.monotonic()
        made = sign(manifest(number, 0), signing)
        assert store.publish(made, file)
        store.pin(made.key, "a soak must not lose it")
        journal.note("published", number=number, digest=made.digest, began=began, stored=True)
    store.session.close()


class Operator(Process):
    """The only one who takes anything away."""

    limit = 6 * LIMIT
    """A collection is as many requests as it needs, of some seconds each."""

    def __init__(self, world: World, name: str, restart_seconds: float) -> None:
        super().__init__(world, name)
        self.restart_seconds = restart_seconds
        self.signing = SigningKey.load(signing_key_path(settings()))

    def attempt(self, work: Callable[[], None]) -> None:
        """See `Process`. Commands are processes of their own, none of which knows that the service was away."""
        circuit_for(self.remote.url).reached()
        super().attempt(work)

    def work(self) -> None:
        """Until the soak ends."""
        self.run(
            {self.collect_by_age: 2, self.collect_by_size: 1, self.collect_copies: 2, self.recall: 3},
            pause=1.0,
        )

    def collect_by_age(self) -> None:
        """Have the service forget what nobody used for a while."""
        self._collect(max_age=MAX_AGE)

    def collect_by_size(self) -> None:
        """Have it forget what is more than it may hold."""
        self._collect(max_bytes=MAX_BYTES)

    def _collect(self, *, max_age: float | None = None, max_bytes: int | None = None) -> None:
        began = time.monotonic()
        done: Collected | None = None
        # Noted first: it may take things away and be killed before it can say so.
        self.journal.note("collecting", age=max_age, until=began + 4 * self.restart_seconds)
        try:
            done = collect(self.remote, max_age=max_age, max_bytes=max_bytes)
        finally:
            # One that was broken off may go on in the service for as long as that lives.
            until = time.monotonic() + (self.restart_seconds if done is None else 0)
            removed = None if done is None else [decision.candidate.key for decision in done.removed]
            self.journal.note("collected", age=max_age, began=began, until=until, removed=removed)
        self.counts["collections"] += 1
        self.counts["collected"] += len(done.removed)

    def collect_copies(self) -> None:
        """Make room on one host, while its clients read the copies."""
        home = Path(self.world.folder) / f"host-{self.draw.randrange(4)}"
        if home.is_dir():
            with mock.patch.dict(os.environ, {"AOTCACHE_HOME": str(home)}):
                done = collect_copies(max_age=5)
            for problem in done.problems:
                self.journal.fault("unusable", f"gc --home: {problem}")
            self.counts["copies collected"] += len(done.removed)

    def recall(self) -> None:
        """Recall one of the entries that were published last."""
        published = [
            note["number"] for note in notes(Path(self.world.folder)) if note["event"] == "published"
        ]
        numbers = [number for number in published if number not in PINNED][-30:]
        if not numbers:
            return
        self.recalls.learn(self.remote)
        number = self.draw.choice(numbers)
        digest = manifest(number, self.generation(number)).digest
        publish_list(
            self.remote, self.signing, self.recalls, recall={digest: "the soak recalls it"}, seconds=_DAY
        )
        self.journal.note("recalled", number=number, digest=digest)
        self.counts["recalls"] += 1


__all__ = ["MAX_AGE", "Operator", "pin"]
