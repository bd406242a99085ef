"""What children of the hatchery do: acts that may be killed, and checks afterwards. All of it through the product."""

from __future__ import annotations

import codecs
import hashlib
import importlib
import io
import os
import pkgutil
import random
import sqlite3
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import alembic.autogenerate
import alembic.command
import filelock
import httpx
import obstore.store
import psycopg
import sqlalchemy
import sqlalchemy.dialects.postgresql.psycopg
import sqlalchemy.dialects.sqlite.pysqlite
import uvicorn
from typer.main import get_command

import aotcache.api.app
import aotcache.cli.database
import aotcache.cli.keys
import aotcache.cli.serve
from aotcache import lockfile, passing
from aotcache.cli import doctor
from aotcache.cli import main as run_command_line
from aotcache.cli.app import app
from aotcache.config import Settings
from aotcache.db import migrate
from aotcache.db.engine import Database
from aotcache.errors import AotcacheError, NotStored, StoreError
from aotcache.runtime import registry
from aotcache.store import ObjectStore, http, open_store, tiered
from aotcache.store.local import locked
from aotcache.trust import SigningKey, signing_key_path, trusted_keys
from aotcache.types import CacheKey, Digest, Target
from tests.faults import entries, shim
from tests.faults.hatchery import acknowledge
from tests.manifests import make_manifest

_IMPORTED = (
    alembic.autogenerate, alembic.command, aotcache.api.app, aotcache.cli.database, aotcache.cli.keys,
    aotcache.cli.serve, filelock, http, httpx, obstore.store, psycopg, sqlalchemy.dialects.postgresql.psycopg,
    sqlalchemy.dialects.sqlite.pysqlite, tiered, uvicorn,
)  # fmt: skip
"""Imported before anything is forked, so that no child does it again."""


def warm_up() -> None:
    """Have what is loaded at first use loaded before anything is forked."""
    get_command(app)
    SigningKey.generate()
    codecs.lookup("cp437")  # zipfile's, where another user may not read the interpreter's files
    for entry in pkgutil.iter_modules(aotcache.cli.__path__, "aotcache.cli."):
        importlib.import_module(entry.name)


def publish(
    url: str,
    archive: str,
    seed: int,
    size: int,
    name: str | None = None,
    replace: bool = False,
    sign: bool = False,
    tier: bool = True,
) -> bool:
    """Publish an entry, and acknowledge it."""
    manifest = entries.manifest_of(seed, size, name)
    if sign:
        manifest = entries.signed(manifest)
    stored = open_store(url, tier=tier).publish(manifest, Path(archive), replace=replace)
    acknowledge(key=manifest.key, digest=manifest.digest, stored=stored)
    return stored


def unpack(url: str, key: str) -> str:
    """Unpack the one entry of a key as a worker does right before it opens it."""
    store = open_store(url)
    (manifest,) = store.lookup(CacheKey(key))
    folder = registry.unpack(manifest, registry._Fetched(store), Settings().home)
    acknowledge(folder=str(folder))
    return str(folder)


def take(url: str, key: str) -> str:
    """Fetch the one archive of a key into this host's tier."""
    store = open_store(url)
    (manifest,) = store.lookup(CacheKey(key))
    path = store.blob_path(manifest.digest)
    assert path is not None
    assert path.read_bytes() == entries.right_archive(manifest)
    acknowledge(path=str(path), digest=manifest.digest)
    return str(path)


def command(*, argv: list[str]) -> int:
    """Run a command line as the `aotcache` program does; its exit status."""
    sys.argv = ["aotcache", *argv]
    try:
        run_command_line()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
        if status == 0:
            acknowledge(argv=argv)
        return status
    return 0


def write_lock(path: str, cells: int, mark: str) -> bool:
    """Write a lock file with so many cells."""
    lock = lock_of(cells, mark)
    changed = lockfile.write_lock(Path(path), lock)
    acknowledge(mark=mark, cells=cells)
    return changed


def lock_of(cells: int, mark: str) -> lockfile.Lock:
    """A lock file's content: `mark` is in every cell of it."""
    digest = Digest("ab" * 32)
    return lockfile.Lock(
        mark,
        [
            lockfile.LockedCell(
                region=f"layers.{number}",
                mode="infer",
                bucket={"seq": number},
                target=str(Target.parse("cpu:x86_64-avx2")),
                toolchain=mark,
                key=CacheKey(f"{number:064x}"),
                digest=digest,
            )
            for number in range(cells)
        ],
    )


