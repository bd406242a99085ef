"""`plan` and `warm` on this host: builder processes under one parent that publishes."""

from __future__ import annotations

import json
import logging
import os
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from aotcache import host
from aotcache.build.plan import Cell, Plan, Row, make_plan
from aotcache.compat import CPU_LEVELS, cpu_level_features
from aotcache.compile.sandbox import Sandbox
from aotcache.config import Settings
from aotcache.errors import AotcacheError, ConfigError, StoreError
from aotcache.key import KeyParts
from aotcache.lockfile import Lock, LockedCell, lock_path, read_lock, write_lock
from aotcache.manifest import Manifest
from aotcache.spec import Spec, load_spec
from aotcache.store import open_store
from aotcache.store.base import Store
from aotcache.store.local import locked, make_dirs
from aotcache.types import Digest, Target

logger = logging.getLogger(__name__)

_STAGING = "warm-"
"""How the folders begin in which builders work; the process that owns one follows."""


class Progress(Protocol):
    """What a display of a warm implements. Called from several threads, one call at a time."""

    def planned(self, plan: Plan, builds: Sequence[Cell]) -> None:
        """The plan is made; `builds` are about to be built."""

    def stage(self, cell: Cell | None, stage: str) -> None:
        """A build entered a stage; no cell while a builder starts and captures the drafter."""

    def finished(self, cell: Cell, seconds: float, error: AotcacheError | None) -> None:
        """A build ended."""


@dataclass(frozen=True, slots=True)
class Built:
    """One cell that a warm built, or failed to build.

    Attributes:
        cell: The cell.
        seconds: Wall time of the build.
        manifest: What was published; None if it failed.
        error: Why it failed.
        reused: Whether an identical graph had been compiled before.
    """

    cell: Cell
    seconds: float
    manifest: Manifest | None
    error: AotcacheError | None
    reused: bool = False


@dataclass(frozen=True, slots=True)
class WarmReport:
    """What a warm did. `ok` is whether every cell is covered now."""

    plan: Plan
    built: tuple[Built, ...]
    seconds: float
    lock: Path | None

    @property
    def failed(self) -> list[Built]:
        """The builds that failed."""
        return [b for b in self.built if b.error is not None]

    @property
    def ok(self) -> bool:
        """Whether every cell of the plan is covered."""
        return not self.failed

    def __str__(self) -> str:
        built = len(self.built) - len(self.failed)
        done = (
            f"{len(self.plan.rows)} cells: {built} built, {len(self.failed)} failed, in {self.seconds:.1f} s"
        )
        return "\n".join([done, *(f"{type(b.error).__name__}: {b.cell}: {b.error}" for b in self.failed)])


