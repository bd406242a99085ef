"""Short counts of every family of the fault harness. `python -m tests.faults` runs the long ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import obstore
import obstore.store
import psycopg
import pytest

from tests.faults import dying
from tests.faults.answers import answers
from tests.faults.clocks import HOUR, clocks
from tests.faults.compiles import compile_rounds
from tests.faults.databases import databases
from tests.faults.kills import STAGES, kill_rounds
from tests.faults.publishing import Replacing
from tests.faults.racing import races
from tests.faults.report import table, write_tables
from tests.faults.surroundings import surroundings
from tests.faults.tally import KINDS, Tally


@pytest.mark.slow
def test_a_process_killed_between_any_two_operations_loses_nothing_and_blocks_nobody(tmp_path: Path) -> None:
    tallies = kill_rounds(tmp_path, 3 * len(STAGES), seed=os.getpid())
    for tally in tallies:
        tally.require()
    assert {tally.name for tally in tallies} == set(STAGES)
    assert sum(tally.hit for tally in tallies) > len(STAGES)


def test_requests_to_a_bucket_and_to_a_database_are_operations(tmp_path: Path) -> None:
    """Compiled code makes them, which says little of itself: a kill is to come between any two of these as well."""
    bucket = obstore.store.MemoryStore()
    obstore.put(bucket, "there", b"x")
    requests: list[Callable[[], object]] = [
        lambda: obstore.put(bucket, "new", b"x"),
        lambda: obstore.get(bucket, "there"),
        lambda: obstore.head(bucket, "there"),
        lambda: obstore.copy(bucket, "there", "too"),
        lambda: obstore.delete(bucket, "there"),
        lambda: psycopg.connect("host=/nonexistent dbname=none"),
    ]
    for request in requests:
        slots = dying.Slots.create(tmp_path / "slots")
        slots.arm(dying.NEVER)
        with dying.watched(slots), suppress(psycopg.OperationalError):
            request()
        assert slots.count == 1
        slots.close()


def test_a_replacement_that_is_undone_is_counted_as_lost(tmp_path: Path) -> None:
    with surroundings(tmp_path) as around:
        stage, refs = Replacing(around), dict[Path, bytes]()
        with stage.ready():
            for _ in range(4):  # the last one replaces the first one
                call, arguments = stage.act()
                stage.done(around.hatched.run(call, arguments, counted=False).acknowledged)
                for ref in Path(stage.url.removeprefix("file://")).glob("refs/*/*/*.json"):
                    refs.setdefault(ref, ref.read_bytes())
            assert stage.check() == []
            for ref, first in refs.items():
                ref.write_bytes(first)
            (problem,) = stage.check()
            assert problem.startswith("lost: ")


@pytest.mark.slow
def test_a_warm_killed_in_a_compile_leaves_whole_entries_and_no_builder(tmp_path: Path) -> None:
    headers = Path(os.environ["AOTCACHE_HOME"], "headers")
    (tally,) = compile_rounds(tmp_path, 1, seed=os.getpid(), headers=headers)
    tally.require()
    assert (tally.hit, tally.notes) == (1, {"beside a builder": 1})


@pytest.mark.slow
def test_of_two_publishers_of_one_key_one_wins_in_every_store(tmp_path: Path) -> None:
    for tally in races(tmp_path, 3, seed=os.getpid()):
        tally.require()


@pytest.mark.slow
def test_whatever_a_server_answers_a_download_is_right_or_a_typed_error(tmp_path: Path) -> None:
    for tally in answers(tmp_path, 2, seed=os.getpid()):
        tally.require()


@pytest.mark.slow
def test_a_database_that_goes_away_costs_time_and_no_entry(tmp_path: Path) -> None:
    killed, locked = databases(tmp_path, 1, locked_seconds=1.0)
    killed.require()
    locked.require()  # whether its lock came in time to keep a publish waiting is chance
    assert killed.hit == killed.rounds


@pytest.mark.slow
def test_clocks_an_hour_off_change_nothing(tmp_path: Path) -> None:
    for tally in clocks(tmp_path, servers=(-HOUR, HOUR), others=((HOUR, -HOUR), (-HOUR, HOUR))):
        tally.require()


def test_tables_are_written_between_their_markers_alone(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text(
        "before\n<!-- a: begin -->\nold\n<!-- a: end -->\nbetween\n<!-- b: begin -->\nkept\n<!-- b: end -->\n"
    )
    tally = Tally("a", "a thing", rounds=3, hit=2, limit=5.0)
    tally.note(["lost: it"])
    write_tables([tally], document)
    text = document.read_text()
    assert text.startswith("before\n<!-- a: begin -->\n| scenario |")
    assert "| a thing | 3 | 2 | 0 | 0 | 0 | 1 | 0 | 0 | 0 | 0.0 / 5 s |  |" in text
    # What is counted another time takes the place of its own line alone.
    write_tables([Tally("a", "another", rounds=4, limit=5.0, notes={"reads": 7})], document)
    write_tables([Tally("a", "a thing", rounds=5, limit=5.0)], document)
    text = document.read_text()
    assert "| a thing | 5 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0.0 / 5 s |  |" in text
    assert "| another | 4 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0.0 / 5 s | 7 reads |" in text
    assert "| **all** | 9 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 |  |  |" in text
    assert "old" not in text
    assert text.endswith("between\n<!-- b: begin -->\nkept\n<!-- b: end -->\n")
    assert {len(line.split("|")) for line in table([tally]).splitlines()} == {len(KINDS) + 8}


def test_a_tally_fails_with_what_went_wrong() -> None:
    tally = Tally("a", "a thing", limit=1.0)
    with pytest.raises(AssertionError, match="no round"):
        tally.require()
    tally.rounds = 1
    tally.took(2.0)
    assert tally.counts["late"] == 1
    with pytest.raises(AssertionError, match="the limit is 1 s"):
        tally.require()
