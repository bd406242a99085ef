"""Builds: what clients ask for, builders take and everybody can watch. One at a time for each entry."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

from sqlalchemy import delete, func, select, tuple_
from sqlalchemy.orm import Session

from aotcache.db.engine import Database, among, clean, now
from aotcache.db.models import ACTIVE, STATES, BuildEventRow, BuildRow, LeaseRow
from aotcache.errors import LeaseLost
from aotcache.service import queue
from aotcache.service.cursors import pack, unpack
from aotcache.service.leases import Held, Lease, Leases
from aotcache.service.queue import Failure
from aotcache.types import CacheKey

State = Literal["queued", "running", "done", "failed", "cancelled"]

FAILED_SECONDS = 600.0
"""How long a failure is the answer to everybody who asks for the same entry."""
_NOT_STORED = ("StoreError", "ServiceUnavailable")
"""Failures of the store and not of the build, such as a full disk; they are nobody else's answer."""
KEPT_SECONDS = 30 * 24 * 3600.0
"""How long builds that ended are kept."""
MOST = 1000
"""Most rows of one page, and most events of one answer."""
_TRIED = 50
"""How many queued builds one claim tries to get."""


@dataclass(frozen=True, slots=True)
class Build:
    """One build. Times are seconds since the epoch.

    Attributes:
        stage, expected_seconds: Where the running attempt is, and how long this stage should take.
        attempts: How many have begun.
        error: Why the last attempt failed.
        log: The end of the last attempt's log; None in a listing, which does not read it.
        expires: When a failure stops being the answer to new requests.
    """

    id: str
    spec: str
    key: CacheKey
    variant: str
    state: State
    stage: str | None
    expected_seconds: float | None
    attempts: int
    error: Failure | None
    log: str | None
    created: float
    updated: float
    expires: float | None

    @property
    def ended(self) -> bool:
        """Whether its state is final."""
        return self.state not in ACTIVE


@dataclass(frozen=True, slots=True)
class BuildPage:
    """Part of a listing; `next` asks for the part after it, None at the end."""

    builds: list[Build]
    next: str | None


@dataclass(frozen=True, slots=True)
class Claimed:
    """A build that a builder has taken, and the lease that lets it publish."""

    build: Build
    lease: Lease


