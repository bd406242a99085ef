"""The names of specs that builds may have: kept, shared by servers, and forgotten at last."""

from __future__ import annotations

import pytest
from sqlalchemy import text

from aotcache.db.engine import Database
from aotcache.service import specs
from aotcache.service.specs import Specs


def test_what_was_registered_is_known_to_every_server_and_after_a_restart(database: Database) -> None:
    Specs(database).register(["b", "a"])
    Specs(database).register(["a", "c"])
    assert list(Specs(database).known()) == ["a", "b", "c"]


def test_own_names_are_known_at_once_and_to_others_when_they_are_written(database: Database) -> None:
    known = Specs(database, ["own"])
    assert list(known.known()) == ["own"]
    assert Specs(database).known() == {}
    known.flush()
    assert list(Specs(database).known()) == ["own"]


def test_a_name_said_again_keeps_its_first_time(database: Database) -> None:
    Specs(database).register(["a"])
    with database.session(write=True) as session:
        session.execute(text("UPDATE specs SET registered = 5"))
    Specs(database).register(["a"])
    assert Specs(database).known() == {"a": 5.0}


def test_a_name_that_nobody_has_had_for_long_is_none(database: Database) -> None:
    Specs(database).register(["a", "b"])
    with database.session(write=True) as session:
        session.execute(text("UPDATE specs SET seen = seen - 3000000 WHERE name = 'a'"))
    assert list(Specs(database).known()) == ["b"]
    Specs(database).register(["a"])
    assert list(Specs(database).known()) == ["a", "b"]


def test_more_names_than_there_is_room_for_are_left_out(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(specs, "MOST", 2)
    Specs(database).register(["a", "b", "c"])
    Specs(database).register(["b", "d"])
    assert list(Specs(database).known()) == ["a", "b"]


def test_a_name_is_written_once_and_not_with_every_claim(database: Database) -> None:
    known = Specs(database)
    known.register(["a"])
    with database.session(write=True) as session:
        session.execute(text("DELETE FROM specs"))
    known.register(["a"])
    assert known.known() == {}
