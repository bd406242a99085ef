"""A body that does not come to its end is given up."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest

from aotcache.api import middleware
from tests.api.conftest import Api
from tests.manifests import make_manifest


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/resolve"), ("PUT", f"/v1/artifacts/{make_manifest().key}")]
)
def test_half_a_body_is_waited_for_so_long_and_no_longer(
    api: Api, monkeypatch: pytest.MonkeyPatch, method: str, path: str
) -> None:
    monkeypatch.setattr(middleware, "BODY_SECONDS", 0.3)
    pieces, sent = [b'{"keys":', b" ["], list[dict[str, Any]]()

    async def receive() -> dict[str, Any]:
        if not pieces:
            await anyio.sleep_forever()
        return {"type": "http.request", "body": pieces.pop(0), "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    async def ask() -> None:
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
        }
        with anyio.fail_after(20):
            await api.app({**scope, "headers": headers, "http_version": "1.1"}, receive, send)

    assert api.client.portal is not None
    api.client.portal.call(ask)
    assert sent[0]["status"] == 408
    assert (b"connection", b"close") in sent[0]["headers"]
    error = json.loads(sent[1]["body"])["error"]
    assert error["type"] == "timeout"
    assert "within 0.3 s" in error["message"]
