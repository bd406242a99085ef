"""The steps of a build's life, each inside the `exclusive` session of its key and variant.

queued -> running -> done | failed
  ^________|                        a retry, or a builder that died, at the first attempt; given back at any
queued, running -> cancelled
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from aotcache.db.engine import clean, moment, now
from aotcache.db.models import ACTIVE, ArtifactRow, BuildEventRow, BuildRow, LeaseRow, RecalledRow
from aotcache.types import CacheKey

ATTEMPTS = 2
"""How often a build is tried in all."""
LOG_BYTES = 64 * 1024
"""How much of a log is kept: its end."""
_MESSAGE = 16_000


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a build failed: the error's class and its message."""

    type: str
    message: str

    def to_json(self) -> dict[str, str]:
        """As events and answers have it."""
        return {"type": self.type, "message": self.message}


def new_build(session: Session, spec: str, key: CacheKey, variant: str, state: str) -> BuildRow:
    """A build in its first state."""
    at = moment(session)
    row = BuildRow(
        id=secrets.token_hex(16),
        spec=spec,
        key=key,
        variant=variant,
        state=state,
        attempts=0,
        log="",
        sequence=0,
        created=at,
        updated=at,
    )
    session.add(row)
    session.flush()
    record(session, row, "state", {"state": state})
    return row


def record(session: Session, row: BuildRow, kind: str, data: dict[str, Any]) -> None:
    """Number and keep one event."""
    row.sequence += 1
    row.updated = moment(session)
    session.add(BuildEventRow(build_id=row.id, sequence=row.sequence, at=row.updated, kind=kind, data=data))
    session.flush()


def latest(session: Session, key: CacheKey, variant: str) -> BuildRow | None:
    """The newest build of an entry."""
    return session.scalars(
        select(BuildRow)
        .where(BuildRow.key == key, BuildRow.variant == variant)
        .order_by(BuildRow.created.desc(), BuildRow.id.desc())
        .limit(1)
        .execution_options(populate_existing=True)
    ).first()


def is_stored(session: Session, key: CacheKey, variant: str) -> bool:
    """Whether the index has the entry, and nobody has recalled it."""
    a, r = ArtifactRow, RecalledRow
    recalled = select(r.what).where(r.what.in_((a.digest, a.key)))
    stored = select(a.key).where(a.key == key, a.variant == variant, ~recalled.exists())
    return session.execute(stored).first() is not None


def lease_token(session: Session, row: BuildRow) -> int | None:
    """The fencing token of the build's lease, if that still holds."""
    return session.execute(
        select(LeaseRow.token).where(LeaseRow.id == row.lease, LeaseRow.expires > now())
    ).scalar()


def start(session: Session, row: BuildRow, lease: str, holder: str) -> None:
    """A builder begins an attempt."""
    row.state, row.lease, row.holder = "running", lease, clean(holder, 512)
    row.attempts += 1
    row.stage, row.expected_seconds = None, None
    record(session, row, "state", {"state": "running", "attempt": row.attempts, "holder": row.holder})


def stage(session: Session, row: BuildRow, name: str, expected_seconds: float | None) -> None:
    """The builder says where it is; saying it again is only a sign of life."""
    name = clean(name, 128)
    if expected_seconds is not None and not math.isfinite(expected_seconds):
        expected_seconds = None  # JSON has no such number
    row.updated = moment(session)
    if (row.stage, row.expected_seconds) != (name, expected_seconds):
        row.stage, row.expected_seconds = name, expected_seconds
        record(session, row, "stage", {"stage": name, "expected_seconds": expected_seconds})


def succeed(session: Session, row: BuildRow) -> None:
    """The artifact is there."""
    row.state = "done"
    row.error_type = row.error_message = None
    _leave(session, row, {"state": "done"})


def cancel(session: Session, row: BuildRow) -> None:
    """Nobody wants it any more. The builder keeps its lease until it has noticed, so that nobody begins beside it."""
    row.state = "cancelled"
    record(session, row, "state", {"state": "cancelled"})


def give_back(session: Session, row: BuildRow) -> None:
    """The builder ends for reasons of its own: the attempt does not count."""
    row.state = "queued"
    row.attempts -= 1
    _leave(session, row, {"state": "queued"})


def fail(session: Session, row: BuildRow, failure: Failure, *, again: bool, seconds: float) -> None:
    """An attempt failed: the build waits for another one, or stays failed until `seconds` have passed."""
    failure = Failure(clean(failure.type, 128), clean(failure.message, _MESSAGE))
    row.error_type, row.error_message = failure.type, failure.message
    if again and row.attempts < ATTEMPTS:
        row.state = "queued"
        _leave(session, row, {"state": "queued", "error": failure.to_json()})
    else:
        row.state = "failed"
        row.expires = moment(session) + seconds
        _leave(session, row, {"state": "failed", "error": failure.to_json(), "expires": row.expires})


def settle(session: Session, row: BuildRow, *, seconds: float) -> None:
    """What a build whose builder has died must be by now; does nothing to any other."""
    if row.state != "running" or lease_token(session, row) is not None:
        return
    if is_stored(session, CacheKey(row.key), row.variant):
        succeed(session, row)
        return
    died = Failure(
        "BuilderDied",
        f"builder {row.holder} gave no sign of life for longer than its lease, "
        f"at stage {row.stage or '(none)'} of attempt {row.attempts} of {ATTEMPTS}",
    )
    fail(session, row, died, again=True, seconds=seconds)


def keep_log(row: BuildRow, log: str) -> None:
    """Keep the end of a log, from the beginning of a line."""
    data = clean(log).encode()
    if len(data) > LOG_BYTES:
        data = data[-LOG_BYTES:]
        data = data.partition(b"\n")[2] or data
    row.log = data.decode("utf-8", "ignore")


def artifact_arrived(session: Session, key: CacheKey, variant: str) -> None:
    """Somebody published what a build still waits for. One that runs is ended by its builder.

    What is recalled is no answer: the build that is to replace it goes on.
    """
    row = latest(session, key, variant)
    if row is not None and row.state == "queued" and is_stored(session, key, variant):
        succeed(session, row)


def _leave(session: Session, row: BuildRow, data: dict[str, Any]) -> None:
    if row.lease is not None:
        session.execute(delete(LeaseRow).where(LeaseRow.id == row.lease))
    row.lease, row.stage, row.expected_seconds = None, None, None
    record(session, row, "state", data)


__all__ = ["ACTIVE", "ATTEMPTS", "LOG_BYTES", "Failure"]
