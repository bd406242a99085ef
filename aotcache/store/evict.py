"""What a collection removes and why: rules over values alone, no store is touched here.

Least recently used first. An archive that several entries share counts once; for the size limit it is as
young as its youngest entry, and goes with all of them or not at all, since nothing is won by a part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from aotcache.types import CacheKey, Digest

DAY = 24 * 3600.0
"""Seconds. What looks abandoned may be half a publish, or another host's clock; not after a day."""

Kind = Literal["entry", "archive", "unpacked"]

Held = Literal["newer", "unclear"]
"""Why no rule may remove something: written in a newer format; perhaps named by a ref that cannot be read."""

Reason = Literal[
    "pinned",
    "locked",
    "leased",
    "newer",
    "unclear",
    "recent",
    "busy",
    "limits",
    "age",
    "size",
    "gone",
    "unnamed",
]
"""Why something stays (the first eight) or goes (the last four). "busy": it was to go, and somebody used or
replaced it, or another collection has it, or it could not be removed."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Something that could be removed.

    Attributes:
        kind: An entry; an archive that no entry names; or a folder of unpacked libraries.
        key: Of an entry.
        variant: Of an entry.
        digest: The archive; None for an entry whose ref cannot be read.
        size: Bytes of the archive or folder; None where the store has no such archive.
        used: When it was used last, or written if nothing says when; seconds since the epoch.
        place: Where it lies, if what is collected are several places.
        held: Why no rule may remove it.
        problem: Why a lookup takes the entry for a miss.
        what: Region, mode and bucket of an entry, for people.
        resumed: Of an archive that no entry names: a collection that did not end had begun to remove it.
    """

    kind: Kind
    key: CacheKey | None
    variant: str
    digest: Digest | None
    size: int | None
    used: float
    place: str = ""
    held: Held | None = None
    problem: str | None = None
    what: str = ""
    resumed: bool = False

    @property
    def order(self) -> tuple[float, str, str, str, str, str]:
        """Sorts by last use; of equal times, the same way on every host."""
        return (self.used, self.key or "", self.variant, self.digest or "", self.kind, self.place)


@dataclass(frozen=True, slots=True)
class Limits:
    """What is to be kept.

    Attributes:
        max_bytes: Of all archives together; None for no limit.
        max_age: Seconds that an entry may go unused; None for no limit.
    """

    max_bytes: int | None = None
    max_age: float | None = None


