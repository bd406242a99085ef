from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import text

from aotcache.db.engine import Database
from aotcache.errors import BadCursor, LeaseLost
from aotcache.service.builds import Build, Builds, Claimed
from aotcache.service.index import Index
from aotcache.service.leases import Lease, Leases
from aotcache.service.queue import LOG_BYTES, Failure
from aotcache.types import CacheKey
from tests.manifests import make_manifest
from tests.service.entries import KEY, VARIANT, enter, run_out

BROKEN = Failure("CompileFailed", "g++ said no")


def asked(builds: Builds, key: CacheKey = KEY) -> Build:
    return builds.request("drafter", key, VARIANT)


def claimed(builds: Builds, holder: str = "builder") -> Claimed:
    found = builds.claim(["drafter"], [VARIANT], holder)
    assert found is not None
    return found


def finished(
    builds: Builds, claim: Claimed, error: Failure | None, *, log: str = "", retry: bool = False
) -> Build:
    return builds.finish(claim.build.id, claim.lease.id, claim.lease.token, error=error, log=log, retry=retry)


def history(builds: Builds, build: Build) -> list[object]:
    return [event.data.get("state") or event.data["stage"] for event in builds.events(build.id)]


def test_everybody_who_asks_gets_the_same_build(builds: Builds) -> None:
    first = asked(builds)
    assert (first.state, first.attempts, first.spec) == ("queued", 0, "drafter")
    claimed(builds)
    assert asked(builds).id == first.id


def test_many_who_ask_at_once_make_one_build(builds: Builds) -> None:
    with ThreadPoolExecutor(8) as pool:
        ids = {build.id for build in pool.map(lambda _: asked(builds), range(64))}
    assert len(ids) == 1
    assert len(builds.page().builds) == 1


def test_what_is_stored_already_is_done(builds: Builds, index: Index) -> None:
    manifest = enter(index)
    build = asked(builds, manifest.key)
    assert (build.state, build.attempts) == ("done", 0)
    assert asked(builds, manifest.key).id == build.id


def test_a_build_from_request_to_done(builds: Builds, index: Index, leases: Leases) -> None:
    manifest = make_manifest()
    build = asked(builds, manifest.key)
    claim = claimed(builds)
    assert (claim.build.id, claim.build.state, claim.build.attempts) == (build.id, "running", 1)
    for stage in ("export", "export", "compile"):
        answer = builds.progress(
            build.id, claim.lease.id, claim.lease.token, stage=stage, expected_seconds=2.5
        )
        assert (answer.cancelled, answer.seconds) == (False, 60.0)
    assert builds.counts()["running", "compile"] == 1
    with leases.publishing(manifest.key, VARIANT, (claim.lease.id, claim.lease.token)):
        index.add(manifest, manifest.document(), modified=1.0)
    done = finished(builds, claim, None, log="all well")
    assert (done.state, done.stage, done.log, done.error) == ("done", None, "all well", None)
    assert history(builds, build) == ["queued", "running", "export", "compile", "done"]
    assert [event.sequence for event in builds.events(build.id)] == [1, 2, 3, 4, 5]
    assert [event.sequence for event in builds.events(build.id, after=3)] == [4, 5]
    assert isinstance(leases.acquire(manifest.key, VARIANT, "next"), Lease)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf")])
def test_a_length_of_time_that_json_cannot_hold_is_none(builds: Builds, seconds: float) -> None:
    build = asked(builds)
    claim = claimed(builds)
    builds.progress(build.id, claim.lease.id, claim.lease.token, stage="nul\0", expected_seconds=seconds)
    assert builds.events(build.id)[-1].data == {"stage": "nul\ufffd", "expected_seconds": None}


def test_done_without_an_entry_is_a_failure(builds: Builds) -> None:
    asked(builds)
    failed = finished(builds, claimed(builds), None)
    assert failed.state == "failed"
    assert failed.error is not None
    assert failed.error.type == "NotStored"


def test_a_failure_is_everybodys_answer_until_it_expires(builds: Builds, database: Database) -> None:
    asked(builds)
    failed = finished(builds, claimed(builds), BROKEN, log="why")
    assert (failed.state, failed.error, failed.log) == ("failed", BROKEN, "why")
    assert failed.expires is not None
    assert asked(builds) == failed
    assert builds.claim(["drafter"], [VARIANT], "builder") is None
    with database.session(write=True) as session:
        session.execute(text("UPDATE builds SET expires = expires - 601"))
    fresh = asked(builds)
    assert fresh.id != failed.id
    assert fresh.state == "queued"


