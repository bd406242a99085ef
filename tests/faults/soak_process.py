"""What the processes of a soak have in common: a journal, and a way to do things so that no error escapes."""

from __future__ import annotations

import os
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from aotcache.config import settings
from aotcache.errors import AotcacheError, LeaseHeld, LeaseLost, ServiceUnavailable
from aotcache.manifest import Manifest
from aotcache.recall import Recalls
from aotcache.store import Store
from aotcache.store.circuit import circuit_for
from aotcache.store.http import HttpStore
from aotcache.trust import trust_problem
from tests.faults.soak_world import LIMIT, Journal, World, manifest

SUMMARY_SECONDS = 5.0
"""How often a process adds up what it did: what is killed loses the last of it."""


class Process:
    """One of them.

    Args:
        world: Where it is.
        name: In the journal.
    """

    limit = LIMIT
    """Seconds that one operation may take."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.draw = random.Random(f"{world.seed} {name} {time.monotonic_ns()}")
        self.journal = Journal(Path(world.folder), name)
        self.counts: Counter[str] = Counter()
        self.remote = HttpStore(world.url)
        self.recalls = Recalls(settings().home)
        self.slowest = 0.0
        self._summed = time.monotonic()

    def reached(self) -> bool:
        """Whether the service answered when it was asked last."""
        return circuit_for(self.remote.url).unreached is None

    def attempt(self, work: Callable[[], None]) -> None:
        """Do one thing. A service that is away is a service that is away; any other error is a fault."""
        began = time.monotonic()
        try:
            work()
            if self.reached():
                self.counts["done"] += 1
        except ServiceUnavailable:
            self.counts["away"] += 1
        except (LeaseHeld, LeaseLost):
            self.counts["lease of another"] += 1
        except AotcacheError as error:
            self.journal.fault("unusable", f"{work.__name__}: {type(error).__name__}: {error}")
        except Exception:
            self.journal.fault("unusable", traceback.format_exc())
        took = time.monotonic() - began
        self.slowest = max(self.slowest, took)
        if took > self.limit:
            self.journal.fault("late", f"{work.__name__} took {took:.1f} s, at most {self.limit:g}")

    def run(self, works: dict[Callable[[], None], int], pause: float) -> None:
        """Do one after another, by their weights, until the soak ends, or whoever started it.

        The pauses leave room on a small machine; nothing relies on them.

        Args:
            works: What there is to do.
            pause: Between two of them, in seconds on average.
        """
        choices, weights, parent = list(works), list(works.values()), os.getppid()
        while not self.world.ended and os.getppid() == parent:
            self.attempt(self.draw.choices(choices, weights)[0])
            if time.monotonic() - self._summed > SUMMARY_SECONDS:
                self.sum_up()
            time.sleep(self.draw.uniform(0, 2 * pause))
        self.sum_up()

    def sum_up(self) -> None:
        """Note what was done since the last time."""
        self.journal.note("sum", since=self._summed, counts=dict(self.counts), slowest=self.slowest)
        self.counts.clear()
        self._summed = time.monotonic()

    def sure(self, store: Store) -> bool:
        """Whether anything may be opened, as a worker asks after a look-up. It may not where the service was heard
        to have other recalls, and went away before it told them."""
        problem = self.recalls.check(store)
        if problem is None:
            return True
        if self.reached():
            self.journal.fault("unusable", problem)
        self.counts["unsure of recalls"] += 1
        return False

    def recalled(self, found: Manifest) -> bool:
        """Whether an entry must not be used, as far as this host knows."""
        there = self.recalls.problem(found) is not None
        self.counts["refused as recalled"] += there
        return there

    def refused(self, found: Manifest) -> bool:
        """Whether an entry must not be used, by what a worker asks before it opens one."""
        problem = trust_problem(found, own=False, config=settings(), url=self.remote.url)
        if problem is not None:
            self.journal.fault("wrong", problem)
        return problem is not None or self.recalled(found)

    def generation(self, number: int) -> int:
        """Which build of a number may be there: the first one that nobody has recalled."""
        generation = 0
        while self.recalls.problem(manifest(number, generation)) is not None:
            generation += 1
        return generation
