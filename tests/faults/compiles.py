"""kill -9 in real compiles: `aotcache warm` of one small region, killed at every stage that it names.

Rounds kill the command itself, or the builder process that compiles for it. Afterwards the store holds
whole entries only, no builder lives on without its parent, and the same command succeeds.
"""

from __future__ import annotations

import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from aotcache.lockfile import lock_path, read_lock
from aotcache.store import open_store
from tests.faults.tally import Tally
from tests.services.building import children, write_spec
from tests.services.serving import ROOT

LIMIT = 300.0
"""Seconds that a warm of one region may take on a busy machine."""

_COMPILING = 5
"""Lines that a warm has said once it compiles: the first round is killed there, be it the only one."""

_ORPHANS_SECONDS = 20.0
"""Within which a builder must have ended whose parent was killed."""


def compile_rounds(
    folder: Path,
    rounds: int,
    *,
    seed: int = 0,
    headers: Path | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Tally]:
    """Kill so many warms.

    Args:
        folder: For everything.
        rounds: How many.
        seed: Of the delays.
        headers: Precompiled headers of torch's to share; default: made in the first round.
        progress: Told after each round.
    """
    home = folder / "home"
    home.mkdir(parents=True, mode=0o700)
    if headers is not None:
        (home / "headers").symlink_to(headers)
    chance = random.Random(seed)
    tallies = {
        who: Tally("compile", f"aotcache warm, its {who} killed", limit=LIMIT)
        for who in ("parent", "builder")
    }
    stages = 8
    for number in range(rounds):
        who = "builder" if number % 3 == 2 else "parent"
        tally = tallies[who]
        stage = (number + _COMPILING) % stages
        stages = _round(folder, home, tally, number, who, stage, chance.uniform(0, 0.8))
        progress(f"{tally.name}: round {number + 1} of {rounds}, {len(tally.problems)} problems")
    return [tally for tally in tallies.values() if tally.rounds]


def _round(
    folder: Path, home: Path, tally: Tally, number: int, who: str, stage: int, delay: float
) -> int:  # fmt: skip
    """One round; how many stages the warm names that is not disturbed."""
    where = f"round {number}, stage {stage}: "
    # A letter is a region that was never compiled here.
    spec = write_spec(folder / f"spec{number}", chr(ord("a") + number % 25), f"killed{number}")
    store = (folder / "store").as_uri()
    tally.rounds += 1
    warm = _Warm(spec.path, store, home)
    warm.until_stage(stage)
    time.sleep(delay)  # anywhere in the stage, no race is waited for
    builders = warm.builders(at_least=1 if who == "builder" else 0)
    if builders:
        tally.notes["beside a builder"] = tally.notes.get("beside a builder", 0) + 1
    victims = builders[:1] if who == "builder" else [warm.process.pid]
    if warm.process.poll() is None:
        for victim in victims:
            try:
                os.kill(victim, signal.SIGKILL)
                tally.hit += 1
            except ProcessLookupError:
                continue
    status = warm.end()
    if who == "builder" and status not in (0, 1):
        tally.note([f"unusable: it ended with {status}"], where)
    ends = time.monotonic() + _ORPHANS_SECONDS
    while left := [pid for pid in builders if _is_builder(pid)]:
        if time.monotonic() > ends:
            tally.note([f"stuck: builder {left} lives on without its parent"], where)
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            break
        time.sleep(0.05)
    tally.note(_verified(store, home), where)
    lock = lock_path(spec.path)
    if lock.exists():
        tally.acknowledged += 1
        there = {manifest.digest for manifest in open_store(store).list()}
        lost = read_lock(lock).digests() - there
        tally.note([f"lost: the lock file names {digest}" for digest in lost], where)
    began = time.monotonic()
    again = _Warm(spec.path, store, home)
    status = again.end()
    tally.took(time.monotonic() - began)
    if status != 0 or not lock.exists():
        tally.note([f"unusable: the same ends with {status}: {again.said[-5:]}"], where)
    else:
        tally.acknowledged += 1
        there = {manifest.digest for manifest in open_store(store).list()}
        if not read_lock(lock).digests() <= there:
            tally.note(["lost: the lock file names what the store does not have"], where)
    tally.note(_verified(store, home), f"{where}done again: ")
    left_over = [path.name for pattern in ("warm-*", ".removing-*") for path in home.glob(pattern)]
    tally.note([f"unusable: {name} is left in the home" for name in left_over], where)
    return max(3, len(again.said))


class _Warm:
    """`aotcache warm` of a spec, in a process of its own."""

    def __init__(self, spec: Path, store: str, home: Path) -> None:
        variables = {name: value for name, value in os.environ.items() if not name.startswith("AOTCACHE_")}
        variables |= {"AOTCACHE_HOME": str(home), "AOTCACHE_CONFIG_HOME": str(home / "config")}
        variables |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "aotcache", "warm", str(spec), "--store", store, "--jobs", "1"],
            cwd=ROOT,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.said: list[str] = []
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as said:
            for line in said:
                self._lines.put(line.rstrip())
        self._lines.put("")

    def until_stage(self, number: int) -> None:
        """Read lines until so many were said, or it has ended."""
        ends = time.monotonic() + LIMIT
        while len(self.said) < number:
            line = self._lines.get(timeout=max(0.1, ends - time.monotonic()))
            if not line:
                return
            self.said.append(line)

    def builders(self, at_least: int) -> list[int]:
        """Its builders, once there are so many, or it has ended."""
        ends = time.monotonic() + LIMIT
        while True:
            found = children(self.process.pid)
            if len(found) >= at_least or self.process.poll() is not None or time.monotonic() > ends:
                return found
            time.sleep(0.01)

    def end(self) -> int:
        """Wait for its end; its exit status."""
        try:
            status = self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        while not self._lines.empty():
            self.said.append(self._lines.get())
        return status


def _is_builder(pid: int) -> bool:
    try:
        return "aotcache.build.worker" in Path("/proc", str(pid), "cmdline").read_text()
    except OSError:
        return False


def _verified(store: str, home: Path) -> list[str]:
    """What `aotcache verify` finds wrong in the store."""
    done = subprocess.run(
        [sys.executable, "-m", "aotcache", "verify", "--store", store, "--json"],
        cwd=ROOT,
        env={**os.environ, "AOTCACHE_HOME": str(home), "AOTCACHE_CONFIG_HOME": str(home / "config")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    try:
        found = json.loads(done.stdout)
    except ValueError:
        return [f"unusable: verify ended with {done.returncode}: {done.stderr[-500:]}"]
    return [
        f"partial: {entry['key']}: {entry['problems']}" for entry in found["entries"] if entry["problems"]
    ]
