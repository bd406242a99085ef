"""The bundled drafters at work: `demo`.

Warms the examples of a checkout here, then runs two programs of `examples/threads`,
each in a process of its own: training from artifacts, and torch.compile for comparison.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import aotcache
from aotcache.cli.output import JsonFlag, Progress, StoreOption, emit_json, err, print_lines
from aotcache.cli.warming import WarmProgress
from aotcache.errors import AotcacheError, ConfigError
from aotcache.passing import scratch

SPECS = ("dflash/dflash.toml", "eagle3/eagle3.toml")
"""The specs that are warmed; the first is the one that is trained."""

TOLERANCE = 1e-4
"""Largest gradient error against eager, relative to the gradient's largest entry, that
float32 round-off explains."""

_LIMIT = 1800
"""Seconds after which a program counts as hung."""


def demo(
    threads: Annotated[int, typer.Option(min=1, help="Training threads.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each thread.")] = 50,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Builder processes at once.")] = 2,
    examples: Annotated[
        Path | None, typer.Option(help="The examples folder.  [default: the one of this checkout]")
    ] = None,
    store: StoreOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Warm the bundled drafters, train one on threads beside a tracing thread, and compare.

    Exit code 1 if a training thread traced, failed, disagrees with eager, or needed
    torch's own loader.
    """
    folder = _examples(examples)
    builds, seconds = _warm(folder, store, jobs)
    say = err().print
    say(f"training on {threads} threads beside a thread that keeps tracing")
    common = ("--threads", str(threads), "--steps", str(steps))
    where = () if store is None else ("--store", store)
    trained = _program(folder, "train.py", "--spec", str(folder / SPECS[0]), *common, *where)
    say("the same with torch.compile(flex_attention), forward only: torch has no CPU backward for it")
    compared = _program(folder, "torch_compile.py", *common)
    report = {
        "traces_in_workers": trained["traces_in_workers"],
        "worker_errors": len(trained["errors"]),
        "steps": trained["steps"],
        "threads": threads,
        "max_grad_rel_error": trained["max_grad_rel_error"],
        "load_seconds": trained["load_seconds"],
        "first_step_seconds": trained["first_step_seconds"],
        "runners": trained["runners"],
        "torch_compile": compared,
        "builds": builds,
        "build_seconds": seconds,
        "steps_per_second": trained["steps_per_second"],
        "losses": trained["losses"],
        "traces_beside": trained["traces_beside"],
    }
    problems = problems_of(report, trained["errors"], steps)
    if as_json:
        emit_json(report)
    else:
        print_lines(_text(report))
    for problem in problems:
        err().print(f"[bold red]failed[/]: {problem}", markup=True)
    if problems:
        raise typer.Exit(1)


def _examples(given: Path | None) -> Path:
    folder = given if given is not None else Path(aotcache.__file__).parents[1] / "examples"
    missing = [name for name in (*SPECS, "threads/train.py") if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"{folder} is not the examples folder: it has no {missing[0]}. The installed package does not "
            "hold the examples; give the folder of a checkout with --examples"
        )
    return folder.resolve()


def _warm(folder: Path, store: str | None, jobs: int) -> tuple[int, float]:
    from aotcache import build

    builds, started = 0, time.perf_counter()
    for name in SPECS:
        with Progress(f"warm {Path(name).stem}") as display:
            report = build.warm(folder / name, store=store, jobs=jobs, progress=WarmProgress(display))
        if report.failed:
            first = report.failed[0]
            assert first.error is not None
            raise first.error
        builds += len(report.built)
    return builds, time.perf_counter() - started


def _program(folder: Path, name: str, *arguments: str) -> dict[str, Any]:
    """Run one program of `examples/threads`; what it printed goes to stderr, its result is JSON."""
    with scratch("aotcache-demo-") as place:
        result = place / "result.json"
        command = [sys.executable, str(folder / "threads" / name), *arguments, "--result", str(result)]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=sys.stderr, timeout=_LIMIT, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise AotcacheError(f"{name} did not end within {_LIMIT} s; it was stopped") from error
        if done.returncode != 0 or not result.exists():
            raise AotcacheError(f"{name} ended with exit code {done.returncode}; its messages are above")
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def problems_of(report: dict[str, Any], errors: Sequence[str], steps: int) -> list[str]:
    """Why a demo's report is a failure: one sentence per reason, none if it is a success.

    Args:
        report: What `demo --json` prints.
        errors: What training threads and the tracing thread raised.
        steps: How many steps each thread was to make.
    """
    problems = [f"a thread failed: {error}" for error in errors]
    if report["traces_in_workers"]:
        problems.append(f"training threads traced {report['traces_in_workers']} times, expected 0")
    if report["steps"] < steps:
        problems.append(f"a thread made {report['steps']} steps, expected {steps}")
    error = report["max_grad_rel_error"]
    if error is None:
        problems.append("gradients were not compared with eager")
    elif not error <= TOLERANCE:
        problems.append(
            f"gradients differ from eager by {error:g} (relative), expected at most {TOLERANCE:g}"
        )
    if not report["runners"]:
        problems.append("no region ran from an artifact")
    foreign = sorted(region for region, runner in report["runners"].items() if runner != "native")
    if foreign:
        problems.append(f"ran on torch's own loader: {', '.join(foreign)}")
    return problems


def _text(report: dict[str, Any]) -> list[str]:
    compared = report["torch_compile"]
    lines = [
        f"builds                       {report['builds']} in {report['build_seconds']:.1f} s",
        f"load                         {report['load_seconds']:.3f} s",
        f"first training step          {_number(report['first_step_seconds'], '.3f', ' s after attach')}",
        f"traces in training threads   {report['traces_in_workers']}",
        f"traces of the thread beside  {report['traces_beside']}",
        f"errors in training threads   {report['worker_errors']}",
        f"largest gradient error       {_number(report['max_grad_rel_error'], '.2e', ' of eager, relative')}",
    ]
    for i, (rate, losses) in enumerate(zip(report["steps_per_second"], report["losses"], strict=True)):
        course = "no step" if losses is None else f"loss {losses[0]:.4f} -> {losses[1]:.4f}"
        lines.append(f"thread {i}                     {rate:.1f} steps/s, {course}")
    lines += [
        "",
        f"torch.compile beside the same tracing thread, {compared['calls']} calls, forward only:",
        f"FX race errors               {compared['fx_race_errors']}",
        f"other errors                 {compared['other_errors']}",
        f"first call that succeeded    {_number(compared['first_step_seconds'], '.1f', ' s after the start')}",
    ]
    return lines


def _number(value: float | None, form: str, unit: str) -> str:
    return "none" if value is None else f"{value:{form}}{unit}"
