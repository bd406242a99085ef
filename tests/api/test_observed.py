"""Errors, request ids, logs, health and metrics."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from aotcache.api import logs
from aotcache.api.middleware import JSON_BYTES
from aotcache.trust import SigningKey
from tests.api.conftest import Api, Start


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """What the server's log handler writes, while the test's own stays."""
    root, stream = logging.getLogger(), io.StringIO()
    kept, level = root.handlers[:], root.level
    logs.configure(stream)
    yield stream
    root.handlers[:] = kept
    root.setLevel(level)


def lines(written: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in written.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("GET", "/v1/blobs/" + "0" * 64, 404, "not_stored"),
        ("POST", "/v1/artifacts", 405, "method_not_allowed"),
        ("GET", "/v1/artifacts?limit=0", 422, "invalid"),
        ("POST", "/v1/resolve", 422, "invalid"),
        ("GET", "/v1/builds/none", 404, "not_found"),
    ],
)
def test_every_error_has_the_one_body(api: Api, method: str, path: str, status: int, kind: str) -> None:
    answer = api.client.request(method, path)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"type", "message", "details", "request_id"}
    assert error["type"] == kind
    assert error["request_id"] == answer.headers["x-request-id"]


def test_what_breaks_inside_is_told_by_its_id_alone(
    api: Api, monkeypatch: pytest.MonkeyPatch, written: io.StringIO
) -> None:
    def breaks(*_: object) -> None:
        raise RuntimeError("a secret of the inside")

    monkeypatch.setattr(api.service.index, "resolve", breaks)
    answer = api.client.post("/v1/resolve", json={"keys": []}, headers={"X-Request-Id": "mine.1"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "internal")
    assert "secret" not in answer.text
    failed = [line for line in lines(written) if "exception" in line]
    assert "mine.1" in str(failed[0]["message"])
    assert "a secret of the inside" in str(failed[0]["exception"])


def test_a_refusal_does_not_repeat_what_was_sent(api: Api) -> None:
    answer = api.client.post("/v1/resolve", json={"keys": ["aot_" + "s" * 43]})
    assert answer.status_code == 422
    assert "sss" not in answer.text


@pytest.mark.parametrize("given", ["a", "A-1_b.c", "x" * 64])
def test_a_request_keeps_its_id(api: Api, given: str) -> None:
    assert api.client.get("/healthz", headers={"X-Request-Id": given}).headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "x" * 65, "a b", "ä".encode().decode("latin-1"), "a;b"])
def test_an_id_that_is_none_is_replaced(api: Api, given: str) -> None:
    found = api.client.get("/healthz", headers={"X-Request-Id": given.encode("latin-1")}).headers[
        "x-request-id"
    ]  # type: ignore[dict-item]
    assert found != given
    assert 1 <= len(found) <= 64


def test_a_body_of_json_over_a_mebibyte_is_413(api: Api) -> None:
    fits = api.client.post("/v1/resolve", json={"keys": [f"{n:064x}" for n in range(1000)]})
    assert fits.status_code == 200

    def pieces() -> Iterator[bytes]:
        for _ in range(JSON_BYTES // 1000 + 2):
            yield b" " * 1000

    for body in (b" " * (JSON_BYTES + 1), pieces()):
        answer = api.client.post("/v1/resolve", content=body, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (413, "too_large")


def test_one_line_per_request_and_no_token_in_any(api: Api, written: io.StringIO) -> None:
    headers = api.bearer("read")
    secret = headers["Authorization"].removeprefix("Bearer ")
    api.client.get("/v1/artifacts", params={"region": secret}, headers={**headers, "X-Request-Id": "r1"})
    api.client.get(f"/v1/{secret}", headers=headers)
    api.client.get("/v1/artifacts", headers={"Authorization": f"Bearer {secret}x"})
    logging.getLogger("anything").warning("a token %s in a message", secret)
    requests = [line for line in lines(written) if line.get("event") == "request"]
    assert len(requests) == 3
    first = requests[0]
    assert (first["request_id"], first["method"], first["route"]) == ("r1", "GET", "/v1/artifacts")
    assert (first["status"], first["token"]) == (200, "token of read 0")
    assert first["bytes_out"] == len(api.client.get("/v1/artifacts", headers=headers).content)
    assert requests[1]["route"] is None
    assert secret not in written.getvalue()


def test_signatures_and_passwords_are_cut_out_of_every_line() -> None:
    text = (
        "GET https://bucket.example/blobs/ab?X-Amz-Signature=beef&x=1 then "
        "postgresql://user:hunter2@host/db then aot_abcdefghijklmnop. "
        "and Bearer%20aot_abcdefghijklmnop"
    )
    assert logs.redacted(text) == (
        "GET https://bucket.example/blobs/ab?*** then postgresql://user:***@host/db then aot_***. "
        "and Bearer%20aot_***"
    )


def test_ready_means_a_database_of_this_version(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    assert api.client.get("/readyz").json() == {"status": "ok"}
    monkeypatch.setattr("aotcache.api.health.current", lambda _: "0000")
    answer = api.client.get("/readyz")
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "unavailable")
    assert answer.headers["retry-after"] == "2"
    assert "aotcache db upgrade" in answer.json()["error"]["message"]
    assert api.client.get("/healthz").status_code == 200


def test_a_database_that_is_gone_is_unavailable(start_api: Start, tmp_path) -> None:  # type: ignore[no-untyped-def]
    api = start_api(database=f"sqlite:///{tmp_path / 'empty.db'}")
    for path in ("/readyz", "/v1/artifacts"):
        answer = api.client.get(path)
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "unavailable")


def test_the_trusted_keys_are_shown_to_everybody(start_api: Start) -> None:
    api = start_api(loopback=False)
    other = SigningKey.generate()
    api.config.trusted.add(other.public, "other")
    rows = api.client.get("/v1/trust").json()["keys"]
    assert {(row["name"], row["fingerprint"]) for row in rows} == {
        ("tests", api.key.public.fingerprint),
        ("other", other.public.fingerprint),
    }
    assert {row["public"] for row in rows} == {api.key.public.to_text(), other.public.to_text()}


def test_metrics_count_what_happened(api: Api) -> None:
    manifest = api.publish(b"archive")
    api.client.post("/v1/resolve", json={"keys": [manifest.key, "0" * 64, "1" * 64]})
    api.client.get("/made/up/path")
    api.client.request("BREW", "/healthz")
    api.service.usage.flush()
    api.service.metrics.totals(api.service.index.totals())
    api.service.builds.request("drafter", manifest.key, "v")
    api.service.metrics.builds(api.service.builds.counts())
    text = api.client.get("/metrics").text
    for line in (
        'aotcache_requests_total{method="PUT",route="/v1/blobs/{digest}",status="201"} 1.0',
        'aotcache_requests_total{method="GET",route="other",status="404"} 1.0',
        'aotcache_requests_total{method="other",route="/healthz",status="405"} 1.0',
        'aotcache_request_seconds_count{method="POST",route="/v1/resolve"} 1.0',
        "aotcache_hits_total 1.0",
        "aotcache_misses_total 2.0",
        "aotcache_store_artifacts 1.0",
        "aotcache_store_archives 1.0",
        "aotcache_store_bytes 7.0",
        "aotcache_build_seconds_saved_total 0.5",
        'aotcache_builds{stage="",state="queued"} 1.0',
    ):
        assert line in text.splitlines(), line
    assert "made/up" not in text
