from __future__ import annotations

import time
from datetime import timedelta

import pytest
from sqlalchemy import text

from aotcache.db.engine import Database
from aotcache.errors import ConfigError, DatabaseError
from aotcache.service.tokens import Tokens


@pytest.fixture
def tokens(database: Database) -> Tokens:
    return Tokens(database)


def test_a_token_allows_its_scopes_and_no_other(tokens: Tokens) -> None:
    shown, made = tokens.create("ci", ["publish", "read", "read"], timedelta(days=30))
    assert shown.startswith("aot_")
    assert len(shown) == 4 + 43
    assert made.scopes == ("read", "publish")
    assert made.expires is not None
    assert made.expires - made.created == pytest.approx(30 * 24 * 3600)
    granted = tokens.check(shown)
    assert granted is not None
    assert (granted.id, granted.name) == (made.id, "ci")
    assert [scope for scope in ("read", "publish", "build", "admin") if granted.allows(scope)] == [
        "read",
        "publish",
    ]


def test_admin_allows_everything(tokens: Tokens) -> None:
    shown, _ = tokens.create("root", ["admin"])
    granted = tokens.check(shown)
    assert granted is not None
    assert all(granted.allows(scope) for scope in ("read", "publish", "build", "admin"))


@pytest.mark.parametrize("shown", ["", "aot_", "aot_wrong", "nul\0", "\ud800", "x" * 100_000])
def test_what_is_no_token_allows_nothing(tokens: Tokens, shown: str) -> None:
    tokens.create("ci", ["read"])
    assert tokens.check(shown) is None


def test_the_text_is_nowhere_in_the_database(tokens: Tokens, database: Database) -> None:
    shown, _ = tokens.create("ci", ["read"])
    tokens.check(shown)
    with database.session() as session:
        rows = session.execute(text("SELECT * FROM tokens")).all()
    assert len(rows) == 1
    assert shown not in str(rows)
    assert shown.removeprefix("aot_") not in str(rows)


def test_a_token_that_expired_allows_nothing(tokens: Tokens, database: Database) -> None:
    shown, made = tokens.create("ci", ["read"], timedelta(hours=1))
    assert tokens.any_live()
    with database.session(write=True) as session:
        session.execute(text("UPDATE tokens SET expires = expires - 3601"))
    assert tokens.check(shown) is None
    assert not tokens.any_live()
    assert [one.id for one in tokens.list()] == [made.id]


@pytest.mark.parametrize("by", ["id", "name"])
def test_a_revoked_token_allows_nothing(tokens: Tokens, by: str) -> None:
    shown, made = tokens.create("ci", ["read"])
    kept, _ = tokens.create("other", ["read"])
    assert [one.id for one in tokens.revoke(getattr(made, by))] == [made.id]
    assert tokens.check(shown) is None
    assert tokens.check(kept) is not None
    assert tokens.revoke(getattr(made, by)) == ()
    first, second = tokens.list()
    assert first.revoked is not None
    assert second.revoked is None


def test_a_name_is_free_again_once_its_token_ended(tokens: Tokens) -> None:
    tokens.create("ci", ["read"])
    with pytest.raises(ConfigError, match="named 'ci' already"):
        tokens.create("ci", ["read"])
    tokens.revoke("ci")
    tokens.create("ci", ["read"])
    assert len(tokens.list()) == 2


def test_use_is_noted_to_the_minute(tokens: Tokens, database: Database) -> None:
    shown, _ = tokens.create("ci", ["read"])
    assert tokens.list()[0].last_used is None

    def use() -> float:
        tokens.check(shown)
        tokens.flush()
        at = tokens.list()[0].last_used
        assert at is not None
        return at

    first = use()
    assert use() == first
    with database.session(write=True) as session:
        session.execute(text("UPDATE tokens SET last_used = last_used - 61"))
    assert use() >= first


def test_a_token_is_checked_while_nothing_can_be_written(tokens: Tokens, database_url: str) -> None:
    shown, _ = tokens.create("ci", ["read"])
    other = Database(database_url)
    started = time.monotonic()
    with other.session(write=True):
        assert tokens.check(shown) is not None
    assert time.monotonic() - started < 10
    other.close()
    tokens.flush()
    assert tokens.list()[0].last_used is not None


def test_a_use_that_could_not_be_noted_is_noted_the_next_time(tokens: Tokens, database: Database) -> None:
    shown, _ = tokens.create("ci", ["read"])
    tokens.check(shown)
    with database.session(write=True) as session:
        session.execute(text("ALTER TABLE tokens RENAME TO elsewhere"))
    with pytest.raises(DatabaseError):
        tokens.flush()
    with database.session(write=True) as session:
        session.execute(text("ALTER TABLE elsewhere RENAME TO tokens"))
    tokens.flush()
    assert tokens.list()[0].last_used is not None


@pytest.mark.parametrize(
    ("name", "scopes", "expires", "told"),
    [
        ("ci", [], None, "scopes"),
        ("ci", ["read", "write"], None, "read, write"),
        (" ", ["read"], None, "name"),
        ("x" * 129, ["read"], None, "name"),
        ("nul\0", ["read"], None, "name"),
        ("ci", ["read"], timedelta(0), "expires"),
    ],
)
def test_what_makes_no_token(
    tokens: Tokens, name: str, scopes: list[str], expires: timedelta | None, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        tokens.create(name, scopes, expires)
    assert tokens.list() == []
