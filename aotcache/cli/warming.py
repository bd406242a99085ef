"""Building: `warm`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from aotcache.cli.contact import meet
from aotcache.cli.output import (
    JsonFlag,
    Progress,
    StoreOption,
    count,
    emit_json,
    err,
    human_bucket,
    human_bytes,
    human_region,
    print_lines,
    print_table,
)
from aotcache.errors import AotcacheError

if TYPE_CHECKING:
    from aotcache.build import Cell, Plan, Row, WarmReport

_SHORT = 12


class WarmProgress:
    """Shows a warm on a `Progress`; implements `aotcache.build.Progress`."""

    def __init__(self, display: Progress) -> None:
        self._display = display

    def planned(self, plan: Plan, builds: Sequence[Cell]) -> None:
        """See `aotcache.build.Progress`."""
        covered = sum(row.state == "covered" for row in plan)
        self._display.expect(len(builds))
        to_do = count(len(builds), "build")
        self._display.say(f"{count(len(plan.rows), 'cell')}, {covered} covered, {to_do} to do")

    def stage(self, cell: Cell | None, stage: str) -> None:
        """See `aotcache.build.Progress`."""
        self._display.say(stage if cell is None else f"{stage} {cell}")

    def finished(self, cell: Cell, seconds: float, error: AotcacheError | None) -> None:
        """See `aotcache.build.Progress`."""
        failed = "" if error is None else f"  FAILED: {type(error).__name__}"
        self._display.step(f"{cell}  {seconds:.1f} s{failed}")


def warm(
    specs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="SPEC...", help="Specs, one after the other.  [default: aotcache.toml]"),
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Only show every cell: covered or missing.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="As --plan, and exit 1 if a cell is missing.")
    ] = False,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Builder processes at once.")] = 1,
    force: Annotated[bool, typer.Option("--force", help="Build also what is covered.")] = False,
    target: Annotated[
        list[str] | None,
        typer.Option(metavar="TARGET", help="Build for these instead of the spec's, e.g. cpu:x86_64-avx2."),
    ] = None,
    remote: Annotated[
        bool, typer.Option("--remote", help="Have the service that is the store build what is missing.")
    ] = False,
    store: StoreOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Build and publish what specs ask for and the store does not have.

    One key is built once, whichever layers share it. Where all is covered, the lock file is
    written beside the spec. Exit code 1 if a build failed; the others are published. Of several
    specs, one that fails keeps none of the others from being built; with --json there is a list.
    """
    meet(store)
    wanted: list[Path | None] = list(specs) if specs else [None]
    several = len(wanted) > 1
    reports: list[dict[str, Any]] = []
    failed = False
    for spec in wanted:
        if several and not as_json:
            print_lines([f"{spec}:"])
        try:
            made, report = _one(spec, plan or check, store, jobs, force, target, remote)
        except AotcacheError as error:
            if not several:
                raise
            failed = True
            reports.append({"spec": str(spec), "error": _error_json(error)})
            if not as_json:
                err().print(f"[bold red]{type(error).__name__}[/]:", end=" ")
                err().print(str(error), markup=False)
            continue
        failed = failed or (report is not None and not report.ok) or (check and bool(made.missing))
        if as_json:
            cells = {"cells": [row.to_json() for row in made], "missing": len(made.missing)}
            reports.append(({"spec": str(spec)} if several else {}) | cells | _report_json(report))
        elif report is None:
            _print_plan(made, spec, store)
        else:
            _print_report(report)
        _warn_of_untrusted(made)
        _warn_of_recalled(made)
    if as_json:
        emit_json(reports if several else reports[0])
    if failed:
        raise typer.Exit(1)


def _one(
    spec: Path | None,
    only_plan: bool,
    store: str | None,
    jobs: int,
    force: bool,
    target: list[str] | None,
    remote: bool,
) -> tuple[Plan, WarmReport | None]:
    from aotcache import build

    with Progress("warm") as display:
        progress = WarmProgress(display)
        if only_plan:
            return build.plan(spec, store=store, targets=target, progress=progress), None
        report = build.warm(
            spec, store=store, jobs=jobs, force=force, targets=target, remote=remote, progress=progress
        )
        return report.plan, report


