"""Leases: the right of one holder to build and publish one entry, until it expires.

Every lease has a fencing token that is greater than that of any lease before it, also where rows
were deleted in between. Time is the database's clock, so holders' clocks may say what they like.
A lease that ran out is lost, also if nobody has taken it since: its holder begins anew.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from aotcache.db.engine import Database, clean, moment, now
from aotcache.db.models import CounterRow, LeaseRow
from aotcache.errors import LeaseHeld, LeaseLost
from aotcache.types import CacheKey

SECONDS = 60.0
"""How long a lease lasts after it was taken or renewed."""
_HOLDER = 512


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease that was taken.

    Attributes:
        id: Its name.
        token: The fencing token.
        seconds: How long it lasts from now on.
    """

    id: str
    key: CacheKey
    variant: str
    token: int
    holder: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Held:
    """Somebody else has it.

    Attributes:
        holder: Who, in their own words.
        expires_in: Seconds until it runs out, unless it is renewed.
    """

    holder: str
    expires_in: float


class Leases:
    """Takes, renews and checks leases. Safe for threads, processes and hosts.

    Args:
        database: Where they are.
        seconds: How long one lasts after it was taken or renewed.
    """

    def __init__(self, database: Database, *, seconds: float = SECONDS) -> None:
        self._database = database
        self.seconds = seconds

    def acquire(self, key: CacheKey, variant: str, holder: str) -> Lease | Held:
        """Take the lease of an entry, or learn who has it. A holder that asks twice is told of itself."""
        with self._database.exclusive(key, variant) as session:
            return self.take(session, key, variant, holder)

    def take(self, session: Session, key: CacheKey, variant: str, holder: str) -> Lease | Held:
        """`acquire` inside the `exclusive` session of the entry."""
        held = self.holder(session, key, variant)
        if held is not None:
            return held
        session.execute(delete(LeaseRow).where(LeaseRow.key == key, LeaseRow.variant == variant))
        token = session.execute(
            update(CounterRow)
            .where(CounterRow.name == "fencing")
            .values(value=CounterRow.value + 1)
            .returning(CounterRow.value),
            execution_options={"synchronize_session": False},
        ).scalar_one()
        lease = Lease(secrets.token_hex(16), key, variant, token, clean(holder, _HOLDER), self.seconds)
        session.add(
            LeaseRow(
                id=lease.id,
                key=key,
                variant=variant,
                token=token,
                holder=lease.holder,
                expires=moment(session) + self.seconds,
            )
        )
        session.flush()
        return lease

    def holder(self, session: Session, key: CacheKey, variant: str) -> Held | None:
        """Who holds an entry now."""
        found = session.execute(
            select(LeaseRow.holder, LeaseRow.expires - now()).where(
                LeaseRow.key == key, LeaseRow.variant == variant, LeaseRow.expires > now()
            )
        ).first()
        return None if found is None else Held(found[0], max(0.0, float(found[1])))

    def renew(self, lease: str, token: int) -> float:
        """A heartbeat: the lease lasts `seconds` from now on, which are returned.

        Raises:
            LeaseLost: if it ran out, was released, or somebody else has it.
        """
        with self._database.session() as session:
            entry = session.execute(
                select(LeaseRow.key, LeaseRow.variant).where(LeaseRow.id == clean(lease))
            ).first()
        if entry is None:
            raise _lost(lease, token)
        key, variant = entry
        with self._database.exclusive(key, variant) as session:
            return self.extend(session, CacheKey(key), variant, lease, token)

    def extend(self, session: Session, key: CacheKey, variant: str, lease: str, token: int) -> float:
        """`renew` inside the `exclusive` session of the entry."""
        self.require(session, key, variant, lease, token)
        session.execute(
            update(LeaseRow).where(LeaseRow.id == clean(lease)).values(expires=now() + self.seconds),
            execution_options={"synchronize_session": False},
        )
        return self.seconds

    def release(self, lease: str, token: int) -> None:
        """Give a lease back; does nothing if it is lost already."""
        with self._database.session(write=True) as session:
            held = session.execute(select(LeaseRow.token).where(LeaseRow.id == clean(lease))).scalar()
            if held == token:
                session.execute(delete(LeaseRow).where(LeaseRow.id == clean(lease)))

    def require(self, session: Session, key: CacheKey, variant: str, lease: str, token: int) -> None:
        """Make sure of a lease inside the `exclusive` session of its entry, to whose end it then holds.

        Raises:
            LeaseLost: if it is not held any more, or is of another entry.
        """
        held = session.execute(
            select(LeaseRow.token).where(
                LeaseRow.id == clean(lease),
                LeaseRow.key == key,
                LeaseRow.variant == variant,
                LeaseRow.expires > now(),
            )
        ).scalar()
        if held is None or held != token:
            raise _lost(lease, token)

    @contextmanager
    def publishing(self, key: CacheKey, variant: str, claim: tuple[str, int] | None) -> Iterator[Session]:
        """Hold an entry while its ref is written: nobody can take over in between.

        `Index.add` belongs inside, in the same thread: it joins this transaction. On SQLite
        every other writer of the database waits meanwhile.

        Args:
            key, variant: The entry.
            claim: The publisher's lease and fencing token, if it has one.

        Raises:
            LeaseLost: if the lease of `claim` is not held any more.
            LeaseHeld: if there is no claim, and somebody holds the entry.
        """
        with self._database.exclusive(key, variant) as session:
            if claim is not None:
                self.require(session, key, variant, *claim)
            elif (held := self.holder(session, key, variant)) is not None:
                raise LeaseHeld(
                    f"{held.holder} is building {key} for {variant}; its lease lasts {held.expires_in:.0f} s: "
                    "wait for it, or try again then",
                    holder=held.holder,
                    expires_in=held.expires_in,
                )
            yield session


def _lost(lease: str, token: int) -> LeaseLost:
    return LeaseLost(
        f"lease {clean(lease, 64)} with token {token} is not held any more: it ran out, was given back, "
        "or somebody else has taken over. Nothing was written; ask for a new lease",
        lease=clean(lease, 64),
        token=token,
    )


__all__ = ["SECONDS", "Held", "Lease", "Leases"]
