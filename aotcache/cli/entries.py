"""Looking at what a store holds: `ls`, `show` and `why`."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from aotcache.cli.deaths import KnownDeaths
from aotcache.cli.output import (
    JsonFlag,
    StoreOption,
    count,
    emit_json,
    err,
    human_bucket,
    human_bytes,
    human_region,
    human_time,
    print_lines,
    print_table,
)
from aotcache.compat import HostFacts, Rejected, verdict
from aotcache.config import settings
from aotcache.errors import NotStored
from aotcache.manifest import InputSlot, Manifest
from aotcache.recall import Recalls
from aotcache.store import Entry, Store, open_store
from aotcache.store.circuit import circuit_for
from aotcache.store.refusal import refusal
from aotcache.trust import Standing, standing

SHORT = 12
"""Characters of a key or digest that tables show; commands take any unique beginning."""

KeyArgument = Annotated[
    str, typer.Argument(metavar="KEY", help="A key or digest, or a unique beginning of one.")
]


def find(store: Store, beginning: str) -> list[Entry]:
    """The entries of one key: all its variants, or those with one digest.

    Args:
        store: Where to look.
        beginning: A key or digest, or a beginning that no other key or digest shares.

    Raises:
        NotStored: nothing or more than one thing begins so.
    """
    wanted = beginning.lower()

    matches = [e for e in store.entries() if e.key.startswith(wanted) or _digest(e).startswith(wanted)]
    by_key = {e.key for e in matches if e.key.startswith(wanted)}
    by_digest = {_digest(e) for e in matches if _digest(e).startswith(wanted)}
    if not matches:
        raise NotStored(
            f"store {store.url} has no key or digest that begins with {beginning!r}; "
            "`aotcache ls` lists what it has, `aotcache why --spec SPEC` explains what it lacks",
            key=beginning,
        )
    if len(by_key) + len(by_digest) > 1:
        named = ", ".join(sorted(text[:SHORT] for text in by_key | by_digest))
        raise NotStored(
            f"{beginning!r} begins several keys or digests in {store.url}: {named}; give more of it",
            key=beginning,
        )
    return matches


def _digest(entry: Entry) -> str:
    return entry.manifest.digest if entry.manifest is not None else ""


def _unreadable(entry: Entry) -> dict[str, Any]:
    return {"key": entry.key, "variant": entry.variant, "problem": entry.problem}


def judge(entries: Iterable[Entry], facts: HostFacts, store: Store) -> list[dict[str, Any]]:
    """Whether a host with these facts accepts each entry of a store, and why not: values for JSON."""
    verdicts = []
    config, recalls = settings(), recalls_in(store)
    for entry in entries:
        reasons = [entry.problem] if entry.problem is not None else []
        if entry.manifest is not None:
            problem = refusal(store, entry.manifest, config)
            recalled = recalls.problem(entry.manifest)
            reasons += [found for found in (problem, recalled) if found is not None]
            answer = verdict(entry.manifest, facts)
            reasons += answer.reasons if isinstance(answer, Rejected) else ()
        verdicts.append(
            {"key": entry.key, "variant": entry.variant, "accepted": not reasons, "reasons": reasons}
        )
    return verdicts


def recalls_in(store: Store) -> Recalls:
    """What is recalled here, with what a store has to say of it now. That it cannot is said on stderr."""
    recalls = Recalls(settings().home)
    unsure = recalls.check(store)
    if unsure is not None:
        err().print(Text(unsure))
    return recalls


def ls(
    region: Annotated[str | None, typer.Option(help="Only regions that match this pattern.")] = None,
    store: StoreOption = None,
    as_json: JsonFlag = False,
) -> None:
    """List what a store holds."""
    opened = open_store(store)
    found = [e for e in opened.entries() if region is None or _matches(e, region)]
    usage = opened.usage()
    deaths, recalls = KnownDeaths.of(opened), recalls_in(opened)
    if as_json:
        emit_json(
            {
                "store": opened.url,
                "entries": [
                    _summary(e) | _signature(e, opened, recalls) | {"deaths": deaths.number(e)} for e in found
                ],
                "refs": usage.refs,
                "blobs": usage.blobs,
                "bytes": usage.bytes,
            }
        )
        return
    away = circuit_for(opened.url).unreached is not None
    where = f"this host's copies of {opened.url}" if away else opened.url
    if not usage.refs:
        fill = "" if away else "; `aotcache warm` and `aotcache fetch --to` fill a store"
        print_lines([f"nothing is stored in {where}{fill}"])
        return
    columns = (
        "key", "region", "mode", "bucket", "target", "torch", "runner", "size", "digest", "deaths", "written",
    )  # fmt: skip
    print_table(columns, (_row(e, deaths.number(e)) for e in found))
    problems = (recalls.problem(e.manifest) for e in found if e.manifest is not None)
    print_lines(dict.fromkeys(problem for problem in problems if problem is not None))
    held = f"{count(usage.refs, 'entry')}, {count(usage.blobs, 'archive')}"
    print_lines([f"{held}, {human_bytes(usage.bytes)} in {where}"])


def _matches(entry: Entry, pattern: str) -> bool:
    return entry.manifest is not None and fnmatch.fnmatchcase(entry.manifest.region, pattern)


def _summary(entry: Entry) -> dict[str, Any]:
    m = entry.manifest
    if m is None:
        return _unreadable(entry)
    return {
        "key": m.key,
        "variant": entry.variant,
        "region": m.region,
        "mode": m.mode,
        "bucket": m.bucket,
        "target": str(m.target),
        "torch": m.toolchain.torch,
        "runner": m.runner,
        "digest": m.digest,
        "size": entry.size,
        "modified": entry.modified,
        "problem": entry.problem,
    }


def _row(entry: Entry, deaths: int) -> Sequence[str]:
    m = entry.manifest
    when = human_time(entry.modified)
    if m is None:
        return (
            entry.key[:SHORT],
            f"unreadable: {entry.problem}",
            "-",
            "-",
            "-",
            "-",
            "-",
            "-",
            "-",
            "-",
            when,
        )
    return (
        m.key[:SHORT],
        human_region(m.region),
        m.mode,
        human_bucket(m.bucket),
        str(m.target),
        m.toolchain.torch,
        m.runner,
        human_bytes(entry.size) if entry.size is not None else "gone",
        m.digest[:SHORT],
        str(deaths or "-"),
        when,
    )


def show(key: KeyArgument, store: StoreOption = None, as_json: JsonFlag = False) -> None:
    """Show the manifests of one key: how it is called, what it needs, how it was checked and built."""
    opened = open_store(store)
    found = find(opened, key)
    deaths, recalls = KnownDeaths.of(opened), recalls_in(opened)
    if as_json:
        emit_json(
            [
                json.loads(e.manifest.to_json()) | _signature(e, opened, recalls) | deaths.to_json(e)
                if e.manifest is not None
                else _unreadable(e)
                for e in found
            ]
        )
        return
    for number, entry in enumerate(found):
        if number:
            print_lines([""])
        if entry.problem is not None:
            print_lines([f"problem      {entry.problem}"])
        print_lines(deaths.lines(entry))
        if entry.manifest is not None:
            recalled = recalls.problem(entry.manifest)
            print_lines([] if recalled is None else [f"recalled     {recalled}"])
            print_lines(
                _describe(entry.manifest, standing(entry.manifest, own=opened.own, config=settings()))
            )


def _signature(entry: Entry, store: Store, recalls: Recalls) -> dict[str, Any]:
    if entry.manifest is None:
        return {}
    return {
        "signature": standing(entry.manifest, own=store.own, config=settings()).to_json(),
        "recalled": recalls.problem(entry.manifest),
    }


def _describe(m: Manifest, signature: Standing) -> Iterator[str]:
    yield f"key          {m.key}"
    yield f"digest       {m.digest}  {human_bytes(m.size)}, {len(m.members)} members"
    yield f"signature    {signature}"
    yield f"region       {human_region(m.region)}, {m.mode}, bucket {human_bucket(m.bucket)}"
    yield f"variant      {m.target}, torch {m.toolchain.torch} ({m.toolchain.git[:10]}), " + (
        f"CUDA {m.toolchain.cuda}" if m.toolchain.cuda else "CPU build"
    )
    yield "runner       " + (
        "native: threads run it at once"
        if m.runner == "native"
        else "torch's own loader: it holds the GIL, so threads take turns (the graph calls extern kernels)"
    )
    yield f"inputs       {len(m.inputs)}"
    yield from (f"  {i:3} {_slot(slot)}" for i, slot in enumerate(m.inputs))
    yield f"outputs      {len(m.outputs)}"
    updates = {mutation.output: m.inputs[mutation.input].name for mutation in m.mutations}
    for i, slot in enumerate(m.outputs):
        note = "" if slot.differentiable else "  not differentiable"
        note += f"  new value of {updates[i]}" if i in updates else ""
        yield f"  {i:3} {slot.dtype} {_sizes(slot.shape)} strides {_sizes(slot.stride)}{note}"
    for alias in m.aliases:
        what = "is" if alias.view is None else "lies in"
        yield f"aliases      tensor {alias.position} of the result {what} {alias.of} {alias.index}"
    if m.pair is not None:
        yield (
            f"backward     takes {len(m.pair.saved_inputs)} saved inputs, {m.pair.intermediates} saved "
            f"intermediates and {len(m.pair.tangents)} incoming gradients, "
            f"returns {len(m.pair.gradients)} gradients"
        )
    yield f"needs        CPU features: {' '.join(m.host.cpu_features) or 'none'}"
    yield f"             glibc {m.host.glibc or '-'}, GLIBCXX {m.host.libstdcxx or '-'}"
    yield f"             libraries: {' '.join(m.host.libraries) or 'none'}"
    if m.host.operators:
        yield f"             custom operators: {' '.join(sorted(m.host.operators))}"
    proof = m.certificate
    yield (
        f"checked      against eager float64 on {proof.batches} batches, tolerance {proof.tolerance:g}; "
        "largest relative error of each batch:"
    )
    yield from (f"             {w.what}: {w.artifact:.2e}, eager itself {w.eager:.2e}" for w in proof.worst)
    built = m.provenance
    stages = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in built.seconds.items())
    yield f"built        {human_time(built.created)}, {sum(built.seconds.values()):.1f} s ({stages})"
    yield f"             torch {built.torch}, Python {built.python}, {built.compiler}" + (
        f", Triton {built.triton}" if built.triton else ""
    )
    yield "components   " + ", ".join(f"{c.name} {c.digest[:SHORT]}" for c in m.parts.components)


def _slot(slot: InputSlot) -> str:
    grad = "  gradient" if slot.requires_grad else ""
    if slot.draw is not None:
        grad = f"  drawn by {slot.draw.operator}({', '.join(str(n) for n in slot.draw.numbers)})"
    return f"{slot.kind:9} {slot.name}  {slot.dtype} {_sizes(slot.shape)} strides {_sizes(slot.stride)}{grad}"


def _sizes(sizes: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in sizes) or "scalar"


def why(
    key: Annotated[
        str | None, typer.Argument(metavar="KEY", help="A key or digest, or a unique beginning of one.")
    ] = None,
    spec: Annotated[Path | None, typer.Option(help="Explain what the store lacks of this spec.")] = None,
    against: Annotated[
        str | None, typer.Option(metavar="KEY", help="Another stored key: name what differs between the two.")
    ] = None,
    store: StoreOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Explain a miss: the nearest stored entry and what differs, or why this host rejects an artifact.

    With a KEY alone the entry must be stored, and every variant's verdict is told. With
    --spec (or neither: `aotcache.toml`) the cells that the store lacks are explained;
    a KEY then picks one of them. Exit code 1 if something is missing or rejected.
    """
    opened = open_store(store)
    if key is not None and against is not None:
        found = _compare(opened, key, against)
    elif key is not None and spec is None:
        found = _verdicts(opened, key)
    else:
        found = _missing(opened, spec, key)
    if as_json:
        emit_json(found)
    else:
        print_lines(_explain(found))
    if not found["ok"]:
        raise typer.Exit(1)