@pytest.mark.parametrize("kind", ["StoreError", "ServiceUnavailable"])
def test_what_could_not_be_stored_is_tried_anew_for_the_next_who_asks(builds: Builds, kind: str) -> None:
    """Case D11: nothing negative is kept of a full disk."""
    full = Failure(kind, "cannot write: No space left on device")
    first = asked(builds)
    assert finished(builds, claimed(builds), full, retry=True).state == "queued"
    failed = finished(builds, claimed(builds), full, retry=True)
    assert (failed.state, failed.error) == ("failed", full)
    fresh = asked(builds)
    assert fresh.id != first.id
    assert (fresh.state, fresh.attempts) == ("queued", 0)


def test_a_failure_ends_where_the_entry_came_from_elsewhere(builds: Builds, index: Index) -> None:
    manifest = make_manifest()
    asked(builds, manifest.key)
    finished(builds, claimed(builds), BROKEN)
    enter(index)
    assert asked(builds, manifest.key).state == "done"


def test_what_is_given_back_was_no_attempt(builds: Builds) -> None:
    builds.request("drafter", KEY, VARIANT)
    for _ in range(3):
        back = finished(builds, claimed(builds), None, retry=True)
        assert (back.state, back.attempts, back.error) == ("queued", 0, None)
    assert claimed(builds).build.attempts == 1


def test_a_retry_is_the_second_attempt_and_the_last(builds: Builds) -> None:
    build = asked(builds)
    again = finished(builds, claimed(builds), BROKEN, retry=True)
    assert (again.state, again.attempts, again.error) == ("queued", 1, BROKEN)
    last = finished(builds, claimed(builds), BROKEN, retry=True)
    assert (last.state, last.attempts) == ("failed", 2)
    assert history(builds, build) == ["queued", "running", "queued", "running", "failed"]


def test_a_builder_that_dies_loses_the_build_to_the_next_claim(builds: Builds, database: Database) -> None:
    build = asked(builds)
    dead = claimed(builds, "dead")
    assert builds.claim(["drafter"], [VARIANT], "early") is None
    run_out(database)
    heir = claimed(builds, "heir")
    assert (heir.build.id, heir.build.attempts) == (build.id, 2)
    assert heir.lease.token > dead.lease.token
    with pytest.raises(LeaseLost):
        builds.progress(build.id, dead.lease.id, dead.lease.token, stage="late")
    with pytest.raises(LeaseLost):
        finished(builds, dead, None)
    assert history(builds, build) == ["queued", "running", "queued", "running"]


def test_whoever_looks_sees_that_the_builder_died(builds: Builds, database: Database) -> None:
    build = asked(builds)
    for state in ("queued", "failed"):
        claimed(builds, "mortal")
        run_out(database)
        seen = builds.get(build.id)
        assert seen is not None
        assert (seen.state, seen.error and seen.error.type) == (state, "BuilderDied")
    assert asked(builds).id == build.id


def test_listings_and_events_see_it_too(builds: Builds, database: Database) -> None:
    build = asked(builds)
    claimed(builds)
    run_out(database)
    assert [found.state for found in builds.page().builds] == ["queued"]
    claimed(builds)
    run_out(database)
    assert history(builds, build)[-1] == "failed"


def test_a_builder_that_died_after_it_published_is_done(
    builds: Builds, index: Index, database: Database
) -> None:
    manifest = make_manifest()
    build = asked(builds, manifest.key)
    claimed(builds)
    enter(index)
    run_out(database)
    assert asked(builds, manifest.key) == builds.get(build.id)
    assert history(builds, build)[-1] == "done"


def test_what_somebody_else_publishes_is_built_no_more(builds: Builds, index: Index) -> None:
    manifest = make_manifest()
    build = asked(builds, manifest.key)
    enter(index)
    assert history(builds, build) == ["queued", "done"]
    assert builds.claim(["drafter"], [VARIANT], "builder") is None


def test_what_somebody_else_is_building_is_not_claimed(builds: Builds, leases: Leases) -> None:
    asked(builds)
    lease = leases.acquire(KEY, VARIANT, "aotcache warm elsewhere")
    assert isinstance(lease, Lease)
    assert builds.claim(["drafter"], [VARIANT], "builder") is None
    leases.release(lease.id, lease.token)
    assert claimed(builds).build.state == "running"


def test_a_builder_gets_what_it_can_build_the_oldest_first(builds: Builds) -> None:
    keys = [CacheKey(f"{n:064x}") for n in (3, 1, 2)]
    made = [asked(builds, key) for key in keys]
    assert builds.claim(["other"], [VARIANT], "builder") is None
    assert builds.claim(["drafter"], ["cuda-sm_90"], "builder") is None
    assert builds.claim([], [], "builder") is None
    assert [claimed(builds).build.id for _ in keys] == [build.id for build in made]


def test_cancelled_in_the_queue(builds: Builds) -> None:
    build = asked(builds)
    cancelled = builds.cancel(build.id)
    assert cancelled is not None
    assert cancelled.state == "cancelled"
    assert builds.claim(["drafter"], [VARIANT], "builder") is None
    assert asked(builds).id != build.id


