"""What this host can and cannot do: `doctor`."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from aotcache.cli.entries import SHORT, judge
from aotcache.cli.output import (
    JsonFlag,
    StoreOption,
    count,
    emit_json,
    human_bucket,
    human_bytes,
    human_region,
    human_time,
    print_lines,
    print_table,
)
from aotcache.cli.recall import renewing
from aotcache.compat import best
from aotcache.config import settings
from aotcache.errors import AotcacheError, RejectedArtifact
from aotcache.manifest import Manifest
from aotcache.recall import Recalls
from aotcache.rotation import previous_key_path
from aotcache.store import Entry, Store, open_store
from aotcache.store.circuit import circuit_for
from aotcache.trust import SigningKey, signing_key_path, trusted_keys

if TYPE_CHECKING:
    from aotcache.compat import HostFacts

_COMPILERS = ("g++", "clang++", "c++")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        what: What was looked at.
        state: `ok`; `note` for what only matters to some uses; `fail` for what must be mended.
        detail: What was found, and for `fail` what to do.
    """

    what: str
    state: Literal["ok", "note", "fail"]
    detail: str


def doctor(store: StoreOption = None, as_json: JsonFlag = False) -> None:
    """Report on this host: torch, target, compiler, home, and every stored artifact's verdict.

    Exit code 1 if something must be mended before artifacts can be loaded here.
    """
    findings = [*_python(), *_torch(), *_compiler(), *_home(), *_keys()]
    verdicts: list[dict[str, Any]] = []
    try:
        opened = open_store(store)
        entries = list(opened.entries())
        facts = _facts()
        if facts is not None:
            verdicts = _with_taken(entries, judge(entries, facts, opened), facts)
        findings.append(_store(opened, entries))
        findings += _recalls(opened)
    except AotcacheError as error:
        findings.append(Finding("store", "fail", str(error)))
    findings += _summary(verdicts)
    ok = all(f.state != "fail" for f in findings)
    if as_json:
        emit_json({"ok": ok, "findings": [asdict(f) for f in findings], "artifacts": verdicts})
    else:
        print_table(("", "what", "found"), ((f.state, f.what, f.detail) for f in findings))
        if verdicts:
            print_lines([""])
            print_table(("key", "region", "mode", "bucket", "variant", "verdict"), map(_verdict, verdicts))
        print_lines(f"{v['key'][:SHORT]}  {v['variant']}: {r}" for v in verdicts for r in v["reasons"])
    if not ok:
        raise typer.Exit(1)


def _python() -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")


def _torch() -> Iterator[Finding]:
    from aotcache.host import host_facts, host_target, host_toolchain

    try:
        yield Finding("torch", "ok", str(host_toolchain()))
    except ImportError as error:
        yield Finding("torch", "fail", f"cannot be imported: {error}; pip install 'torch>=2.11,<2.15'")
        return
    except AotcacheError as error:
        yield Finding("torch", "fail", str(error))
        return
    facts = host_facts()
    yield Finding("target", "ok", str(host_target("cpu")))
    for arch in facts.cuda_archs:
        yield Finding("target", "ok", f"cuda:{arch}, driver for CUDA {facts.driver}")
    yield Finding("libraries", "ok", f"glibc {facts.glibc}, GLIBCXX {facts.libstdcxx}")


def _facts() -> HostFacts | None:
    from aotcache.host import host_facts

    try:
        return host_facts()
    except (ImportError, AotcacheError):
        return None  # reported by _torch


def _compiler() -> Iterator[Finding]:
    for name in _COMPILERS:
        path = shutil.which(name)
        if path is None:
            continue
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=False)
        if done.returncode == 0:
            yield Finding("compiler", "ok", f"{path}: {done.stdout.partition(chr(10))[0]}")
            return
    yield Finding(
        "compiler",
        "note",
        "no C++ compiler: artifacts load, `aotcache warm` cannot build; apt-get install g++",
    )


def _home() -> Iterator[Finding]:
    try:
        home = settings().home
    except AotcacheError as error:
        yield Finding("home", "fail", str(error))
        return
    nearest = home if os.path.exists(home) else next(p for p in home.parents if os.path.exists(p))
    try:
        # Tried, not read from the mode: root, access lists and read-only mounts all differ from it.
        with tempfile.NamedTemporaryFile(dir=nearest, prefix=".aotcache-doctor-"):
            pass
    except OSError as error:
        yield Finding("home", "fail", f"{home}: cannot write there ({error.strerror}); set AOTCACHE_HOME")
        return
    if os.statvfs(nearest).f_flag & os.ST_NOEXEC:
        yield Finding(
            "home",
            "fail",
            f"{home}: on a file system mounted noexec, libraries cannot be opened there; set AOTCACHE_HOME",
        )
        return
    free = human_bytes(shutil.disk_usage(nearest).free)
    yield Finding("home", "ok", f"{home}{'' if os.path.exists(home) else ' (not made yet)'}, {free} free")
    kind = _file_system(nearest)
    if kind in ("nfs", "nfs4", "cifs", "smb3", "lustre", "fuse.sshfs"):
        yield Finding(
            "home", "note", f"{home} is on {kind}: locks need a local disk; set AOTCACHE_HOME to one"
        )


