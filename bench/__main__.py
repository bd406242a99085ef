"""Runs every benchmark, one after another: `python -m bench [--quick]`."""

from __future__ import annotations

import argparse
import importlib
import sys

from bench.common import publish

ALL = (
    "first_step",
    "steady",
    "dispatch",
    "flex",
    "threads",
    "archive",
    "warm_throughput",
    "stream",
    "serve",
    "misses",
)


def main() -> int:
    """Run them; 1 when one of them failed to run. A missed bar is a figure, not a failure."""
    parser = argparse.ArgumentParser(prog="python -m bench")
    parser.add_argument("--quick", action="store_true", help="fewer repeats: figures are rougher")
    parser.add_argument("only", nargs="*", choices=[*ALL, []], help="the ones to run; all when none is named")
    options = parser.parse_args()
    failed = []
    for name in options.only or ALL:
        try:
            publish(importlib.import_module(f"bench.{name}").run(options.quick))
        except RuntimeError as error:
            failed.append(name)
            print(f"{name} failed: {error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