def _compare(store: Store, key: str, against: str) -> dict[str, Any]:
    ours, theirs = (_readable(find(store, k))[0] for k in (key, against))
    differences = ours.parts.diff(theirs.parts)
    return {
        "ok": True,
        "key": ours.key,
        "against": theirs.key,
        "differences": [asdict(d) for d in differences],
        "lines": [f"{ours.key} / {theirs.key}", *(f"  {d}" for d in differences)]
        if differences
        else ["the two are one key"],
    }


def _readable(entries: Iterable[Entry]) -> list[Manifest]:
    entries = list(entries)
    manifests = [e.manifest for e in entries if e.manifest is not None]
    if not manifests:
        raise NotStored(f"key {entries[0].key} has no manifest that can be read: {entries[0].problem}")
    return manifests


def _verdicts(store: Store, key: str) -> dict[str, Any]:
    from aotcache.host import host_facts

    variants = judge(find(store, key), host_facts(), store)
    return {"ok": any(v["accepted"] for v in variants), "variants": variants}


def _missing(store: Store, spec: Path | None, key: str | None) -> dict[str, Any]:
    from aotcache.build import plan

    made = plan(spec, store=store)
    rows = [row for row in made if key is None or row.cell.key.startswith(key.lower())]
    if not rows:
        raise NotStored(
            f"no cell of the spec has a key that begins with {key!r}; the code, structure or call that led "
            "to it is not what the spec makes now. The error of the miss itself names what differs",
            key=key,
        )
    return {
        "ok": all(row.state == "covered" and row.untrusted is None for row in rows),
        "cells": [row.to_json() | _nearest(row, store) for row in rows],
    }