def _keys() -> Iterator[Finding]:
    """Who signs here, and whose signatures count."""
    try:
        config = settings()
        trusted = trusted_keys(config).list()
    except AotcacheError as error:
        yield Finding("trusted keys", "fail", str(error))
        return
    names = ", ".join(f"{key.name} ({key.key.fingerprint})" for key in trusted)
    yield Finding("trusted keys", "ok", names or "none: only what this user built on this host is opened")
    if config.trust_unsigned:
        yield Finding(
            "trusted keys", "note", "AOTCACHE_TRUST_UNSIGNED is set: artifacts are opened whoever made them"
        )
    path = signing_key_path(config)
    if not os.path.exists(path):
        yield Finding(
            "signing key", "note", f"none at {path}: what is built here cannot be published; aotcache keygen"
        )
        return
    try:
        public = SigningKey.load(path).public
    except AotcacheError as error:
        yield Finding("signing key", "fail", str(error))
        return
    if previous_key_path(config).exists():
        yield Finding(
            "signing key",
            "note",
            "a rotation is open, and the key before it signs too: when your stores are signed by both (aotcache "
            "sign), and every host trusts the new one, aotcache keygen --retire",
        )
    if any(key.key == public for key in trusted):
        yield Finding("signing key", "ok", f"{public.fingerprint} at {path}, trusted here")
    else:
        yield Finding(
            "signing key",
            "note",
            f"{public.fingerprint} at {path} is not trusted here; if it has leaked, delete that file and run "
            f"aotcache keygen, else aotcache trust add {public.to_text()}",
        )


_SOON_SECONDS = 14 * 24 * 3600.0
"""A recall list that expires within this is told of."""


def _recalls(store: Store) -> Iterator[Finding]:
    """What was taken back, and whether this host can be sure to know all of it."""
    recalls = Recalls(settings().home)
    recalls.learn(store)
    lists, stale = recalls.newest(), recalls.stale(store)
    if stale is not None:
        yield Finding("recalls", "note", stale)
    elif lists:
        yield Finding(
            "recalls", "ok", f"{count(len(recalls.in_force()), 'recall')} in force: aotcache recall"
        )
    soon = time.time() + _SOON_SECONDS
    for signer, listed in lists:
        if stale is None and listed.expires < soon:
            when = human_time(listed.expires)
            yield Finding("recalls", "note", f"the list by {signer} expires {when}: {renewing(store)}")
    for key in recalls.uncounted():
        yield Finding("recalls", "note", f"lists by {key} do not count: it is not trusted (any more)")


def _file_system(path: Path) -> str | None:
    """Type of the file system that holds `path` (Linux), or None."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return None
    real = path.resolve()
    holding = [m for m in mounts if len(m) > 2 and real.is_relative_to(m[1].replace(r"\040", " "))]
    return max(holding, key=lambda m: len(m[1]))[2] if holding else None


def _store(store: Store, entries: list[Entry]) -> Finding:
    """How much a store holds, and whether a worker would open what lies there.

    One archive stands for all: looking at it reads it whole.
    """
    usage = store.usage()
    first = next((entry.usable for entry in entries if entry.usable is not None), None)
    try:
        if first is not None:
            store.blob_path(first.digest)
    except RejectedArtifact as error:
        return Finding("store", "fail", str(error))
    unreached = circuit_for(store.url).unreached
    if unreached is not None:
        return Finding("store", "fail", f"{unreached}; of its entries this host has {usage.refs}")
    return Finding("store", "ok", f"{store.url}: {count(usage.refs, 'entry')}, {human_bytes(usage.bytes)}")


def _with_taken(
    entries: list[Entry], verdicts: list[dict[str, Any]], facts: HostFacts
) -> list[dict[str, Any]]:
    """The verdicts with what they are about, and which of several accepted variants of a key a worker takes."""
    accepted: dict[str, list[Manifest]] = {}
    for entry, found in zip(entries, verdicts, strict=True):
        if entry.manifest is not None and found["accepted"]:
            accepted.setdefault(entry.key, []).append(entry.manifest)
    taken = {key: best(manifests, facts) for key, manifests in accepted.items()}
    return [
        found
        | {
            "region": None if entry.manifest is None else entry.manifest.region,
            "mode": None if entry.manifest is None else entry.manifest.mode,
            "bucket": None if entry.manifest is None else entry.manifest.bucket,
            "taken": entry.manifest is not None and taken.get(entry.key) is entry.manifest,
        }
        for entry, found in zip(entries, verdicts, strict=True)
    ]


def _verdict(found: dict[str, Any]) -> tuple[str, ...]:
    """One line of the table of verdicts."""
    if found["mode"] is None:
        about = ("-", "-", "-")
    else:
        about = (human_region(found["region"]), found["mode"], human_bucket(found["bucket"]))
    reasons = len(found["reasons"])
    answer = f"rejected: {reasons} reason{'' if reasons == 1 else 's'}, below"
    if found["accepted"]:
        answer = "accepted" if found["taken"] else "accepted; a better variant of this key is taken"
    return (found["key"][:SHORT], *about, found["variant"], answer)


def _summary(verdicts: list[dict[str, Any]]) -> Iterator[Finding]:
    if not verdicts:
        return
    count = Counter(v["accepted"] for v in verdicts)
    state: Literal["ok", "note"] = "note" if count[False] else "ok"
    yield Finding("artifacts", state, f"{count[True]} accepted here, {count[False]} rejected")