def read_lock(path: str) -> list[Any] | None:
    """The mark and number of cells of a lock file; None if there is none."""
    if not Path(path).exists():
        return None
    found = lockfile.read_lock(Path(path))
    assert {cell.toolchain for cell in found.cells} <= {found.drafter}
    return [found.drafter, len(found.cells)]


def examine(
    url: str, acknowledged: dict[str, str], replaced: dict[str, list[str]] | None = None, tier: bool = False
) -> list[str]:
    """What is wrong with a store: partial entries, wrong bytes, and what is not there though it was acknowledged.

    Args:
        url: Its address.
        acknowledged: Digests by key.
        replaced: Digests by key that may have taken an acknowledged one's place since.
        tier: Look through this host's copies.
    """
    store = open_store(url, tier=tier)
    problems = []
    there: dict[str, set[str]] = {}
    for entry in store.entries():
        if entry.manifest is None or entry.problem is not None:
            problems.append(f"partial: {entry.key}/{entry.variant}: {entry.problem}")
            continue
        there.setdefault(entry.key, set()).add(entry.manifest.digest)
        problems += _wrong_bytes(store, entry.manifest)
    for key, digest in acknowledged.items():
        if not there.get(key, set()) & {digest, *(replaced or {}).get(key, ())}:
            problems.append(f"lost: {key} with {digest} was acknowledged, and {there.get(key)} is there")
    return problems


def _wrong_bytes(store: Any, manifest: Any) -> Iterator[str]:
    with TemporaryDirectory() as scratch:
        path = Path(scratch, "archive")
        try:
            store.fetch(manifest.digest, path)
        except AotcacheError as error:
            yield f"partial: {manifest.key}: its archive cannot be fetched: {error}"
        else:
            if path.read_bytes() != entries.right_archive(manifest):
                yield f"wrong: {manifest.key}: its archive has other bytes than it was made with"


def watch(url: str, stop: str, tier: bool = False, replaced: bool = True) -> dict[str, Any]:
    """Read a store again and again beside those who write it, until a file appears.

    Args:
        url: Its address.
        stop: The file.
        tier: Look through this host's copies.
        replaced: Whether entries are replaced meanwhile: one that is, between a look at its ref and one at its
            archive, is no fault.
    """
    problems: list[str] = []
    reads = 0
    while not Path(stop).exists():
        store = open_store(url, tier=tier)
        for entry in store.entries():
            reads += 1
            if entry.manifest is None or entry.problem is not None:
                again = [e for e in store.variants(entry.key) if e.variant == entry.variant]
                if not replaced or (again and again[0].problem is not None):
                    problems.append(f"partial: {entry.key}/{entry.variant}: {entry.problem}")
                continue
            problems += _wrong_bytes(store, entry.manifest)
        time.sleep(0.01)
    return {"reads": reads, "problems": problems}


def examine_home(seconds: float = 5.0) -> list[str]:
    """What is wrong in this host's home: locks that are not free, copies and unpacked folders that are not whole."""
    home, problems = Settings().home, []
    for path in sorted(home.rglob("*.lock")):
        try:
            filelock.FileLock(path, timeout=seconds).acquire().lock.release()
        except filelock.Timeout:
            problems.append(f"stuck: {path} is not free within {seconds:g} s")
    for tier in sorted((home / "tiers").glob("*")):
        copies = open_store(tier)
        bad = [entry for entry in copies.entries() if entry.problem is not None]
        problems += [f"partial: copy {entry.key}: {entry.problem}" for entry in bad]
        for blob in (tier / "blobs").glob("*/*"):
            try:
                copies.blob_path(Digest(blob.name))
            except AotcacheError as error:
                problems.append(f"partial: copy {blob.name}: {error}")
    return problems


def examine_unpacked(url: str, key: str) -> list[str]:
    """What is wrong with the folder that an entry is unpacked to, if it is there."""
    store = open_store(url)
    (manifest,) = store.lookup(CacheKey(key))
    folder = Settings().home / "unpacked" / manifest.digest
    if not folder.exists():
        return []
    problem = registry._problem(manifest, folder, Settings().home)
    return [] if problem is None else [f"partial: {problem}"]


def hold(name: str, seconds: float) -> None:
    """Hold a lock of this host, to be killed meanwhile."""
    with locked(Settings().locks, name, seconds):
        acknowledge(held=name)
        time.sleep(seconds)


def probe(url: str, key: str, digest: str) -> dict[str, Any]:
    """What a process of its own sees of an entry: whether it is found, and whether its bytes are right."""
    store = open_store(url)
    found = [m for m in store.lookup(CacheKey(key)) if m.digest == digest]
    if not found:
        return {"found": False}
    with TemporaryDirectory() as scratch:
        path = Path(scratch, "archive")
        try:
            store.fetch(found[0].digest, path)
        except NotStored:
            return {"found": False}
        return {"found": True, "right": path.read_bytes() == entries.right_archive(found[0])}


