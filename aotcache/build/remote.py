"""`warm(..., remote=True)`: the service's builders build what is missing; this host watches."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from aotcache.build.plan import Cell
from aotcache.build.report import Built
from aotcache.build.session import Session
from aotcache.errors import (
    AotcacheError,
    BuildError,
    ConfigError,
    ServiceError,
    ServiceUnavailable,
    SpecError,
)
from aotcache.manifest import Manifest
from aotcache.recall import recall_problem
from aotcache.store.builds import Build, BuildService, service_of, shared
from aotcache.types import Variant

logger = logging.getLogger(__name__)

_WATCHED = 8
"""Builds that are watched at once; the others are looked at when one of these has ended."""
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 5.0
"""Seconds between looks where events do not come through."""


def service_for(session: Session) -> BuildService:
    """The service that is to build for a session.

    Raises:
        ConfigError: its store is no service.
        SpecError: the service has no spec of that name.
    """
    service = service_of(session.store)
    if service is None:
        raise ConfigError(
            f"remote builds are a service's, and store {session.store.url} is none: give --store http(s)://..., "
            "or set AOTCACHE_STORE"
        )
    known = service.specs()
    name = session.spec.drafter.name
    if name not in known:
        raise SpecError(
            f"{service.url} builds no spec named {name!r} (in [drafter] of {session.spec.path}); registered: "
            f"{', '.join(map(repr, known)) or 'none'}. The operator adds it: aotcache serve --spec, or a "
            "builder that has it; or build here, without --remote",
            registered=known,
        )
    return service


def build_remotely(session: Session, service: BuildService, cells: Sequence[Cell]) -> list[Built]:
    """Ask for every cell at once, and follow the builds to their ends.

    Raises:
        ServiceError: the service refuses, or was away for longer than a build may take.
    """
    asked = [
        _Asked(cell, service.request(session.spec.drafter.name, cell.key, cell.target, session.toolchain))
        for cell in cells
    ]
    watch = _Watch(session, service, asked)
    # Daemons: a command that is interrupted waits for no stream of events.
    threads = [
        threading.Thread(target=watch.run, name=f"aotcache-remote-{i}", daemon=True)
        for i in range(min(_WATCHED, len(asked)))
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:
        watch.stop()
    if watch.crashes:
        raise watch.crashes[0]
    return [watch.found[i] for i in range(len(asked))]


@dataclass(frozen=True, slots=True)
class _Asked:
    cell: Cell
    build: Build


class _Watch:
    """Follows builds until they end, on several threads."""

    def __init__(self, session: Session, service: BuildService, asked: Sequence[_Asked]) -> None:
        self._session = session
        self._service = service
        self._todo = list(enumerate(asked))[::-1]
        self._stopped = threading.Event()
        self.found: dict[int, Built] = {}
        self.crashes: list[BaseException] = []

    def stop(self) -> None:
        """Look no further."""
        self._stopped.set()

    def run(self) -> None:
        """Follow one after the other until none is left."""
        while not self._stopped.is_set():
            try:
                number, asked = self._todo.pop()
            except IndexError:
                return
            try:
                self.found[number] = self.follow(asked)
            except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
                self.crashes.append(error)
                self.stop()

    def follow(self, asked: _Asked) -> Built:
        """What became of one build; the display is told on the way."""
        started = time.perf_counter()
        build = self._to_its_end(asked)
        manifest: Manifest | None = None
        error: AotcacheError | None = None
        if build.state == "done":
            variant = Variant(asked.cell.target, self._session.toolchain)
            found = shared(self._session.store).lookup(asked.cell.key)
            manifest = next((m for m in found if m.variant == variant), None)
            if manifest is None:
                error = BuildError(
                    f"{self._service.url} says that it has key {asked.cell.key} for {variant}, and does not give it; "
                    "see its log",
                    key=asked.cell.key,
                )
            elif (problem := recall_problem(manifest, home=self._session.config.home)) is not None:
                error = BuildError(
                    f"{self._service.url} takes for built what is recalled here: {problem}; it knows no such recall "
                    "by a key that it trusts: aotcache recall --store, or aotcache trust add on its host",
                    key=asked.cell.key,
                )
        else:
            error = build.failure()
        built = Built(asked.cell, time.perf_counter() - started, manifest, error)
        self._session.finished(built)
        return built

    def _to_its_end(self, asked: _Asked) -> Build:
        build, pause = asked.build, _FIRST_PAUSE
        heard = time.monotonic()
        shown: str | None = None
        listen = True
        while not build.ended:
            assert build.id is not None
            if self._stopped.is_set():
                raise BuildError(f"build {build.id} is not watched any more, and goes on", build=build.id)
            try:
                if listen:
                    self._listen(asked.cell, build.id)
                else:
                    self._stopped.wait(pause)
                    pause = min(_LONGEST_PAUSE, pause * 1.5)
                build = self._service.get(build.id)
                heard = time.monotonic()
            except ServiceUnavailable as error:
                if time.monotonic() - heard > self._session.config.build_seconds:
                    raise
                logger.info("build %s is not seen for now: %s", build.id, error)
                listen = False  # the service or what is before it may not pass events on
                continue
            if not build.ended:
                listen = False
                if build.stage is not None and build.stage != shown:
                    shown = build.stage
                    self._show(asked.cell, build.stage, build.expected_seconds)
        return build

    def _listen(self, cell: Cell, build: str) -> None:
        """Show events until the stream ends."""
        try:
            for event in self._service.events(build):
                if self._stopped.is_set():
                    return
                data = event["data"]
                if event["event"] == "stage":
                    self._show(cell, str(data["stage"]), data.get("expected_seconds"))
                elif data.get("state") == "queued" and "error" in data:
                    self._show(cell, f"failed ({data['error']['type']}), queued again")
        except ServiceUnavailable:
            raise
        except (ServiceError, KeyError, TypeError) as error:
            logger.info("events of build %s cannot be read, it is polled: %s", build, error)

    def _show(self, cell: Cell, stage: str, expected: float | None = None) -> None:
        text = stage if expected is None else f"{stage} (about {expected:.0f} s in all)"
        self._session.tell(lambda p: p.stage(cell, text))


__all__ = ["build_remotely", "service_for"]
