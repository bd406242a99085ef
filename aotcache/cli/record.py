"""Recording another program's calls: `record`."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from aotcache import compat
from aotcache.cli.output import (
    JsonFlag,
    StoreOption,
    count,
    emit_json,
    err,
    human_region,
    print_lines,
    print_table,
)
from aotcache.config import recording_environment
from aotcache.errors import ConfigError, ManifestError
from aotcache.manifest import Manifest
from aotcache.recorded import Index, calls_folder, read_index
from aotcache.store import open_store

_MANY = 32
"""Different calls of a drafter beyond which padding is worth a hint: each of them is built."""


def record(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="The program and its arguments.")],
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="The spec to write (.toml), or a folder for <spec>.recorded.toml.  [default: beside the spec]",
        ),
    ] = None,
    store: StoreOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Run a program that attaches drafters, and record the calls it makes.

    Nothing is compiled and nothing is traced: every region runs eagerly. What is written,
    <spec>.recorded.toml and a folder of calls beside it, is a spec from which `aotcache warm` builds what
    the run needs, no more. A few steps are enough, if they meet every shape. For example:

        aotcache record -- python train.py --steps 20

        aotcache warm drafter.recorded.toml

    The exit code is the program's; 1 if it ended well and nothing was recorded. With --json the program's
    stdout goes to stderr.
    """
    run = Path(tempfile.mkdtemp(prefix="aotcache-record-"))
    try:
        code = _run(command, recording_environment(output, run), to_stderr=as_json)
        records = _records(run)
    finally:
        shutil.rmtree(run, ignore_errors=True)
    _Report(records, store, code).show(as_json=as_json)
    recorded = any(r.index is not None and r.index.numbers() for r in records)
    if code or not recorded:
        raise typer.Exit(code or 1)


def _run(command: Sequence[str], environment: dict[str, str], *, to_stderr: bool) -> int:
    """Run a program to its end; its exit code, or 128 and the signal that ended it."""
    terminal = _at_terminal()
    running: list[subprocess.Popen[bytes]] = []

    def interrupt(*_: Any) -> None:
        # A terminal has told the program already, and a second Ctrl-C would break its ending.
        if running and not terminal:
            _send(lambda: os.killpg(running[0].pid, signal.SIGINT))

    def terminate(*_: Any) -> None:
        if running:
            _send(running[0].terminate)

    before = [(n, signal.signal(n, h)) for n, h in ((signal.SIGINT, interrupt), (signal.SIGTERM, terminate))]
    try:
        running.append(
            subprocess.Popen(
                list(command),
                env=environment,
                stdout=sys.stderr.fileno() if to_stderr else None,
                start_new_session=not terminal,
            )
        )
        code = running[0].wait()
    except OSError as error:
        raise ConfigError(f"cannot run {command[0]!r}: {error.strerror}; name a program after --") from error
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _at_terminal() -> bool:
    """Whether a terminal sends its Ctrl-C to this process, and so to what it starts."""
    try:
        with open("/dev/tty") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def _send(what: Callable[[], None]) -> None:
    try:
        what()
    except ProcessLookupError:
        pass  # it has ended meanwhile


@dataclass(frozen=True, slots=True)
class _Record:
    """What an attached spec came to. No index where nothing was written."""

    spec: str
    output: Path
    index: Index | None


def _records(run: Path) -> list[_Record]:
    """The records of a run: every `attach` left a note."""
    found: dict[Path, _Record] = {}
    for note in sorted(run.glob("*.json")):
        told = json.loads(note.read_text())
        output = Path(told["output"])
        try:
            index = read_index(calls_folder(output))
        except ManifestError:
            index = None
        if index is not None and index.run != run.name:
            index = None  # of an earlier run: this one wrote nothing
        found[output] = _Record(told["spec"], output, index)
    return list(found.values())


class _Report:
    """What the command says at the end."""

    def __init__(self, records: Sequence[_Record], store: str | None, code: int) -> None:
        self._records = records
        self._store = store
        self._code = code

    def show(self, *, as_json: bool) -> None:
        written = [(r, r.index) for r in self._records if r.index is not None]
        rows = [(r, index, self._rows(index)) for r, index in written]
        if as_json:
            emit_json(
                {
                    "exit_code": self._code,
                    "records": [
                        {
                            "spec": str(r.output),
                            "attached": r.spec,
                            "calls": len(index.numbers()),
                            "keys": keys,
                            "left_out": index.problems(),
                            "warm": self._warm(r.output),
                        }
                        for r, index, keys in rows
                    ],
                }
            )
        for r, index, keys in rows:
            if not as_json:
                self._print(r, index, keys)
            _warn(index)
        if not any(index.numbers() for _, index in written):
            err().print(Text(_nothing(self._records)))

    def _rows(self, index: Index) -> list[dict[str, Any]]:
        """One row for each region and key, and whether the store has what this host can run."""
        stored = open_store(self._store).resolve(set(index.keys))
        rows = []
        for key, recorded in index.keys.items():
            calls = [number for number in index.numbers() if key in index.calls[number - 1].keys]
            state = "covered" if _runs_here(stored[key]) else "missing" if calls else "left out"
            row = {"mode": recorded.mode, "key": key, "calls": calls, "state": state}
            rows += [{"region": name, "count": times, **row} for name, times in recorded.regions.items()]
        return sorted(rows, key=lambda row: (row["region"], row["calls"], row["key"]))

    def _print(self, r: _Record, index: Index, rows: list[dict[str, Any]]) -> None:
        if rows:
            print_table(
                ("region", "mode", "call", "count", "store", "key"),
                [
                    (
                        human_region(w["region"]),
                        w["mode"],
                        ",".join(map(str, w["calls"])) or "-",
                        str(w["count"]),
                        w["state"],
                        w["key"][:12],
                    )
                    for w in rows
                ],
            )
        if index.numbers():
            calls = count(len(index.numbers()), "different call")
            print_lines(
                [f"{calls} of the drafter recorded in {r.output}", f"to build: {self._warm(r.output)}"]
            )

    def _warm(self, output: Path) -> str:
        return shlex.join(
            ["aotcache", "warm", str(output), *([] if self._store is None else ["--store", self._store])]
        )


def _runs_here(manifests: Iterable[Manifest]) -> bool:
    """Whether this host can run one of a key's artifacts."""
    manifests = list(manifests)
    if not manifests:
        return False
    from aotcache.host import host_facts  # needs torch, which takes its time

    return not isinstance(compat.best(manifests, host_facts()), compat.Rejected)


def _warn(index: Index) -> None:
    for problem in index.problems():
        err().print(Text(f"left out: {problem}"))
    if len(index.numbers()) > _MANY:
        err().print(
            Text(
                f"{len(index.numbers())} different calls are as many builds of each region; pad batches with "
                "aotcache.Buckets, and record again"
            )
        )


def _nothing(records: Sequence[_Record]) -> str:
    if not records:
        return (
            "nothing was recorded: the program never came to aotcache.attach. See that it gets there, and that it "
            "hands its environment on to the processes that train"
        )
    specs = ", ".join(sorted({r.spec for r in records}))
    return (
        f"nothing was recorded of {specs}: aotcache.attach was called, and no call of the attached model itself led "
        "to a call of one of its regions that could be kept. See that the model that is attached is the one that is "
        "trained, that it is called as model(...) rather than model.forward(...), and what was left out"
    )
