"""The plain trainer of the examples, on a drafter whose functions alone are compiled."""

from __future__ import annotations

import os
import subprocess
import sys

from aotcache.spec import Spec
from tests.cases.support import ROOT


def test_two_threads_train_on_lengths_of_all_kinds(functions: Spec) -> None:
    program = ROOT / "examples" / "threads" / "plain.py"
    done = subprocess.run(
        [sys.executable, program, "--spec", functions.path, "--steps", "4"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        # Two layers and one mask in each step.
        assert line.endswith("hits 12, misses 0, eager_calls 0, traces 0"), line