def _nearest(row: Any, store: Store) -> dict[str, Any]:
    if row.state == "covered" or row.recalled is not None:
        return {}
    variants = [str(m.variant) for m in store.lookup(row.cell.key)]
    if variants:
        return {"other_variants": variants}
    from aotcache.runtime.resolve import nearest

    found = nearest(row.cell.parts, row.cell.mode, store.near(row.cell.parts, row.cell.mode))
    if found is None:
        return {"nearest": None, "differences": []}
    m = found.manifest
    return {
        "nearest": m.key,
        "nearest_region": m.region,
        "nearest_bucket": m.bucket,
        "differences": found.differences,
        "explanation": found.lines("the spec"),
    }


def _explain(found: dict[str, Any]) -> Iterator[str]:
    yield from found.get("lines", ())
    for variant in found.get("variants", ()):
        answer = "accepted" if variant["accepted"] else "rejected"
        yield f"{variant['key'][:SHORT]}  {variant['variant']}: {answer}"
        yield from (f"  {reason}" for reason in variant["reasons"])
    for cell in found.get("cells", ()):
        region, bucket = human_region(cell["region"]), human_bucket(cell["bucket"])
        name = f"{region} {cell['mode']} {bucket} {cell['target']}"
        if cell["state"] == "covered":
            refused = cell["untrusted"]
            yield f"{name}: covered by {cell['digest'][:SHORT]}{', which this host does not open' if refused else ''}"
            if refused:
                yield f"  {refused}"
            continue
        yield f"{name}: missing, key {cell['key']}"
        if cell["recalled"] is not None:
            yield f"  what is stored under it does not count: {cell['recalled']}"
        elif "other_variants" in cell:
            yield f"  stored under this key for: {', '.join(cell['other_variants'])}"
        elif cell["nearest"] is None:
            from aotcache.runtime.resolve import nothing_near

            yield f"  {nothing_near(cell['mode'])}"
        else:
            yield from (f"  {line}" for line in cell["explanation"])
