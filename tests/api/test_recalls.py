"""Recall lists over HTTP, and what a service does with what is recalled."""

from __future__ import annotations

import json
import time
from typing import Any

from aotcache.recall_list import SignedList, next_list, signer_of
from aotcache.trust import SigningKey
from tests.api.conftest import Api, Start


def make(key: SigningKey, *known: SignedList, **changes: Any) -> SignedList:
    return SignedList.make(
        next_list([k.listed for k in known], now=time.time(), seconds=86400.0, **changes), key
    )


def put(api: Api, made: SignedList, **options: Any) -> Any:
    return api.client.put("/v1/recalls", content=made.document, **options)


def test_a_list_is_taken_and_shown_and_look_ups_tell_of_it(api: Api) -> None:
    manifest = api.publish()
    asked = {"keys": [manifest.key]}
    assert api.client.post("/v1/resolve", json=asked).json()["recalls"] is None
    assert api.client.get("/v1/recalls").json() == {"tag": None, "recalls": []}
    made = make(api.key, recall={manifest.digest: "wrong gradients"})
    answer = put(api, made)
    assert (answer.status_code, answer.json()) == (201, {"stored": True, "number": 1})
    again = put(api, made)
    assert (again.status_code, again.json()) == (200, {"stored": False, "number": 1})
    shown = api.client.get("/v1/recalls")
    tag = shown.json()["tag"]
    (row,) = shown.json()["recalls"]
    assert (row["signer"], row["number"]) == (signer_of(api.key.public), 1)
    document = json.dumps(row["document"], sort_keys=True, separators=(",", ":")).encode()
    assert document == made.document
    assert api.client.post("/v1/resolve", json=asked).json()["recalls"] == tag
    # It is still told where the archive is: whether it is opened is the client's to decide, by keys that it trusts.
    assert api.client.post("/v1/resolve", json=asked).json()["found"] != {}
    unchanged = api.client.get("/v1/recalls", headers={"If-None-Match": shown.headers["etag"]})
    assert (unchanged.status_code, unchanged.content) == (304, b"")


def test_a_list_that_does_not_follow_is_a_conflict(api: Api) -> None:
    first = make(api.key, recall={"a" * 64: "bad"})
    second = make(api.key, first, recall={"b" * 64: "bad"})
    assert put(api, second).status_code == 201
    answer = put(api, first)
    assert answer.status_code == 409
    assert answer.json()["error"]["type"] == "conflict"
    assert answer.json()["error"]["details"] == {"number": 2}


def test_a_list_by_a_key_that_is_not_trusted_is_refused(api: Api) -> None:
    stranger = SigningKey.generate()
    answer = put(api, make(stranger, recall={"a" * 64: "bad"}))
    assert answer.status_code == 403
    assert answer.json()["error"]["type"] == "untrusted"
    assert stranger.public.fingerprint in answer.json()["error"]["message"]
    assert api.client.get("/v1/recalls").json()["recalls"] == []


def test_what_is_no_list_is_invalid(api: Api) -> None:
    manifest = api.manifest()
    for body in (b"", b"{}", b"junk", manifest.document(), b"[" * 100_000):
        answer = api.client.put("/v1/recalls", content=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (422, "invalid"), body
    assert api.client.put("/v1/recalls", content=b"x" * (2 << 20)).status_code == 413


def test_reading_needs_read_and_writing_admin(api: Api) -> None:
    made = make(api.key, recall={"a" * 64: "bad"})
    read, publish, admin = (api.bearer(scope) for scope in ("read", "publish", "admin"))
    assert api.client.get("/v1/recalls").status_code == 401
    assert api.client.get("/v1/recalls", headers=publish).status_code == 403
    assert put(api, made, headers=read).status_code == 403
    assert put(api, made, headers=publish).status_code == 403
    assert put(api, made, headers=admin).status_code == 201
    assert api.client.get("/v1/recalls", headers=read).status_code == 200


def test_what_is_recalled_is_not_published(api: Api) -> None:
    by_digest, by_key = api.manifest(b"one"), api.manifest(b"two", call="two")
    put(api, make(api.key, recall={by_digest.digest: "wrong gradients", by_key.key: "wrong always"}))
    for manifest, archive in ((by_digest, b"one"), (by_key, b"two")):
        api.client.put(f"/v1/blobs/{manifest.digest}", content=archive)
        answer = api.client.put(f"/v1/artifacts/{manifest.key}", content=manifest.document())
        assert answer.status_code == 403
        assert answer.json()["error"]["type"] == "recalled"
        assert "it is recalled: wrong" in answer.json()["error"]["message"]
        assert api.client.get(f"/v1/artifacts/{manifest.key}").status_code == 404


def test_who_may_publish_replaces_what_is_recalled_and_nothing_else(api: Api) -> None:
    old, new = api.publish(b"old"), api.manifest(b"new")
    assert old.key == new.key
    headers, admin = api.bearer("publish", "read"), api.bearer("admin")

    def publish() -> bool:
        answer = api.client.put(f"/v1/artifacts/{new.key}", content=new.document(), headers=headers)
        assert answer.status_code in (200, 201)
        return bool(answer.json()["stored"])

    api.client.put(f"/v1/blobs/{new.digest}", content=b"new", headers=headers)
    assert not publish()
    assert put(api, make(api.key, recall={old.digest: "bad"}), headers=admin).status_code == 201
    assert publish()
    found = api.client.post("/v1/resolve", json={"keys": [new.key]}, headers=headers).json()["found"]
    assert [row["digest"] for row in found[new.key]] == [new.digest]
    assert not publish()


def test_every_server_over_one_database_tells_of_a_list_at_once(start_api: Start) -> None:
    one, other = start_api(), start_api()
    assert put(one, make(one.key, recall={"a" * 64: "bad"})).status_code == 201
    tag = other.client.get("/v1/recalls").json()["tag"]
    assert tag is not None
    assert other.client.post("/v1/resolve", json={"keys": []}).json()["recalls"] == tag


def test_a_server_over_an_empty_database_knows_the_lists_of_its_store_from_the_start(
    start_api: Start, tmp_path: Any
) -> None:
    from aotcache.store import open_store

    key = SigningKey.generate()
    first = start_api()
    first.config.trusted.add(key.public, "operator")
    made = make(key, recall={"a" * 64: "bad"})
    open_store(tmp_path / "store").put_recall(made.document, made.signer)
    second = start_api()
    (row,) = second.client.get("/v1/recalls").json()["recalls"]
    assert row["signer"] == made.signer
