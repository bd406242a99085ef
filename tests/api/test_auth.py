"""Who may call what: a table over every route of the application, and the rules without tokens."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from starlette.routing import BaseRoute, Route

from aotcache.api.app import create_app
from aotcache.api.auth import SCOPES, is_loopback
from aotcache.api.state import ServiceConfig
from aotcache.trust import TrustedKeys
from tests.api.conftest import Api, Start

KEY = "0" * 64
BUILD = "nobuild"
OPEN = None

LEASE = {"key": KEY, "variant": "v", "holder": "h"}
TOOLCHAIN = {"torch": "2.13.0", "git": "c" * 40, "cuda": None}
WANTED = {"spec": "drafter", "key": KEY, "target": "cpu:x86_64-avx2", "toolchain": TOOLCHAIN}
CLAIM = {"specs": ["drafter"], "variants": ["v"], "holder": "h"}

# Method and route; the scope it needs; how to call it; what it answers once it is let through.
TABLE: dict[tuple[str, str], tuple[str | None, str, dict[str, Any], int]] = {
    ("POST", "/v1/resolve"): ("read", "/v1/resolve", {"json": {"keys": []}}, 200),
    ("POST", "/v1/deaths"): ("read", "/v1/deaths", {"json": {"deaths": []}}, 200),
    ("GET", "/v1/artifacts"): ("read", "/v1/artifacts", {}, 200),
    ("GET", "/v1/artifacts/{key}"): ("read", f"/v1/artifacts/{KEY}", {}, 404),
    ("PUT", "/v1/artifacts/{key}"): ("publish", f"/v1/artifacts/{KEY}", {"content": b"{}"}, 422),
    ("DELETE", "/v1/artifacts/{key}"): ("admin", f"/v1/artifacts/{KEY}", {}, 200),
    ("GET", "/v1/blobs/{digest}"): ("read", f"/v1/blobs/{KEY}", {}, 404),
    ("HEAD", "/v1/blobs/{digest}"): ("read", f"/v1/blobs/{KEY}", {}, 404),
    ("PUT", "/v1/blobs/{digest}"): ("publish", f"/v1/blobs/{KEY}", {"content": b"x"}, 422),
    ("GET", "/v1/keys/{key}/why"): ("read", f"/v1/keys/{KEY}/why", {}, 200),
    ("POST", "/v1/keys/{key}/why"): ("read", f"/v1/keys/{KEY}/why", {"json": {"components": []}}, 200),
    ("GET", "/v1/trust"): (OPEN, "/v1/trust", {}, 200),
    ("POST", "/v1/leases"): ("publish", "/v1/leases", {"json": LEASE}, 201),
    ("PUT", "/v1/leases/{id}"): ("publish", "/v1/leases/x", {"json": {"token": 1}}, 409),
    ("DELETE", "/v1/leases/{id}"): ("publish", "/v1/leases/x?token=1", {}, 204),
    ("GET", "/v1/specs"): ("read", "/v1/specs", {}, 200),
    ("POST", "/v1/builds"): ("build", "/v1/builds", {"json": WANTED}, 202),
    ("GET", "/v1/builds"): ("build", "/v1/builds", {}, 200),
    ("GET", "/v1/builds/{id}"): ("build", f"/v1/builds/{BUILD}", {}, 404),
    ("DELETE", "/v1/builds/{id}"): ("build", f"/v1/builds/{BUILD}", {}, 404),
    ("GET", "/v1/builds/{id}/events"): ("build", f"/v1/builds/{BUILD}/events", {}, 404),
    ("POST", "/v1/builds/claim"): ("publish", "/v1/builds/claim", {"json": CLAIM}, 204),
    ("POST", "/v1/builds/{id}/events"): (
        "publish",
        f"/v1/builds/{BUILD}/events",
        {"json": {"lease": "l", "token": 1, "stage": "s"}},
        409,
    ),
    ("POST", "/v1/builds/{id}/finish"): (
        "publish",
        f"/v1/builds/{BUILD}/finish",
        {"json": {"lease": "l", "token": 1}},
        409,
    ),
    ("POST", "/v1/gc"): ("admin", "/v1/gc", {"json": {}}, 200),
    ("GET", "/v1/recalls"): ("read", "/v1/recalls", {}, 200),
    ("PUT", "/v1/recalls"): ("admin", "/v1/recalls", {"content": b"{}"}, 422),
    ("GET", "/v1/pins"): ("read", "/v1/pins", {}, 200),
    ("PUT", "/v1/pins/{what}"): ("admin", f"/v1/pins/{KEY}", {"json": {}}, 200),
    ("DELETE", "/v1/pins/{what}"): ("admin", f"/v1/pins/{KEY}", {}, 200),
    ("GET", "/healthz"): (OPEN, "/healthz", {}, 200),
    ("GET", "/readyz"): (OPEN, "/readyz", {}, 200),
    ("GET", "/metrics"): (OPEN, "/metrics", {}, 200),
    ("GET", "/docs"): (OPEN, "/docs", {}, 200),
    ("HEAD", "/docs"): (OPEN, "/docs", {}, 200),
    ("GET", "/docs/oauth2-redirect"): (OPEN, "/docs/oauth2-redirect", {}, 200),
    ("HEAD", "/docs/oauth2-redirect"): (OPEN, "/docs/oauth2-redirect", {}, 200),
    ("GET", "/openapi.json"): (OPEN, "/openapi.json", {}, 200),
    ("HEAD", "/openapi.json"): (OPEN, "/openapi.json", {}, 200),
}


def every_route(routes: list[BaseRoute]) -> Iterator[tuple[str, str]]:
    """Method and path of each, those of included routers too."""
    for route in routes:
        if isinstance(route, Route):
            yield from ((method, route.path) for method in route.methods or ())
        else:
            # FastAPI keeps an included router as one entry.
            yield from every_route(route.original_router.routes)  # type: ignore[attr-defined]


def test_the_table_has_every_route_and_no_other(api: Api) -> None:
    assert set(every_route(api.app.routes)) == set(TABLE)


def test_every_route_lets_in_whom_it_must_and_nobody_else(api: Api) -> None:
    tokens = {scope: api.bearer(scope) for scope in SCOPES}
    everything = api.bearer("read", "publish", "build")
    made, row = api.service.tokens.create("revoked", SCOPES)
    api.service.tokens.revoke(row.id)
    revoked = {"Authorization": f"Bearer {made}"}
    short, _ = api.service.tokens.create("expired", SCOPES, timedelta(microseconds=1))
    expired = {"Authorization": f"Bearer {short}"}
    shut: dict[str, dict[str, str]] = {
        "no token": {},
        "revoked": revoked,
        "expired": expired,
        "unknown": {"Authorization": "Bearer aot_" + "x" * 43},
        "empty": {"Authorization": "Bearer "},
        "another scheme": {"Authorization": "Basic " + made},
    }
    for (method, path), (scope, where, options, through) in TABLE.items():

        def status(headers: dict[str, str]) -> int:
            return api.client.request(method, where, headers=headers, **options).status_code  # noqa: B023

        for name, headers in shut.items():
            expected = through if scope is OPEN else 401
            assert status(headers) == expected, (method, path, name)
        for held, headers in tokens.items():
            allowed = scope is OPEN or held in (scope, "admin")
            got = status(headers)
            if (method, path) == ("POST", "/v1/leases") and got == 409:
                continue  # Somebody in this loop took it before.
            assert got == (through if allowed else 403), (method, path, held)
        if scope != "admin":
            assert status(everything) not in (401, 403), (method, path)


def test_a_refusal_says_which_scope_is_missing(api: Api) -> None:
    answer = api.client.delete(f"/v1/artifacts/{KEY}", headers=api.bearer("read"))
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (403, "forbidden")
    assert error["details"] == {"scope": "admin"}
    assert "'admin'" in error["message"]


def test_a_401_names_the_scheme(api: Api) -> None:
    api.bearer("read")
    answer = api.client.get("/v1/artifacts")
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")


def test_the_first_token_shuts_the_door_and_the_last_one_to_go_opens_it(api: Api) -> None:
    assert api.client.get("/v1/artifacts").status_code == 200
    headers = api.bearer("read")
    assert api.client.get("/v1/artifacts").status_code == 401
    assert api.client.get("/v1/artifacts", headers=headers).status_code == 200
    (token,) = api.service.tokens.list()
    api.service.tokens.revoke(token.id)
    assert api.client.get("/v1/artifacts").status_code == 200
    # Whoever still shows the revoked one is told, and not taken for somebody without.
    assert api.client.get("/v1/artifacts", headers=headers).status_code == 401


def test_away_from_loopback_nobody_is_served_without_a_token(start_api: Start) -> None:
    api = start_api(loopback=False)
    for method, path in TABLE:
        scope, where, options, _ = TABLE[method, path]
        if scope is not OPEN:
            assert api.client.request(method, where, **options).status_code == 401, (method, path)
    assert api.client.get("/v1/artifacts", headers=api.bearer("read")).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8400", "127.0.0.1.evil.example", "0.0.0.0", "", "[::2]"]
)
def test_without_tokens_another_host_name_is_refused(api: Api, host: str) -> None:
    answer = api.client.get("/v1/artifacts", headers={"Host": host})
    assert (answer.status_code, answer.json()["error"]["type"]) == (403, "forbidden")


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost:8400", "127.0.0.1:1", "127.0.0.2", "[::1]", "[::1]:8400"]
)
def test_without_tokens_names_of_loopback_are_served(api: Api, host: str) -> None:
    assert api.client.get("/v1/artifacts", headers={"Host": host}).status_code == 200


def test_with_a_token_the_host_name_does_not_matter(api: Api) -> None:
    headers = {**api.bearer("read"), "Host": "cache.example"}
    assert api.client.get("/v1/artifacts", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("host", False),
    ],
)
def test_what_loopback_is(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_an_application_opens_nothing_before_it_starts(tmp_path) -> None:  # type: ignore[no-untyped-def]
    config = ServiceConfig("memory:///", f"sqlite:///{tmp_path / 'none.db'}", TrustedKeys(tmp_path), tmp_path)
    assert list(every_route(create_app(config).routes))
    assert list(tmp_path.iterdir()) == []
