"""`python -m tests.faults`: the long version of the fault harness, and the tables of docs/reliability.md."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.faults.report import write_tables
from tests.faults.tally import Tally


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--kill-rounds", type=int, default=0, help="kill -9 in stages that need no compiler")
    parser.add_argument(
        "--stages", action="append", metavar="TEXT", help="of these, only the stages whose names hold a TEXT"
    )
    parser.add_argument("--compile-rounds", type=int, default=0, help="kill -9 in `aotcache warm`")
    parser.add_argument("--corruptions", type=int, default=0, help="random corruptions of stored entries")
    parser.add_argument("--soak-minutes", type=float, default=0, help="of clients, builders, GC and restarts")
    parser.add_argument(
        "--races", type=int, default=0, help="races of two publishers, for each kind of store"
    )
    parser.add_argument("--answers", type=int, default=0, help="rounds of each wrong answer of a server")
    parser.add_argument("--databases", type=int, default=0, help="times that the database goes away")
    parser.add_argument("--clocks", action="store_true", help="clocks that are an hour off")
    parser.add_argument("--seed", type=int, default=0, help="of whatever is drawn")
    parser.add_argument("--no-report", action="store_true", help="leave docs/reliability.md as it is")
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="aotcache-faults-"))
    folder.chmod(0o755)
    problems = 0
    try:
        for family in _families(asked):
            place = folder / str(time.monotonic_ns())
            place.mkdir()
            tallies = family(place)
            shutil.rmtree(place, ignore_errors=True)
            for tally in tallies:
                print(f"{tally.family}: {tally.name}: {tally.rounds} rounds, {tally.counts}", flush=True)
                for problem in tally.problems:
                    print(f"    {problem}", flush=True)
                problems += len(tally.problems)
            _writer(asked)(tallies)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{problems} problems", flush=True)
    return 1 if problems else 0


Family = Callable[[Path], list[Tally]]


def _families(asked: argparse.Namespace) -> list[Family]:
    """What is to be run; each is imported when it is, because some of it loads torch."""
    seed, found = asked.seed, list[Family]()
    if asked.kill_rounds:
        from tests.faults.kills import STAGES, kill_rounds

        wanted = asked.stages or [""]
        names = tuple(name for name in STAGES if any(text in name for text in wanted))
        found.append(
            lambda place: kill_rounds(
                place, asked.kill_rounds, seed=seed, names=names, progress=_progress(), counted=_writer(asked)
            )
        )
    if asked.races:
        from tests.faults.racing import races

        found.append(lambda place: races(place, asked.races, seed=seed, progress=_progress()))
    if asked.answers:
        from tests.faults.answers import answers

        found.append(lambda place: answers(place, asked.answers, seed=seed, progress=_progress()))
    if asked.databases:
        from tests.faults.databases import databases

        found.append(lambda place: databases(place, asked.databases, locked_seconds=5, progress=_progress()))
    if asked.clocks:
        from tests.faults.clocks import clocks

        found.append(lambda place: clocks(place, progress=_progress()))
    if asked.compile_rounds:
        from tests.faults.compiles import compile_rounds

        found.append(
            lambda place: compile_rounds(place, asked.compile_rounds, seed=seed, progress=_progress())
        )
    if asked.corruptions:
        found.append(lambda place: _corruptions(asked.corruptions, seed))
    if asked.soak_minutes:
        from tests.faults import soak

        found.append(lambda place: [soak.run(asked.soak_minutes, place, seed=seed)])
    return found


def _writer(asked: argparse.Namespace) -> Callable[[list[Tally]], None]:
    """What writes tables, unless they are to stay."""

    def write(tallies: list[Tally]) -> None:
        if not asked.no_report:
            write_tables(tallies)

    return write


def _corruptions(count: int, seed: int) -> list[Tally]:
    from tests.faults import corruption

    say = _progress()
    return corruption.run(count, seed, progress=lambda done: say(f"corruptions: {done} of {count}")).tallies()


def _progress() -> Callable[[str], None]:
    """Every line on a terminal over the one before; elsewhere one every ten seconds."""
    told = [0.0]

    def say(text: str) -> None:
        if sys.stdout.isatty():
            print(f"\r\x1b[2K{text}", end="", flush=True)
        elif time.monotonic() - told[0] > 10:
            told[0] = time.monotonic()
            print(text, flush=True)

    return say


if __name__ == "__main__":
    sys.exit(main())
