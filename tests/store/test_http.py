"""The service as a store: how often it asks, and what it makes of answers that are not right."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from aotcache.errors import LeaseHeld, LeaseLost, ServiceError
from aotcache.manifest import Manifest
from aotcache.store import open_store
from aotcache.store.http import HttpStore
from aotcache.store.session import Limits, ServiceSession
from aotcache.trust import SigningKey, sign
from aotcache.types import CacheKey, sha256
from tests.manifests import make_manifest, write_archive
from tests.services.serving import Serving
from tests.store.faulty import Answer, Asked, Faulty, faulty


@pytest.fixture
def store_at() -> Iterator[Callable[[str], HttpStore]]:
    opened: list[HttpStore] = []

    def make(url: str) -> HttpStore:
        opened.append(HttpStore(url, ServiceSession(url, limits=Limits(attempts=2))))
        return opened[-1]

    yield make
    for store in opened:
        store.session.close()


StoreAt = Callable[[str], HttpStore]


def answering(*answers: Any) -> Callable[[Answer, Asked], None]:
    """Answers with each of these as JSON in turn; the last one again and again."""
    left = list(answers)

    def answer(answer: Answer, asked: Asked) -> None:
        found = left.pop(0) if len(left) > 1 else left[0]
        answer.send(200, json.dumps(found).encode())

    return answer


def told(manifest: Manifest, **changes: Any) -> dict[str, Any]:
    document = manifest.document()
    variant = {
        "variant": str(manifest.variant),
        "document": sha256(document),
        "modified": 5.0,
        "envelope": json.loads(document),
    }
    return {"key": manifest.key, "variants": [variant | changes]}


def routes(server: Faulty) -> Counter[str]:
    return Counter(f"{asked.method} {asked.path.partition('?')[0][:13]}" for asked in server.asked)


def test_a_thousand_keys_are_one_request_and_those_found_one_each(store_at: StoreAt) -> None:
    found = [make_manifest(call=f"{n}") for n in range(20)]
    by_key = {manifest.key: manifest for manifest in found}
    absent = [CacheKey(f"{n:064x}") for n in range(1980)]

    def answer(answer: Answer, asked: Asked) -> None:
        if asked.method == "POST":
            keys = json.loads(asked.body)["keys"]
            assert len(keys) == 1000
            there = {
                key: [{"variant": "v", "digest": "d", "size": 1, "document": "x"}]
                for key in keys
                if key in by_key
            }
            answer.send(200, json.dumps({"found": there, "missing": {}}).encode())
        else:
            answer.send(200, json.dumps(told(by_key[CacheKey(asked.path[-64:])])).encode())

    with faulty(answer) as server:
        answers = store_at(server.url).resolve([*absent, *by_key, *by_key])
    assert {key: manifests for key, manifests in answers.items() if manifests} == {
        k: [m] for k, m in by_key.items()
    }
    assert len(answers) == 2000
    assert routes(server) == {"POST /v1/resolve": 2, "GET /v1/artifacts": 20}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"document": "0" * 64}, "its document hashes to"),
        ({"variant": "cpu-other+torch2.13.0-cccccccc-cpu"}, "filed under another name"),
        ({"envelope": {"schema": 99}}, "manifest schema 99"),
    ],
)
def test_a_manifest_that_is_not_what_the_service_says_is_a_miss(
    store_at: StoreAt, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], said: str
) -> None:
    manifest = sign(make_manifest(), SigningKey.generate())
    with faulty(answering(told(manifest, **changes))) as server:
        assert store_at(server.url).lookup(manifest.key) == []
    assert said in caplog.text


def test_a_manifest_keeps_its_signature(store_at: StoreAt) -> None:
    manifest = sign(make_manifest(), SigningKey.generate())
    with faulty(answering(told(manifest))) as server:
        [found] = store_at(server.url).lookup(manifest.key)
    assert found.envelope == manifest.envelope
    assert found.document() == manifest.document()


@pytest.mark.parametrize(
    "answer",
    [
        [],
        {},
        {"variants": 5},
        {"variants": [5]},
        {"variants": [{"variant": "v"}]},
        {"variants": [{"variant": "v", "document": "d", "modified": math.nan, "envelope": {}}]},
        {"variants": [{"variant": "v", "document": "d", "modified": 10**400, "envelope": {}}]},
    ],
    ids=lambda answer: json.dumps(answer)[:80],
)
def test_an_answer_of_another_version_is_an_error_that_says_so(store_at: StoreAt, answer: Any) -> None:
    with faulty(answering(answer)) as server:
        with pytest.raises(ServiceError, match="not of version 1"):
            store_at(server.url).lookup(make_manifest().key)


@pytest.mark.parametrize("changes", [{"size": math.inf}, {"key": ["x"]}, {"digest": {}}, {"size": None}])
def test_a_row_that_makes_no_sense_is_an_error_that_says_so(
    store_at: StoreAt, changes: dict[str, Any]
) -> None:
    row = {"key": "a" * 64, "variant": "v", "digest": "b" * 64, "size": 1} | changes
    with faulty(answering({"artifacts": [row], "next": None})) as server:
        with pytest.raises(ServiceError, match="not of version 1"):
            store_at(server.url).usage()


def test_what_a_service_calls_a_variant_moves_no_cursor(
    store_at: StoreAt, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = make_manifest()
    with faulty(answering(told(manifest, variant="\x1b[2J\nfake"))) as server:
        assert store_at(server.url).lookup(manifest.key) == []
    assert "/?[2J?fake is taken for a miss" in caplog.text


def test_pages_that_never_end_are_an_error(store_at: StoreAt) -> None:
    with faulty(answering({"artifacts": [], "next": "again"})) as server:
        with pytest.raises(ServiceError, match="a page after which the next one is the same"):
            store_at(server.url).usage()


def test_listings_are_read_page_by_page(
    service: Serving,
    store_at: StoreAt,
    signing_key: SigningKey,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aotcache.store.http._PAGE", 2)
    before = len(service.requests())
    store = store_at(service.url)
    archive = write_archive(tmp_path, b"archive")
    made = [sign(make_manifest(call=f"{n}"), signing_key) for n in range(5)]
    for manifest in made:
        assert store.publish(manifest, archive)
    assert [m.key for m in store.list()] == sorted(m.key for m in made)
    assert store.usage().refs == 5
    uploads = [
        r for r in service.requests()[before:] if r["method"] == "PUT" and r["route"] == "/v1/blobs/{digest}"
    ]
    assert len(uploads) == 1


def test_an_unsigned_manifest_is_not_published(service: Serving, store_at: StoreAt, tmp_path: Path) -> None:
    manifest = make_manifest()
    with pytest.raises(ServiceError) as caught:
        store_at(service.url).publish(manifest, write_archive(tmp_path, b"archive"))
    assert caught.value.details["type"] == "untrusted"
    assert caught.value.details["request_id"] in str(caught.value)
    assert store_at(service.url).lookup(manifest.key) == []


def test_a_publish_under_a_lease_needs_it(
    service: Serving, store_at: StoreAt, signing_key: SigningKey, tmp_path: Path
) -> None:
    store = store_at(service.url)
    manifest = sign(make_manifest(call="leased"), signing_key)
    archive = write_archive(tmp_path, b"archive")
    body = {"key": manifest.key, "variant": str(manifest.variant), "holder": "host-a"}
    lease = store.session.json("POST", "/v1/leases", body=body)
    with pytest.raises(LeaseHeld) as held:
        store.session.json("POST", "/v1/leases", body=body | {"holder": "host-b"})
    assert held.value.details["holder"] == "host-a"
    with pytest.raises(LeaseHeld):
        store.publish(manifest, archive)
    with pytest.raises(LeaseLost):
        store.publish(manifest, archive, lease=(lease["lease"], lease["token"] + 1))
    assert store.lookup(manifest.key) == []
    assert store.publish(manifest, archive, lease=(lease["lease"], lease["token"]))
    assert store.lookup(manifest.key) == [manifest]


def test_what_others_log_of_their_requests_is_not_touched(
    store_at: StoreAt, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    for name in ("httpx", "httpcore"):
        # Libraries that other tests import turn these down.
        caplog.set_level(logging.DEBUG, logger=name)
        monkeypatch.setattr(logging.getLogger(name), "disabled", False)
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    with faulty(answering({"artifacts": [], "next": None})) as server:
        store_at(server.url).usage()
        theirs = [r.getMessage() for r in caplog.records if r.name.partition(".")[0] in ("httpx", "httpcore")]
        assert not [line for line in theirs if "artifacts" in line or "headers" in line]
        with httpx.Client() as client:
            client.get(f"{server.url}/theirs?q=1")
    assert "/theirs?q=1" in caplog.text


def test_an_entry_that_a_service_killed_meanwhile_does_not_list_is_listed_once_published_again(
    store_at: StoreAt, service: Serving, signing_key: SigningKey, tmp_path: Path
) -> None:
    manifest = sign(make_manifest(b"stored and not listed"), signing_key)
    archive = write_archive(tmp_path, b"stored and not listed")
    open_store(service.store).publish(manifest, archive)
    client = store_at(service.url)
    assert client.resolve([manifest.key]) == {manifest.key: []}
    assert client.publish(manifest, archive)
    assert client.resolve([manifest.key]) == {manifest.key: [manifest]}
    assert not client.publish(manifest, archive)
