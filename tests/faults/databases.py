"""A database that goes away in the middle of requests, and comes back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.faults import entries
from tests.faults.hatchery import Child, Ended
from tests.faults.surroundings import Server, Surroundings, surroundings
from tests.faults.tally import Tally
from tests.services.postgres import Postgres

LIMIT = 90.0
"""Seconds that one publish may take, all its tries included: 60 for a call, and what it waits before."""

SIZE = 20_000
COUNT = 40


class Mortal(Postgres):
    """A server of PostgreSQL that can be killed and started again over its data, and keeps what it committed."""

    def __init__(self) -> None:
        super().__init__(synchronous_commit="on")

    def kill(self) -> None:
        """kill -9 of the server and of whatever serves a connection."""
        children = Path(f"/proc/{self._server.pid}/task/{self._server.pid}/children").read_text().split()
        for pid in (self._server.pid, *map(int, children)):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._server.wait(60)


def databases(
    folder: Path,
    rounds: int,
    *,
    locked_seconds: float = 3.0,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Tally]:
    """Take the database away so many times, each while entries are being published."""
    with surroundings(folder) as around:
        assert around.key is not None
        return [
            _killed(around, rounds, progress),
            _locked(around, rounds, locked_seconds, progress),
        ]


def _killed(around: Surroundings, rounds: int, progress: Callable[[str], None]) -> Tally:
    tally = Tally("database", "PostgreSQL is killed amid publishes, and started again", limit=LIMIT)
    postgres = Mortal()
    try:
        server = Server(around, around.place(), database=postgres.url(postgres.create()))
        server.start()
        for number in range(rounds):
            child = _publishing(around, server, number)
            _after_some(child, server)
            postgres.kill()
            early = child.poll()
            time.sleep(0.2 + 0.1 * (number % 5))  # what is asked meanwhile finds nobody
            postgres.start()
            _judge(around, server, tally, early or child.wait(), number, hit=early is None)
            progress(f"{tally.name}: {number + 1} of {rounds}, {len(tally.problems)} problems")
        server.stop()
    finally:
        postgres.close()
    return tally


def _locked(around: Surroundings, rounds: int, seconds: float, progress: Callable[[str], None]) -> Tally:
    tally = Tally("database", f"SQLite is locked for {seconds:g} s amid publishes", limit=LIMIT)
    server = Server(around, around.place())
    server.start()
    for number in range(rounds):
        child = _publishing(around, server, number)
        _after_some(child, server)
        locking = around.hatched.begin(
            "tests.faults.acts:lock_database",
            {"path": str(server.folder / "aotcache.db"), "seconds": seconds},
            limit=seconds + 60,
            counted=False,
        )
        ended = child.wait()
        # Only a publish that had to wait for the lock, or was refused for it, was hit by it.
        hit = any("refused" in line or line["seconds"] > seconds / 2 for line in ended.acknowledged)
        _judge(around, server, tally, ended, number, hit=hit)
        assert locking.wait().status == 0
        progress(f"{tally.name}: {number + 1} of {rounds}, {len(tally.problems)} problems")
    server.stop()
    return tally


def _publishing(around: Surroundings, server: Server, number: int) -> Child:
    folder = around.folder / "many"
    first = number * COUNT
    for seed in range(first, first + COUNT):
        entries.written(folder, seed, SIZE)
    arguments = {"url": server.url, "folder": str(folder), "first": first, "count": COUNT, "size": SIZE}
    return around.hatched.begin("tests.faults.acts:publish_many", arguments, limit=LIMIT * 2, counted=False)


def _after_some(child: Child, server: Server) -> None:
    """Wait until some entries are in the store, so that what comes hits the middle."""
    refs = server.folder / "store" / "refs"
    before = len(list(refs.glob("*/*/*.json")))
    until = time.monotonic() + LIMIT
    while len(list(refs.glob("*/*/*.json"))) < before + 5:
        assert time.monotonic() < until, "nothing is published"
        time.sleep(0.01)


def _judge(
    around: Surroundings, server: Server, tally: Tally, ended: Ended, number: int, *, hit: bool
) -> None:
    where = f"round {number}: "
    tally.rounds += 1
    tally.hit += hit
    if ended.status != 0:
        tally.note([f"{'late' if ended.late else 'unusable'}: {ended.status} {ended.error}"], where)
    done = {line["key"]: line["digest"] for line in ended.acknowledged if "key" in line}
    refused = [line for line in ended.acknowledged if "refused" in line]
    tally.acknowledged += len(done)
    tally.notes["refused meanwhile"] = tally.notes.get("refused meanwhile", 0) + len(refused)
    for line in ended.acknowledged:
        tally.took(line["seconds"])
    # What was acknowledged is in the store and in the index, and the rest can be published now.
    behind = (server.folder / "store").as_uri()
    for call, arguments in (
        ("examine", {"url": behind, "acknowledged": done}),
        ("examine_index", {"url": server.url, "acknowledged": done}),
    ):
        seen = around.hatched.run(f"tests.faults.acts:{call}", arguments, limit=LIMIT, counted=False)
        tally.note(seen.answer if seen.status == 0 else [f"unusable: {call}: {seen.error}"], where)
    again = _publishing(around, server, number).wait()
    if again.status != 0 or again.answer["refused"]:
        tally.note([f"unusable: publishing does not work again: {again.error} {again.said[:1]}"], where)
