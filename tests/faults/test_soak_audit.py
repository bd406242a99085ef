"""The soak's last look notices a loss, also one that was made good since, and excuses what went by a rule."""

from __future__ import annotations

from typing import Any

from tests.faults import soak_audit
from tests.faults.soak_world import NUMBERS, PINNED, key

NUMBER = NUMBERS[20]
NOTHING: dict[int, Any] = dict.fromkeys(NUMBERS, ())


def published(at: float, number: int = NUMBER) -> dict[str, Any]:
    return {
        "event": "published",
        "at": at,
        "who": "builder-0",
        "number": number,
        "began": at - 1,
        "stored": True,
    }


def missing(at: float, number: int = NUMBER) -> dict[str, Any]:
    return {"event": "missing", "at": at, "who": "builder-1", "number": number, "asked": at - 0.5}


def collection(began: float, ended: float, *removed: int, age: float | None = None) -> list[dict[str, Any]]:
    common = {"who": "operator-0", "age": age, "until": ended}
    keys = [key(number) for number in removed]
    return [
        {"event": "collecting", "at": began, **common},
        {"event": "collected", "at": ended, "began": began, "removed": keys, **common},
    ]


def lost(*lines: dict[str, Any]) -> tuple[int, int]:
    """How many are found to be lost at the end, and how many to have been missing."""
    ordered = sorted(lines, key=lambda line: float(line["at"]))
    return len(list(soak_audit._lost(ordered, NOTHING))), len(list(soak_audit._missing(ordered)))


def test_what_went_by_no_rule_is_lost_also_if_it_is_published_again() -> None:
    assert lost(published(10), missing(20)) == (1, 1)
    others = collection(11, 12, NUMBER + 1), collection(13, 14, NUMBER, age=20.0)
    assert lost(published(10), *others[0], *others[1], missing(20), published(21)) == (1, 1)


def test_what_a_collection_says_that_it_took_is_not_lost() -> None:
    assert lost(published(10), *collection(15, 16, NUMBER), missing(20)) == (0, 0)
    assert lost(published(10), *collection(35, 36, NUMBER, age=20.0), missing(40)) == (0, 0)
    # It had been published anew by then; or had not been taken yet.
    assert lost(published(10), *collection(15, 16, NUMBER), published(18), missing(20)) == (1, 1)
    assert lost(published(10), missing(12), *collection(15, 16, NUMBER)) == (0, 1)


def test_a_collection_that_was_not_heard_to_the_end_may_have_taken_what_its_rule_allows() -> None:
    begun = collection(15, 16, age=5.0)[0]
    assert lost(published(10), begun, missing(20)) == (0, 0)
    assert lost(published(14), begun, missing(20)) == (1, 1)
    ended = {"event": "service ended", "at": 15.5, "who": "service"}
    assert lost(published(10), *collection(15, 16), ended, missing(20)) == (0, 0)
    assert lost(published(10), *collection(15, 16), {**ended, "at": 17}, missing(20)) == (1, 1)


def test_nothing_excuses_that_what_is_pinned_is_gone() -> None:
    pinned = PINNED[0]
    assert lost(published(10, pinned), *collection(15, 16, pinned), missing(20, pinned)) == (1, 1)
