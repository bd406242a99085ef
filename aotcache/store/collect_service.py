"""A collection by the service itself, asked for in rounds: each does part of it and says whether there is more."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, get_args

from aotcache.errors import ServiceError
from aotcache.store.evict import Candidate, Collected, Decision, Kind, Limits, Reason
from aotcache.store.http import HttpStore
from aotcache.types import CacheKey, Digest

_LONGEST = 1000
"""Rounds of one collection: more than a store of a billion entries takes."""


def collect_service(
    store: HttpStore,
    limits: Limits,
    locked: Collection[str],
    *,
    dry_run: bool,
    told: Callable[[str], None],
) -> Collected:
    """Have a service collect; needs the scope admin. Arguments as of `collect`.

    Raises:
        ServiceError: it refuses, or what it answers makes no sense.
    """
    body: dict[str, Any] = {
        "max_bytes": limits.max_bytes,
        "max_age": limits.max_age,
        "locked": sorted(locked),
        "dry_run": dry_run,
    }
    decisions: dict[tuple[str, str | None, str, str | None], Decision] = {}
    before = after = over = 0
    notes: list[str] = []
    told(f"looking at {store.url}")
    for number in range(_LONGEST):
        answer = store.session.json("POST", "/v1/gc", body=body)
        try:
            for row in answer["decisions"]:
                decision = _decision(row, store.url)
                c = decision.candidate
                decisions[c.kind, c.key, c.variant, c.digest] = decision
            before = before if number else int(answer["before"])
            after, over = int(answer["after"]), int(answer["over"])
            notes += [str(note) for note in answer["notes"]]
            body["cursor"] = answer["next"]
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ServiceError(
                f"{store.url}: /v1/gc: the answer is not of version 1 of the service ({error!r}); is it an older or "
                "a newer one?",
                url=store.url,
            ) from None
        if body["cursor"] is None:
            break
        told(f"{sum(decision.remove for decision in decisions.values())} so far")
    ordered = sorted(decisions.values(), key=lambda decision: decision.candidate.order)
    return Collected(store.url, dry_run, tuple(ordered), before, after, over, (), tuple(notes))


def _decision(row: Any, place: str) -> Decision:
    kind, reason = row["kind"], row["reason"]
    if kind not in get_args(Kind) or reason not in get_args(Reason):
        raise ValueError(f"{kind!r} and {reason!r} say nothing")
    candidate = Candidate(
        kind,
        None if row["key"] is None else CacheKey(str(row["key"])),
        str(row["variant"] or ""),
        None if row["digest"] is None else Digest(str(row["digest"])),
        None if row["size"] is None else int(row["size"]),
        float(row["last_used"]),
        place,
        what=str(row["what"] or ""),
    )
    return Decision(candidate, bool(row["remove"]), reason)


__all__ = ["collect_service"]
