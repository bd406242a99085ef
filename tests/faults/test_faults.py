"""Short counts of every family of the fault harness. `python -m tests.faults` runs the long ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.faults.answers import answers
from tests.faults.clocks import HOUR, clocks
from tests.faults.compiles import compile_rounds
from tests.faults.databases import databases
from tests.faults.kills import kill_rounds
from tests.faults.racing import races
from tests.faults.report import table, write_tables
from tests.faults.stages import STAGES
from tests.faults.tally import KINDS, Tally


@pytest.mark.slow
def test_a_process_killed_between_any_two_operations_loses_nothing_and_blocks_nobody(tmp_path: Path) -> None:
    tallies = kill_rounds(tmp_path, 3 * len(STAGES), seed=os.getpid())
    for tally in tallies:
        tally.require()
    assert {tally.name for tally in tallies} == set(STAGES)
    assert sum(tally.hit for tally in tallies) > len(STAGES)


@pytest.mark.slow
def test_a_warm_killed_in_a_compile_leaves_whole_entries_and_no_builder(tmp_path: Path) -> None:
    headers = Path(os.environ["AOTCACHE_HOME"], "headers")
    for tally in compile_rounds(tmp_path, 1, seed=os.getpid(), headers=headers):
        tally.require()


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
    for tally in databases(tmp_path, 1, locked_seconds=1.0):
        tally.require()


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
