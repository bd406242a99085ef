"""The builder of a service: takes the builds that wait for its specs, builds, publishes, and tells.

One build at a time. The process that runs the drafter's code is ended whenever its build is
cancelled or lost, and kept for the next build of the same spec otherwise, because it has
captured the drafter already.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from aotcache.build.leases import Heartbeat, holder
from aotcache.build.plan import Cell, Plan, expected_seconds, known_builds
from aotcache.build.session import Session, open_session
from aotcache.errors import (
    AotcacheError,
    BuilderDied,
    BuildError,
    ConfigError,
    LeaseLost,
    ServiceUnavailable,
    StoreError,
)
from aotcache.store import open_store
from aotcache.store.builds import BuildService, service_of, shared
from aotcache.types import Variant

if TYPE_CHECKING:
    from aotcache.compile.sandbox import Sandbox
    from aotcache.manifest import Manifest
    from aotcache.spec import Spec
    from aotcache.store.base import Store
    from aotcache.store.builds import Build, Lease

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
"""Between claims while nothing waits."""
IDLE_SECONDS = 300.0
"""How long a drafter that was captured is kept for a further build."""
_LONGEST_PAUSE = 30.0
"""Between claims while the service is away."""
_SHOWN = 40
"""How many cells a message lists."""


class _Cancelled(BuildError):
    """Nobody wants the build any more."""


class _Stopped(BuildError):
    """The builder was told to end."""


class _NoSuchCell(BuildError):
    """A build asks for a key that the spec does not lead to."""


_KINDS: dict[type, str] = {_NoSuchCell: "BuildError", _Cancelled: "BuildError"}
"""How errors of this module are recorded: by names that everybody knows."""


class _Kept:
    """A spec, and what is kept of it between builds: its session, its builder process, its cells.

    Implements `aotcache.build.Progress`: stages go to whoever builds now.
    """

    def __init__(self, spec: Spec, store: Store) -> None:
        self.spec = spec
        self.used = time.monotonic()
        self.watcher: _Watched | None = None
        self._open = ExitStack()
        self.session: Session = self._open.enter_context(open_session(spec, store, None, self))
        self.variants = [str(Variant(target, self.session.toolchain)) for target in self.session.targets]
        self._sandbox: Sandbox | None = None
        self._cells: dict[tuple[str, str], Cell] = {}
        self._known: list[Manifest] = []

    def planned(self, plan: Plan, builds: Sequence[Cell]) -> None:
        """See `aotcache.build.Progress`."""

    def finished(self, cell: Cell, seconds: float, error: AotcacheError | None) -> None:
        """See `aotcache.build.Progress`."""

    def stage(self, cell: Cell | None, stage: str) -> None:
        """See `aotcache.build.Progress`."""
        if self.watcher is not None:
            self.watcher.tell(stage)

    @property
    def captured(self) -> bool:
        """Whether the builder process has captured the drafter."""
        return bool(self._cells)

    @property
    def alive(self) -> bool:
        """Whether a builder process is kept."""
        return self._sandbox is not None

    def sandbox(self) -> Sandbox:
        """The builder process; a new one where the last is gone."""
        if self._sandbox is not None and self._sandbox.dead:
            self.end()
        if self._sandbox is None:
            self._sandbox = self.session.sandbox()
        return self._sandbox

    def cell(self, build: Build, sandbox: Sandbox) -> Cell | None:
        """The cell that a build asks for; captures the drafter if that was not done yet. None: there is none."""
        if not self._cells:
            captured = self.session.capture(sandbox)
            self._known = known_builds(shared(self.session.store))
            for cell in captured:
                self._cells.setdefault((cell.key, str(Variant(cell.target, self.session.toolchain))), cell)
        return self._cells.get((build.key, build.variant))

    def no_such_cell(self, build: Build) -> _NoSuchCell:
        """What to say to who asked for a cell that is not there."""
        keys = {key for key, _ in self._cells}
        why = (
            f"it has it for {', '.join(v for k, v in self._cells if k == build.key)}"
            if build.key in keys
            else "the asker's drafter, its code, its options or its batches are others than those of the "
            "spec here, or the spec leaves out this bucket or mode"
        )
        cells = [f"  {cell}: {cell.key}" for cell in self._cells.values()]
        more = len(cells) - _SHOWN
        text = "\n".join(
            [
                f"spec {build.spec!r} has no cell of key {build.key} for {build.variant}: {why}. Its cells:",
                *cells[:_SHOWN],
                *([f"  and {more} more"] if more > 0 else []),
            ]
        )
        return _NoSuchCell(text, key=build.key, variant=build.variant)

    def expected(self, cell: Cell) -> float | None:
        """Seconds that a build of the cell took before, or of one like it."""
        return expected_seconds(cell, self._known)

    def built(self, manifest: Manifest) -> None:
        """Keep in mind how long it took."""
        self._known.append(manifest)

    def log(self) -> str:
        """The end of what the builder process printed."""
        return "" if self._sandbox is None else self._sandbox.log()

    def end(self) -> None:
        """End the builder process. What it captured is captured anew by the next: code may have changed."""
        if self._sandbox is not None:
            self.session.end(self._sandbox)
            self._sandbox = None
        self._cells = {}

    def close(self) -> None:
        """End all of it."""
        self.end()
        self._open.close()


class _Watched:
    """One build under its lease: sends stages and signs of life, and ends the builder when told so."""

    def __init__(self, service: BuildService, build: Build, lease: Lease, kept: _Kept) -> None:
        assert build.id is not None
        self._service, self._build, self._lease = service, build.id, lease
        self._stage = "start"
        self._expected: float | None = None
        self._sandbox: Sandbox | None = None
        self._ending = threading.Lock()
        self._over: AotcacheError | None = None
        self.heart = Heartbeat(self._beat, lease.seconds, self._lost)
        kept.watcher = self

    def tell(self, stage: str) -> None:
        """The build entered a stage."""
        self._stage = stage
        self.heart.wake()

    def expect(self, seconds: float | None) -> None:
        """How long the build should take."""
        self._expected = seconds

    def _beat(self) -> None:
        if self._service.progress(self._build, self._lease, self._stage, self._expected):
            raise _Cancelled("the build was cancelled")

    def _lost(self) -> None:
        self.end(self.heart.lost or LeaseLost("the lease is lost"))

    def end(self, why: AotcacheError) -> None:
        """End the build at once, from any thread."""
        with self._ending:
            self._over = self._over or why
            if self._sandbox is not None:
                self._sandbox.kill()

    def uses(self, sandbox: Sandbox) -> None:
        """What to end. Raises what the build was ended for meanwhile."""
        with self._ending:
            self._sandbox = sandbox
            if self._over is not None:
                raise self._over

    @property
    def over(self) -> AotcacheError | None:
        """Why the build was ended from outside."""
        return self._over


class Builder:
    """Builds what a service's queue holds for some specs, until it is told to stop.

    Args:
        specs: What it may build, each under its drafter's name.
        url: Address of the service.
        idle_seconds: How long the process of a drafter is kept without a build.

    Raises:
        ConfigError: two specs of one name, no service at `url`, no signing key that it trusts, or a target that
            this host cannot build.
    """

    def __init__(self, specs: Sequence[Spec], url: str, *, idle_seconds: float = IDLE_SECONDS) -> None:
        store = open_store(url)
        service = service_of(store)
        if service is None:
            raise ConfigError(f"{url} is no service: expected http://host:port or https://host")
        self._service = service
        self._idle_seconds = idle_seconds
        self._stop = threading.Event()
        self._current: _Watched | None = None
        self._kept: dict[str, _Kept] = {}
        try:
            for spec in specs:
                name = spec.drafter.name
                if name in self._kept:
                    raise ConfigError(
                        f"{spec.path} and {self._kept[name].spec.path} are both named {name!r}: builds ask for a "
                        "spec by [drafter] name, so give each its own"
                    )
                self._kept[name] = _Kept(spec, store)
                self._kept[name].session.require_trusted_key()
        except BaseException:
            self._close()
            raise

    @property
    def names(self) -> list[str]:
        """Names of its specs."""
        return sorted(self._kept)

    def stop(self) -> None:
        """End soon, from any thread or a signal handler: what is being built goes back to the queue."""
        self._stop.set()
        threading.Thread(target=self._end_current, name="aotcache-stop", daemon=True).start()

    def _end_current(self) -> None:
        watched = self._current
        if watched is not None:
            watched.end(_Stopped("the builder was told to end; the build goes on with another"))

    def run(self) -> None:
        """Build until `stop`.

        Raises:
            ServiceError: the service refuses this builder: no right to publish, another interface.
        """
        failures = 0
        try:
            while not self._stop.is_set():
                self._end_idle()
                try:
                    claimed = self._claim()
                except ServiceUnavailable as error:
                    failures += 1
                    if failures == 1:
                        logger.warning("%s; asking again until it is back", error)
                    pause = min(_LONGEST_PAUSE, POLL_SECONDS * 2**failures)
                    self._stop.wait(pause * random.uniform(0.5, 1))
                    continue
                if failures:
                    logger.warning("%s is back", self._service.url)
                    failures = 0
                if claimed is None:
                    self._stop.wait(POLL_SECONDS)
                else:
                    self._build(*claimed)
        finally:
            self._close()

    def _claim(self) -> tuple[Build, Lease] | None:
        """The next build of any spec, for a variant that this very spec is built for here."""
        specs: dict[tuple[str, ...], list[str]] = {}
        for name, kept in self._kept.items():
            specs.setdefault(tuple(kept.variants), []).append(name)
        claims = (self._service.claim(names, variants, holder()) for variants, names in specs.items())
        return next((claimed for claimed in claims if claimed is not None), None)

    def _end_idle(self) -> None:
        for kept in self._kept.values():
            if kept.alive and time.monotonic() - kept.used > self._idle_seconds:
                kept.end()

    def _close(self) -> None:
        for kept in self._kept.values():
            kept.close()

    def _build(self, build: Build, lease: Lease) -> None:
        kept = self._kept[build.spec]
        watched = _Watched(self._service, build, lease, kept)
        logger.info("build %s: key %s of %s, attempt %d", build.id, build.key, build.spec, build.attempts)
        started = time.monotonic()
        with watched.heart:
            self._current = watched
            try:
                if self._stop.is_set():
                    self._end_current()
                error = self._try(build, lease, kept, watched)
            finally:
                self._current = None
                kept.watcher = None
        error = error if error is None else watched.over or error
        kept.used = time.monotonic()
        took = time.monotonic() - started
        if error is None:
            logger.info("build %s: published after %.1f s", build.id, took)
        else:
            logger.warning("build %s: %s after %.1f s: %s", build.id, type(error).__name__, took, error)
        self._finish(build, lease, kept, error)

    def _try(self, build: Build, lease: Lease, kept: _Kept, watched: _Watched) -> AotcacheError | None:
        try:
            fresh = not kept.captured
            cell = self._find(build, kept, watched)
            if cell is None and not fresh:
                kept.end()  # the drafter's files may have changed since it was captured
                cell = self._find(build, kept, watched)
            if cell is None:
                raise kept.no_such_cell(build)
            watched.expect(kept.expected(cell))
            built = kept.session.build(cell, kept.sandbox(), False, lease)
        except AotcacheError as error:
            return error
        if built.manifest is not None:
            kept.built(built.manifest)
        return built.error

    def _find(self, build: Build, kept: _Kept, watched: _Watched) -> Cell | None:
        sandbox = kept.sandbox()
        watched.uses(sandbox)
        return kept.cell(build, sandbox)

    def _finish(self, build: Build, lease: Lease, kept: _Kept, error: AotcacheError | None) -> None:
        """Tell the service. A build that cannot be told of is taken over when its lease ends."""
        log = str(error.details.get("log", "")) if isinstance(error, BuilderDied) else kept.log()
        known = error is None or isinstance(error, _NoSuchCell)
        if not known:
            kept.end()  # another attempt begins in a new process
        if isinstance(error, LeaseLost):
            return
        assert build.id is not None
        said = None if error is None else (_KINDS.get(type(error), type(error).__name__), str(error))
        try:
            self._service.finish(
                build.id,
                lease,
                error=None if isinstance(error, _Stopped) else said,
                log="" if error is None else log,
                retry=not known,
            )
        except StoreError as failure:
            logger.warning("build %s: the service was not told how it ended: %s", build.id, failure)
