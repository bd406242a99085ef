"""Moving artifacts and checking their bytes and signatures: `fetch` and `verify`. Neither opens one."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from aotcache.archive import contents, flaws, readable
from aotcache.cli.contact import meet
from aotcache.cli.entries import SHORT, find, recalls_in
from aotcache.cli.output import (
    JsonFlag,
    Progress,
    StoreOption,
    emit_json,
    human_bytes,
    human_region,
    print_lines,
)
from aotcache.cli.rerunning import verify_by_running
from aotcache.config import Settings, settings
from aotcache.errors import (
    ConfigError,
    CorruptArtifact,
    NotStored,
    RecalledArtifact,
    RejectedArtifact,
    StoreError,
)
from aotcache.manifest import Manifest
from aotcache.passing import scratch
from aotcache.rotation import sign_with, signing_keys
from aotcache.store import Entry, Store, open_store
from aotcache.store.refusal import refusal, written_by_others
from aotcache.trust import Standing, standing
from aotcache.types import Digest

logger = logging.getLogger(__name__)

KeysArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY", help="Keys or digests, or unique beginnings of them."),
]

_CHUNK = 1 << 20
"""Bytes read at once."""


def fetch(
    keys: KeysArgument = None,
    lock: Annotated[Path | None, typer.Option(help="Everything that this lock file names.")] = None,
    store: StoreOption = None,
    to: Annotated[str | None, typer.Option(metavar="URL", help="Publish into this store.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write each archive to this folder as <digest>.pt2.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Copy artifacts out of a store: into another store, or into a folder.

    What came from elsewhere must be signed by a trusted key, and stays signed as it was. What
    was built on this host is signed with its own key when it leaves it.
    """
    if (to is None) == (out is None):
        raise ConfigError("fetch needs one place to copy to: --to STORE or --out FOLDER")
    if bool(keys) == (lock is not None):
        raise ConfigError("fetch needs what to copy: one or more KEYs, or --lock FILE")
    meet(store)
    source = open_store(store)
    target = None if to is None else open_store(to)
    if target is not None and target.url == source.url:
        raise ConfigError(
            f"fetch would copy {source.url} onto itself; name the other store with --store or --to"
        )
    manifests = _locked(source, lock) if lock is not None else _named(source, keys or [])
    config = settings()
    _require_trusted(source, manifests, config)
    _require_not_recalled(source, manifests)
    if target is not None and not target.own:
        manifests = _signed(source, manifests, config)
    results: list[dict[str, Any]] = []
    with Progress("fetch", len(manifests)) as progress:
        for manifest in manifests:
            name = f"{manifest.digest[:SHORT]} {human_region(manifest.region)} {manifest.mode}"
            progress.say(f"{name} {human_bytes(manifest.size)}")
            stored = _copy(source, manifest, target, out)
            progress.step(f"{name} {'copied' if stored else 'was there already'}")
            results.append(
                {
                    "key": manifest.key,
                    "variant": str(manifest.variant),
                    "digest": manifest.digest,
                    "size": manifest.size,
                    "copied": stored,
                }
            )
    where = target.url if target is not None else str(out)
    if as_json:
        emit_json({"from": source.url, "to": where, "artifacts": results})
    else:
        copied = [r for r in results if r["copied"]]
        total = human_bytes(sum(r["size"] for r in copied))
        print_lines([f"{len(copied)} of {len(results)} artifacts copied to {where}, {total}"])


def _named(source: Store, keys: list[str]) -> list[Manifest]:
    found: dict[tuple[str, str], Manifest] = {}
    for key in keys:
        for entry in find(source, key):
            if entry.manifest is None or entry.problem is not None:
                raise NotStored(
                    f"{source.url}: {entry.key}/{entry.variant} cannot be copied: {entry.problem}; warm it",
                    key=entry.key,
                )
            found[entry.key, entry.variant] = entry.manifest
    return list(found.values())


