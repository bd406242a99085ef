"""Two publishers of one key with different archives at the same moment, one of them killed in most rounds."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults import entries
from tests.faults.surroundings import Server, Surroundings, surroundings
from tests.faults.tally import Tally

LIMIT = 30.0
SIZE = 60_000


def races(
    folder: Path, rounds: int, *, seed: int = 0, progress: Callable[[str], None] = lambda text: None
) -> list[Tally]:
    """Race so many times for each kind of store."""
    with surroundings(folder) as around:
        assert around.key is not None
        server = Server(around, around.place())
        server.start()
        places: list[tuple[str, str, dict[str, str], str]] = [
            ("a directory", (around.place() / "store").as_uri(), {}, ""),
            ("a bucket (S3)", around.s3.bucket(), dict(around.s3.environment), ""),
            ("a service", server.url, {}, ""),
        ]
        made = []
        for name, url, environment, _ in places:
            tally = Tally("two publishers", f"one key of {name}", limit=LIMIT)
            chance = random.Random(seed)
            total = _operations(around, url, environment)
            for number in range(rounds):
                _race(around, tally, url, environment, number, total, chance)
                progress(f"two publishers, {name}: {number + 1} of {rounds}, {len(tally.problems)} problems")
            made.append(tally)
        server.stop()
        return made


def _arguments(around: Surroundings, url: str, seed: int, name: str) -> dict[str, Any]:
    archive = entries.written(around.folder / "racing", seed, SIZE)
    return {
        "url": url, "archive": str(archive), "seed": seed, "size": SIZE, "name": name, "sign": True, "tier": False,
    }  # fmt: skip


def _operations(around: Surroundings, url: str, environment: dict[str, str]) -> int:
    ended = around.hatched.run(
        "tests.faults.acts:publish", _arguments(around, url, 900_000, "undisturbed"), environment=environment
    )
    assert ended.status == 0, ended.error
    return ended.operations


def _race(
    around: Surroundings, tally: Tally, url: str, environment: dict[str, str], number: int, total: int,
    chance: random.Random,
) -> None:  # fmt: skip
    where, name = f"round {number}: ", f"race {number}"
    kill_at = chance.randint(1, total) if number % 4 else None
    both = [2 * number, 2 * number + 1]
    racers = [
        around.hatched.begin(
            "tests.faults.acts:publish",
            _arguments(around, url, seed, name),
            environment=environment,
            kill_at=kill_at if which == 0 else None,
            limit=LIMIT,
        )
        for which, seed in enumerate(both)
    ]
    ended = [racer.wait() for racer in racers]
    tally.rounds += 1
    tally.hit += ended[0].killed
    for which, one in enumerate(ended):
        tally.took(one.seconds)
        if one.late:
            tally.note([f"late: publisher {which} was still at work after {LIMIT:g} s"], where)
        elif one.status != 0 and not (which == 0 and one.killed):
            tally.note([f"unusable: publisher {which} ended with {one.status}: {one.error}"], where)
    done = [line for one in ended for line in one.acknowledged]
    tally.acknowledged += len(done)
    winners = [line["digest"] for line in done if line["stored"]]
    if len(winners) > 1:
        tally.note([f"lost: both were told that theirs was stored: {winners}"], where)
    key = entries.manifest_of(both[0], SIZE, name).key
    expected = dict.fromkeys([key], winners[0]) if winners else {}
    arguments = {"url": url, "key": key, "digest": expected.get(key)}
    seen = around.hatched.run(
        "tests.faults.acts:examine_key", arguments, environment=environment, limit=LIMIT
    )
    tally.note(seen.answer if seen.status == 0 else [f"unusable: {seen.error}"], where)
    # Whoever was killed comes again: stored now, or told that one is there.
    again = around.hatched.run(
        "tests.faults.acts:publish",
        _arguments(around, url, both[0], name),
        environment=environment,
        limit=LIMIT,
    )
    if again.status != 0:
        tally.note([f"unusable: the same fails afterwards: {again.error}"], where)
    for seed in both:
        (around.folder / "racing" / f"{seed}-{SIZE}.pt2").unlink()
