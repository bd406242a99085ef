"""`aotcache verify --run`: stored artifacts against float64 eager."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from aotcache.cli.contact import meet
from aotcache.cli.output import Progress, count, emit_json, human_bucket, human_region, print_lines

if TYPE_CHECKING:
    from aotcache.build.plan import Cell, Plan, Row
    from aotcache.build.rerun import Rerun
    from aotcache.errors import AotcacheError

_SHORT = 12


class _Shown:
    """Shows checks on a `Progress`; implements `aotcache.build.Progress`."""

    def __init__(self, display: Progress) -> None:
        self._display = display

    def planned(self, plan: Plan, builds: Sequence[Cell]) -> None:
        """See `aotcache.build.Progress`."""
        self._display.expect(len(builds))
        self._display.say(f"{count(len(builds), 'artifact')} to run")

    def stage(self, cell: Cell | None, stage: str) -> None:
        """See `aotcache.build.Progress`."""
        self._display.say(stage if cell is None else f"{stage} {cell}")

    def finished(self, cell: Cell, seconds: float, error: AotcacheError | None) -> None:
        """See `aotcache.build.Progress`."""
        self._display.step(f"{cell}  {seconds:.1f} s  {'agrees' if error is None else type(error).__name__}")


def verify_by_running(keys: Sequence[str], spec: Path | None, store: str | None, as_json: bool) -> None:
    """Check again, and print what was found. Exits with 1 unless something was checked and all of it agrees."""
    from aotcache.build.rerun import agreed, rerun

    meet(store)

    def wanted(row: Row) -> bool:
        names = (row.cell.key, row.digest or "")
        return not keys or any(name.startswith(key.lower()) for key in keys for name in names)

    with Progress("verify") as display:
        found = rerun(spec, store=store, wanted=wanted, progress=_Shown(display))
    if as_json:
        emit_json({"ok": agreed(found), "cells": [_to_json(one) for one in found]})
    else:
        print_lines(_lines(found))
    if not agreed(found):
        raise typer.Exit(1)


def _state(one: Rerun) -> str:
    if one.certificate is not None:
        return "agrees"
    if one.error is None:
        return "missing"
    return "disagrees" if type(one.error).__name__ == "CertificateFailed" else "not checked"


def _to_json(one: Rerun) -> dict[str, Any]:
    error = one.error
    return {
        "region": one.cell.region,
        "mode": one.cell.mode,
        "bucket": dict(one.cell.bucket),
        "target": str(one.cell.target),
        "key": one.cell.key,
        "digest": one.digest,
        "state": _state(one),
        "certificate": None if one.certificate is None else asdict(one.certificate),
        "error": None if error is None else {"type": type(error).__name__, "message": str(error)},
        "seconds": one.seconds,
    }


def _lines(found: Sequence[Rerun]) -> Iterator[str]:
    for one in found:
        cell = one.cell
        name = f"{human_region(cell.region)} {cell.mode} {human_bucket(dict(cell.bucket))} {cell.target}"
        if one.certificate is not None:
            worst = max((m.artifact for m in one.certificate.worst), default=0.0)
            digest, batches = (one.digest or "")[:_SHORT], one.certificate.batches
            yield f"{name}: {digest} agrees, by {worst:.2e} of the largest entry on {batches} batches"
        elif one.error is not None:
            yield f"{name}: {_state(one)}: {one.error}"
        else:
            yield f"{name}: nothing is stored, key {cell.key}"
    agree = sum(one.certificate is not None for one in found)
    stored = sum(one.digest is not None for one in found)
    yield f"{agree} of {stored} stored artifacts agree with float64 eager"
