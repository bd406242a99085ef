"""Entries over HTTP: publish, resolve, list, read, delete, explain."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import threading
from dataclasses import replace

import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine

from aotcache.errors import DatabaseError
from aotcache.key import Component, KeyParts
from aotcache.manifest import Manifest
from aotcache.trust import SigningKey, sign
from aotcache.types import CacheKey
from tests.api.conftest import Api
from tests.manifests import make_manifest


def put(api: Api, manifest: Manifest, key: str | None = None, **options: object):  # type: ignore[no-untyped-def]
    return api.client.put(
        f"/v1/artifacts/{key or manifest.key}",
        content=manifest.document(),
        **options,  # type: ignore[arg-type]
    )


def error(answer) -> tuple[int, str]:  # type: ignore[no-untyped-def]
    return answer.status_code, answer.json()["error"]["type"]


def test_a_published_entry_is_found_in_every_way(api: Api) -> None:
    manifest = api.publish()
    document = hashlib.sha256(manifest.document()).hexdigest()
    reference = {
        "variant": str(manifest.variant),
        "digest": manifest.digest,
        "size": manifest.size,
        "document": document,
    }
    missing = "0" * 64
    resolved = api.client.post("/v1/resolve", json={"keys": [manifest.key, missing]}).json()
    assert resolved["found"] == {manifest.key: [reference]}
    assert set(resolved["missing"]) == {missing}

    (row,) = api.client.get("/v1/artifacts").json()["artifacts"]
    assert row.items() >= reference.items()
    assert (row["key"], row["region"], row["mode"]) == (manifest.key, "layers.0", "train")
    assert (row["bucket"], row["target"], row["torch"]) == ({"seq": 256}, "cpu:x86_64-avx2", "2.13.0")

    detail = api.client.get(f"/v1/artifacts/{manifest.key}").json()
    (variant,) = detail["variants"]
    assert (variant["variant"], variant["document"]) == (str(manifest.variant), document)
    rebuilt = Manifest.from_json(json.dumps(variant["envelope"]).encode(), where="the answer")
    assert rebuilt == manifest
    assert rebuilt.document() == manifest.document()


def test_an_etag_saves_reading_a_key_again(api: Api) -> None:
    manifest = api.publish()
    first = api.client.get(f"/v1/artifacts/{manifest.key}")
    again = api.client.get(f"/v1/artifacts/{manifest.key}", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    api.publish(target="cpu:x86_64-avx512")
    changed = api.client.get(
        f"/v1/artifacts/{manifest.key}", headers={"If-None-Match": first.headers["etag"]}
    )
    assert changed.status_code == 200
    assert len(changed.json()["variants"]) == 2


def test_a_publish_that_the_index_did_not_take_keeps_its_archive(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ref is written by then. Another entry that shares the archive may go; the same request enters this one."""
    twin, broken = api.publish(b"shared", call="twin"), api.manifest(b"shared", call="broken off")

    def away(*_: object, **__: object) -> None:
        raise DatabaseError("away")

    with monkeypatch.context() as patch:
        patch.setattr(api.service.index, "add", away)
        assert put(api, broken).status_code == 503
    assert api.client.delete(f"/v1/artifacts/{twin.key}").json() == {"deleted": 1}
    assert api.client.get(f"/v1/blobs/{broken.digest}").content == b"shared"
    assert put(api, broken).json() == {"stored": False}
    assert api.client.post("/v1/resolve", json={"keys": [broken.key]}).json()["found"]
    assert api.client.delete(f"/v1/artifacts/{broken.key}").json() == {"deleted": 1}
    assert api.client.get(f"/v1/blobs/{broken.digest}").status_code == 404