def test_cancelled_while_it_runs_the_builder_is_told_and_nobody_begins_beside_it(builds: Builds) -> None:
    build = asked(builds)
    claim = claimed(builds)
    builds.cancel(build.id)
    fresh = asked(builds)
    assert fresh.id != build.id
    assert builds.claim(["drafter"], [VARIANT], "other") is None
    assert builds.progress(build.id, claim.lease.id, claim.lease.token, stage="late").cancelled
    assert finished(builds, claim, BROKEN, log="stopped").state == "cancelled"
    assert claimed(builds, "other").build.id == fresh.id
    assert history(builds, build) == ["queued", "running", "cancelled"]


def test_cancelling_what_has_ended_changes_nothing(builds: Builds) -> None:
    asked(builds)
    failed = finished(builds, claimed(builds), BROKEN)
    assert builds.cancel(failed.id) == failed
    assert builds.cancel("no such build") is None


def test_a_lease_of_another_kind_ends_no_build(builds: Builds, leases: Leases) -> None:
    build = asked(builds)
    lease = leases.acquire(KEY, VARIANT, "aotcache warm elsewhere")
    assert isinstance(lease, Lease)
    with pytest.raises(LeaseLost, match="not that of build"):
        builds.finish(build.id, lease.id, lease.token, error=None, log="")
    with pytest.raises(LeaseLost, match="no build"):
        builds.progress("unknown", lease.id, lease.token)


def test_the_end_of_a_long_log_is_kept(builds: Builds) -> None:
    asked(builds)
    log = "".join(f"line {n}\0é\n" for n in range(10_000))
    kept = finished(builds, claimed(builds), BROKEN, log=log).log
    assert kept is not None
    assert LOG_BYTES - 20 < len(kept.encode()) <= LOG_BYTES
    assert kept.endswith("line 9999\ufffdé\n")
    assert kept.startswith("line ")


def test_a_log_of_one_long_line_is_kept_in_part(builds: Builds) -> None:
    asked(builds)
    kept = finished(builds, claimed(builds), BROKEN, log="x" * 100_000 + "\n").log
    assert kept == "x" * (LOG_BYTES - 1) + "\n"


def test_pages_go_from_the_newest_to_the_oldest(builds: Builds) -> None:
    made = [asked(builds, CacheKey(f"{n:064x}")).id for n in range(5)]
    claimed(builds)
    first = builds.page(limit=2)
    second = builds.page(limit=2, cursor=first.next)
    last = builds.page(limit=2, cursor=second.next)
    assert [b.id for page in (first, second, last) for b in page.builds] == made[::-1]
    assert last.next is None
    assert first.builds[0].log is None
    assert [b.id for b in builds.page(state="running").builds] == made[:1]
    assert builds.page(state="no\0such").builds == []
    with pytest.raises(BadCursor):
        builds.page(cursor="WzEsMl0")


def test_counts_have_every_state(builds: Builds) -> None:
    asked(builds)
    assert builds.counts() == {
        ("queued", ""): 1,
        ("running", ""): 0,
        ("done", ""): 0,
        ("failed", ""): 0,
        ("cancelled", ""): 0,
    }


def test_old_builds_are_forgotten_with_their_events(builds: Builds, database: Database) -> None:
    old = asked(builds)
    finished(builds, claimed(builds), BROKEN)
    with database.session(write=True) as session:
        session.execute(text("UPDATE builds SET created = created - 2700000, expires = 0"))
    asked(builds)
    assert builds.get(old.id) is None
    assert builds.events(old.id) == []


def test_an_unknown_build_is_nothing(builds: Builds) -> None:
    assert builds.get("x\0y") is None
    assert builds.events("x") == []


def test_another_process_sees_everything(builds: Builds, database_url: str) -> None:
    build = asked(builds)
    claim = claimed(builds)
    restarted = Database(database_url)
    try:
        found = Builds(restarted).get(build.id)
        assert found == claim.build
        assert Builds(restarted).progress(build.id, claim.lease.id, claim.lease.token).seconds == 60.0
    finally:
        restarted.close()


def test_of_many_who_ask_all_along_all_get_the_one_recorded_failure(builds: Builds) -> None:
    def fail_twice() -> int:
        attempts = 0
        while attempts < 2:
            claim = builds.claim(["drafter"], [VARIANT], "builder")
            if claim is not None:
                attempts += 1
                finished(builds, claim, BROKEN, retry=True)
        return attempts

    def ask_until_it_ends(_: int) -> Build:
        while not (build := asked(builds)).ended:
            pass
        return build

    with ThreadPoolExecutor(9) as pool:
        builder = pool.submit(fail_twice)
        answers = list(pool.map(ask_until_it_ends, range(64)))
        assert builder.result() == 2
    assert len({answer.id for answer in answers}) == 1
    assert {(answer.state, answer.attempts, answer.error) for answer in answers} == {("failed", 2, BROKEN)}
    assert builds.claim(["drafter"], [VARIANT], "builder") is None