@dataclass(frozen=True, slots=True)
class Protected:
    """What stays whatever the limits say.

    Attributes:
        pins: Keys and digests.
        locked: Digests that lock files name.
        leased: Entries (key, variant) that somebody builds right now.
    """

    pins: Collection[str] = frozenset()
    locked: Collection[str] = frozenset()
    leased: Collection[tuple[str, str]] = frozenset()

    def reason(self, candidate: Candidate) -> Reason | None:
        """Why a candidate must stay, if it must."""
        if candidate.held is not None:
            return candidate.held
        if candidate.digest in self.pins or candidate.key in self.pins:
            return "pinned"
        if candidate.digest in self.locked:
            return "locked"
        if candidate.key is not None and (candidate.key, candidate.variant) in self.leased:
            return "leased"
        return None


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a candidate goes, and the reason for either."""

    candidate: Candidate
    remove: bool
    reason: Reason

    def to_json(self) -> dict[str, object]:
        """What commands and services say of it."""
        c = self.candidate
        return {
            "kind": c.kind,
            "key": c.key,
            "variant": c.variant or None,
            "digest": c.digest,
            "size": c.size,
            "last_used": c.used,
            "what": c.what or None,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """What a collection would do.

    Attributes:
        decisions: One for each candidate, least recently used first.
        before: Bytes of all archives and folders; those shared count once.
        after: Bytes of what stays.
        over: Bytes above the size limit that cannot be freed: they are pinned, locked or in use.
    """

    decisions: tuple[Decision, ...]
    before: int
    after: int
    over: int

    @property
    def removed(self) -> list[Candidate]:
        """What goes, in the order in which it does."""
        return [decision.candidate for decision in self.decisions if decision.remove]


@dataclass(frozen=True, slots=True)
class Collected:
    """What a collection did, or would do.

    Attributes:
        where: The store's URL, or what else was collected.
        dry_run: Nothing was removed.
        decisions: What goes and what stays, least recently used first. Of a service those alone that
            go, and those that its limits would take but something protects.
        before, after: Bytes of all archives.
        over: Bytes above the size limit that cannot be freed.
        problems: What could not be removed.
        notes: What cannot be read, so that nothing says what it is.
    """

    where: str
    dry_run: bool
    decisions: tuple[Decision, ...]
    before: int
    after: int
    over: int
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def removed(self) -> list[Decision]:
        """What went, or would."""
        return [decision for decision in self.decisions if decision.remove]


@dataclass(slots=True)
class Planner:
    """Decides candidate by candidate, so that those of a large store need never be in memory together.

    Candidates come in their order, each with its group: all that have the same archive, itself included.

    Attributes:
        total: Bytes of all archives before.
        limits, protected: The rules.
        now: Seconds since the epoch, by the clock that `used` is by.
        freed: Bytes that what was decided so far frees.
    """

    total: int
    limits: Limits
    protected: Protected
    now: float
    freed: int = field(default=0)

    @property
    def over(self) -> int:
        """Bytes above the size limit still."""
        if self.limits.max_bytes is None:
            return 0
        return max(0, self.total - self.freed - self.limits.max_bytes)

    def reached(self, used: float) -> bool:
        """Whether nothing that was used at this time or later goes."""
        return self.over == 0 and not self._older(used, self.limits.max_age)

    def decide(self, candidate: Candidate, group: Sequence[Candidate]) -> Iterator[Decision]:
        """What to do with a candidate, and with those of its group that were left undecided.

        Nothing at all where that depends on a later one of the group, or nothing speaks against it.
        """
        stays = self.protected.reason(candidate)
        goes = None if stays is not None else self._outlived(candidate)
        if stays is not None:
            yield Decision(candidate, False, stays)
        elif goes is not None:
            yield Decision(candidate, True, goes)
        elif candidate.kind == "archive":
            yield Decision(candidate, False, "recent")
        if candidate.order != max(member.order for member in group):
            return
        left = [m for m in group if self.protected.reason(m) is not None or self._outlived(m) is None]
        size = max(member.size or 0 for member in group)
        if not left:
            self.freed += size
        elif self.over and size and not any(self._fixed(member) for member in left):
            self.freed += size
            for member in left:
                yield Decision(member, True, "size")

    def _fixed(self, candidate: Candidate) -> bool:
        return self.protected.reason(candidate) is not None or candidate.kind == "archive"

    def _outlived(self, candidate: Candidate) -> Reason | None:
        """Why an unprotected candidate goes whatever the size."""
        if candidate.kind == "archive":
            return "unnamed" if candidate.resumed or self._older(candidate.used, DAY) else None
        if candidate.digest is not None and candidate.size is None and self._older(candidate.used, DAY):
            return "gone"
        return "age" if self._older(candidate.used, self.limits.max_age) else None

    def _older(self, used: float, seconds: float | None) -> bool:
        return seconds is not None and self.now - used > seconds


def plan(
    candidates: Iterable[Candidate],
    *,
    max_bytes: int | None = None,
    max_age: float | None = None,
    pins: Collection[str] = frozenset(),
    locked: Collection[str] = frozenset(),
    leased: Collection[tuple[str, str]] = frozenset(),
    now: float,
) -> Plan:
    """Decide over all candidates at once.

    Args:
        candidates: In any order.
        max_bytes, max_age: See `Limits`.
        pins, locked, leased: See `Protected`.
        now: See `Planner`. What was used later, by a clock that is ahead, counts as used now.
    """
    ordered = sorted(candidates, key=lambda candidate: candidate.order)
    groups: dict[object, list[Candidate]] = defaultdict(list)
    for number, candidate in enumerate(ordered):
        groups[_group(candidate, number)].append(candidate)
    total = sum(max(member.size or 0 for member in group) for group in groups.values())
    planner = Planner(total, Limits(max_bytes, max_age), Protected(pins, locked, leased), now)
    decided: dict[int, Decision] = {}
    for number, candidate in enumerate(ordered):
        for decision in planner.decide(candidate, groups[_group(candidate, number)]):
            decided[id(decision.candidate)] = decision
    decisions = tuple(decided.get(id(c)) or Decision(c, False, "limits") for c in ordered)
    return Plan(decisions, total, total - planner.freed, planner.over)


def _group(candidate: Candidate, number: int) -> object:
    if candidate.digest is None:
        return number
    return (candidate.place, candidate.kind == "unpacked", candidate.digest)


__all__ = [
    "DAY",
    "Candidate",
    "Collected",
    "Decision",
    "Held",
    "Kind",
    "Limits",
    "Plan",
    "Planner",
    "Protected",
    "Reason",
    "plan",
]
