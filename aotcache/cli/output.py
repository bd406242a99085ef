"""How commands speak: a result for people or as JSON, and progress on stderr.

Results go to stdout, everything else to stderr, so `--json` can be piped while
progress is still seen. On a terminal progress is a live bar; elsewhere it is one
plain line per event, which is what a log wants.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store", metavar="URL", help="A store: a path, s3://..., http://...  [default: AOTCACHE_STORE]"
    ),
]

_WIDE = 10_000
"""Columns assumed where no terminal says how many it has: nothing is cut or folded there."""


def emit_json(data: Any) -> None:
    """Print one JSON document to stdout."""
    sys.stdout.write(json.dumps(data, indent=2, sort_keys=True, default=str) + "\n")
    sys.stdout.flush()


def out() -> Console:
    """A console on stdout."""
    return _console(stderr=False)


def err() -> Console:
    """A console on stderr."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, soft_wrap=True, width=None if stream.isatty() else _WIDE)


def plain(text: str) -> str:
    """Text for a terminal: what a store says, names of regions among it, must not move its cursor."""
    return "\n".join(
        "".join(c if c.isprintable() or c == "\t" else "?" for c in line) for line in text.split("\n")
    )


def print_lines(lines: Iterable[str]) -> None:
    """Print lines to stdout, without styles. What goes on after a line break of its own is indented.

    So a text from a store never begins a line that would be taken for one of ours.
    """
    console = out()
    for line in lines:
        console.print(Text(plain(line).replace("\n", "\n    ")))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table to stdout: aligned columns, no frame, one line per row.

    A narrow terminal wraps a row as any long line; cells folded into columns of three letters
    could neither be read nor copied.
    """
    lines = [tuple(columns), *(tuple(plain(cell).replace("\n", "?") for cell in row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for number, line in enumerate(lines):
        text = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        out().print(Text(text, style="" if number else "bold"))


def count(number: int, what: str) -> str:
    """`1, "build"` as `1 build`, `2, "build"` as `2 builds`, `2, "entry"` as `2 entries`."""
    if number == 1:
        return f"1 {what}"
    return f"{number} {what.removesuffix('ry')}ries" if what.endswith("ry") else f"{number} {what}s"


def human_bytes(size: int | None) -> str:
    """`1234567` as `1.2 MB`; decimal units."""
    if size is None:
        return "-"
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def human_bucket(bucket: dict[str, int]) -> str:
    """`{"seq": 1024}` as `seq=1024`."""
    return " ".join(f"{name}={size}" for name, size in sorted(bucket.items())) or "-"


def human_region(name: str) -> str:
    """A region's name; the empty one is the whole drafter."""
    return name or "(whole drafter)"


def human_time(moment: float) -> str:
    """Seconds since the epoch as local date and time; "-" for what is no time, as a store of others can say."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
    except (ValueError, OverflowError, OSError):
        return "-"


class Progress:
    """Progress of one long command on stderr: a bar on a terminal, plain lines elsewhere.

    Use it as a context manager. One thread at a time.

    Args:
        what: What is being done, e.g. `warm`.
        total: How many steps there are, if known.
    """

    def __init__(self, what: str, total: int | None = None) -> None:
        self._what = what
        self._total = total
        self._done = 0
        self._started = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                ProgressColumn,
                Task,
                TextColumn,
                TimeElapsedColumn,
            )
            from rich.progress import Progress as Bar
            from rich.table import Column

            class Now(ProgressColumn):
                """What is being done: the only column that a narrow terminal cuts."""

                def render(self, task: Task) -> Text:
                    return Text(task.description, no_wrap=True, overflow="ellipsis")

            self._bar = Bar(
                TextColumn("[bold]{task.fields[what]}"),
                BarColumn(bar_width=16, table_column=Column(no_wrap=True)),
                MofNCompleteColumn(table_column=Column(no_wrap=True)),
                TimeElapsedColumn(table_column=Column(no_wrap=True)),
                Now(table_column=Column()),
                console=err(),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total, what=self._what)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def expect(self, total: int) -> None:
        """Say how many steps there are."""
        self._total = total
        if self._bar is not None:
            self._bar.update(self._task, total=total)

    def say(self, text: str) -> None:
        """What is being done now, or news: replaces the bar's text, or is a line of its own."""
        text = plain(text)
        if self._bar is not None:
            self._bar.update(self._task, description=text, refresh=True)
        else:
            self._line(text)

    def step(self, text: str) -> None:
        """One more step is done; `text` names it and stays on the screen."""
        self._done, text = self._done + 1, plain(text)
        if self._bar is not None:
            self._bar.console.print(Text(text))
            self._bar.update(self._task, advance=1, description="")
        else:
            count = f"{self._done}/{self._total}" if self._total is not None else str(self._done)
            self._line(f"[{count}] {text}")

    def _line(self, text: str) -> None:
        sys.stderr.write(f"{self._what} {time.monotonic() - self._started:7.1f}s  {text}\n")
        sys.stderr.flush()
