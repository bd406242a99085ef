"""kill -9 between any two operations, at every stage that needs no compiler.

A stage prepares a round, names the act that is killed, and says afterwards what is wrong. The act is then
done again and must succeed: nothing that a killed process left may stand in its way.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.hatchery import Ended, Hatchery
from tests.faults.hosting import (
    Holding,
    Keys,
    LockFile,
    Migrating,
    MigratingPostgres,
    Resuming,
    Taking,
    Trusting,
    Unpacking,
)
from tests.faults.publishing import Bucket, Directory, Replacing, ServerKilled, Service
from tests.faults.stages import LIMIT, Stage
from tests.faults.surroundings import surroundings
from tests.faults.tally import Tally

OUTSIDE = 4
"""Every how manyth round is killed at a random time, from outside, instead of at an operation."""


STAGES: dict[str, type[Stage]] = {
    stage.name: stage
    for stage in (
        Directory, Replacing, Bucket, Service, ServerKilled, Unpacking, Taking, Resuming, Migrating,
        MigratingPostgres, Keys, Trusting, LockFile, Holding,
    )
}  # fmt: skip


@dataclass
class _Points:
    """Operations to be killed at: each once in a random order, then anew."""

    total: int
    chance: random.Random
    left: list[int] = field(default_factory=list)

    def __next__(self) -> int:
        if not self.left:
            self.left = list(range(1, self.total + 1))
            self.chance.shuffle(self.left)
        return self.left.pop()


def kill_rounds(
    folder: Path,
    rounds: int,
    *,
    seed: int = 0,
    names: tuple[str, ...] | None = None,
    progress: Callable[[str], None] = lambda text: None,
    counted: Callable[[list[Tally]], None] = lambda tallies: None,
) -> list[Tally]:
    """Kill so many processes, spread over the stages, and count what was wrong afterwards.

    Args:
        folder: For everything.
        rounds: How many; every stage has one at least.
        seed: Of what is drawn.
        names: Stages; default: all.
        progress: Told after each round.
        counted: Given what was counted so far after each stage.
    """
    with surroundings(folder) as around:
        wanted = [make for name, make in STAGES.items() if names is None or name in names]
        weights = [make.weight for make in wanted]
        shares = _shared(rounds, weights)
        tallies: list[Tally] = []
        for make, share in zip(wanted, shares, strict=True):
            tallies.append(_stage(make(around), share, random.Random(seed), progress))
            counted(tallies)
        return tallies


def _shared(rounds: int, weights: list[int]) -> list[int]:
    whole = sum(weights)
    shares = [max(1, rounds * weight // whole) for weight in weights]
    shares[0] += max(0, rounds - sum(shares))
    return shares


def _stage(stage: Stage, rounds: int, chance: random.Random, progress: Callable[[str], None]) -> Tally:
    tally = Tally("killed", stage.name, limit=LIMIT)
    hatched = stage.around.hatched
    with stage.ready():
        call, arguments = stage.act()
        whole = _act(stage, hatched, call, arguments)
        assert whole.status == 0, f"{stage.name} does not work undisturbed: {whole.error}\n{whole.log}"
        stage.done(whole.acknowledged)
        problems = stage.check()
        assert not problems, problems
        points = _Points(stage.operations(whole), chance)
        for number in range(rounds):
            where = f"round {number}: "
            call, arguments = stage.act()
            if number % OUTSIDE == OUTSIDE - 1:
                how: dict[str, Any] = {"kill_after": chance.uniform(0.0, 1.1 * whole.seconds)}
            else:
                how = {"kill_at": next(points)}
            ended = stage.disturbed(call, arguments, how)
            tally.rounds += 1
            tally.hit += stage.was_hit(ended)
            if ended.late:
                tally.note([f"late: {how}: it was still at work after {LIMIT:g} s"], where)
            elif not stage.may_end_so(ended):
                tally.note([f"unusable: {how}: it ended with {ended.status}: {ended.error}"], where)
            tally.acknowledged += len(ended.acknowledged)
            stage.done(ended.acknowledged)
            tally.note((f"{problem} ({how})" for problem in stage.check()), where)
            began = time.monotonic()
            again = _act(stage, hatched, call, arguments)
            tally.took(time.monotonic() - began)
            if again.status != 0:
                tally.note(
                    [
                        f"unusable: after {how} the same fails with {again.status}: {again.error} {again.log[-2000:]}"
                    ],
                    where,
                )
            tally.acknowledged += len(again.acknowledged)
            stage.done(again.acknowledged)
            tally.note((f"{problem} (done again after {how})" for problem in stage.check()), where)
            tally.note((f"{problem} ({how})" for problem in stage.finished()), where)
            progress(f"{stage.name}: {number + 1} of {rounds}, {len(tally.problems)} problems")
        tally.note(stage.watched())
    tally.notes |= stage.notes
    return tally


def _act(stage: Stage, hatched: Hatchery, call: str, arguments: dict[str, Any]) -> Ended:
    return hatched.run(call, arguments, limit=LIMIT, environment=stage.environment)
