"""One stage that processes are killed in: what is done there, and what must hold afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from tests.faults.hatchery import Ended
from tests.faults.surroundings import Surroundings

LIMIT = 30.0
"""Seconds that an act may take, the one that is done again after a kill included."""


class Stage:
    """One stage; see `kills.py` for when each method is called."""

    name: ClassVar[str]
    weight: ClassVar[int] = 10

    def __init__(self, around: Surroundings) -> None:
        self.around = around
        self.environment: dict[str, str | None] = {}
        self.notes: dict[str, int] = {}

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Servers and the like, for all rounds."""
        yield

    def act(self) -> tuple[str, dict[str, Any]]:
        """Prepare a round: the function that will be killed, and its arguments."""
        raise NotImplementedError

    def disturbed(self, call: str, arguments: dict[str, Any], how: Mapping[str, Any]) -> Ended:
        """Do the act and kill it."""
        return self.around.hatched.run(call, arguments, limit=LIMIT, environment=self.environment, **how)

    def was_hit(self, ended: Ended) -> bool:
        """Whether the kill came before the act was done."""
        return ended.killed

    def may_end_so(self, ended: Ended) -> bool:
        """Whether the act may end so when something is killed."""
        return ended.killed or ended.status == 0

    def operations(self, whole: Ended) -> int:
        """Among how many operations to choose, by an act that was not disturbed."""
        return whole.operations

    def done(self, acknowledged: list[dict[str, Any]]) -> None:
        """Take note of what was acknowledged."""

    def check(self) -> list[str]:
        """What fresh processes find wrong."""
        raise NotImplementedError

    def finished(self) -> list[str]:
        """What is wrong once the round is over."""
        return []

    def watched(self) -> list[str]:
        """What readers beside the rounds found wrong."""
        return []

    def ask(self, call: str, **arguments: Any) -> list[str]:
        """The problems that a function of `acts` finds in a process of its own."""
        ended = self.around.hatched.run(
            f"tests.faults.acts:{call}", arguments, limit=LIMIT, environment=self.environment
        )
        if ended.status == 0:
            return list(ended.answer)
        kind = "late" if ended.late else "unusable"
        return [f"{kind}: {call} ended with {ended.status}: {ended.error} {ended.log[-2000:]}"]