def _locked(source: Store, lock: Path) -> list[Manifest]:
    from aotcache.lockfile import read_lock

    named = read_lock(lock).cells
    cells = {cell.digest: cell for cell in named}
    found: dict[str, list[Manifest]] = {}
    for manifests in source.resolve(cell.key for cell in named).values():
        for manifest in manifests:
            if manifest.digest in cells:
                found.setdefault(manifest.digest, []).append(manifest)
    missing = sorted(set(cells) - set(found))
    if missing:
        first = cells[missing[0]]
        raise NotStored(
            f"{source.url} lacks {len(missing)} of the {len(cells)} artifacts that {lock} names, first "
            f"{missing[0]} (region {first.region!r}, {first.mode})",
            digests=missing,
        )
    return [manifest for digest in sorted(found) for manifest in found[digest]]


def _require_trusted(source: Store, manifests: Iterable[Manifest], config: Settings) -> None:
    """Refuse what would not be opened from there, before anything of it is read."""
    refused = []
    for manifest in manifests:
        problem = refusal(source, manifest, config)
        if problem is not None:
            refused.append((manifest, problem))
        elif config.trust_unsigned:
            found = standing(manifest, own=source.own, config=config)
            if found.problem is not None:
                logger.warning(
                    "AOTCACHE_TRUST_UNSIGNED is set: copying %s of %s, although %s; without a signature it is opened "
                    "from a store of this user's own as if it had been built here",
                    manifest.digest,
                    source.url,
                    found.problem,
                )
    if refused:
        manifest, problem = refused[0]
        raise RejectedArtifact(
            f"{source.url}: {len(refused)} of the artifacts asked for are not trusted, and nothing is copied; first "
            f"{manifest.digest} (region {manifest.region!r}, {manifest.mode}): {problem}",
            digests=[m.digest for m, _ in refused],
        )


def _require_not_recalled(source: Store, manifests: Iterable[Manifest]) -> None:
    recalls = recalls_in(source)
    refused = [(m, problem) for m in manifests if (problem := recalls.problem(m)) is not None]
    if refused:
        raise RecalledArtifact(
            f"{source.url}: {len(refused)} of the artifacts asked for are recalled, and nothing is copied; first: "
            f"{refused[0][1]}; warm again to have another built, unless the key itself is recalled",
            digests=[manifest.digest for manifest, _ in refused],
        )


def _signed(source: Store, manifests: list[Manifest], config: Settings) -> list[Manifest]:
    """What leaves this host: signed by whoever signed it before, else with this host's key."""
    bare = [manifest for manifest in manifests if manifest.envelope is None]
    if not bare:
        return manifests
    if not source.own:
        raise RejectedArtifact(
            f"{source.url}: {bare[0].digest} is not signed and was not built here, so this host does not sign it "
            "either; have whoever built it publish it again with a key",
            digests=[manifest.digest for manifest in bare],
        )
    keys = signing_keys(config)
    return [sign_with(manifest, keys) if manifest.envelope is None else manifest for manifest in manifests]


def _copy(source: Store, manifest: Manifest, target: Store | None, folder: Path | None) -> bool:
    if folder is not None:
        path = folder / f"{manifest.digest}.pt2"
        if path.exists() and _sha256(path) == manifest.digest:
            return False
        source.fetch(manifest.digest, path)
        return True
    assert target is not None
    with scratch("aotcache-fetch-") as place:
        archive = place / "archive.pt2"
        source.fetch(manifest.digest, archive)
        return target.publish(manifest, archive)


