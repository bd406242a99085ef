"""`demo`: the main job end to end, and what makes it fail."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aotcache.cli.bundled import TOLERANCE, problems_of

STEPS = 25

GOOD: dict[str, Any] = {
    "traces_in_workers": 0,
    "worker_errors": 0,
    "steps": 50,
    "max_grad_rel_error": 1e-6,
    "runners": {"layers.0": "native"},
}


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    """The examples without inference, and with one bucket each: 3 builds, not 12."""
    folder = tmp_path / "examples"
    shutil.copytree(Path(__file__).parents[2] / "examples", folder)
    for spec in (folder / "dflash/dflash.toml", folder / "eagle3/eagle3.toml"):
        text, changed = re.subn('"train", "infer"', '"train"', spec.read_text())
        text, one = re.subn(r"(seq +=) \[\d+, (\d+)\]", r"\1 [\2]", text)
        assert (changed, one) == (1, 1)
        spec.write_text(text)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_demo_trains_on_four_threads_that_never_trace(examples: Path) -> None:
    command = [sys.executable, "-c", "from aotcache.cli import main; main()", "demo", "--json"]
    command += ["--steps", str(STEPS), "--jobs", "1"]
    done = subprocess.run(
        [*command, "--examples", str(examples)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["builds"] == 3
    assert report["traces_in_workers"] == 0
    assert report["worker_errors"] == 0
    assert report["threads"] == 4
    assert report["steps"] == STEPS
    assert report["max_grad_rel_error"] <= TOLERANCE
    assert report["traces_beside"] > 0
    assert report["runners"] == {"layers.0": "native", "layers.1": "native"}
    assert all(last < first for first, last in report["losses"])
    assert report["load_seconds"] > 0
    assert report["first_step_seconds"] > 0
    compared = report["torch_compile"]
    assert {"fx_race_errors", "other_errors", "first_step_seconds"} <= set(compared)
    assert compared["fx_race_errors"] + compared["other_errors"] <= compared["calls"]


def test_a_good_run_has_no_problems() -> None:
    assert problems_of(GOOD, [], 50) == []


@pytest.mark.parametrize(
    ("change", "errors", "message"),
    [
        ({"traces_in_workers": 3}, [], "traced 3 times"),
        ({}, ["ValueError: no"], "ValueError: no"),
        ({"steps": 49}, [], "49 steps, expected 50"),
        ({"max_grad_rel_error": 1e-2}, [], "gradients differ from eager by 0.01"),
        ({"max_grad_rel_error": float("nan")}, [], "gradients differ"),
        ({"max_grad_rel_error": None}, [], "gradients were not compared"),
        ({"runners": {"layers.0": "torch", "layers.1": "native"}}, [], "torch's own loader: layers.0"),
        ({"runners": {}}, [], "no region ran"),
    ],
)
def test_each_failure_is_named(change: dict[str, Any], errors: list[str], message: str) -> None:
    (problem,) = problems_of({**GOOD, **change}, errors, 50)
    assert message in problem


def test_without_the_examples_it_says_where_to_find_them(run: Any, tmp_path: Path) -> None:
    done = run("demo", "--examples", tmp_path)
    assert done.code == 2
    assert "--examples" in done.err