def _error_json(error: AotcacheError) -> dict[str, str]:
    return {"type": type(error).__name__, "message": str(error)}


def _report_json(report: WarmReport | None) -> dict[str, Any]:
    if report is None:
        return {}
    return {
        "ok": report.ok,
        "seconds": report.seconds,
        "lock": None if report.lock is None else str(report.lock),
        "built": [
            {
                "region": b.cell.region,
                "mode": b.cell.mode,
                "bucket": dict(b.cell.bucket),
                "target": str(b.cell.target),
                "key": b.cell.key,
                "seconds": b.seconds,
                "digest": None if b.manifest is None else b.manifest.digest,
                "reused": b.reused,
                "error": None if b.error is None else _error_json(b.error),
            }
            for b in report.built
        ],
    }


def _print_plan(made: Plan, spec: Path | None, store: str | None) -> None:
    first: dict[str, str] = {}
    for row in made:
        first.setdefault(f"{row.cell.key} {row.cell.target}", human_region(row.cell.region))
    rows = [
        (
            human_region(row.cell.region),
            row.cell.mode,
            human_bucket(dict(row.cell.bucket)),
            str(row.cell.target),
            _state(row)
            if not row.shared
            else f"{_state(row)}, as {first[f'{row.cell.key} {row.cell.target}']}",
            "-" if row.seconds is None or row.shared else f"{row.seconds:.0f} s",
            row.cell.key[:_SHORT],
            "-" if row.digest is None else row.digest[:_SHORT],
        )
        for row in made
    ]
    print_table(("region", "mode", "bucket", "target", "state", "expected", "key", "digest"), rows)
    expected = [row.seconds for row in made if row.state == "missing" and not row.shared]
    known = [seconds for seconds in expected if seconds is not None]
    line = f"{count(len(rows), 'cell')}, " + (
        f"{count(len(expected), 'build')} missing" if expected else "all covered"
    )
    if known:
        line += f", about {sum(known):.0f} s of building" + (
            "" if len(known) == len(expected) else f" for the {len(known)} whose like was built before"
        )
    print_lines([line])
    if expected:
        named = ([] if spec is None else [str(spec)]) + ([] if store is None else ["--store", store])
        err().print(Text(f"to build: {shlex.join(['aotcache', 'warm', *named])}"))


def _state(row: Row) -> str:
    return row.state if row.recalled is None else f"{row.state}: recalled"


def _warn_of_recalled(made: Plan) -> None:
    for reason in dict.fromkeys(row.recalled for row in made if row.recalled is not None):
        err().print(Text(f"does not count as there: {reason}"))


def _warn_of_untrusted(made: Plan) -> None:
    """Say why workers on this host would not open what covers a cell, once for each reason."""
    rows = [row for row in made if row.untrusted is not None]
    for reason in dict.fromkeys(row.untrusted for row in rows):
        number = count(sum(row.untrusted == reason for row in rows), "cell")
        err().print(Text(f"not trusted here: what covers {number}: {reason}"))


def _print_report(report: WarmReport) -> None:
    console = err()
    for built in report.failed:
        console.print(f"[bold red]{type(built.error).__name__}[/]:", f"{built.cell}:", end=" ")
        console.print(str(built.error), markup=False)
    done = [b for b in report.built if b.manifest is not None]
    size = sum({b.manifest.digest: b.manifest.size for b in done if b.manifest is not None}.values())
    compiled = sum(not b.reused for b in done)
    cells = count(len(report.plan.rows), "cell")
    if report.built:
        line = (
            f"{cells}: {len(done)} built in {report.seconds:.1f} s "
            f"({compiled} compiled, {len(done) - compiled} from identical graphs, {human_bytes(size)}), "
            f"{len(report.failed)} failed"
        )
    else:
        line = f"{cells}: all covered, nothing to build; looked at in {report.seconds:.1f} s"
    print_lines([line, *([f"lock file {report.lock}"] if report.lock is not None else [])])
