"""The numerics check once more, on what is stored of a spec: `aotcache verify --run`. Compiles nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from aotcache import host
from aotcache.build.plan import Cell, Row
from aotcache.build.report import Progress
from aotcache.build.session import Session, open_session
from aotcache.compat import Rejected, verdict
from aotcache.compile.sandbox import Sandbox
from aotcache.errors import AotcacheError, BuildError, NotStored, RecalledArtifact, RejectedArtifact
from aotcache.manifest import Certificate, Manifest
from aotcache.recall import recall_problem
from aotcache.spec import Spec
from aotcache.store.base import Store
from aotcache.store.builds import shared
from aotcache.store.refusal import refusal
from aotcache.types import Digest, Variant

_CERTIFICATE = TypeAdapter(Certificate)


@dataclass(frozen=True, slots=True)
class Rerun:
    """One cell of a spec, checked once more.

    Attributes:
        cell: The cell.
        digest: Of the archive that covers it; None: nothing does, and nothing was run.
        certificate: What was measured now; None if it was not run, or does not agree.
        error: Why there is no certificate: `CertificateFailed` where the artifact and float64 eager disagree.
        seconds: Wall time.
    """

    cell: Cell
    digest: Digest | None
    certificate: Certificate | None
    error: AotcacheError | None
    seconds: float


def rerun(
    spec: Spec | str | Path | None = None,
    *,
    store: Store | str | None = None,
    wanted: Callable[[Row], bool] = lambda row: True,
    progress: Progress | None = None,
) -> list[Rerun]:
    """Check what a store has of a spec against float64 eager, as it was checked when it was built.

    The drafter is captured and the artifacts are run in a builder's process, on the spec's own batches. An
    artifact that kills this process costs a new one. What this host would not open is not run.

    Args:
        spec: A spec, its path, or None for `aotcache.toml` in the working directory.
        store: A store or its URL; default is the configured one.
        wanted: Which cells are checked.
        progress: A display.

    Returns:
        Each cell once, identical layers as one.

    Raises:
        SpecError, CaptureError, UnsupportedGraph, Unfingerprintable: see `aotcache.warm`.
        StoreError: the store cannot be read.
    """
    with open_session(spec, store, None, progress) as session:
        sandbox = session.sandbox()
        try:
            plan = session.plan(sandbox)
            rows = [row for row in plan if not row.shared and wanted(row)]
            covered = [row.cell for row in rows if row.state == "covered"]
            session.tell(lambda p: p.planned(plan, covered))
            found = []
            for row in rows:
                if row.state == "covered" and sandbox.dead:
                    session.end(sandbox)
                    sandbox = session.sandbox()
                found.append(_one(session, row, sandbox))
            return found
        finally:
            session.end(sandbox)


def _one(session: Session, row: Row, sandbox: Sandbox) -> Rerun:
    cell, started = row.cell, time.perf_counter()
    if row.state != "covered":
        return Rerun(cell, None, None, None if row.recalled is None else _not_run(row, row.recalled), 0.0)
    certificate: Certificate | None = None
    error: AotcacheError | None = None
    try:
        manifest = _openable(session, row)
        archive = _archive(session, manifest, sandbox)
        answer = sandbox.request(
            {"do": "certify", "manifest": manifest.to_json().decode(), "archive": str(archive)},
            lambda event: session.stage(cell, event),
        )
        certificate = _CERTIFICATE.validate_python(answer["certificate"])
    except AotcacheError as found:
        error = found
    except (KeyError, ValidationError) as found:
        error = BuildError(f"the builder's answer is no certificate: {found}")
    seconds = time.perf_counter() - started
    session.tell(lambda p: p.finished(cell, seconds, error))
    return Rerun(cell, row.digest, certificate, error, seconds)


def _openable(session: Session, row: Row) -> Manifest:
    """The manifest of what covers a cell, if this host would open it. Raises NotStored or RejectedArtifact."""
    variant = Variant(row.cell.target, session.toolchain)
    stored = shared(session.store).lookup(row.cell.key)
    manifest = next((m for m in stored if m.variant == variant and m.digest == row.digest), None)
    if manifest is None:
        raise NotStored(
            f"archive {row.digest} of {row.cell} is gone from {session.store.url} since it was looked up"
        )
    recalled = recall_problem(manifest, home=session.config.home)
    if recalled is not None:
        raise _not_run(row, recalled)
    # Of this manifest: another one may have come with the same archive since the plan was made.
    problem = refusal(session.store, manifest, session.config)
    if problem is not None:
        raise RejectedArtifact(f"archive {row.digest} of {row.cell} is not run: {problem}", digest=row.digest)
    answer = verdict(manifest, host.host_facts())
    if isinstance(answer, Rejected):
        raise RejectedArtifact(f"archive {row.digest} of {row.cell} is not run: {answer}", digest=row.digest)
    return manifest


def _not_run(row: Row, recalled: str) -> RecalledArtifact:
    return RecalledArtifact(f"what is stored for {row.cell} is not run: {recalled}", key=row.cell.key)


def _archive(session: Session, manifest: Manifest, sandbox: Sandbox) -> Path:
    """A file on this host with the checked bytes."""
    path = session.store.blob_path(manifest.digest)
    if path is None:
        path = sandbox.staging / f"{manifest.digest}.pt2"
        session.store.fetch(manifest.digest, path)
    return path


def agreed(found: Sequence[Rerun]) -> bool:
    """Whether anything was checked, and all of it agrees."""
    return any(one.certificate is not None for one in found) and all(one.error is None for one in found)


__all__ = ["Rerun", "agreed", "rerun"]
