from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from aotcache.db.engine import Database
from aotcache.errors import LeaseHeld, LeaseLost
from aotcache.service.index import Index
from aotcache.service.leases import Held, Lease, Leases
from tests.service.entries import KEY, OTHER, VARIANT, enter, run_out


def taken(leases: Leases, holder: str = "one", variant: str = VARIANT) -> Lease:
    lease = leases.acquire(KEY, variant, holder)
    assert isinstance(lease, Lease)
    return lease


def test_one_holder_at_a_time(leases: Leases) -> None:
    lease = taken(leases)
    assert (lease.holder, lease.seconds) == ("one", 60.0)
    held = leases.acquire(KEY, VARIANT, "two")
    assert isinstance(held, Held)
    assert held.holder == "one"
    assert 50 < held.expires_in <= 60


def test_another_variant_is_another_entry(leases: Leases) -> None:
    taken(leases)
    assert isinstance(leases.acquire(KEY, OTHER, "two"), Lease)


def test_a_lease_that_ran_out_is_taken_over_and_lost(leases: Leases, database: Database) -> None:
    first = taken(leases)
    run_out(database)
    second = taken(leases, "two")
    assert second.token > first.token
    with pytest.raises(LeaseLost, match=first.id):
        leases.renew(first.id, first.token)
    assert leases.renew(second.id, second.token) == 60.0


def test_a_lease_that_ran_out_cannot_be_renewed_though_nobody_took_it(
    leases: Leases, database: Database
) -> None:
    lease = taken(leases)
    run_out(database)
    with pytest.raises(LeaseLost):
        leases.renew(lease.id, lease.token)


def test_renewing_makes_it_last(database: Database) -> None:
    short, long = Leases(database, seconds=5), Leases(database, seconds=500)
    lease = taken(short)
    long.renew(lease.id, lease.token)
    held = short.acquire(KEY, VARIANT, "two")
    assert isinstance(held, Held)
    assert held.expires_in > 400


def test_tokens_never_go_back(leases: Leases) -> None:
    tokens = []
    for _ in range(3):
        lease = taken(leases)
        tokens.append(lease.token)
        leases.release(lease.id, lease.token)
    assert tokens == sorted(set(tokens))


def test_releasing_with_a_wrong_token_releases_nothing(leases: Leases) -> None:
    lease = taken(leases)
    leases.release(lease.id, lease.token - 1)
    leases.release("nobody's", lease.token)
    assert isinstance(leases.acquire(KEY, VARIANT, "two"), Held)


@pytest.mark.parametrize("token", [0, -1, 2**80])
def test_a_wrong_token_is_refused(leases: Leases, token: int) -> None:
    lease = taken(leases)
    with pytest.raises(LeaseLost), leases.publishing(KEY, VARIANT, (lease.id, token)):
        pytest.fail("published with a wrong token")
    with pytest.raises(LeaseLost):
        leases.renew(lease.id, token)


def test_a_lease_is_good_for_its_own_entry_alone(leases: Leases) -> None:
    lease = taken(leases)
    with pytest.raises(LeaseLost), leases.publishing(KEY, OTHER, (lease.id, lease.token)):
        pytest.fail("published another entry")


def test_publishing_without_a_lease_waits_for_whoever_builds(leases: Leases, database: Database) -> None:
    taken(leases)
    with pytest.raises(LeaseHeld, match="one is building") as raised, leases.publishing(KEY, VARIANT, None):
        pytest.fail("published beside a builder")
    assert raised.value.details["holder"] == "one"
    run_out(database)
    with leases.publishing(KEY, VARIANT, None):
        pass


def test_a_lost_lease_publishes_nothing(leases: Leases, database: Database) -> None:
    lease = taken(leases)
    run_out(database)
    with pytest.raises(LeaseLost), leases.publishing(KEY, VARIANT, (lease.id, lease.token)):
        pytest.fail("published with a lost lease")


def test_what_is_indexed_while_publishing_is_part_of_it(leases: Leases, index: Index) -> None:
    def killed() -> None:
        with leases.publishing(KEY, VARIANT, None):
            enter(index)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        killed()
    assert index.page().artifacts == []
    with leases.publishing(KEY, VARIANT, None):
        enter(index)
    assert len(index.page().artifacts) == 1


def test_nobody_takes_over_while_a_ref_is_written(leases: Leases, database: Database) -> None:
    lease = taken(leases)
    order: list[str] = []

    def take_over() -> None:
        run_out(database)
        assert isinstance(leases.acquire(KEY, VARIANT, "two"), Lease)
        order.append("taken over")

    with ThreadPoolExecutor(1) as pool:
        with leases.publishing(KEY, VARIANT, (lease.id, lease.token)):
            waiting = pool.submit(take_over)
            assert wait({waiting}, timeout=0.3).done == set()
            order.append("written")
        waiting.result(timeout=20)
    assert order == ["written", "taken over"]


def test_of_many_at_once_one_gets_it(leases: Leases) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: leases.acquire(KEY, VARIANT, f"holder {n}"), range(16)))
    won = [answer for answer in answers if isinstance(answer, Lease)]
    assert len(won) == 1
    assert {answer.holder for answer in answers} == {won[0].holder}
