"""Tokens: what clients show to be let in. Kept as sha256 alone; the text is shown once, when it is made."""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import ColumnElement, or_, select, update

from aotcache.db.engine import Database, among, clean, moment, now
from aotcache.db.models import TokenRow
from aotcache.errors import ConfigError
from aotcache.types import sha256

PREFIX = "aot_"
SCOPES = ("read", "publish", "build", "admin")
"""What a token can allow; `admin` allows everything."""
_NOTED_SECONDS = 60.0
"""How fresh `last_used` is: not every request writes."""
_NAME = 128


@dataclass(frozen=True, slots=True)
class Token:
    """One token, without its text. Times are seconds since the epoch.

    Attributes:
        expires: When it ends by itself; None for never.
        revoked: When it was revoked.
        last_used: When it was last shown, to the minute.
    """

    id: str
    name: str
    scopes: tuple[str, ...]
    created: float
    expires: float | None
    revoked: float | None
    last_used: float | None


@dataclass(frozen=True, slots=True)
class Granted:
    """What a token that is valid allows."""

    id: str
    name: str
    scopes: tuple[str, ...]

    def allows(self, scope: str) -> bool:
        """Whether it allows what needs `scope`."""
        return scope in self.scopes or "admin" in self.scopes


class Tokens:
    """Makes and checks tokens. Safe for threads and processes."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._shown: set[str] = set()

    def create(self, name: str, scopes: Iterable[str], expires: timedelta | None = None) -> tuple[str, Token]:
        """Make a token.

        Args:
            name: What to call it; a living token must not have the name already.
            scopes: What it allows.
            expires: How long it lasts; None for ever.

        Returns:
            The token's text, which nobody can find out later, and the token.

        Raises:
            ConfigError: for a name that is taken or empty, a scope that there is not, or no scope at all.
        """
        wanted = set(scopes)
        if not wanted or not wanted <= set(SCOPES):
            asked = ", ".join(sorted(wanted)) or "(none)"
            raise ConfigError(f"scopes {asked}: expected one or more of {', '.join(SCOPES)}")
        if not name.strip() or len(name) > _NAME or clean(name) != name:
            raise ConfigError(f"token name {name[:80]!r}: expected 1 to {_NAME} plain characters")
        if expires is not None and expires <= timedelta(0):
            raise ConfigError(f"a token that expires after {expires} would never be valid")
        text = PREFIX + secrets.token_urlsafe(32)
        with self._database.exclusive("tokens", name) as session:
            if session.execute(select(TokenRow.id).where(TokenRow.name == name, _live())).first() is not None:
                raise ConfigError(f"there is a token named {name!r} already: revoke it, or take another name")
            at = moment(session)
            row = TokenRow(
                id=secrets.token_hex(6),
                name=name,
                hash=sha256(text.encode()),
                scopes=[scope for scope in SCOPES if scope in wanted],
                created=at,
                expires=None if expires is None else at + expires.total_seconds(),
            )
            session.add(row)
            session.flush()
            return text, _token(row)

    def list(self) -> list[Token]:
        """All tokens, the oldest first; those that ended too."""
        with self._database.session() as session:
            return [
                _token(row)
                for row in session.scalars(select(TokenRow).order_by(TokenRow.created, TokenRow.id))
            ]

    def revoke(self, token: str) -> tuple[Token, ...]:
        """End the living tokens with this id or name, from the next request on; returns them."""
        named = or_(TokenRow.id == clean(token), TokenRow.name == clean(token))
        with self._database.session(write=True) as session:
            rows = session.scalars(select(TokenRow).where(named, _live())).all()
            at = moment(session)
            for row in rows:
                row.revoked = at
            session.flush()
            return tuple(_token(row) for row in rows)

    def check(self, text: str) -> Granted | None:
        """What a client's text allows; None if it is no token, or one that expired or was revoked."""
        hashed = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
        stale = or_(TokenRow.last_used.is_(None), TokenRow.last_used < now() - _NOTED_SECONDS)
        with self._database.session() as session:
            found = session.execute(
                select(TokenRow.id, TokenRow.name, TokenRow.scopes, stale).where(
                    TokenRow.hash == hashed, _live()
                )
            ).first()
        if found is None:
            return None
        if found[3]:
            with self._lock:
                self._shown.add(found[0])
        return Granted(found[0], found[1], tuple(found[2]))

    def flush(self) -> None:
        """Write when the tokens were used that were shown since the last time; call it every few seconds.

        Not in `check`: who may read is let in also where nothing can be written, as on a full disk.

        Raises:
            DatabaseError: if it could not be written; it is kept for the next time then.
        """
        with self._lock:
            shown, self._shown = self._shown, set()
        if not shown:
            return
        try:
            with self._database.session(write=True) as session:
                session.execute(
                    update(TokenRow)
                    .where(among(session, TokenRow.id, sorted(shown)))
                    .values(last_used=now()),
                    execution_options={"synchronize_session": False},
                )
        except BaseException:
            with self._lock:
                self._shown |= shown
            raise

    def any_live(self) -> bool:
        """Whether any token is valid now: while there is none, the service needs none."""
        with self._database.session() as session:
            return session.execute(select(TokenRow.id).where(_live()).limit(1)).first() is not None


def _live() -> ColumnElement[bool]:
    return TokenRow.revoked.is_(None) & or_(TokenRow.expires.is_(None), TokenRow.expires > now())


def _token(row: TokenRow) -> Token:
    return Token(row.id, row.name, tuple(row.scopes), row.created, row.expires, row.revoked, row.last_used)


__all__ = ["PREFIX", "SCOPES", "Granted", "Token", "Tokens"]
