"""The soak: clients and builders at one service over PostgreSQL and a bucket that is killed again and again.

`run` does it and looks afterwards at everything that was acknowledged: it is there and right, or was
collected or recalled by rule. What clients and builders do is in `soak_workers.py`, what an operator does
beside them in `soak_operator.py`, what is stored in `soak_world.py`, and the last look in `soak_audit.py`.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from aotcache.trust import SigningKey, TrustedKeys
from tests.faults import soak_audit
from tests.faults.soak_operator import pin
from tests.faults.soak_world import LIMIT, Journal, World, notes
from tests.faults.tally import Tally
from tests.services.postgres import Postgres
from tests.services.s3 import s3_server
from tests.services.serving import ROOT, serving

AGAIN_SECONDS = 150.0
"""Within which everybody must be at work again once the service is back for good."""

_END_SECONDS = 120.0
"""Within which every process must have ended after it was told to."""

Role = tuple[str, int]


def run(
    minutes: float,
    folder: Path,
    *,
    clients: int = 8,
    builders: int = 2,
    restart_seconds: float = 30.0,
    seed: int = 0,
) -> Tally:
    """Soak one service, and look at what is left.

    Args:
        minutes: How long everybody is at work, restarts included.
        folder: For everything; there is nothing in it.
        clients, builders: How many processes of each.
        restart_seconds: How long the service lives each time.
        seed: Of what is drawn.

    Returns:
        What was done and what went wrong; a round is a life of the service, of which most end by SIGKILL.
        Nothing is raised for what the service did.
    """
    tally = Tally("soak", f"{clients} clients and {builders} builders for {minutes:g} minutes", limit=LIMIT)
    home = folder / "service"
    key = SigningKey.generate()
    key.save(home / "config" / "signing.pem")
    TrustedKeys(home / "config" / "trusted").add(key.public, "builders")
    postgres = Postgres()
    try:
        with s3_server(folder / "s3") as s3:
            place: dict[str, Any] = {
                "store": s3.bucket(),
                "database": postgres.url(postgres.create()),
                "environment": dict(s3.environment),
            }
            with serving(home, **place) as server:
                world = World(str(folder), server.url, seed)
                world.save()
                place["port"] = int(server.url.rpartition(":")[2])
                pin(world, server.config_home)
            with _Crew(world, home / "config", clients, builders, restart_seconds) as crew:
                _restart_again_and_again(home, place, crew, tally, 60 * minutes, restart_seconds)
            with serving(home, **place) as server:
                tally.note(soak_audit.look(server, s3.environment, folder))
    finally:
        postgres.close()
    _add_up(folder, tally)
    return tally


def _restart_again_and_again(
    home: Path, place: dict[str, Any], crew: _Crew, tally: Tally, seconds: float, restart_seconds: float
) -> None:
    """For as long as the soak is to last; then once more, until everybody is at work again."""
    draw = random.Random(seconds)
    ends = time.monotonic() + seconds
    while True:
        with serving(home, **place) as server:
            crew.watch(min(time.monotonic() + restart_seconds, ends), tally)
            if time.monotonic() >= ends:
                crew.see_all_at_work(tally)
                crew.end(tally)
                return
            if tally.rounds % 3 == 2:
                server.close()
            else:
                server.kill()
                tally.hit += 1
            crew.note_end_of_service()
        tally.rounds += 1
        crew.kill_one(draw)


class _Crew:
    """The processes. Two clients share a host, as far as aotcache can tell; the others have their own."""

    def __init__(
        self, world: World, config_home: Path, clients: int, builders: int, restart_seconds: float
    ) -> None:
        self._world, self._config, self._seconds = world, config_home, restart_seconds
        self._roles: list[Role] = [("operator", 0)]
        self._roles += [*(("client", n) for n in range(clients)), *(("builder", n) for n in range(builders))]
        self._running: dict[Role, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> _Crew:
        for role in self._roles:
            self._start(role)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            if process.poll() is None:
                process.kill()
            process.wait()

    def _start(self, role: Role) -> None:
        folder, (kind, number) = Path(self._world.folder), role
        home = folder / (f"host-{number // 2}" if kind == "client" else f"{kind}-{number}")
        home.mkdir(mode=0o700, exist_ok=True)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("AOTCACHE_")}
        own = {"AOTCACHE_HOME": str(home), "AOTCACHE_CONFIG_HOME": str(self._config)}
        with (folder / f"{kind}-{number}.log").open("ab") as log:
            self._running[role] = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.faults.soak_processes"),
                    *(kind, str(folder), str(number), str(self._seconds)),
                ],
                env={**kept, **own, "AOTCACHE_STORE": self._world.url},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def watch(self, until: float, tally: Tally) -> None:
        """Wait; a process that ends meanwhile is a fault, and is replaced."""
        while time.monotonic() < until:
            for role, process in list(self._running.items()):
                if process.poll() is not None:
                    tally.note([f"unusable: {role[0]} {role[1]} ended with {process.returncode}"])
                    self._start(role)
            time.sleep(0.1)

    def note_end_of_service(self) -> None:
        """For the audit: what was going on there was never told to the end."""
        Journal(Path(self._world.folder), "service").note("service ended")

    def kill_one(self, draw: random.Random) -> None:
        """As a power cut would, in the middle of whatever it does; another one takes its place."""
        role = draw.choice(self._roles)
        self._running[role].kill()
        self._running[role].wait()
        self._start(role)

    def see_all_at_work(self, tally: Tally) -> None:
        """Wait until each has done something again since now, but for the operator, whose collections may be long."""
        since = time.monotonic()
        missing = {f"{kind}-{number}" for kind, number in self._roles if kind != "operator"}
        while missing and time.monotonic() < since + AGAIN_SECONDS:
            self.watch(time.monotonic() + 1, tally)
            for note in notes(Path(self._world.folder)):
                if note["event"] == "sum" and note["since"] > since and note["counts"].get("done"):
                    missing.discard(note["who"])
        for name in sorted(missing):
            tally.note([f"unusable: {name} did nothing within {AGAIN_SECONDS:g} s of the last start"])

    def end(self, tally: Tally) -> None:
        """Tell all to end after what they are doing, and wait for it."""
        self._world.end()
        until = time.monotonic() + _END_SECONDS
        for (kind, number), process in self._running.items():
            try:
                status = process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                tally.note([f"late: {kind} {number} had not ended after {_END_SECONDS:g} s"])
            else:
                if status != 0:
                    tally.note([f"unusable: {kind} {number} ended with {status}"])


def _add_up(folder: Path, tally: Tally) -> None:
    done: Counter[str] = Counter()
    for note in notes(folder):
        if note["event"] == "sum":
            done.update(note["counts"])
            tally.slowest = max(tally.slowest, note["slowest"])
        elif note["event"] == "fault":
            tally.note([f"{note['kind']}: {note['who']}: {note['text']}"])
        elif note["event"] == "published":
            tally.acknowledged += 1
    tally.notes = dict(done)
