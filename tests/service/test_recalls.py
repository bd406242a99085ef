"""What a service keeps of recall lists, on both databases."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from aotcache.db.engine import Database
from aotcache.errors import RecallConflict
from aotcache.recall_list import RecallList, SignedList, next_list, signer_of
from aotcache.service.builds import Builds
from aotcache.service.index import Index
from aotcache.service.recalls import ServiceRecalls
from aotcache.store import ObjectStore, open_store
from aotcache.trust import SigningKey, TrustedKeys
from aotcache.types import CacheKey, Digest
from tests.service.entries import enter

A, B = Digest("a" * 64), Digest("b" * 64)
NOWHERE = CacheKey("0" * 64)


@pytest.fixture
def key() -> SigningKey:
    return SigningKey.generate()


@pytest.fixture
def trusted(tmp_path: Path, key: SigningKey) -> TrustedKeys:
    found = TrustedKeys(tmp_path / "trusted")
    found.add(key.public, "operator")
    return found


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    opened = open_store(tmp_path / "store")
    assert isinstance(opened, ObjectStore)
    return opened


@pytest.fixture
def recalls(database: Database) -> ServiceRecalls:
    return ServiceRecalls(database)


def following(key: SigningKey, *known: SignedList, **changes: object) -> SignedList:
    lists = [one.listed for one in known]
    return SignedList.make(next_list(lists, now=time.time(), seconds=86400.0, **changes), key)  # type: ignore[arg-type]


def test_a_list_is_shown_and_changes_the_tag(
    recalls: ServiceRecalls, store: ObjectStore, trusted: TrustedKeys, key: SigningKey
) -> None:
    assert recalls.tag() is None
    assert recalls.shown().lists == ()
    first = following(key, recall={A: "bad"})
    assert recalls.put(first, store, trusted)
    tag = recalls.tag()
    assert tag is not None
    assert recalls.shown().lists == (first,)
    assert recalls.shown().tag == tag
    assert recalls.problem(A, NOWHERE) == "bad"
    assert recalls.problem(B, NOWHERE) is None
    assert recalls.problem(B, CacheKey(A)) == "bad"
    assert not recalls.put(first, store, trusted)
    assert recalls.tag() == tag
    second = following(key, first, lift=[A])
    assert recalls.put(second, store, trusted)
    assert recalls.shown().lists == (second,)
    assert recalls.tag() != tag
    assert recalls.problem(A, NOWHERE) is None
    assert list(store.recalls()) == [second.document]


def test_a_list_that_does_not_follow_the_one_that_is_there_is_refused(
    recalls: ServiceRecalls, store: ObjectStore, trusted: TrustedKeys, key: SigningKey
) -> None:
    first = following(key, recall={A: "bad"})
    second = following(key, first, recall={B: "bad"})
    recalls.put(second, store, trusted)
    without = SignedList.make(RecallList(9, 1.0, 2.0), key)
    for wrong in (first, following(key, recall={B: "other"}), without):
        with pytest.raises(RecallConflict, match="recall list 2 by"):
            recalls.put(wrong, store, trusted)
    assert recalls.shown().lists == (second,)


def test_what_is_put_into_the_store_behind_it_is_read(
    recalls: ServiceRecalls, store: ObjectStore, trusted: TrustedKeys, key: SigningKey
) -> None:
    made = following(key, recall={A: "bad"})
    store.put_recall(made.document, made.signer)
    stranger = SigningKey.generate()
    other = following(stranger, recall={B: "bad"})
    store.put_recall(other.document, other.signer)
    recalls.read(store, trusted)
    assert recalls.shown().lists == (made,)
    assert recalls.problem(B, NOWHERE) is None


@pytest.mark.parametrize("what", ["nothing", "an older one"])
def test_a_list_that_the_store_lost_stays_in_force_and_is_put_back(
    recalls: ServiceRecalls,
    store: ObjectStore,
    trusted: TrustedKeys,
    key: SigningKey,
    tmp_path: Path,
    what: str,
) -> None:
    first = following(key, recall={A: "bad"})
    second = following(key, first, recall={B: "bad"})
    recalls.put(second, store, trusted)
    shutil.rmtree(tmp_path / "store" / "recalls")
    if what == "an older one":
        store.put_recall(first.document, first.signer)
    recalls.read(store, trusted)
    assert recalls.shown().lists == (second,)
    assert list(store.recalls()) == [second.document]


def test_junk_in_the_place_of_a_list_takes_nothing_out_of_force_and_keeps_nobody_from_recalling(
    recalls: ServiceRecalls, store: ObjectStore, trusted: TrustedKeys, key: SigningKey, tmp_path: Path
) -> None:
    first = following(key, recall={A: "bad"})
    recalls.put(first, store, trusted)
    (path,) = (tmp_path / "store" / "recalls").rglob("*.json")
    path.write_bytes(b"junk")
    recalls.read(store, trusted)
    assert recalls.shown().lists == (first,)
    second = following(key, first, recall={B: "bad"})
    assert recalls.put(second, store, trusted)
    assert recalls.shown().lists == (second,)


def test_a_list_of_the_same_number_behind_the_service_takes_nothing_out_of_force(
    recalls: ServiceRecalls, store: ObjectStore, trusted: TrustedKeys, key: SigningKey, tmp_path: Path
) -> None:
    """Its store was set back, and somebody recalled there who had not seen the list."""
    first = following(key, recall={A: "bad"})
    recalls.put(first, store, trusted)
    shutil.rmtree(tmp_path / "store" / "recalls")
    other = following(key, recall={B: "bad"})
    store.put_recall(other.document, other.signer)
    recalls.read(store, trusted)
    assert {recalls.problem(A, NOWHERE), recalls.problem(B, NOWHERE)} == {"bad"}
    assert set(recalls.shown().lists) == {first, other}
    joined = following(key, first, other)
    assert recalls.put(joined, store, trusted)
    assert recalls.shown().lists == (joined,)
    assert list(store.recalls()) == [joined.document]


def test_lists_of_two_operators_who_knew_nothing_of_each_other_both_hold(
    recalls: ServiceRecalls, store: ObjectStore, trusted: TrustedKeys, key: SigningKey
) -> None:
    one = following(key, recall={A: "bad"})
    other = SignedList.make(next_list([], recall={B: "bad"}, now=1.0, seconds=1.0, after=6), key)
    for made in (one, other):
        store.put_recall(made.document, made.signer)
    recalls.read(store, trusted)
    assert {recalls.problem(A, NOWHERE), recalls.problem(B, NOWHERE)} == {"bad"}
    joined = following(key, one, other)
    assert recalls.put(joined, store, trusted)
    assert recalls.shown().lists == (joined,)


def test_a_key_that_is_no_longer_trusted_recalls_nothing(
    recalls: ServiceRecalls, store: ObjectStore, trusted: TrustedKeys, key: SigningKey
) -> None:
    recalls.put(following(key, recall={A: "bad"}), store, trusted)
    trusted.remove("operator")
    recalls.read(store, trusted)
    assert recalls.tag() is None
    assert recalls.problem(A, NOWHERE) is None
    assert len(store.recalls()) == 1


def test_a_full_list_is_kept_whole(
    recalls: ServiceRecalls, store: ObjectStore, trusted: TrustedKeys, key: SigningKey
) -> None:
    many = {f"{number:064x}": f"reason {number}" for number in range(1, 2001)}
    recalls.put(following(key, recall=many), store, trusted)
    assert recalls.problem(Digest(f"{1999:064x}"), NOWHERE) == "reason 1999"


def test_a_recalled_entry_is_not_there_for_whoever_asks_for_a_build(
    recalls: ServiceRecalls,
    index: Index,
    builds: Builds,
    store: ObjectStore,
    trusted: TrustedKeys,
    key: SigningKey,
) -> None:
    manifest = enter(index)
    variant = str(manifest.variant)
    assert builds.request("drafter", manifest.key, variant).state == "done"
    made = following(key, recall={manifest.digest: "bad"})
    recalls.put(made, store, trusted)
    queued = builds.request("drafter", manifest.key, variant)
    assert queued.state == "queued"
    # Its row once more is no replacement, as after a publish that was broken off.
    index.add(manifest, manifest.document(), modified=0.0)
    assert builds.get(queued.id).state == "queued"
    claimed = builds.claim(["drafter"], [variant], "builder")
    assert claimed is not None
    recalls.put(following(key, made, lift=[manifest.digest]), store, trusted)
    ended = builds.finish(claimed.build.id, claimed.lease.id, claimed.lease.token, error=None, log="")
    assert ended.state == "done"


def test_signers_are_named_by_hex(key: SigningKey) -> None:
    assert f"ed25519:{signer_of(key.public)}" == key.public.fingerprint
