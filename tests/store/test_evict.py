"""The planner: rules that hold whatever lies in a store."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from aotcache.store.evict import DAY, Candidate, Limits, Plan, Planner, Protected, plan
from aotcache.types import CacheKey, Digest

NOW = 1_000_000_000.0
DIGESTS = [Digest(f"{n:064x}") for n in range(6)]
KEYS = [CacheKey(f"{n:064x}") for n in range(100, 108)]
SIZES = dict(zip(DIGESTS, (0, 1, 10, 100, 1000, 10_000), strict=True))


def entry(number: int, digest: Digest | None, age: float, **changes: object) -> Candidate:
    size = None if digest is None else SIZES[digest]
    made = Candidate("entry", KEYS[number % len(KEYS)], f"v{number}", digest, size, NOW - age)
    return replace(made, **changes)  # type: ignore[arg-type]


def archive(digest: Digest, age: float, **changes: object) -> Candidate:
    return replace(Candidate("archive", None, "", digest, SIZES[digest], NOW - age), **changes)  # type: ignore[arg-type]


AGES = st.sampled_from((-3600.0, 0.0, 60.0, 3600.0, DAY + 1, 10 * DAY, 100 * DAY))


@st.composite
def stores(draw: st.DrawFn) -> list[Candidate]:
    """Entries, some of which share archives or cannot be read, and archives that none names."""
    found: list[Candidate] = []
    gone = draw(st.sets(st.sampled_from(DIGESTS), max_size=2))
    for number in range(draw(st.integers(0, 12))):
        digest = draw(st.sampled_from([*DIGESTS, None]))
        held = draw(st.sampled_from((None, None, None, "newer", "unclear")))
        made = entry(number, digest, draw(AGES), held=held)
        found.append(replace(made, size=None) if digest in gone else made)
    named = {candidate.digest for candidate in found}
    unnamed = sorted(draw(st.sets(st.sampled_from(DIGESTS), max_size=3)) - named)
    found += [archive(digest, draw(AGES), resumed=draw(st.booleans())) for digest in unnamed]
    return draw(st.permutations(found))


LIMITS = st.builds(
    Limits,
    st.none() | st.sampled_from((0, 1, 11, 500, 1500, 11_111)),
    st.none() | st.sampled_from((0.0, 100.0, 5 * DAY)),
)
PROTECTED = st.builds(
    Protected,
    st.frozensets(st.sampled_from([*KEYS, *DIGESTS]), max_size=3),
    st.frozensets(st.sampled_from(DIGESTS), max_size=2),
    st.frozensets(st.sampled_from([(key, f"v{n}") for n, key in enumerate(KEYS)]), max_size=2),
)


def planned(candidates: Iterable[Candidate], limits: Limits, protected: Protected = Protected()) -> Plan:  # noqa: B008
    return plan(
        candidates,
        max_bytes=limits.max_bytes,
        max_age=limits.max_age,
        pins=protected.pins,
        locked=protected.locked,
        leased=protected.leased,
        now=NOW,
    )


def total(candidates: Iterable[Candidate]) -> int:
    return sum({c.digest: c.size or 0 for c in candidates if c.digest is not None}.values())


@given(stores(), LIMITS, PROTECTED)
def test_what_is_protected_stays_and_each_candidate_has_one_decision(
    candidates: list[Candidate], limits: Limits, protected: Protected
) -> None:
    made = planned(candidates, limits, protected)
    assert sorted(d.candidate.order for d in made.decisions) == sorted(c.order for c in candidates)
    for candidate in made.removed:
        assert candidate.held is None
        assert candidate.key not in protected.pins
        assert candidate.digest not in protected.pins
        assert candidate.digest not in protected.locked
        assert (candidate.key, candidate.variant) not in protected.leased


@given(stores(), LIMITS, PROTECTED)
def test_the_sizes_are_those_of_what_stays(
    candidates: list[Candidate], limits: Limits, protected: Protected
) -> None:
    made = planned(candidates, limits, protected)
    stays = [d.candidate for d in made.decisions if not d.remove]
    assert (made.before, made.after) == (total(candidates), total(stays))
    assert made.over == (0 if limits.max_bytes is None else max(0, made.after - limits.max_bytes))


@given(stores(), LIMITS, PROTECTED)
def test_a_limit_that_is_not_kept_leaves_nothing_that_could_go(
    candidates: list[Candidate], limits: Limits, protected: Protected
) -> None:
    made = planned(candidates, limits, protected)
    if not made.over:
        return
    groups: dict[Digest, list[Candidate]] = defaultdict(list)
    for decision in made.decisions:
        c = decision.candidate
        if not decision.remove and c.digest is not None and c.size:
            groups[c.digest].append(c)
    for group in groups.values():
        assert any(c.kind == "archive" or protected.reason(c) is not None for c in group)


@given(stores(), LIMITS, PROTECTED)
def test_for_the_size_the_archives_used_longest_ago_go_and_no_more_than_needed(
    candidates: list[Candidate], limits: Limits, protected: Protected
) -> None:
    made = planned(candidates, limits, protected)
    by_size = [d.candidate for d in made.decisions if d.reason == "size"]
    used: dict[Digest, float] = {}
    for c in candidates:
        if c.digest is not None and c.size:
            used[c.digest] = max(used.get(c.digest, c.used), c.used)
    went = {c.digest for c in by_size if c.digest is not None}
    fixed = {c.digest for c in candidates if c.kind == "archive" or protected.reason(c) is not None}
    stayed = {d.candidate.digest for d in made.decisions if not d.remove and d.candidate.size} - fixed
    for digest in stayed:
        assert digest is not None
        assert all(used[gone] <= used[digest] for gone in went)
    # With the youngest of them back the limit would be exceeded.
    if went:
        assert limits.max_bytes is not None
        youngest = max(went, key=lambda digest: max(c.order for c in by_size if c.digest == digest))
        assert made.after + SIZES[youngest] > limits.max_bytes


@given(stores(), LIMITS, PROTECTED)
def test_a_second_plan_over_what_stays_changes_nothing(
    candidates: list[Candidate], limits: Limits, protected: Protected
) -> None:
    made = planned(candidates, limits, protected)
    again = planned([d.candidate for d in made.decisions if not d.remove], limits, protected)
    assert again.removed == []


@given(stores(), LIMITS, PROTECTED)
def test_page_by_page_the_same_goes(
    candidates: list[Candidate], limits: Limits, protected: Protected
) -> None:
    """As a service does it: it stops where nothing that was used later can go."""
    entries = [replace(c, held=None) for c in candidates if c.kind == "entry" and c.size is not None]
    planner = Planner(total(entries), limits, protected, NOW)
    gone = []
    for candidate in sorted(entries, key=lambda c: c.order):
        if planner.reached(candidate.used):
            break
        group = [c for c in entries if c.digest == candidate.digest]
        gone += [d.candidate for d in planner.decide(candidate, group) if d.remove]
    assert sorted(c.order for c in gone) == sorted(
        c.order for c in planned(entries, limits, protected).removed
    )


def reasons(made: Plan) -> list[tuple[bool, str]]:
    return [(d.remove, d.reason) for d in made.decisions]


def test_without_limits_only_garbage_goes() -> None:
    made = planned(
        [
            entry(0, DIGESTS[1], 1000 * DAY),
            entry(1, DIGESTS[2], 2 * DAY, size=None),
            entry(2, DIGESTS[3], 3600, size=None),
            archive(DIGESTS[4], 3 * DAY),
            archive(DIGESTS[5], 1800),
            archive(DIGESTS[0], 60, resumed=True),
            entry(3, None, 500 * DAY),
        ],
        Limits(),
    )
    assert reasons(made) == [
        (False, "limits"),
        (False, "limits"),
        (True, "unnamed"),
        (True, "gone"),
        (False, "limits"),
        (False, "recent"),
        (True, "unnamed"),
    ]


def test_a_shared_archive_goes_with_the_last_of_its_entries_or_not_at_all() -> None:
    old, young = entry(0, DIGESTS[4], 10 * DAY), entry(1, DIGESTS[4], 60)
    other = entry(2, DIGESTS[4 - 1], 3600)
    assert planned([old, young, other], Limits(max_bytes=1000)).removed == [other]
    assert planned([old, young, other], Limits(max_bytes=99)).removed == [old, other, young]
    pinned = Protected(pins={young.key or ""})
    assert planned([old, young], Limits(max_bytes=0), pinned).removed == []
    # By age each entry goes for itself.
    made = planned([old, young], Limits(max_age=5 * DAY))
    assert (made.removed, made.after) == ([old], 1000)


def test_equal_times_are_in_one_order_everywhere() -> None:
    several = [entry(n, DIGESTS[n], 60) for n in (1, 2, 3, 4)]
    for order in (several, several[::-1]):
        assert planned(order, Limits(max_bytes=1000)).removed == several[:3]


def test_what_a_clock_ahead_of_ours_wrote_is_the_youngest_and_still_goes_for_the_size() -> None:
    ahead, behind = entry(0, DIGESTS[3], -3600), entry(1, DIGESTS[4], 3600)
    assert planned([ahead, behind], Limits(max_age=1800)).removed == [behind]
    assert planned([ahead, behind], Limits(max_bytes=100)).removed == [behind]
    assert planned([ahead, behind], Limits(max_bytes=99)).removed == [behind, ahead]


def test_what_is_pinned_beyond_the_limit_is_said_in_bytes() -> None:
    made = planned(
        [entry(0, DIGESTS[4], 60), entry(1, DIGESTS[3], 90)], Limits(500), Protected(pins={DIGESTS[4]})
    )
    assert (made.after, made.over) == (1000, 500)
    assert reasons(made) == [(True, "size"), (False, "pinned")]
