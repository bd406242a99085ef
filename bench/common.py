"""What all benchmarks share: the machine, fresh processes, bars, tables and JSON.

A benchmark measures both sides of each ratio in one run and reports through `publish`. What
must start cold runs in a process of its own: the module calls itself with `--side`, and the
side's last line on stdout is its result as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
SIDE_LIMIT = 900.0
"""Seconds after which a side's process is given up."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A ratio and the bound it is to keep (design section 12)."""

    what: str
    value: float
    bound: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether the ratio keeps its bound."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def __str__(self) -> str:
        relation = "at least" if self.at_least else "at most"
        return f"{self.what}: {_short(self.value)}, bar {relation} {_short(self.bound)}"


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of one benchmark."""

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    bars: Sequence[Bar]
    data: Mapping[str, Any] = field(default_factory=dict)


def machine() -> dict[str, Any]:
    """What the figures depend on: processor, cores, Python, torch. Loads torch."""
    import torch

    model = platform.processor() or platform.machine()
    for line in _lines(Path("/proc/cpuinfo")):
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
    }


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def publish(report: Report) -> None:
    """Print the table and the bars, and write `bench/results/<name>.json`."""
    console = Console()
    table = Table(title=report.title, title_justify="left")
    for i, column in enumerate(report.columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in report.rows:
        table.add_row(*row)
    console.print(table)
    for bar in report.bars:
        console.print(f"  {'met   ' if bar.met else 'MISSED'}  {bar}", highlight=False)
    here = machine()
    console.print(
        f"  {here['processor']}, {here['cores']} cores, torch {here['torch']}, Python {here['python']}\n",
        highlight=False,
    )
    RESULTS.mkdir(parents=True, exist_ok=True)
    document = {
        "name": report.name,
        "machine": here,
        "bars": [{**asdict(bar), "met": bar.met} for bar in report.bars],
        "columns": list(report.columns),
        "rows": [list(row) for row in report.rows],
        "data": dict(report.data),
    }
    (RESULTS / f"{report.name}.json").write_text(json.dumps(document, indent=2) + "\n")


Side = Callable[..., dict[str, Any]]


def main(name: str, run: Callable[[bool], Report], sides: Mapping[str, Side]) -> None:
    """The command line of a benchmark module: the whole of it, or one side in this process."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}")
    parser.add_argument("--quick", action="store_true", help="fewer repeats: figures are rougher")
    parser.add_argument("--side", choices=sorted(sides), help=argparse.SUPPRESS)
    parser.add_argument("--args", default="{}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is not None:
        print(json.dumps(sides[options.side](**json.loads(options.args))), flush=True)
    else:
        publish(run(options.quick))


def fresh(module: str, side: str, *, env: Mapping[str, str] | None = None, **args: Any) -> dict[str, Any]:
    """Run one side of a benchmark in a process of its own and return its result.

    Raises:
        RuntimeError: it failed or took longer than `SIDE_LIMIT`; the message ends with its output.
    """
    command = [sys.executable, "-m", module, "--side", side, "--args", json.dumps(args)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        capture_output=True,
        text=True,
        timeout=SIDE_LIMIT,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"side {side} of {module} exited with {done.returncode}:\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def seconds_per_call(function: Callable[[], Any], *, least: float = 0.2, repeats: int = 5) -> float:
    """The median over `repeats` of the mean time of a call, each over at least `least` seconds."""
    function()
    start = perf_counter()
    function()
    calls = max(1, int(least / max(perf_counter() - start, 1e-7)))
    times = []
    for _ in range(repeats):
        start = perf_counter()
        for _ in range(calls):
            function()
        times.append((perf_counter() - start) / calls)
    return median(times)


def in_turn(
    sides: Mapping[str, Callable[[], Any]], *, rounds: int = 7, least: float = 0.1
) -> dict[str, float]:
    """Seconds per call of several functions, measured in turn so that a busy machine hits all alike.

    The least of the rounds is reported: whatever else runs on the machine only ever adds.
    """
    best: dict[str, float] = {}
    for _ in range(rounds):
        for name, function in sides.items():
            took = seconds_per_call(function, least=least, repeats=1)
            best[name] = min(took, best.get(name, took))
    return best


def text_of_seconds(seconds: float) -> str:
    """Seconds for a table: `1.23 s`, `4.5 ms`, `6.7 µs`."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1.0 or unit == "µs":
            return f"{seconds * factor:.3g} {unit}"
    raise AssertionError


def _short(value: float) -> str:
    return f"1/{1 / value:.4g}" if 0 < value < 0.3 else f"{value:.3g}"
