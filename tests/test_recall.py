"""Recall lists, and what a host makes of those that stores show it."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aotcache.config import settings
from aotcache.envelope import Envelope, Signature
from aotcache.errors import ManifestError, RecallConflict, ServiceUnavailable, StoreError
from aotcache.manifest import Manifest
from aotcache.recall import Recalls, publish_list, recall_problem
from aotcache.recall_list import (
    LARGEST,
    MOST,
    RECALL_TYPE,
    Lifted,
    Recalled,
    RecallList,
    SignedList,
    merged,
    next_list,
    signer_of,
)
from aotcache.store import open_store
from aotcache.store.base import Store
from aotcache.trust import SigningKey, trusted_keys
from aotcache.types import Digest
from tests.manifests import copies, make_manifest

DAY = 86400.0
A, B, C = ("a" * 64, "b" * 64, "c" * 64)


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SigningKey:
    """The one key that is trusted in this test."""
    monkeypatch.setenv("AOTCACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AOTCACHE_CONFIG_HOME", str(tmp_path / "config"))
    made = SigningKey.generate()
    trusted_keys(settings()).add(made.public, "operator")
    return made


class Shown:
    """A store elsewhere, which shows what it is told to.

    Attributes:
        documents: Its lists.
        away: Whether it is out of reach.
        asked: How often it was asked.
    """

    own = False

    def __init__(self, *documents: bytes, url: str = "https://cache.example.org") -> None:
        self.documents = list(documents)
        self.url = url
        self.away = False
        self.asked = 0

    def recalls(self, of: Callable[[str], bool] | None = None) -> Sequence[bytes]:
        self.asked += 1
        if self.away:
            raise ServiceUnavailable(f"{self.url} was not reached")
        return self.documents

    def put_recall(self, document: bytes, signer: str) -> None:
        self.documents = [document]


def listed(
    number: int,
    *recalled: str,
    lifted: Sequence[str] = (),
    at: float | None = None,
    expires: float | None = None,
) -> RecallList:
    now = time.time() if at is None else at
    return RecallList(
        number,
        now,
        now + DAY if expires is None else expires,
        tuple(Recalled(what, "wrong gradients", now) for what in sorted(recalled)),
        tuple(Lifted(what, now) for what in sorted(lifted)),
    )


def signed(key: SigningKey, *arguments: Any, **options: Any) -> bytes:
    return SignedList.make(listed(*arguments, **options), key).document


def manifest_of(digest: str) -> Manifest:
    return replace(make_manifest(), digest=Digest(digest))


def blocked(home: Path, *digests: str) -> list[str]:
    return [d for d in digests if recall_problem(manifest_of(d), home=home) is not None]


@pytest.fixture
def home() -> Path:
    return settings().home


# the document


def test_a_list_comes_back_as_it_was_signed(key: SigningKey) -> None:
    made = SignedList.make(listed(3, A, B, lifted=[C]), key)
    assert SignedList.from_document(made.document, where="here") == made
    assert made.by(key.public)
    assert not made.by(SigningKey.generate().public)


def _payload(**changes: Any) -> bytes:
    data = json.loads(listed(3, A, B, lifted=[C], at=1e9).to_json()) | changes
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        _payload(format=2),
        _payload(format=True),
        _payload(number=0),
        _payload(number=1 << 53),
        _payload(number=1.0),
        _payload(number=True),
        _payload(issued=-1.0),
        _payload(expires=1e300),
        _payload(more=1),
        _payload(recalled=None),
        _payload(recalled=[{"what": A, "at": 1.0}]),
        _payload(recalled=[{"what": A[:-1], "reason": "r", "at": 1.0}]),
        _payload(recalled=[{"what": A.upper(), "reason": "r", "at": 1.0}]),
        _payload(recalled=[{"what": A, "reason": "", "at": 1.0}]),
        _payload(recalled=[{"what": A, "reason": "two\nlines", "at": 1.0}]),
        _payload(recalled=[{"what": A, "reason": "r" * 301, "at": 1.0}]),
        _payload(recalled=[{"what": A, "reason": "r", "at": 1.0}, {"what": A, "reason": "s", "at": 1.0}]),
        _payload(recalled=[{"what": C, "reason": "r", "at": 1.0}]),
        _payload(recalled=[{"what": B, "reason": "r", "at": 1.0}, {"what": A, "reason": "r", "at": 1.0}]),
        _payload().replace(b":3,", b": 3,"),
        _payload().replace(b'"number":3', b'"number":3,"number":3'),
        _payload().replace(b"1000000000.0", b"NaN"),
        _payload().replace(b"1000000000.0", b"1e9"),
    ],
)
def test_what_is_no_list_is_a_typed_error(payload: bytes, key: SigningKey) -> None:
    with pytest.raises(ManifestError, match="here: not a recall list"):
        RecallList.from_json(payload, where="here")
    bare = Envelope(payload, (), RECALL_TYPE)
    signature = Signature(key.public.fingerprint, key.sign(bare.signed_bytes))
    with pytest.raises(ManifestError):
        SignedList.from_document(replace(bare, signatures=(signature,)).to_json(), where="here")


def test_a_list_is_never_larger_than_its_bound(key: SigningKey) -> None:
    many = {f"{i:064x}": "r" for i in range(MOST)}
    full = next_list([], recall=many, now=1.0, seconds=1.0)
    assert len(SignedList.make(full, key).document) < LARGEST
    with pytest.raises(ManifestError, match="at most 2000"):
        next_list([full], recall={A: "one more"}, now=2.0, seconds=1.0)
    long = next_list([], recall={f"{i:064x}": "é" * 300 for i in range(MOST)}, now=1.0, seconds=1.0)
    with pytest.raises(ManifestError, match=f"at most {LARGEST}"):
        SignedList.make(long, key)
    with pytest.raises(ManifestError, match=f"expected at most {LARGEST}"):
        SignedList.from_document(b"x" * (LARGEST + 1), where="here")


def test_the_latest_word_counts_whatever_the_clocks_say() -> None:
    first = next_list([], recall={A: "bad"}, now=1e9, seconds=DAY)
    # Lifted on a host whose clock is an hour behind, then recalled on one that is further behind.
    second = next_list([first], lift=[A], now=1e9 - 3600, seconds=DAY)
    assert merged([second, first]) == {A: second.lifted[0]}
    third = next_list([first, second], recall={A: "bad again"}, now=1.0, seconds=DAY)
    assert [listed.number for listed in (first, second, third)] == [1, 2, 3]
    assert merged([third, first, second]) == {A: third.recalled[0]}
    assert third.covers(second)
    assert second.covers(first)
    assert not first.covers(second)


def test_of_two_words_at_one_time_recalled_counts() -> None:
    one, other = listed(1, A, at=5.0), listed(1, lifted=[A], at=5.0)
    assert merged([one, other]) == merged([other, one]) == {A: one.recalled[0]}


# what a host keeps


def test_what_is_recalled_in_a_store_is_blocked_by_digest_and_by_key(key: SigningKey, home: Path) -> None:
    manifest = make_manifest()
    store = Shown(signed(key, 1, A, manifest.key))
    assert Recalls(home).check(store) is None
    assert blocked(home, A, B) == [A, B]  # all of them are of the recalled key
    other = replace(
        manifest, key=make_manifest(call="other").key, components=make_manifest(call="other").components
    )
    assert recall_problem(other, home=home) is None
    problem = recall_problem(manifest, home=home)
    assert problem is not None
    assert f"key {manifest.key} is recalled: wrong gradients" in problem
    assert f"operator ({key.public.fingerprint})" in problem


def test_nothing_is_recalled_where_nobody_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AOTCACHE_CONFIG_HOME", str(tmp_path / "config"))
    home = tmp_path / "home"
    store = Shown(signed(SigningKey.generate(), 1, A))
    assert Recalls(home).check(store) is None
    assert blocked(home, A) == []
    assert Recalls(home).uncounted() == []


def test_this_users_own_key_counts_though_it_is_not_trusted_here(key: SigningKey, home: Path) -> None:
    own = SigningKey.generate()
    own.save(settings().config_home / "signing.pem")
    Recalls(home).check(Shown(signed(own, 1, A)))
    assert blocked(home, A) == [A]


def test_an_old_list_that_is_shown_again_undoes_nothing_and_is_told(
    key: SigningKey, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = signed(key, 1, at=100.0), signed(key, 2, A)
    store = Shown(new)
    recalls = Recalls(home)
    recalls.check(store)
    store.documents = [old]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert recalls.check(store) is None
    assert blocked(home, A) == [A]
    (said,) = [r.getMessage() for r in caplog.records if "has shown recall list 2" in r.getMessage()]
    assert "and list 1 now" in said


def test_a_list_that_is_withheld_stays_in_force_and_is_told(
    key: SigningKey, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Shown(signed(key, 2, A))
    Recalls(home).check(store)
    store.documents = []
    with caplog.at_level(logging.WARNING):
        Recalls(home).check(store)
    assert blocked(home, A) == [A]
    assert any("and none now" in record.getMessage() for record in caplog.records)


def test_lists_of_one_key_from_two_stores_that_know_nothing_of_each_other_both_count(
    key: SigningKey, home: Path
) -> None:
    one, other = Shown(signed(key, 5, A)), Shown(signed(key, 9, B), url="https://other.example.org")
    for store in (one, other, one):
        Recalls(home).check(store)
    assert blocked(home, A, B, C) == [A, B]
    joined = Shown()
    joined.documents = [
        SignedList.make(
            next_list([s.listed for s in Recalls(home).by(key.public)], now=1.0, seconds=DAY), key
        ).document
    ]
    Recalls(home).check(joined)
    assert blocked(home, A, B, C) == [A, B]
    assert len(list((home / "recalls" / signer_of(key.public)).iterdir())) == 1
    for store in (one, other):
        Recalls(home).check(store)
    assert len(list((home / "recalls" / signer_of(key.public)).iterdir())) == 1


def test_a_lift_reaches_whoever_sees_it_last_or_first(key: SigningKey, home: Path, tmp_path: Path) -> None:
    first = next_list([], recall={A: "bad", B: "bad"}, now=time.time(), seconds=DAY)
    second = next_list([first], lift=[A], now=time.time(), seconds=DAY)
    documents = [SignedList.make(one, key).document for one in (first, second)]
    for folder, order in (("x", documents), ("y", documents[::-1])):
        for number, document in enumerate(order):
            Recalls(tmp_path / folder).check(Shown(document, url=f"https://{number}.example.org"))
        assert blocked(tmp_path / folder, A, B) == [B]


def test_a_key_that_is_no_longer_trusted_recalls_nothing(key: SigningKey, home: Path) -> None:
    Recalls(home).check(Shown(signed(key, 1, A)))
    trusted_keys(settings()).remove("operator")
    assert blocked(home, A) == []
    assert Recalls(home).uncounted() == [key.public.fingerprint]
    trusted_keys(settings()).add(key.public, "operator")
    assert blocked(home, A) == [A]


def _by_a_stranger(key: SigningKey) -> bytes:
    return signed(SigningKey.generate(), 7, A)


def _under_a_trusted_name(key: SigningKey) -> bytes:
    envelope = Envelope.from_json(_by_a_stranger(key), where="here")
    return replace(
        envelope, signatures=(replace(envelope.signatures[0], keyid=key.public.fingerprint),)
    ).to_json()


def _signed_as_something_else(key: SigningKey) -> bytes:
    bare = Envelope(listed(7, A).to_json(), (), "text/plain")
    signature = Signature(key.public.fingerprint, key.sign(bare.signed_bytes))
    return replace(bare, signatures=(signature,), kind=RECALL_TYPE).to_json()


def _no_list(key: SigningKey) -> bytes:
    return b"junk"


@pytest.mark.parametrize(
    "forge", [_by_a_stranger, _under_a_trusted_name, _signed_as_something_else, _no_list]
)
def test_what_no_trusted_key_signed_recalls_nothing_and_hides_nothing(
    key: SigningKey, home: Path, forge: Callable[[SigningKey], bytes]
) -> None:
    Recalls(home).check(Shown(forge(key), signed(key, 1, B)))
    assert blocked(home, A, B) == [B]


def test_a_clock_that_is_ahead_at_the_signer_delays_nothing(key: SigningKey, home: Path) -> None:
    Recalls(home).check(Shown(signed(key, 1, A, at=time.time() + 3600)))
    assert blocked(home, A) == [A]


def test_a_kept_list_that_has_gone_bad_blocks_everything_until_a_store_shows_it_again(
    key: SigningKey, home: Path
) -> None:
    store = Shown(signed(key, 1, A))
    Recalls(home).check(store)
    (path,) = (home / "recalls" / signer_of(key.public)).iterdir()
    data = bytearray(path.read_bytes())
    for place in range(0, len(data), 7):
        spoilt = data.copy()
        spoilt[place] ^= 1
        path.write_bytes(spoilt)
        assert blocked(home, A, B) == [A, B], place
    problem = recall_problem(manifest_of(B), home=home)
    assert problem is not None
    assert str(path) in problem
    Recalls(home).check(store)
    assert blocked(home, A, B) == [A]
    path.write_bytes(spoilt)
    store.documents = [signed(key, 2, A, C)]
    Recalls(home).check(store)
    assert blocked(home, A, B, C) == [A, C]


def test_of_lists_apart_one_that_has_gone_bad_goes_on_blocking(key: SigningKey, home: Path) -> None:
    """Nobody can tell what it recalled, and no other list has it."""
    one, other = Shown(signed(key, 5, A)), Shown(signed(key, 9, B), url="https://other.example.org")
    for store in (one, other):
        Recalls(home).check(store)
    path = min((home / "recalls" / signer_of(key.public)).iterdir())
    path.write_bytes(b"spoilt")
    other.documents = [signed(key, 10, B, C)]
    Recalls(home).check(other)
    assert blocked(home, "d" * 64) == ["d" * 64]
    Recalls(home).check(one)
    assert blocked(home, A, B, C, "d" * 64) == [A, B, C]


def test_a_home_that_cannot_be_written_keeps_lists_for_the_process(
    key: SigningKey, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    home.mkdir(mode=0o700, exist_ok=True)
    (home / "recalls").write_text("in the way")
    recalls = Recalls(home)
    with caplog.at_level(logging.WARNING):
        store = Shown(signed(key, 1, A))
        assert recalls.check(store) is None
    assert recalls.problem(manifest_of(A)) is not None
    assert recalls.problem(manifest_of(B)) is None
    assert blocked(home, A, B) == [A]  # also for whoever else asks in this process
    assert "cannot be kept" in caplog.text
    (home / "recalls").unlink()
    recalls.check(store)
    assert len(list((home / "recalls" / signer_of(key.public)).iterdir())) == 1
    assert blocked(home, A, B) == [A]


def test_threads_that_learn_at_once_lose_nothing(key: SigningKey, home: Path) -> None:
    """Half of them of a list and of those that follow it, half of lists that know nothing of it."""
    chain = [next_list([], recall={f"{0:064x}": "bad"}, now=1e9, seconds=DAY * 1e4)]
    for number in range(1, 6):
        chain.append(next_list(chain[-1:], recall={f"{number:064x}": "bad"}, now=1e9, seconds=DAY * 1e4))
    apart = [
        next_list([], recall={f"{number:064x}": "bad"}, now=1e9, seconds=DAY * 1e4, after=number)
        for number in range(6, 12)
    ]
    documents = [SignedList.make(one, key).document for one in (*chain, *apart)]

    def learn(document: bytes) -> None:
        for _ in range(5):
            Recalls(home).check(Shown(document, url=f"https://{hash(document)}.example.org"))
            recall_problem(manifest_of(A), home=home)

    threads = [threading.Thread(target=learn, args=(document,)) for document in documents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    wanted = [f"{number:064x}" for number in range(12)]
    assert blocked(home, *wanted, A) == wanted
    kept = list((home / "recalls" / signer_of(key.public)).iterdir())
    assert len(kept) == 1 + len(apart)


# how old it may be


def _aged(home: Path, hours: float) -> None:
    (path,) = (home / "recalls" / "asked").iterdir()
    note = json.loads(path.read_bytes())
    note["asked"] -= hours * 3600
    path.write_text(json.dumps(note))


@pytest.mark.parametrize("policy", ["warn", "refuse"])
def test_a_store_that_was_away_too_long_is_told_once_and_follows_the_rule(
    key: SigningKey,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    policy: str,
) -> None:
    monkeypatch.setenv("AOTCACHE_RECALL_STALE", policy)
    store = Shown(signed(key, 1, A))
    Recalls(home).check(store)
    store.away = True
    recalls = Recalls(home)
    assert recalls.check(store) is None
    _aged(home, 167)
    assert recalls.check(store) is None
    _aged(home, 2)
    with caplog.at_level(logging.WARNING):
        answers = {recalls.check(store) for _ in range(3)}
    assert blocked(home, A) == [A]
    if policy == "warn":
        assert answers == {None}
        (record,) = caplog.records
        assert "for 169 hours, expected 168 at most" in record.getMessage()
    else:
        (answer,) = answers
        assert answer is not None
        assert "AOTCACHE_RECALL_STALE=refuse" in answer
    store.away = False
    assert recalls.check(store) is None
    assert recalls.stale(store) is None


def test_a_store_that_was_never_reached_is_stale(key: SigningKey, home: Path) -> None:
    store = Shown()
    store.away = True
    recalls = Recalls(home)
    recalls.learn(store)
    assert "was never asked" in str(recalls.stale(store))


def test_a_store_that_withholds_a_list_grows_stale(
    key: SigningKey, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AOTCACHE_RECALL_HOURS", "1")
    store = Shown(signed(key, 2, A))
    Recalls(home).check(store)
    _aged(home, 2)
    store.documents = []
    recalls = Recalls(home)
    recalls.check(store)
    assert "has shown no recall lists that are certain" in str(recalls.stale(store))
    store.documents = [signed(key, 3, A)]
    recalls.check(store)
    assert recalls.stale(store) is None


def test_an_expired_list_goes_on_blocking_and_is_told(key: SigningKey, home: Path, tmp_path: Path) -> None:
    document = signed(key, 1, A, at=time.time() - 100 * DAY, expires=time.time() - DAY)
    for store in (Shown(document), copies(tmp_path / "copies"), open_store(tmp_path / "own")):
        folder = home / str(store.own) / store.url[:4]
        if not isinstance(store, Shown):
            store.put_recall(document, signer_of(key.public))
        recalls = Recalls(folder)
        recalls.check(store)
        assert blocked(folder, A) == [A]
        assert "has expired on" in str(recalls.stale(store))


def test_a_store_of_ones_own_without_lists_is_never_stale(
    key: SigningKey, home: Path, tmp_path: Path
) -> None:
    own = open_store(tmp_path / "own")
    recalls = Recalls(home)
    assert recalls.check(own) is None
    assert recalls.stale(own) is None
    recalls.check(Shown(signed(key, 1, A, at=1.0, expires=2.0)))
    assert recalls.stale(own) is None
    assert not (tmp_path / "own").exists()


def test_a_note_from_a_clock_that_was_wrong_is_not_believed(key: SigningKey, home: Path) -> None:
    store = Shown()
    Recalls(home).check(store)
    _aged(home, -1)  # an hour ahead is no matter
    store.away = True
    assert Recalls(home).stale(store) is None
    _aged(home, -1000)
    assert Recalls(home).stale(store) is not None


def test_lists_that_a_store_has_and_does_not_show_refuse_everything(key: SigningKey, home: Path) -> None:
    class Odd(Shown):
        def recalls(self, of: Callable[[str], bool] | None = None) -> Sequence[bytes]:
            raise StoreError("cannot read recalls")

    assert "cannot be read, so nothing of it is opened" in str(Recalls(home).check(Odd()))


# putting lists into a store


def test_lists_follow_each_other_and_replace_each_other(key: SigningKey, home: Path, tmp_path: Path) -> None:
    store, recalls = open_store(tmp_path / "store"), Recalls(home)
    for number, what in enumerate((A, B), start=1):
        made = publish_list(store, key, recalls, recall={what: "bad"}, seconds=DAY)
        assert made.number == number
    assert blocked(home, A, B) == [A, B]
    (document,) = store.recalls()
    assert SignedList.from_document(document, where="here").listed == made
    publish_list(store, key, recalls, lift=[A], seconds=DAY)
    assert blocked(home, A, B) == [B]
    assert len(store.recalls()) == 1


def test_a_list_follows_what_this_host_knows_of_other_stores(
    key: SigningKey, home: Path, tmp_path: Path
) -> None:
    recalls = Recalls(home)
    publish_list(open_store(tmp_path / "one"), key, recalls, recall={A: "bad"}, seconds=DAY)
    made = publish_list(open_store(tmp_path / "other"), key, recalls, recall={B: "bad"}, seconds=DAY)
    assert (made.number, [entry.what for entry in made.recalled]) == (2, [A, B])


class Raced:
    """A store at which another operator with the same key is a moment faster, some times."""

    def __init__(self, store: Store, key: SigningKey, times: int) -> None:
        self._store, self._key, self._left = store, key, times

    def put_recall(self, document: bytes, signer: str) -> None:
        if self._left:
            self._left -= 1
            what = f"{self._left:064x}"
            publish_list(
                self._store, self._key, Recalls(Path(os.devnull)), recall={what: "theirs"}, seconds=DAY
            )
        self._store.put_recall(document, signer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_two_operators_with_one_key_lose_nothing_of_each_others(
    key: SigningKey, home: Path, tmp_path: Path
) -> None:
    store = open_store(tmp_path / "store")
    raced: Any = Raced(store, key, 3)
    publish_list(raced, key, Recalls(home), recall={A: "ours"}, seconds=DAY)
    (document,) = store.recalls()
    made = SignedList.from_document(document, where="here").listed
    assert {entry.what for entry in made.recalled} == {A, *(f"{i:064x}" for i in range(3))}
    assert made.number >= 4


def test_a_number_that_was_used_is_not_used_again_by_another_list(key: SigningKey, tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    first, other = signed(key, 4, A), signed(key, 4, B)
    store.put_recall(first, signer_of(key.public))
    store.put_recall(first, signer_of(key.public))
    with pytest.raises(RecallConflict, match="number 4"):
        store.put_recall(other, signer_of(key.public))
    assert list(store.recalls()) == [first]


def test_junk_under_the_next_number_keeps_nobody_from_recalling(
    key: SigningKey, home: Path, tmp_path: Path
) -> None:
    store = open_store(tmp_path / "store")
    folder = tmp_path / "store" / "recalls" / signer_of(key.public)
    folder.mkdir(parents=True)
    for number in range(1, 4):
        (folder / f"{number:016d}.json").write_text("junk")
    made = publish_list(store, key, Recalls(home), recall={A: "bad"}, seconds=DAY)
    assert made.number == 4
    assert blocked(home, A) == [A]
