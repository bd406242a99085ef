"""Making room and keeping what is needed: `gc` and `pin`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from aotcache.cli.entries import SHORT, find
from aotcache.cli.output import (
    JsonFlag,
    Progress,
    StoreOption,
    count,
    emit_json,
    err,
    human_bytes,
    human_time,
    print_lines,
    print_table,
)
from aotcache.cli.quantities import byte_size, duration
from aotcache.errors import ConfigError, NotStored
from aotcache.lockfile import read_lock
from aotcache.store import Store, open_store
from aotcache.store.collect import collect
from aotcache.store.copies import collect_copies
from aotcache.store.evict import Collected, Decision, Reason
from aotcache.store.pins import MOST_REASON
from aotcache.types import Digest, is_digest

_WHY: dict[Reason, str] = {
    "pinned": "pinned",
    "locked": "a lock file names it",
    "leased": "it is being built",
    "newer": "a newer release wrote it",
    "unclear": "a ref that cannot be read may name it",
    "recent": "no entry names it, but it is not a day old: it may be half a publish",
    "busy": "it was used, replaced or left to another run meanwhile",
    "limits": "within the limits",
    "age": "not used for longer than --max-age",
    "size": "used longest ago of what exceeds --max-size",
    "gone": "its archive is gone",
    "unnamed": "no entry names it",
}


def gc(
    max_size: Annotated[
        str | None,
        typer.Option(
            "--max-size", metavar="50GiB", help="Remove what was used longest ago, down to this size."
        ),
    ] = None,
    max_age: Annotated[
        str | None, typer.Option("--max-age", metavar="30d", help="Remove what was not used for this long.")
    ] = None,
    lock: Annotated[
        list[Path] | None,
        typer.Option("--lock", metavar="FILE", help="Keep what this lock file names; can be repeated."),
    ] = None,
    home: Annotated[
        bool,
        typer.Option(
            "--home",
            help="Collect what this host keeps of stores elsewhere, and what it has unpacked; with --store of that "
            "store alone.",
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would go, and why.")] = False,
    store: StoreOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Remove from a store what its limits do not allow: what was used longest ago first.

    Without limits only what nothing names any more goes: archives without an entry, entries
    without an archive, both once they are a day old, and what killed processes left. What is pinned,
    named by a --lock, or being built stays. Exit code 1 if that leaves more than --max-size, or
    something could not be removed.
    """
    limits: dict[str, Any] = {
        "max_bytes": None if max_size is None else byte_size(max_size),
        "max_age": None if max_age is None else duration(max_age).total_seconds(),
        "locked": _locked(lock or ()),
        "dry_run": dry_run,
    }
    with Progress("gc") as progress:
        if home:
            done = collect_copies(store, **limits, told=progress.say)
        else:
            done = collect(open_store(store, tier=False), **limits, told=progress.say)
    if as_json:
        emit_json(_as_json(done))
    else:
        _show(done)
    if done.over or done.problems:
        raise typer.Exit(1)


def _locked(files: Iterable[Path]) -> frozenset[Digest]:
    """Every archive that lock files name. Raises ConfigError for one that is none: it must not count for nothing."""
    return frozenset[Digest]().union(*(read_lock(file).digests() for file in files))


def _as_json(done: Collected) -> dict[str, Any]:
    return {
        "store": done.where,
        "dry_run": done.dry_run,
        "removed": [_row(decision) for decision in done.removed],
        "kept": [_row(decision) for decision in done.decisions if not decision.remove],
        "before": done.before,
        "after": done.after,
        "over": done.over,
        "problems": list(done.problems),
        "notes": list(done.notes),
    }


def _row(decision: Decision) -> dict[str, Any]:
    return {**decision.to_json(), "place": decision.candidate.place}