def serve(folder: str, port: int, store: str | None = None, database: str | None = None) -> int:
    """`aotcache serve`, over a folder that another server may have left."""
    database = database or f"sqlite:///{folder}/aotcache.db"
    argv = ["serve", "--json", "--port", str(port), "--store", store or Path(folder, "store").as_uri()]
    return command(argv=[*argv, "--database", database])


def drafts(root: str) -> list[str]:
    """What lies in a directory beside its objects and below: drafts, hidden files and folders."""
    found = []
    for path in Path(root).rglob("*"):
        inside = path.relative_to(root).parts
        if (inside[0] == "tmp" and len(inside) > 1) or path.name.startswith("."):
            found.append("/".join(inside))
    return sorted(found)


def whoami() -> dict[str, Any]:
    """Who this process is, and where its home is."""
    current = Settings()
    return {"uid": os.getuid(), "home": str(current.home), "store": current.store}


def is_object_store(url: str) -> bool:
    """Whether an address is a directory or a bucket."""
    return isinstance(open_store(url, tier=False), ObjectStore)


def examine_entry(url: str, key: str, digest: str) -> list[str]:
    """What is wrong with one entry that was acknowledged, as a client of a service sees it."""
    store = open_store(url)
    found = [m for m in store.lookup(CacheKey(key)) if m.digest == digest]
    if not found:
        return [f"lost: {key} with {digest} was acknowledged, and {url} does not have it"]
    return list(_wrong_bytes(store, found[0]))


def examine_database(url: str, acknowledged: bool) -> list[str]:
    """What is wrong with a database: tables without a version, a version without its tables."""
    database = Database(url)
    try:
        version = migrate.current(database)
        if version is None:
            with database.connection() as connection:
                tables = sqlalchemy.inspect(connection).get_table_names()
            if tables:
                return [f"partial: it has the tables {tables} and no version"]
            return ["lost: the upgrade was acknowledged, and there are no tables"] if acknowledged else []
        return [f"partial: {problem}" for problem in migrate.check(database)]
    finally:
        database.close()


def make_key() -> int:
    """`aotcache keygen`; that there is a key already is what a second one is to say, and no failure."""
    status = command(argv=["keygen", "--json"])
    if status == 0:
        return 0
    current = Settings()
    key = SigningKey.load(signing_key_path(current))
    if any(trusted.key == key.public for trusted in trusted_keys(current).list()):
        acknowledge(key=key.public.fingerprint)
        return 0
    raise AssertionError("keygen refuses, and the key that is there is not trusted here")


def examine_keys(acknowledged: bool) -> list[str]:
    """What is wrong with this user's keys: half a key, one that others may read, none where one was made."""
    current = Settings()
    path = signing_key_path(current)
    trusted = {key.key.fingerprint for key in trusted_keys(current).list()}
    if not path.exists():
        return ["lost: the key was made, and is not there"] if acknowledged else []
    key = SigningKey.load(path)
    if acknowledged and key.public.fingerprint not in trusted:
        return ["lost: the key was made and is not trusted here"]
    return []


def examine_trusted(acknowledged: bool) -> list[str]:
    """What is wrong with the trusted keys; raises if one of their files is half there."""
    found = trusted_keys(Settings()).list()
    return ["lost: the key was trusted, and is not any more"] if acknowledged and not found else []


def share(url: str, folder: str, rounds: int, keys: int, size: int, own: int) -> dict[str, Any]:
    """Publish and read entries of a directory beside many others who do the same.

    Every round has `keys` entries of its own, published and read in a random order, and every fourth
    round is published in the place of what is there.

    Args:
        url: The directory.
        folder: Where the archives of all rounds lie.
        rounds, keys, size: How many rounds, entries in each, bytes of a member.
        own: Which of the processes this is.

    Returns:
        What went wrong, how often each injected error came, how often each was tried again.
    """
    problems: list[str] = []
    for number in range(rounds):
        order = [number * keys + which for which in range(keys)]
        random.Random(own * 1000 + number).shuffle(order)
        store = open_store(url)
        for seed in order:
            manifest = entries.manifest_of(seed, size)
            store.publish(manifest, Path(folder, f"{seed}-{size}.pt2"), replace=number % 4 == 3)
            problems += examine_own(store, manifest)
    return {"problems": problems, "injected": dict(shim.injected), "retried": passing.retried()}