def test_a_delete_takes_no_row_of_what_is_published_meanwhile(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = api.publish(b"old")
    remove = api.service.collector.remove
    later: list[Manifest] = []

    def removing(*what: object, **options: object) -> object:
        if not later:
            later.append(api.publish(b"new", target="cpu:x86_64-avx512"))
        return remove(*what, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(api.service.collector, "remove", removing)
    assert api.client.delete(f"/v1/artifacts/{old.key}").json() == {"deleted": 1}
    assert later[0].key == old.key
    found = api.client.post("/v1/resolve", json={"keys": [old.key]}).json()["found"][old.key]
    assert [reference["digest"] for reference in found] == [later[0].digest]


def test_a_thousand_keys_are_one_statement(api: Api) -> None:
    manifests = [api.publish(call=f"x float32[{n}]") for n in range(3)]
    keys = [*(m.key for m in manifests), *(hashlib.sha256(str(n).encode()).hexdigest() for n in range(997))]
    statements: list[str] = []

    def note(_1, _2, statement: str, *_: object) -> None:  # type: ignore[no-untyped-def]
        if "artifacts" in statement:
            statements.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        answer = api.client.post("/v1/resolve", json={"keys": keys})
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    assert len(answer.json()["found"]) == 3
    assert len(answer.json()["missing"]) == 997
    # What `/metrics` counts is read in the background, by statements of their own.
    assert len([s for s in statements if "count(" not in s]) == 1


def test_more_than_a_thousand_keys_are_refused(api: Api) -> None:
    assert error(api.client.post("/v1/resolve", json={"keys": ["0" * 64] * 1001})) == (422, "invalid")


def test_a_second_publish_leaves_the_first_alone_and_replace_does_not(api: Api) -> None:
    first = api.publish(b"first")
    second = api.manifest(b"second")
    api.client.put(f"/v1/blobs/{second.digest}", content=b"second")
    answer = put(api, second)
    assert (answer.status_code, answer.json()) == (200, {"stored": False})
    assert api.service.store.lookup(first.key) == [first]
    replaced = put(api, second, params={"replace": "true"})
    assert (replaced.status_code, replaced.json()) == (201, {"stored": True})
    (reference,) = api.service.index.resolve([first.key])[first.key]
    assert reference.digest == second.digest


def test_replacing_needs_the_scope_admin(api: Api) -> None:
    manifest = api.publish()
    publisher, admin = api.bearer("publish"), api.bearer("admin")
    assert error(put(api, manifest, params={"replace": "true"}, headers=publisher)) == (403, "forbidden")
    assert put(api, manifest, params={"replace": "true"}, headers=admin).status_code == 201


def test_an_entry_without_its_archive_is_refused(api: Api) -> None:
    manifest = api.manifest()
    assert error(put(api, manifest)) == (409, "conflict")
    assert api.client.get(f"/v1/artifacts/{manifest.key}").status_code == 404


def test_an_archive_of_another_size_than_the_manifest_says_is_refused(api: Api) -> None:
    published = api.publish(b"archive")
    wrong = api.manifest(b"archive", call="y float32[1]", size=published.size + 1)
    assert error(put(api, wrong)) == (422, "corrupt")
    assert api.client.get(f"/v1/artifacts/{wrong.key}").status_code == 404


def test_only_signatures_of_trusted_keys_are_taken(api: Api) -> None:
    api.client.put(f"/v1/blobs/{make_manifest().digest}", content=b"archive")
    bare = make_manifest()
    stranger = sign(bare, SigningKey.generate())
    for manifest in (bare, stranger):
        answer = put(api, manifest)
        assert error(answer) == (403, "untrusted")
        assert "aotcache trust add" in answer.json()["error"]["message"]
    assert api.client.get(f"/v1/artifacts/{bare.key}").status_code == 404
    assert api.service.index.resolve([bare.key])[bare.key] == []


def test_a_signed_document_that_was_changed_is_refused(api: Api) -> None:
    manifest = api.publish(b"archive")
    envelope = json.loads(manifest.document())
    other = make_manifest(b"archive", call="other")
    envelope["payload"] = base64.b64encode(other.to_json()).decode()
    answer = api.client.put(f"/v1/artifacts/{other.key}", content=json.dumps(envelope))
    assert error(answer) == (403, "untrusted")


def test_a_document_under_another_key_is_refused(api: Api) -> None:
    manifest = api.publish()
    assert error(put(api, manifest, key="0" * 64)) == (422, "invalid")


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"payloadType": 1}'])
def test_what_is_no_document_is_refused(api: Api, body: bytes) -> None:
    assert error(api.client.put(f"/v1/artifacts/{'0' * 64}", content=body)) == (422, "invalid")


def test_a_publish_whose_index_failed_is_repaired_by_the_same_publish(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = api.manifest()
    api.client.put(f"/v1/blobs/{manifest.digest}", content=b"archive")

    def fails(*_: object, **__: object) -> None:
        raise OSError("the disk of the database is full")

    with monkeypatch.context() as patch:
        patch.setattr(api.service.index, "add", fails)
        assert error(put(api, manifest)) == (500, "internal")
    assert api.service.index.resolve([manifest.key])[manifest.key] == []
    assert put(api, manifest).json() == {"stored": False}
    assert len(api.service.index.resolve([manifest.key])[manifest.key]) == 1


def test_publishing_under_a_lease_that_is_lost_writes_nothing(api: Api) -> None:
    manifest = api.manifest()
    api.client.put(f"/v1/blobs/{manifest.digest}", content=b"archive")
    body = {"key": manifest.key, "variant": str(manifest.variant), "holder": "a"}
    lease = api.client.post("/v1/leases", json=body).json()
    claim = f"{lease['lease']}:{lease['token']}"

    assert error(put(api, manifest)) == (409, "conflict")
    assert error(put(api, manifest, headers={"Aotcache-Lease": claim + "0"})) == (409, "lease_lost")
    assert api.service.store.lookup(manifest.key) == []
    assert put(api, manifest, headers={"Aotcache-Lease": claim}).status_code == 201

    api.client.delete(f"/v1/leases/{lease['lease']}", params={"token": lease["token"]})
    assert error(put(api, manifest, headers={"Aotcache-Lease": claim})) == (409, "lease_lost")


@pytest.mark.parametrize("claim", ["x", "x:", ":1", "x:y", "x:-1", "x:" + "9" * 30])
def test_a_lease_that_cannot_be_read_is_refused(api: Api, claim: str) -> None:
    assert error(put(api, api.manifest(), headers={"Aotcache-Lease": claim})) == (422, "invalid")


def test_pages_have_every_entry_once_and_filters_are_exact(api: Api) -> None:
    wanted = {api.publish(call=f"x float32[{n}]").key for n in range(7)}
    api.publish(call="x float32[0]", target="cpu:x86_64-avx512")
    seen: list[tuple[str, str]] = []
    cursor = None
    while True:
        params = {"limit": 3} | ({"cursor": cursor} if cursor else {})
        page = api.client.get("/v1/artifacts", params=params).json()  # type: ignore[arg-type]
        assert len(page["artifacts"]) <= 3
        seen += [(row["key"], row["variant"]) for row in page["artifacts"]]
        cursor = page["next"]
        if cursor is None:
            break
    assert len(seen) == 8
    assert seen == sorted(seen)
    assert {key for key, _ in seen} == wanted
    few = api.client.get("/v1/artifacts", params={"target": "cpu:x86_64-avx512"}).json()["artifacts"]
    assert [row["target"] for row in few] == ["cpu:x86_64-avx512"]
    assert api.client.get("/v1/artifacts", params={"region": "layers"}).json()["artifacts"] == []


def test_a_cursor_that_no_page_gave_is_refused(api: Api) -> None:
    assert error(api.client.get("/v1/artifacts", params={"cursor": "abc"})) == (400, "bad_request")


def test_a_deleted_entry_is_gone_from_store_and_index(api: Api) -> None:
    manifest = api.publish()
    api.publish(target="cpu:x86_64-avx512")
    one = api.client.delete(f"/v1/artifacts/{manifest.key}", params={"variant": str(manifest.variant)})
    assert one.json() == {"deleted": 1}
    assert len(api.client.get(f"/v1/artifacts/{manifest.key}").json()["variants"]) == 1
    assert api.client.delete(f"/v1/artifacts/{manifest.key}").json() == {"deleted": 1}
    assert api.client.delete(f"/v1/artifacts/{manifest.key}").json() == {"deleted": 0}
    assert error(api.client.get(f"/v1/artifacts/{manifest.key}")) == (404, "not_stored")
    assert api.client.get("/v1/artifacts").json()["artifacts"] == []
    assert api.client.get(f"/v1/blobs/{manifest.digest}").status_code == 404


def test_why_names_the_nearest_entry_and_what_differs(api: Api) -> None:
    stored = api.publish(call="x float32[2, 3]")
    parts = stored.parts.components
    changed = Component(parts[-1].name, (("item", "x float32[2, 4]"),))
    asked = KeyParts((*parts[:-1], changed))
    where = f"/v1/keys/{asked.key}/why"
    answer = api.client.post(where, json={"mode": "train", "components": asked.to_json()}).json()
    assert (answer["key"], answer["stored"]) == (asked.key, [])
    (near,) = answer["nearest"]
    assert (near["key"], near["variants"], near["differing"]) == (stored.key, [str(stored.variant)], 1)
    assert "float32[2, 3]" in near["differences"][0]
    assert "float32[2, 4]" in near["differences"][0]
    other = api.client.post(where, json={"mode": "infer", "components": asked.to_json()}).json()
    assert other["nearest"] == []
    # Without components, a key that is not stored can be compared with nothing.
    assert api.client.get(where).json() == {"key": asked.key, "stored": [], "nearest": []}
    assert api.client.get(f"/v1/keys/{stored.key}/why").json()["stored"] == [str(stored.variant)]


@pytest.mark.parametrize(
    "components", [[{}], [{"name": "a"}], [{"name": "a", "items": [["x"]]}], [{"name": 1, "items": 2}]]
)
def test_components_that_are_none_are_refused(api: Api, components: object) -> None:
    answer = api.client.post(f"/v1/keys/{'0' * 64}/why", json={"components": components})
    assert error(answer) == (422, "invalid")


def test_hits_and_misses_are_counted_in_the_database(api: Api) -> None:
    manifest = api.publish()
    for _ in range(3):
        api.client.post("/v1/resolve", json={"keys": [manifest.key, "0" * 64]})
    api.service.usage.flush()
    (row,) = api.client.get("/v1/artifacts", params={"key": manifest.key}).json()["artifacts"]
    assert row["hits"] == 3
    assert row["last_used"] is not None
    totals = api.service.index.totals()
    assert (totals.hits, totals.misses) == (3, 3)
    assert totals.saved_seconds == pytest.approx(1.5)
    assert CacheKey(row["key"]) == manifest.key


def test_a_parameter_that_is_given_twice_is_refused(api: Api) -> None:
    manifest = api.publish()
    path = f"/v1/artifacts/{manifest.key}?variant=a&variant={manifest.target}"
    assert error(api.client.delete(path)) == (400, "bad_request")
    assert api.service.store.lookup(manifest.key) == [manifest]


def test_a_delete_never_takes_the_archive_of_an_entry_that_is_published_meanwhile(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = api.publish(call="first"), api.manifest(call="second")
    client = api.service.store._client
    answers: list[int] = []
    publisher = threading.Thread(target=lambda: answers.append(put(api, second).status_code))

    def delete(path: str) -> bool:
        if path.startswith("blobs/"):
            publisher.start()
            publisher.join(0.5)
        return type(client).delete(client, path)

    monkeypatch.setattr(client, "delete", delete)
    assert api.client.delete(f"/v1/artifacts/{first.key}").json() == {"deleted": 1}
    publisher.join()
    assert answers == [409]
    assert api.client.get(f"/v1/artifacts/{second.key}").status_code == 404
    assert api.publish(call="second").key == second.key


def test_an_archive_stays_while_another_entry_has_it(api: Api) -> None:
    first, second = api.publish(call="first"), api.publish(call="second")
    blob = f"/v1/blobs/{first.digest}"
    api.client.delete(f"/v1/artifacts/{first.key}")
    assert api.client.get(blob).status_code == 200
    api.client.delete(f"/v1/artifacts/{second.key}")
    assert api.client.get(blob).status_code == 404


def test_an_archive_stays_where_the_index_does_not_know_its_entries(api: Api) -> None:
    first, second = api.publish(call="first"), api.publish(call="second")
    for manifest in (first, second):
        api.service.index.remove(manifest.key)
    assert api.client.delete(f"/v1/artifacts/{first.key}").json() == {"deleted": 1}
    assert api.client.get(f"/v1/artifacts/{second.key}").status_code == 200


def test_a_delete_reads_the_refs_of_its_key_alone(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    first = api.publish(call="first")
    for number in range(5):
        api.publish(b"another", call=f"other {number}")
    client = api.service.store._client
    read: list[str] = []

    def get(path: str) -> bytes | None:
        read.append(path)
        return type(client).get(client, path)

    monkeypatch.setattr(client, "get", get)
    assert api.client.delete(f"/v1/artifacts/{first.key}").json() == {"deleted": 1}
    assert read
    assert all(first.key in path for path in read)


@pytest.mark.parametrize(
    ("seconds", "counted"), [(math.inf, 0.0), (math.nan, 0.0), (-5.0, 0.0), (1e300, 30 * 24 * 3600.0)]
)
def test_a_builder_that_took_no_time_there_is_stops_no_counter(
    api: Api, seconds: float, counted: float
) -> None:
    manifest = make_manifest(b"archive")
    changed = replace(manifest.provenance, seconds={"compile": seconds})
    published = api.publish(provenance=changed)
    api.service.usage.hit(published.key, str(published.variant))
    api.service.usage.flush()
    assert api.service.index.totals().saved_seconds == counted