def _show(done: Collected) -> None:
    shown = [d for d in done.decisions if d.remove or d.reason != "limits"]
    if shown and done.dry_run:
        columns = ("", "what", "", "size", "last used", "why")
        print_table(columns, (_cells(decision) for decision in shown))
    kinds = Counter(decision.candidate.kind for decision in done.removed)
    what = [count(kinds["entry"], "entry")]
    what += [count(kinds["archive"], "archive") + " without one"] * bool(kinds["archive"])
    what += [count(kinds["unpacked"], "unpacked folder")] * bool(kinds["unpacked"])
    said = "would remove" if done.dry_run else "removed"
    sizes = f"{human_bytes(done.before)} -> {human_bytes(done.after)}"
    print_lines([f"{said} {', '.join(what)}: {sizes} in {done.where}"])
    _complain(done)


def _cells(decision: Decision) -> tuple[str, ...]:
    c = decision.candidate
    name = c.key if c.key is not None else c.digest
    return (
        "remove" if decision.remove else "keep",
        (name or "")[:SHORT],
        c.what or (c.kind if c.kind != "entry" else "unreadable"),
        human_bytes(c.size),
        human_time(c.used),
        _WHY[decision.reason],
    )


def _complain(done: Collected) -> None:
    console = err()
    for problem in (*done.notes, *done.problems):
        console.print(problem, markup=False)
    if done.over:
        console.print(
            f"{human_bytes(done.over)} more than --max-size stay: what is left is pinned, locked, in use or not a "
            "day old; `aotcache gc --dry-run` shows what and why",
            markup=False,
        )


def pin(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="WHAT",
            help="A key or digest, or a unique beginning of one. Without it all pins are listed.",
        ),
    ] = None,
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Why, for whoever looks later.")
    ] = "",
    remove: Annotated[bool, typer.Option("--remove", help="Remove the pin.")] = False,
    store: StoreOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Keep an entry whatever a collection's limits say, or list what is kept so.

    A pinned key keeps all its variants, a pinned digest all entries with that archive.
    """
    opened = open_store(store, tier=False)
    if what is None:
        if remove or reason:
            raise ConfigError("say what to pin: a key or digest, or a unique beginning of one")
        _list_pins(opened, as_json=as_json)
        return
    if len(reason) > MOST_REASON:
        raise ConfigError(f"the reason has {len(reason)} characters, expected at most {MOST_REASON}")
    if remove:
        name = _named(what, [pin.what for pin in opened.pins()]) or _stored(opened, what)
        if not opened.unpin(name):
            raise NotStored(f"{name} is not pinned in {opened.url}; `aotcache pin` lists what is", what=name)
        if as_json:
            emit_json({"store": opened.url, "removed": name})
        else:
            print_lines([f"{name} is no longer pinned in {opened.url}"])
        return
    made = opened.pin(_stored(opened, what), reason)
    if as_json:
        emit_json({"store": opened.url, "pinned": asdict(made)})
    else:
        print_lines([f"{made.what} is pinned in {opened.url}"])


def _list_pins(store: Store, *, as_json: bool) -> None:
    pins = store.pins()
    if as_json:
        emit_json({"store": store.url, "pins": [asdict(pin) for pin in pins]})
    elif not pins:
        print_lines([f"nothing is pinned in {store.url}"])
    else:
        print_table(
            ("pinned", "since", "reason"),
            ((pin.what, human_time(pin.at) if pin.at else "-", pin.reason) for pin in pins),
        )


def _stored(store: Store, what: str) -> str:
    """The whole key or digest. One that is given whole need not be stored yet."""
    wanted = what.lower()
    if is_digest(wanted):
        return wanted
    entries = find(store, wanted)
    by_key = entries[0].key.startswith(wanted)
    manifest = entries[0].manifest
    return entries[0].key if by_key or manifest is None else manifest.digest


def _named(what: str, pinned: Sequence[str]) -> str | None:
    found = [name for name in pinned if name.startswith(what.lower())]
    return found[0] if len(found) == 1 else None