def examine_own(store: Any, manifest: Any) -> list[str]:
    """What is wrong with an entry that this process has published just now."""
    found = store.lookup(manifest.key)
    if [one.digest for one in found] != [manifest.digest]:
        return [f"lost: {manifest.key} was published, and its look-up answers {found}"]
    path = store.blob_path(manifest.digest)
    if path is None or passing.again(path.read_bytes, path) != entries.right_archive(manifest):
        return [f"wrong: {manifest.key} has other bytes than were published"]
    return list(_wrong_bytes(store, manifest))


def unpack_all(url: str, own: int) -> dict[str, Any]:
    """Unpack every entry of a directory as a worker does, twice, in an order of one's own."""
    store, problems = open_store(url), []
    manifests = list(store.list())
    random.Random(own).shuffle(manifests)
    for manifest in [*manifests, *manifests]:
        folder = registry.unpack(manifest, registry._Fetched(store), Settings().home)
        data = zipfile.ZipFile(io.BytesIO(entries.right_archive(manifest)))
        problems += [
            f"wrong: {manifest.key}: {name}"
            for name in manifest.members
            if passing.again((folder / name).read_bytes, name) != data.read(name)
        ]
    return {
        "problems": problems,
        "count": len(manifests),
        "injected": dict(shim.injected),
        "retried": passing.retried(),
    }


def open_entry(url: str, key: str) -> None:
    """Open the one entry of a key as a worker does, `dlopen` included."""
    store = open_store(url)
    (manifest,) = store.lookup(CacheKey(key))
    registry.open_artifact(manifest, store, Settings().home)


def publish_file(url: str, archive: str, member: str) -> str:
    """Publish an archive whose library is a file of this host; its key."""
    data = Path(archive).read_bytes()
    with zipfile.ZipFile(archive) as package:
        members = {n: Digest(hashlib.sha256(package.read(n)).hexdigest()) for n in package.namelist()}
    manifest = make_manifest(data, call=member, mode="infer", pair=None, members=members)
    open_store(url).publish(manifest, Path(archive))
    return manifest.key


def findings() -> list[dict[str, Any]]:
    """What `aotcache doctor` says of this user's home."""
    # Not the whole of it: torch reads more of the interpreter than another user may be able to.
    return [asdict(finding) for finding in doctor._home()]


def examine_key(url: str, key: str, digest: str | None) -> list[str]:
    """What is wrong with a key that two have published at once.

    Args:
        url: The store.
        key: The key.
        digest: The archive that was acknowledged as stored; None if none was.
    """
    store = open_store(url, tier=False)
    found = list(store.variants(CacheKey(key)))
    problems = [f"partial: {key}: {entry.problem}" for entry in found if entry.problem is not None]
    if digest is not None and [entry.manifest.digest for entry in found if entry.manifest] != [digest]:
        problems.append(f"lost: {digest} was acknowledged as stored, and {found} is there")
    for entry in found:
        if entry.manifest is not None and entry.problem is None:
            problems += _wrong_bytes(store, entry.manifest)
    return problems


def publish_many(url: str, folder: str, first: int, count: int, size: int) -> dict[str, int]:
    """Publish entries one after the other; each that succeeds is acknowledged, and what fails is a typed error."""
    refused = 0
    store = open_store(url, tier=False)
    for seed in range(first, first + count):
        manifest = entries.signed(entries.manifest_of(seed, size))
        began = time.monotonic()
        try:
            store.publish(manifest, Path(folder, f"{seed}-{size}.pt2"))
        except StoreError as error:
            refused += 1
            acknowledge(refused=str(error)[:200], seconds=time.monotonic() - began)
            time.sleep(0.1)
        else:
            acknowledge(key=manifest.key, digest=manifest.digest, seconds=time.monotonic() - began)
    return {"refused": refused}


def lock_database(path: str, seconds: float) -> None:
    """Hold SQLite's one lock for writing, as another process that does not let go."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    acknowledge(locked=path)
    time.sleep(seconds)
    connection.execute("ROLLBACK")
    connection.close()


def shift_clock(seconds: float) -> None:
    """Have this process's wall clock wrong by so much. To be called before what is tried."""
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + seconds  # type: ignore[assignment]
    time.time_ns = lambda: now_ns() + int(seconds * 1e9)  # type: ignore[assignment]


def examine_index(url: str, acknowledged: dict[str, str]) -> list[str]:
    """What a service has forgotten of what it acknowledged."""
    found = open_store(url, tier=False).resolve(CacheKey(key) for key in acknowledged)
    return [
        f"lost: {key} was acknowledged, and the service does not list {digest}"
        for key, digest in acknowledged.items()
        if digest not in [manifest.digest for manifest in found[CacheKey(key)]]
    ]
