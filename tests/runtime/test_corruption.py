"""Some hundred random corruptions of stored entries; `python -m tests.faults --corruptions 10000` makes more."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.faults import corruption
from tests.runtime import artifacts

ROUNDS = 500


@pytest.fixture(scope="session")
def counts(tmp_path_factory: pytest.TempPathFactory) -> corruption.Counts:
    return corruption.run(ROUNDS, 1, made=artifacts.pair(tmp_path_factory))


def test_every_problem_is_in_the_report() -> None:
    """Also those of the entry that was not hit, and of commands that only look."""
    said = ["wrong: it was opened", "the entry that was left alone was missed", "unhandled: it raised"]
    counts = corruption.Counts(
        {"a": Counter(opened=2, wrong=1), "b": Counter(missed=1)},
        [corruption.Problem("a", "round 1", text) for text in said],
    )
    first, second = counts.tallies()
    assert (first.rounds, first.counts["wrong"], first.counts["unusable"]) == (3, 1, 2)
    assert [problem.partition(": ")[2] for problem in first.problems] == said
    assert (second.rounds, second.problems) == (1, [])


@pytest.mark.slow
def test_what_is_opened_after_a_corruption_is_what_was_published(counts: corruption.Counts) -> None:
    assert counts.problems == []
    assert counts.rounds == ROUNDS
    assert (counts.total("wrong"), counts.total("unhandled")) == (0, 0)


def test_every_kind_was_made_and_the_control_opens(counts: corruption.Counts) -> None:
    assert set(counts.kinds) == set(corruption.KINDS)
    assert set(counts.kinds["nothing"]) == {"opened"}
    assert set(counts.kinds["unpacked: changed since"]) == {"opened"}  # made anew, without anybody's help
    assert counts.total("refused") > ROUNDS / 20
    assert counts.total("missed") > ROUNDS / 3
