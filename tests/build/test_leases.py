"""Signs of life of a lease: what ends the work, what does not, and when it is too late to."""

from __future__ import annotations

import threading

import pytest

from aotcache.build.leases import Heartbeat
from aotcache.errors import LeaseLost, ServiceError, ServiceUnavailable

SECONDS = 0.3
LIMIT = 30.0


def test_a_service_that_is_away_for_a_moment_ends_nothing() -> None:
    answers = [ServiceUnavailable("away"), None, None]
    heard, ended = threading.Event(), threading.Event()

    def beat() -> None:
        answer = answers.pop(0) if answers else None
        if not answers:
            heard.set()
        if answer is not None:
            raise answer

    with Heartbeat(beat, SECONDS, ended.set) as heart:
        assert heard.wait(LIMIT)
    assert not ended.is_set()
    assert heart.lost is None


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ServiceUnavailable("away"), "could not be renewed: away"),
        (ServiceError("no right to"), "could not be renewed: no right to"),
        (LeaseLost("somebody else has it"), "somebody else has it"),
    ],
)
def test_a_lease_that_is_not_renewed_in_time_ends_the_work_once(error: Exception, text: str) -> None:
    ends: list[int] = []
    ended = threading.Event()

    def beat() -> None:
        raise error

    def end() -> None:
        ends.append(1)
        ended.set()

    with Heartbeat(beat, SECONDS, end) as heart:
        assert ended.wait(LIMIT)
    assert len(ends) == 1
    assert isinstance(heart.lost, LeaseLost)
    assert text in str(heart.lost)


def test_what_is_heard_after_the_work_ends_nothing() -> None:
    asked, go_on = threading.Event(), threading.Event()
    ends: list[int] = []

    def beat() -> None:
        asked.set()
        go_on.wait(LIMIT)
        raise LeaseLost("too late")

    heart = Heartbeat(beat, SECONDS, lambda: ends.append(1))
    with heart:
        heart.wake()
        assert asked.wait(LIMIT)
    go_on.set()
    heart._thread.join(LIMIT)
    assert heart.lost is not None
    assert ends == []
