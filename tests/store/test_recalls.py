"""Recall lists in every kind of store, as in `test_objects.py`."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from aotcache.config import settings
from aotcache.errors import RecallConflict, ServiceUnavailable, StoreError
from aotcache.recall import Recalls, publish_list
from aotcache.recall_list import SignedList, next_list, signer_of
from aotcache.store import ObjectStore, Store, open_store
from aotcache.store.circuit import circuit_for
from aotcache.store.http import HttpStore
from aotcache.store.tiered import TieredStore
from aotcache.trust import SigningKey, TrustedKeys, trusted_keys
from tests.manifests import make_manifest
from tests.services.serving import Serving
from tests.store.test_objects import places, store

__all__ = ["store"]

A, B = "a" * 64, "b" * 64
DAY = 86400.0


@pytest.fixture
def key(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SigningKey:
    """A key of the test's own, which this host and the service trust."""
    monkeypatch.setenv("AOTCACHE_CONFIG_HOME", str(tmp_path / "config"))
    made = SigningKey.generate()
    trusted_keys(settings()).add(made.public, "operator")
    if "http" in request.node.name:
        server: Serving = request.getfixturevalue("service")
        TrustedKeys(server.config_home / "trusted").add(made.public, "operator")
    return made


def make(key: SigningKey, *known: SignedList, **changes: Any) -> SignedList:
    return SignedList.make(next_list([k.listed for k in known], now=time.time(), seconds=DAY, **changes), key)


def put(store: Store, made: SignedList) -> None:
    store.put_recall(made.document, made.signer)


def shown(store: Store, key: SigningKey) -> list[bytes]:
    """The lists by a key; a service has those of other tests, too."""
    found = [SignedList.from_document(one, where="here") for one in store.recalls()]
    return [one.document for one in found if one.by(key.public)]


def test_a_list_is_shown_as_it_was_signed(store: Store, key: SigningKey) -> None:
    assert shown(store, key) == []
    made = make(key, recall={A: "bad"})
    put(store, made)
    put(store, made)
    assert shown(store, key) == [made.document]
    signer = signer_of(key.public)
    assert made.document in store.recalls(lambda name: name == signer)


def test_a_list_takes_the_place_of_those_that_it_covers(store: Store, key: SigningKey) -> None:
    first = make(key, recall={A: "bad"})
    second = make(key, first, recall={B: "bad"})
    for made in (first, second):
        put(store, made)
        assert shown(store, key) == [made.document]


def test_a_number_is_used_once(store: Store, key: SigningKey) -> None:
    first = make(key, recall={A: "bad"})
    put(store, first)
    with pytest.raises(RecallConflict):
        put(store, make(key, recall={B: "bad"}))
    assert shown(store, key) == [first.document]


def test_what_is_no_list_is_not_stored(store: Store, key: SigningKey) -> None:
    other = make(SigningKey.generate(), recall={A: "bad"})
    with pytest.raises(StoreError):
        store.put_recall(other.document, signer_of(key.public))
    with pytest.raises(StoreError):
        store.put_recall(b"junk", signer_of(key.public))
    assert shown(store, key) == []


def test_operators_at_once_lose_nothing(store: Store, key: SigningKey, tmp_path: Path) -> None:
    def recall(number: int) -> None:
        what = f"{number:064x}"
        publish_list(store, key, Recalls(tmp_path / str(number)), recall={what: "bad"}, seconds=DAY)

    operators = [threading.Thread(target=recall, args=(number,)) for number in range(4)]
    for operator in operators:
        operator.start()
    for operator in operators:
        operator.join(60)
    (document,) = shown(store, key)
    made = SignedList.from_document(document, where="here").listed
    assert [entry.what for entry in made.recalled] == [f"{number:064x}" for number in range(4)]


def test_what_one_host_recalls_another_learns_and_a_lift_too(
    store: Store, key: SigningKey, tmp_path: Path
) -> None:
    manifest = make_manifest()
    operator, worker = Recalls(tmp_path / "operator"), Recalls(tmp_path / "worker")
    publish_list(store, key, operator, recall={manifest.digest: "wrong gradients"}, seconds=DAY)
    assert worker.check(store) is None
    assert "wrong gradients" in str(worker.problem(manifest))
    publish_list(store, key, operator, lift=[manifest.digest], seconds=DAY)
    assert worker.check(store) is None
    assert worker.problem(manifest) is None


def test_junk_in_a_store_is_passed_over(store: Store, key: SigningKey, tmp_path: Path) -> None:
    signer = signer_of(key.public)
    client = places(store)[0]._client
    for path in (
        "recalls/junk",
        f"recalls/{signer}.json",
        f"recalls/{signer}/1.json",
        f"recalls/{signer}/0000000000000001.json",
        f"recalls/{'0' * 64}/0000000000000001.json",
    ):
        client.put(path, b"junk", create=False)
    manifest = make_manifest()
    publish_list(store, key, Recalls(tmp_path / "operator"), recall={manifest.digest: "bad"}, seconds=DAY)
    worker = Recalls(tmp_path / "worker")
    assert worker.check(store) is None
    assert worker.problem(manifest) is not None


