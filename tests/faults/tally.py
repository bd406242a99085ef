"""What a scenario has to hold, and how often it did.

Every scenario of the harness states the same five things: no wrong bytes are used, no partial entry is
seen, nothing that was acknowledged is lost, no wait is longer than its limit, and what was asked for works
again without a human.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

KINDS = ("wrong", "partial", "lost", "stuck", "late", "unusable")
"""How a problem's text begins: wrong bytes were used or shown; half of something was seen; what was
acknowledged is not there; a lock is not free; a limit was passed; the same does not work afterwards."""


@dataclass
class Tally:
    """One scenario's counts.

    Attributes:
        family: What it belongs to, e.g. "killed".
        name: What is done, and what is done to it.
        rounds: How often.
        hit: In how many of them the fault happened before the work was done.
        acknowledged: Things that were said to be done.
        slowest: The longest that a round's recovery took, in seconds.
        limit: What every wait must stay below, in seconds.
        counts: Problems by kind; all zero where the scenario holds.
        problems: Their texts.
        notes: Further counts, for the table.
    """

    family: str
    name: str
    rounds: int = 0
    hit: int = 0
    acknowledged: int = 0
    slowest: float = 0.0
    limit: float = 0.0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    problems: list[str] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)

    def note(self, problems: Iterable[str], where: str = "") -> None:
        """Count problems, whose texts begin with their kinds."""
        for problem in problems:
            kind = problem.partition(":")[0]
            self.counts[kind if kind in self.counts else "unusable"] += 1
            self.problems.append(f"{where}{problem}")

    def took(self, seconds: float) -> None:
        """Count how long a recovery took."""
        self.slowest = max(self.slowest, seconds)
        if self.limit and seconds > self.limit:
            self.note([f"late: it took {seconds:.1f} s, the limit is {self.limit:g} s"])

    def require(self) -> None:
        """Fail, with every problem, unless all of it held."""
        assert not self.problems, "\n".join([f"{self.family}, {self.name}:", *self.problems])
        assert self.rounds > 0, f"{self.family}, {self.name}: no round was made"