def plan(
    spec: Spec | str | Path | None = None,
    *,
    store: Store | str | None = None,
    targets: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> Plan:
    """What a spec asks for and what the store has of it. Captures, compiles nothing.

    Raises:
        SpecError, CaptureError, UnsupportedGraph, Unfingerprintable: see `warm`.
    """
    with _session(spec, store, targets, progress) as session:
        with session.sandbox() as sandbox:
            return session.plan(sandbox)


def warm(
    spec: Spec | str | Path | None = None,
    *,
    store: Store | str | None = None,
    jobs: int = 1,
    force: bool = False,
    targets: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> WarmReport:
    """Build and publish everything a spec asks for that the store does not have.

    Args:
        spec: A spec, its path, or None for `aotcache.toml` in the working directory.
        store: A store or its URL; default is the configured one.
        jobs: How many builder processes run at once.
        force: Build also what is covered, in its place.
        targets: Targets instead of those of the spec, e.g. `cpu:x86_64-avx2`.
        progress: A display.

    Returns:
        The report; a cell that cannot be built is in `failed`, the others are built.
        Where all are covered the lock file is written beside the spec.

    Raises:
        SpecError: the spec is wrong.
        CaptureError, UnsupportedGraph, Unfingerprintable: the drafter cannot be captured.
        BuilderDied: the builder process died while capturing.
    """
    if jobs < 1:
        raise ConfigError(f"jobs is {jobs}, expected at least 1")
    started = time.perf_counter()
    with _session(spec, store, targets, progress) as session:
        with session.sandbox() as first:
            before = session.plan(first)
            todo = _unique(before) if force else before.missing
            session.tell(lambda p: p.planned(before, todo))
            built = session.build(todo, first, jobs, force)
        after = make_plan([row.cell for row in before], session.store, session.toolchain)
        lock = None if after.missing else session.write_lock(after.rows)
    return WarmReport(after, tuple(built), time.perf_counter() - started, lock)


def _unique(of: Plan) -> list[Cell]:
    return [row.cell for row in of if not row.shared]


class _Session:
    """One call of `plan` or `warm`: its store, its staging folder, its builders."""

    def __init__(
        self,
        spec: Spec,
        store: Store,
        targets: list[Target],
        config: Settings,
        staging: Path,
        progress: Progress | None,
    ) -> None:
        self.spec = spec
        self.store = store
        self.targets = targets
        self.config = config
        self.staging = staging
        self.toolchain = host.host_toolchain()
        self._progress = progress
        self._telling = threading.Lock()
        self._stopped = False
        self._builders: list[Sandbox] = []

    def tell(self, what: Callable[[Progress], None]) -> None:
        with self._telling:
            if self._progress is not None and not self._stopped:
                what(self._progress)

    def sandbox(self) -> Sandbox:
        # Builder threads come here at once: a counter of ours could give two of them one folder.
        own = Path(tempfile.mkdtemp(dir=self.staging))
        headers = self.config.home / "headers"
        make_dirs(headers, 0o700)
        memory = self.config.build_memory_gib
        made = Sandbox(
            {
                "spec": str(self.spec.path),
                "staging": str(own),
                "devices": sorted({target.device for target in self.targets}),
            },
            own,
            headers=headers,
            seconds=self.config.build_seconds,
            memory=None if memory is None else int(memory * 2**30),
        )
        self._builders.append(made)
        return made

    def plan(self, sandbox: Sandbox) -> Plan:
        self.tell(lambda p: p.stage(None, "start a builder"))
        answer = sandbox.request({"do": "capture"}, lambda e: self._stage(None, e))
        cells = [
            Cell(
                c["region"],
                c["mode"],
                tuple(c["bucket"].items()),
                target,
                KeyParts.from_json(c["components"]),
            )
            for target in self.targets
            for c in answer["cells"]
            if c["device"] == target.device
        ]
        return make_plan(cells, self.store, self.toolchain)

    def _stage(self, cell: Cell | None, event: Mapping[str, Any]) -> None:
        if "bucket" in event:
            sizes = ",".join(f"{name}={size}" for name, size in event["bucket"].items())
            which = "" if cell is None else " in a further builder"
            self.tell(lambda p: p.stage(None, f"capture {event['mode']} {sizes}".rstrip() + which))
        else:
            self.tell(lambda p: p.stage(cell, str(event["stage"])))

    def build(self, cells: Sequence[Cell], first: Sandbox, jobs: int, force: bool) -> list[Built]:
        """Build cells on `jobs` builders, the first of which has captured already."""
        todo: queue.SimpleQueue[Cell] = queue.SimpleQueue()
        for cell in cells:
            todo.put(cell)
        results: list[Built] = []
        crashes: list[BaseException] = []

        def work(sandbox: Sandbox | None) -> None:
            try:
                self._work(todo, sandbox, results, force)
            except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
                crashes.append(error)
                _drain(todo)

        workers = [
            threading.Thread(
                target=work, args=(first if i == 0 else None,), name=f"aotcache-build-{i}", daemon=True
            )
            for i in range(min(jobs, len(cells)))
        ]
        for worker in workers:
            worker.start()
        try:
            for worker in workers:
                worker.join()
        except BaseException:
            # Ctrl-C: end what runs, and its threads end with it. That its builders died is no news.
            with self._telling:
                self._stopped = True
            _drain(todo)
            for builder in self._builders:
                builder.kill()
            raise
        if crashes:
            raise crashes[0]
        order = {(c.key, c.target): i for i, c in enumerate(cells)}
        return sorted(results, key=lambda b: order[b.cell.key, b.cell.target])

    def _work(
        self, todo: queue.SimpleQueue[Cell], sandbox: Sandbox | None, results: list[Built], force: bool
    ) -> None:
        own: Sandbox | None = None
        try:
            while True:
                try:
                    cell = todo.get_nowait()
                except queue.Empty:
                    return
                if sandbox is None or sandbox.dead:
                    if own is not None:
                        own.close()
                    sandbox = own = self.sandbox()
                built = self._build_one(cell, sandbox, force)
                results.append(built)
                self._finished(built)
        finally:
            if own is not None:
                own.close()

    def _finished(self, built: Built) -> None:
        self.tell(lambda p: p.finished(built.cell, built.seconds, built.error))

    def _build_one(self, cell: Cell, sandbox: Sandbox, force: bool) -> Built:
        started = time.perf_counter()
        index = ContentIndex(self.config, self.store, self.staging)
        try:
            answer = sandbox.request(
                {"do": "build", "key": cell.key, "target": str(cell.target)},
                lambda event: self._answer(cell, event, index, force),
            )
            manifest = Manifest.from_json(answer["manifest"].encode(), where=f"builder of {cell}")
            self.store.publish(manifest, Path(answer["archive"]), replace=force)
            index.remember(manifest)
            return Built(cell, time.perf_counter() - started, manifest, None, index.reused)
        except StoreError:
            # A store that cannot be written fails every cell: say so once, at once.
            raise
        except AotcacheError as error:
            return Built(cell, time.perf_counter() - started, None, error)
        finally:
            index.close()

    def _answer(
        self, cell: Cell, event: Mapping[str, Any], index: ContentIndex, force: bool
    ) -> dict[str, Any] | None:
        if event["event"] != "prepared":
            self._stage(cell, event)
            return None
        return index.claim(event["content"], force=force)

    def write_lock(self, rows: Iterable[Row]) -> Path:
        path = lock_path(self.spec.path)
        cells = [
            LockedCell(
                region=row.cell.region,
                mode=row.cell.mode,
                bucket=dict(row.cell.bucket),
                target=str(row.cell.target),
                toolchain=str(self.toolchain),
                key=row.cell.key,
                digest=_present(row.digest),
            )
            for row in rows
        ]
        kept = read_lock(path) if path.exists() else Lock(self.spec.drafter.name, [])
        write_lock(path, kept.merged(cells))
        return path


def _drain(todo: queue.SimpleQueue[Cell]) -> None:
    while True:
        try:
            todo.get_nowait()
        except queue.Empty:
            return


def _present(digest: Digest | None) -> Digest:
    assert digest is not None
    return digest


class ContentIndex:
    """Finds an artifact of an identical graph, or holds the right to compile it.

    Keeps `content/<content key>.json` under the home: which entry was built from that
    graph on this host. Builders of one graph, in any process of this host, go one
    after the other, so that the later ones find what the first one made.
    """

    def __init__(self, config: Settings, store: Store, staging: Path) -> None:
        self._config = config
        self._store = store
        self._staging = staging
        self._held = ExitStack()
        self.reused = False

    def claim(self, content: str, *, force: bool) -> dict[str, Any]:
        """The builder's next step: to compile, or to take an archive that is there."""
        self._held.enter_context(locked(self._config.locks, f"content {content}", self._config.build_seconds))
        known = None if force else self._recall(content)
        if known is None:
            return {"do": "compile"}
        archive = self._staging / f"{known.digest}.pt2"
        try:
            self._store.fetch(known.digest, archive)
        except AotcacheError:
            return {"do": "compile"}
        self.reused = True
        return {"do": "reuse", "archive": str(archive), "manifest": known.to_json().decode()}

    def _path(self, content: str) -> Path:
        return self._config.home / "content" / f"{content}.json"

    def _recall(self, content: str) -> Manifest | None:
        try:
            data = json.loads(self._path(content).read_bytes())
            manifests = self._store.lookup(data["key"])
            return next((m for m in manifests if m.content == content), None)
        except (OSError, ValueError, KeyError, TypeError, AotcacheError):
            return None

    def remember(self, manifest: Manifest) -> None:
        """Note which entry holds the graph. A note that cannot be written costs a build, no more."""
        path = self._path(manifest.content)
        try:
            make_dirs(path.parent, 0o700)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
                json.dump({"key": manifest.key}, file)
            Path(file.name).replace(path)
        except OSError as error:
            logger.warning("cannot note graph %s in %s: %s", manifest.content, path, error)

    def close(self) -> None:
        """Let the next builder of the graph go on."""
        self._held.close()


def _sweep(home: Path) -> None:
    """Remove what warms that were killed have left. The home is on this host's disk."""
    for folder in home.glob(f"{_STAGING}*"):
        pid = folder.name.removeprefix(_STAGING).partition("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            shutil.rmtree(folder, ignore_errors=True)


def _require_buildable(target: Target) -> None:
    """Refuse, before anything runs, what would be built for another device than its name says.

    Drafters are captured on the target's own kind of device, and artifacts are checked on it
    before they are published: code for a GPU is built where there is one of that kind.
    """
    if target.device != "cuda":
        cpu_level_features(target.arch)  # a level that nobody defined
        return
    here = host.host_facts().cuda_archs
    if target.arch not in here:
        raise ConfigError(
            f"target {target} cannot be built on this host, which has {', '.join(here) or 'no CUDA device'}: what "
            "is built is run and checked before it is published. Warm on a host with such a GPU, or name another "
            f"target (--target, or [targets]): native, {', '.join(f'cpu:{level}' for level in CPU_LEVELS)}"
        )


@contextmanager
def _session(
    spec: Spec | str | Path | None,
    store: Store | str | None,
    targets: Sequence[str] | None,
    progress: Progress | None,
) -> Iterator[_Session]:
    config = Settings()
    loaded = spec if isinstance(spec, Spec) else load_spec(spec)
    opened = open_store(store) if isinstance(store, str) or store is None else store
    if targets is not None:
        loaded = replace(loaded, archs=tuple(targets))
    wanted = list(loaded.targets(host.native_target))
    for target in wanted:
        _require_buildable(target)
    make_dirs(config.home, 0o700)
    _sweep(config.home)
    staging = Path(tempfile.mkdtemp(prefix=f"{_STAGING}{os.getpid()}-", dir=config.home))
    try:
        yield _Session(loaded, opened, wanted, config, staging, progress)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