@dataclass(frozen=True, slots=True)
class Progress:
    """The answer to a heartbeat.

    Attributes:
        cancelled: Nobody wants the build any more: stop, and say `finish`.
        seconds: How long the lease lasts from now on.
    """

    cancelled: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened to a build; `kind` is `state` or `stage`, `data` plain JSON."""

    sequence: int
    at: float
    kind: str
    data: dict[str, Any]


class Builds:
    """The queue of builds. Safe for threads, processes and hosts; nothing is only in memory.

    Whoever looks at a build whose builder has died moves it on: back into the queue after
    the first attempt, to `failed` after the second.

    Args:
        database: Where they are.
        leases: Gives builders their leases; by default with the usual length.
        failed_seconds: How long a failure is kept as the answer to new requests.
    """

    def __init__(
        self,
        database: Database,
        leases: Leases | None = None,
        *,
        failed_seconds: float = FAILED_SECONDS,
    ) -> None:
        self._database = database
        self._leases = Leases(database) if leases is None else leases
        self._failed_seconds = failed_seconds

    def request(self, spec: str, key: CacheKey, variant: str) -> Build:
        """Ask for an entry: everybody who asks for the same one gets the same build.

        Returns:
            The build that is queued or running; one that is done if the entry is there; the
            last failure until it expires; else a new build.
        """
        with self._database.session() as session:
            # Most who ask at once find it as it is: they wait for nobody.
            row = queue.latest(session, key, variant)
            lapsed = row is not None and row.state == "running" and queue.lease_token(session, row) is None
            if row is not None and not lapsed and self._stands(session, row):
                return _build(row)
        with self._database.exclusive(key, variant) as session:
            row = queue.latest(session, key, variant)
            if row is not None:
                self._settle(session, row)
                if self._stands(session, row):
                    return _build(row)
            self._forget_old(session)
            state = "done" if queue.is_stored(session, key, variant) else "queued"
            return _build(queue.new_build(session, clean(spec, 256), key, variant, state))

    def get(self, build: str) -> Build | None:
        """One build by its id, or None."""
        self._look([build])
        with self._database.session() as session:
            row = session.get(BuildRow, clean(build))
            return None if row is None else _build(row)

    def page(self, *, state: str | None = None, limit: int = 100, cursor: str | None = None) -> BuildPage:
        """Builds without their logs, the newest first.

        Raises:
            BadCursor: for a cursor that no page handed out.
        """
        limit = max(1, min(limit, MOST))
        b = BuildRow
        statement = select(b.id).order_by(b.created.desc(), b.id.desc()).limit(limit + 1)
        if state is not None:
            statement = statement.where(b.state == clean(state))
        if cursor is not None:
            statement = statement.where(tuple_(b.created, b.id) < tuple_(*unpack(cursor, float, str)))
        with self._database.session() as session:
            ids = list(session.scalars(statement))
        self._look(ids)
        columns = [column for column in b.__table__.columns if column.name != "log"]
        with self._database.session() as session:
            rows = session.execute(
                select(*columns).where(among(session, b.id, ids)).order_by(b.created.desc(), b.id.desc())
            ).all()
        more = len(ids) > limit
        builds = [_build(row) for row in rows[:limit]]
        return BuildPage(builds, pack(builds[-1].created, builds[-1].id) if more and builds else None)

    def claim(self, specs: Iterable[str], variants: Iterable[str], holder: str) -> Claimed | None:
        """Take the oldest build that this builder can do and nobody holds; None if there is none.

        A builder that died has lost its build to the next claim when its lease runs out.

        Args:
            specs: Names of the specs that the builder has.
            variants: What it can build for.
            holder: What to call it.
        """
        b = BuildRow
        live = (LeaseRow.key == b.key) & (LeaseRow.variant == b.variant) & (LeaseRow.expires > now())
        with self._database.session() as session:
            candidates = session.execute(
                select(b.id, b.key, b.variant)
                .outerjoin(LeaseRow, live)
                .where(
                    b.state.in_(ACTIVE),
                    LeaseRow.id.is_(None),
                    among(session, b.spec, specs),
                    among(session, b.variant, variants),
                )
                .order_by(b.created, b.id)
                .limit(_TRIED)
            ).all()
        for name, key, variant in candidates:
            with self._database.exclusive(key, variant) as session:
                claimed = self._take(session, name, holder)
                if claimed is not None:
                    return claimed
        return None

    def progress(
        self,
        build: str,
        lease: str,
        token: int,
        *,
        stage: str | None = None,
        expected_seconds: float | None = None,
    ) -> Progress:
        """A builder's sign of life: renews its lease, and says where it is.

        Args:
            build, lease, token: What `claim` gave.
            stage: What it does now; None for the same as before.
            expected_seconds: How long the stage should take, if it can be told.

        Raises:
            LeaseLost: if another builder may have taken over.
        """
        with self._held(build, lease, token) as (session, row):
            seconds = self._leases.extend(session, CacheKey(row.key), row.variant, lease, token)
            if row.state == "running" and stage is not None:
                queue.stage(session, row, stage, expected_seconds)
            return Progress(row.state == "cancelled", seconds)

    def finish(
        self, build: str, lease: str, token: int, *, error: Failure | None, log: str, retry: bool = False
    ) -> Build:
        """A builder is through: done if it published, queued again or failed if not. Gives the lease back.

        Args:
            build, lease, token: What `claim` gave.
            error: Why it failed; None if the entry was published.
            log: What it printed; the last 64 KiB are kept.
            retry: Whether another attempt could go better. Without an error it is given back as if
                it had not been begun: the builder was told to end.

        Raises:
            LeaseLost: if another builder may have taken over; nothing is changed then.
        """
        with self._held(build, lease, token) as (session, row):
            queue.keep_log(row, log)
            if row.state == "running":
                self._end(session, row, error, retry)
            self._leases.release(lease, token)
            session.flush()
            return _build(row)

    def cancel(self, build: str) -> Build | None:
        """Nobody wants it any more. One that has ended stays as it is; None if there is no such build."""
        found = self.get(build)
        if found is None:
            return None
        with self._database.exclusive(found.key, found.variant) as session:
            row = _row(session, build)
            if row is None:
                return None
            if row.state in ACTIVE:
                queue.cancel(session, row)
            return _build(row)

    def events(self, build: str, after: int = 0) -> list[Event]:
        """What happened to a build after the event with that number, in order; at most 1000."""
        self._look([build])
        e = BuildEventRow
        with self._database.session() as session:
            rows = session.scalars(
                select(e)
                .where(e.build_id == clean(build), e.sequence > max(0, min(after, 2**31 - 1)))
                .order_by(e.sequence)
                .limit(MOST)
            )
            return [Event(row.sequence, row.at, row.kind, row.data) for row in rows]

    def standing(self, builds: list[str]) -> dict[str, tuple[int, bool]]:
        """The number of each build's last event, and whether it has ended; without builds that are gone."""
        self._look(builds)
        b = BuildRow
        with self._database.session() as session:
            rows = session.execute(select(b.id, b.sequence, b.state).where(among(session, b.id, builds)))
            return {build: (sequence, state not in ACTIVE) for build, sequence, state in rows}

    def counts(self) -> dict[tuple[str, str], int]:
        """How many builds there are by (state, stage); every state is there, the stage is "" outside running."""
        b = BuildRow
        found = {(state, ""): 0 for state in STATES}
        stage = func.coalesce(b.stage, "")
        with self._database.session() as session:
            rows = session.execute(select(b.state, stage, func.count()).group_by(b.state, stage)).all()
        return found | {(state, name): number for state, name, number in rows}

    def _take(self, session: Session, build: str, holder: str) -> Claimed | None:
        row = _row(session, build)
        if row is None:
            return None
        self._settle(session, row)
        if row.state != "queued":
            return None
        key = CacheKey(row.key)
        if queue.is_stored(session, key, row.variant):
            queue.succeed(session, row)
            return None
        lease = self._leases.take(session, key, row.variant, holder)
        if isinstance(lease, Held):
            return None
        queue.start(session, row, lease.id, holder)
        return Claimed(_build(row), lease)

    def _end(self, session: Session, row: BuildRow, error: Failure | None, retry: bool) -> None:
        if error is None and queue.is_stored(session, CacheKey(row.key), row.variant):
            queue.succeed(session, row)
            return
        if error is None and retry:
            queue.give_back(session, row)
            return
        if error is None:
            error, retry = (
                Failure("NotStored", "the builder says that it is done, but has published nothing"),
                False,
            )
        # That it could not be stored says nothing of the build: the next who asks has it tried anew.
        seconds = 0.0 if error.type in _NOT_STORED else self._failed_seconds
        queue.fail(session, row, error, again=retry, seconds=seconds)

    @contextmanager
    def _held(self, build: str, lease: str, token: int) -> Iterator[tuple[Session, BuildRow]]:
        """The build, alone with it, as its builder."""
        with self._database.session() as session:
            found = session.execute(
                select(BuildRow.key, BuildRow.variant).where(BuildRow.id == clean(build))
            ).first()
        if found is None:
            raise LeaseLost(
                f"there is no build {clean(build, 64)}: nothing to report on", build=clean(build, 64)
            )
        key, variant = found
        with self._database.exclusive(key, variant) as session:
            self._leases.require(session, CacheKey(key), variant, lease, token)
            row = _row(session, build)
            if row is None or row.lease != lease:
                raise LeaseLost(
                    f"lease {clean(lease, 64)} is not that of build {clean(build, 64)}: "
                    "report on the build it came with",
                    build=clean(build, 64),
                )
            yield session, row

    def _look(self, builds: list[str]) -> None:
        """Move on those whose builders have died."""
        b = BuildRow
        lapsed = (
            select(b.id, b.key, b.variant)
            .outerjoin(LeaseRow, (LeaseRow.id == b.lease) & (LeaseRow.expires > now()))
            .where(b.state == "running", LeaseRow.id.is_(None))
        )
        with self._database.session() as session:
            found = session.execute(lapsed.where(among(session, b.id, builds))).all()
        for build, key, variant in found:
            with self._database.exclusive(key, variant) as session:
                row = _row(session, build)
                if row is not None:
                    self._settle(session, row)

    def _settle(self, session: Session, row: BuildRow) -> None:
        queue.settle(session, row, seconds=self._failed_seconds)

    def _stands(self, session: Session, row: BuildRow) -> bool:
        """Whether the newest build of an entry is the answer to who asks for it."""
        if row.state in ACTIVE:
            return True
        stored = queue.is_stored(session, CacheKey(row.key), row.variant)
        return row.state == "done" if stored else self._fails_still(session, row)

    def _fails_still(self, session: Session, row: BuildRow) -> bool:
        if row.state != "failed":
            return False
        return bool(
            session.execute(
                select(BuildRow.id).where(BuildRow.id == row.id, BuildRow.expires > now())
            ).first()
        )

    def _forget_old(self, session: Session) -> None:
        session.execute(
            delete(BuildRow).where(BuildRow.state.not_in(ACTIVE), BuildRow.created < now() - KEPT_SECONDS),
            execution_options={"synchronize_session": False},
        )


def _row(session: Session, build: str) -> BuildRow | None:
    return session.get(BuildRow, clean(build), populate_existing=True)


def _build(row: Any) -> Build:
    """Of a whole row, or of the columns of a listing."""
    error = None
    if row.error_type is not None:
        error = Failure(row.error_type, row.error_message or "")
    return Build(
        id=row.id,
        spec=row.spec,
        key=CacheKey(row.key),
        variant=row.variant,
        state=cast(State, row.state),
        stage=row.stage,
        expected_seconds=row.expected_seconds,
        attempts=row.attempts,
        error=error,
        log=getattr(row, "log", None),
        created=row.created,
        updated=row.updated,
        expires=row.expires,
    )


__all__ = ["Build", "BuildPage", "Builds", "Claimed", "Event", "Failure", "Progress"]
