"""`plan` and `warm` on this host: builder processes under one parent that publishes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from aotcache.build.leases import Heartbeat, give_back, take
from aotcache.build.plan import Cell, Plan, make_plan
from aotcache.build.remote import build_remotely, service_for
from aotcache.build.report import Built, Progress, WarmReport
from aotcache.build.session import Session, open_session
from aotcache.compile.sandbox import Sandbox
from aotcache.errors import ConfigError, LeaseHeld
from aotcache.recall import recall_problem
from aotcache.spec import Spec
from aotcache.store.base import Store
from aotcache.store.builds import service_of, shared
from aotcache.types import Variant

_LAST_SECONDS = 5.0
"""For builds to end that were interrupted."""


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
    with open_session(spec, store, targets, progress) as session:
        with session.sandbox() as sandbox:
            return session.plan(sandbox)


def warm(
    spec: Spec | str | Path | None = None,
    *,
    store: Store | str | None = None,
    jobs: int = 1,
    force: bool = False,
    targets: Sequence[str] | None = None,
    remote: bool = False,
    progress: Progress | None = None,
) -> WarmReport:
    """Build and publish everything a spec asks for that the store does not have.

    Args:
        spec: A spec, its path, or None for `aotcache.toml` in the working directory.
        store: A store or its URL; default is the configured one.
        jobs: How many builder processes run at once.
        force: Build also what is covered, in its place.
        targets: Targets instead of those of the spec, e.g. `cpu:x86_64-avx2`.
        remote: Have the service that is the store build, by the spec that is registered there
            under the same name; this host only captures the drafter, to know what is missing.
        progress: A display.

    Returns:
        The report; a cell that cannot be built is in `failed`, the others are built.
        Where all are covered the lock file is written beside the spec.

    Raises:
        SpecError: the spec is wrong; with `remote`, the service has none of its name.
        ConfigError: the store is not this user's own, and there is no key to sign with, or the service
            that is the store does not trust it and something is to be built; with `remote`,
            it is no service, or `jobs` or `force` is given, which are the service's to decide.
        CaptureError, UnsupportedGraph, Unfingerprintable: the drafter cannot be captured.
        BuilderDied: the builder process died while capturing.
    """
    if jobs < 1:
        raise ConfigError(f"jobs is {jobs}, expected at least 1")
    if remote and (force or jobs != 1):
        raise ConfigError("remote builds are the service's: neither jobs nor force can be given for them")
    started = time.perf_counter()
    with open_session(spec, store, targets, progress) as session:
        service = service_for(session) if remote else None
        if service is None:
            session.prepare_to_publish()
        with session.sandbox() as first:
            before = session.plan(first)
            todo = _unique(before) if force else before.missing
            session.tell(lambda p: p.planned(before, todo))
            if service is None:
                if todo:
                    session.require_trusted_key()
                built = _build(session, todo, first, jobs, force)
        if service is not None:
            built = build_remotely(session, service, todo)
        after = make_plan([row.cell for row in before], shared(session.store), session.toolchain)
        lock = None if after.missing else session.write_lock(after.rows)
    return WarmReport(after, tuple(built), time.perf_counter() - started, lock)


def _unique(of: Plan) -> list[Cell]:
    return [row.cell for row in of if not row.shared]


def _build(session: Session, cells: Sequence[Cell], first: Sandbox, jobs: int, force: bool) -> list[Built]:
    """Build cells on `jobs` builders, the first of which has captured already."""
    todo: queue.SimpleQueue[Cell] = queue.SimpleQueue()
    for cell in cells:
        todo.put(cell)
    results: list[Built] = []
    crashes: list[BaseException] = []

    def work(sandbox: Sandbox | None) -> None:
        try:
            _work(session, todo, sandbox, results, force)
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
        # Ctrl-C: end what runs, and its threads end with it.
        _drain(todo)
        session.stop()
        for worker in workers:
            worker.join(_LAST_SECONDS)  # they give their leases back
        raise
    if crashes:
        raise crashes[0]
    order = {(c.key, c.target): i for i, c in enumerate(cells)}
    return sorted(results, key=lambda b: order[b.cell.key, b.cell.target])


def _work(
    session: Session,
    todo: queue.SimpleQueue[Cell],
    sandbox: Sandbox | None,
    results: list[Built],
    force: bool,
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
                    session.end(own)
                sandbox = own = session.sandbox()
            built = _build_one(session, cell, sandbox, force)
            if built.manifest is not None or built.error is not None:
                results.append(built)
            session.finished(built)
    finally:
        if own is not None:
            session.end(own)


def _build_one(session: Session, cell: Cell, sandbox: Sandbox, force: bool) -> Built:
    """Build a cell, under its lease where the store is a service; neither manifest nor error if another host did."""
    service = service_of(session.store)
    if service is None:
        return session.build(cell, sandbox, force)
    variant = Variant(cell.target, session.toolchain)
    started = time.perf_counter()

    def there() -> bool:
        found = (m for m in shared(session.store).lookup(cell.key) if m.variant == variant)
        return not force and any(recall_problem(m, home=session.config.home) is None for m in found)

    try:
        lease = take(
            service,
            cell.key,
            str(variant),
            there=there,
            waiting=lambda whom: session.tell(lambda p: p.stage(cell, f"wait for {whom}")),
            stopped=session.stopped,
            seconds=session.config.build_seconds,
        )
    except LeaseHeld as held:
        return Built(cell, time.perf_counter() - started, None, held)
    if lease is None:
        return Built(cell, time.perf_counter() - started, None, None)
    held_lease = lease
    try:
        with Heartbeat(lambda: service.renew(held_lease), lease.seconds, sandbox.kill) as heart:
            built = session.build(cell, sandbox, force, lease)
        if heart.lost is not None and built.error is not None:
            return replace(built, error=heart.lost)
        return built
    finally:
        give_back(service, lease)


def _drain(todo: queue.SimpleQueue[Cell]) -> None:
    while True:
        try:
            todo.get_nowait()
        except queue.Empty:
            return