# what a look-up costs


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Requests to a service."""
    sent: list[str] = []
    send = httpx.Client.send

    def counted(self: httpx.Client, request: httpx.Request, **options: Any) -> httpx.Response:
        sent.append(f"{request.method} {request.url.path}")
        return send(self, request, **options)

    monkeypatch.setattr(httpx.Client, "send", counted)
    return sent


def test_a_service_is_asked_for_its_lists_only_when_they_are_others(
    service: Serving, key: SigningKey, tmp_path: Path, requests: list[str], request: pytest.FixtureRequest
) -> None:
    TrustedKeys(service.config_home / "trusted").add(key.public, "operator")
    worker, operator = open_store(service.url, tier=False), open_store(service.url, tier=False)
    recalls, missing = Recalls(tmp_path / "home"), make_manifest().key

    def look() -> list[str]:
        requests.clear()
        worker.resolve([missing])
        recalls.check(worker)
        return list(requests)

    look()
    assert look() == ["POST /v1/resolve"]
    publish_list(operator, key, Recalls(tmp_path / "operator"), recall={A: "bad"}, seconds=DAY)
    assert look() == ["POST /v1/resolve", "GET /v1/recalls"]
    assert look() == look() == ["POST /v1/resolve"]
    for opened in (worker, operator):
        assert isinstance(opened, HttpStore)
        opened.session.close()


class Counted:
    """A client of a bucket that counts."""

    def __init__(self, client: Any) -> None:
        self._client, self.asked = client, list[str]()

    def __getattr__(self, name: str) -> Any:
        def ask(path: str, *arguments: Any, **options: Any) -> Any:
            self.asked.append(f"{name} {path.partition('/')[0]}")
            return getattr(self._client, name)(path, *arguments, **options)

        return ask


def test_a_bucket_is_listed_once_and_each_list_is_read_once(
    bucket: str, key: SigningKey, tmp_path: Path
) -> None:
    operator = open_store(bucket, tier=False)
    assert isinstance(operator, ObjectStore)
    client = Counted(operator._client)
    worker, recalls = ObjectStore(bucket, client), Recalls(tmp_path / "home")  # type: ignore[arg-type]

    def look() -> list[str]:
        client.asked.clear()
        recalls.check(worker)
        return list(client.asked)

    assert look() == ["list recalls"]
    publish_list(operator, key, Recalls(tmp_path / "operator"), recall={A: "bad"}, seconds=DAY)
    assert look() == ["list recalls", "get recalls"]
    assert look() == look() == ["list recalls"]
    publish_list(operator, key, Recalls(tmp_path / "operator"), recall={B: "bad"}, seconds=DAY)
    assert look() == ["list recalls", "get recalls"]


# a service that does not show what it tells of


class Withholding(HttpStore):
    """A service whose look-ups tell of lists that it does not show."""

    def __init__(self, url: str, error: StoreError) -> None:
        super().__init__(url)
        self._error = error

    def _read_lists(self) -> Any:
        raise self._error

    def told(self, tag: str | None, *, ago: float = 0.0) -> None:
        self._told = (tag, time.monotonic() - ago)


@pytest.mark.parametrize("error", [ServiceUnavailable("away"), StoreError("odd")])
def test_lists_that_a_service_tells_of_and_does_not_show_refuse_everything(
    key: SigningKey, tmp_path: Path, error: StoreError
) -> None:
    store = Withholding("http://127.0.0.1:9", error)
    recalls = Recalls(tmp_path / "home")
    store.told(None)
    assert recalls.check(store) is None
    store.told("e5" * 32)
    for _ in range(2):
        problem = recalls.check(store)
        assert problem is not None
        assert "nothing of it is opened" in problem
    tiered = TieredStore(ObjectStore("file:///nowhere", None), store, tmp_path)  # type: ignore[arg-type]
    assert recalls.check(tiered) is not None
    assert circuit_for(store.url).unreached is None


class Reading(Withholding):
    """A service that shows its lists, and counts how often."""

    reads = 0

    def _read_lists(self) -> Any:
        self.reads += 1
        return "e5" * 32, []


def test_what_a_look_up_told_long_ago_is_not_taken_for_what_holds_now(
    key: SigningKey, tmp_path: Path
) -> None:
    """A look-up that finds nothing leaves its word behind; a refresh an hour later has to ask."""
    store = Reading("http://127.0.0.1:9", StoreError("unused"))
    recalls = Recalls(tmp_path / "home")
    for tag, ago, reads in (
        (None, 0.0, 0),
        (None, 3600.0, 1),
        ("e5" * 32, 0.0, 1),
        ("e5" * 32, 3600.0, 2),
        ("f6" * 32, 3600.0, 3),
    ):
        store.told(tag, ago=ago)
        assert recalls.check(store) is None
        assert store.reads == reads


def test_an_answer_that_makes_no_sense_is_an_error(key: SigningKey, tmp_path: Path) -> None:
    class Odd:
        def json(self, method: str, path: str, **_: Any) -> Any:
            return self.answer

    for answer in (None, [], {}, {"tag": None}, {"recalls": {}}, {"recalls": [1]}, {"recalls": [{}]}):
        session = Odd()
        session.answer = answer  # type: ignore[attr-defined]
        session.url = "http://127.0.0.1:9"  # type: ignore[attr-defined]
        with pytest.raises(StoreError):
            HttpStore("http://127.0.0.1:9", session).recalls()  # type: ignore[arg-type]
