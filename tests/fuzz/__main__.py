"""The long fuzzing: `python -m tests.fuzz [--seconds 60] [PARSER...]`, or `make fuzz`. Needs atheris (`.[fuzz]`).

Each parser is fuzzed for so long, one after the other. What was learnt is kept in a folder, so that the
next run goes on from there; an input that ends a parser in any other way than by a typed error is kept beside it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fuzz.parsers import PARSERS, Parser

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Fuzz what is named, or everything; 1 if anything was found."""
    asked = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    asked.add_argument("--seconds", type=int, default=60, help="for each parser")
    asked.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir(), f"aotcache-fuzz-{os.getuid()}")
    )
    asked.add_argument("parsers", nargs="*", choices=[*PARSERS, []], metavar="PARSER")
    given = asked.parse_args()
    found = [PARSERS[name] for name in given.parsers] or list(PARSERS.values())
    bad = [parser.name for parser in found if not _fuzz(parser, given.seconds, given.folder)]
    print(
        f"{len(found) - len(bad)} of {len(found)} parsers held" + (f"; not: {', '.join(bad)}" if bad else "")
    )
    return 1 if bad else 0


def _fuzz(parser: Parser, seconds: int, folder: Path) -> bool:
    """Whether a parser held for so long; prints a line about it."""
    name = parser.name.replace(" ", "-")
    corpus, crashes = folder / name / "corpus", folder / name / "crashes"
    for path in (corpus, crashes):
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    for seed in parser.seeds():
        (corpus / hashlib.sha1(seed, usedforsecurity=False).hexdigest()).write_bytes(seed)
    command = [
        sys.executable, "-m", "tests.fuzz.guided", parser.name, str(corpus), f"-max_total_time={seconds}",
        f"-artifact_prefix={crashes}/", "-timeout=20", "-rss_limit_mb=4096", "-max_len=65536", "-print_final_stats=1",
    ]  # fmt: skip
    log = folder / name / "log"
    with log.open("w") as out:
        done = subprocess.run(
            command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, timeout=seconds + 300, check=False
        )
    text = log.read_text(errors="replace")
    runs = re.search(r"number_of_executed_units: (\d+)", text)
    reached = re.findall(r"cov: (\d+)", text)
    state = "held" if done.returncode == 0 else f"FELL, see {log} and {crashes}"
    print(
        f"{parser.name}: {state}; {runs[1] if runs else '?'} inputs, {reached[-1] if reached else '?'} branches",
        flush=True,
    )
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