def _sha256(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return found.hexdigest()


def verify(
    keys: KeysArgument = None,
    run: Annotated[
        bool, typer.Option("--run", help="Run what is stored of a spec, and compare with float64 eager.")
    ] = False,
    spec: Annotated[Path | None, typer.Option(help="With --run: the spec.  [default: aotcache.toml]")] = None,
    store: StoreOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Check stored artifacts: manifest, key, signature, the archive's bytes and every member of it.

    Checks all of the store without KEYs. Nothing is opened, so a bad artifact does no
    harm here. Exit code 1 if anything is wrong.

    With --run the certificates of a spec's artifacts are made again instead: a builder's process runs the drafter
    and the artifacts on the spec's batches, and compiles nothing. Exit code 1 if one disagrees with eager,
    cannot be run, or nothing is stored.
    """
    if run:
        verify_by_running(keys or [], spec, store, as_json)
        return
    if spec is not None:
        raise ConfigError("verify --spec is for --run; without it, all of the store is checked")
    # What lies there is checked, not copies of it.
    opened = open_store(store, tier=False)
    if keys:
        entries = list({(e.key, e.variant): e for key in keys for e in find(opened, key)}.values())
    else:
        entries = list(opened.entries())
    config, own, recalls = settings(), opened.own, recalls_in(opened)
    results: list[dict[str, Any]] = []
    standings: list[Standing] = []
    read: dict[str, _Archive] = {}
    with (
        Progress("verify", len(entries)) as progress,
        scratch("aotcache-verify-") as place,
    ):
        for entry in entries:
            name = f"{entry.key[:SHORT]} {entry.variant}"
            progress.say(name)
            problems = _problems(opened, entry, place, read)
            found: Standing | None = None
            if entry.manifest is not None:
                found = standing(entry.manifest, own=own, config=config)
                standings.append(found)
                others = written_by_others(opened, entry.manifest)
                recalled = recalls.problem(entry.manifest)
                problems += [p for p in (found.problem, others, recalled) if p is not None]
            progress.step(f"{name} {'; '.join(problems) or 'good'}")
            digest = entry.manifest.digest if entry.manifest is not None else None
            results.append(
                {
                    "key": entry.key,
                    "variant": entry.variant,
                    "digest": digest,
                    "signature": None if found is None else found.to_json(),
                    "problems": problems,
                }
            )
    bad = [r for r in results if r["problems"]]
    if as_json:
        emit_json({"store": opened.url, "ok": not bad, "entries": results})
    else:
        lines = [f"{r['key']} {r['variant']}: {problem}" for r in bad for problem in r["problems"]]
        good = f"{len(results) - len(bad)} of {len(results)} entries in {opened.url} are good"
        signed = Counter(str(found) for found in standings if found.problem is None)
        lines += [f"{number} {text}" for text, number in signed.items()]
        print_lines([*lines, good if results else f"nothing is stored in {opened.url}"])
    if bad:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class _Archive:
    """What was read of a stored archive: its bytes, the sha256 of its members by name, and what is wrong with it."""

    size: int
    members: Mapping[str, str]
    problems: list[str]


def _problems(store: Store, entry: Entry, place: Path, read: dict[str, _Archive]) -> list[str]:
    """What is wrong with an entry; `read` keeps what archives hold, so that each is read once."""
    manifest = entry.manifest
    if manifest is None or entry.problem is not None:
        return [str(entry.problem)]
    try:
        seen = read.get(manifest.digest) or _read(store, manifest.digest, place)
    except (StoreError, RejectedArtifact) as error:
        return [str(error)]
    read[manifest.digest] = seen
    if seen.size != manifest.size:
        return [f"its archive has {seen.size} bytes, the manifest says {manifest.size}"]
    if seen.problems:
        return [*seen.problems]
    found = seen.members
    problems = [f"member {name} is missing" for name in sorted(set(manifest.members) - set(found))]
    problems += [
        f"member {name} is not in the manifest" for name in sorted(set(found) - set(manifest.members))
    ]
    problems += [
        f"member {name} has sha256 {found[name]}, the manifest says {expected}"
        for name, expected in sorted(manifest.members.items())
        if name in found and found[name] != expected
    ]
    return problems


def _read(store: Store, digest: Digest, place: Path) -> _Archive:
    path = store.blob_path(digest)
    if path is not None:
        return _measured(path)
    path = place / digest
    try:
        store.fetch(digest, path)
        return _measured(path)
    finally:
        path.unlink(missing_ok=True)  # a whole store need not fit beside itself


def _measured(path: Path) -> _Archive:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise StoreError(f"its archive cannot be read: {error.strerror}", path=str(path)) from error
    try:
        with readable(path, what="its archive") as package:
            problems = flaws(package, size)
            return _Archive(size, {} if problems else contents(package), problems)
    except CorruptArtifact as error:
        return _Archive(size, {}, [str(error)])
    except OSError as error:
        return _Archive(size, {}, [f"its archive cannot be read: {error.strerror}"])
