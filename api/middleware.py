"""Around every request: its id, its limit, its line in the log, and its numbers."""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import Any

import anyio
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aotcache.api.errors import error_response
from aotcache.api.logs import ACCESS

logger = logging.getLogger(__name__)

JSON_BYTES = 1 << 20
"""The largest body of JSON taken."""

DOCUMENT_BYTES = 8 << 20
"""The largest manifest taken."""

BODY_SECONDS = 60.0
"""How long the body of a request may take, archives aside: those may go on while bytes come."""

CUT_OFF = 499
"""What the log says where the client was gone before the answer."""

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}\Z")
_BLOB = "/v1/blobs/"
_ARTIFACT = "/v1/artifacts/"


class Observed:
    """The outermost part of the application that is ours (pure ASGI: bodies pass through it untouched)."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        await _Exchange(scope, receive, send).serve(self.app)


class _Exchange:
    """One request and its response, and what is counted of them."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope, self._receive, self._send = scope, receive, send
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        self.id = given.decode() if _REQUEST_ID.match(given) else uuid.uuid4().hex
        self.status = 0
        self.received = 0
        self.whole = False
        self.begun = time.perf_counter()
        self.sent = 0
        scope.setdefault("state", {})["request_id"] = self.id
        path = scope["path"]
        self.limit: int | None = JSON_BYTES
        if path.startswith(_BLOB):
            self.limit = None
        elif path.startswith(_ARTIFACT):
            self.limit = DOCUMENT_BYTES
        announced = headers.get(b"content-length", b"")
        self.announced = int(announced) if announced.isdigit() else 0

    async def serve(self, app: ASGIApp) -> None:
        started = time.perf_counter()
        try:
            if self.limit is not None and self.announced > self.limit:
                await self._refuse(self.limit)
            else:
                await app(self.scope, self.receive, self.send)
        except ClientDisconnect:
            self.status = CUT_OFF
        except Exception:
            if self.status:
                raise
            logger.exception("request %s failed", self.id)
            answer = error_response(
                "internal", f"the service failed; its log says why, under request {self.id}", {}, self.id
            )
            await answer(self.scope, self._receive, self.send)
        finally:
            self._count(time.perf_counter() - started)

    async def receive(self) -> Message:
        message = await self._next()
        if message["type"] == "http.request":
            self.whole = not message.get("more_body", False)
            self.received += len(message.get("body", b""))
            if self.limit is not None and self.received > self.limit:
                raise HTTPException(413, f"the body has more than the {self.limit} bytes that are taken here")
        return message

    async def _next(self) -> Message:
        if self.limit is None or self.whole:
            return await self._receive()
        try:
            with anyio.fail_after(max(0.0, BODY_SECONDS - (time.perf_counter() - self.begun))):
                return await self._receive()
        except TimeoutError:
            raise HTTPException(
                408, f"the body was not here within {BODY_SECONDS:g} s; send it again"
            ) from None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self.id.encode())]
            if self.status in (408, 413):
                # What is left of the body is not read.
                message["headers"].append((b"connection", b"close"))
        elif message["type"] == "http.response.body":
            self.sent += len(message.get("body", b""))
        await self._send(message)

    async def _refuse(self, limit: int) -> None:
        answer = error_response(
            "too_large",
            f"the body has more than the {limit} bytes that are taken here",
            {"limit": limit},
            self.id,
        )
        await answer(self.scope, self._receive, self.send)

    def _count(self, seconds: float) -> None:
        route = getattr(self.scope.get("route"), "path", None)
        status = self.status or CUT_OFF
        method = self.scope["method"]
        fields: dict[str, Any] = {
            "request_id": self.id,
            "method": method,
            "route": route,
            "status": status,
            "bytes_in": self.received,
            "bytes_out": self.sent,
            "seconds": round(seconds, 6),
            "token": self.scope["state"].get("caller"),
        }
        # A builder without work asks twice a second, all day long.
        idle = route == "/v1/builds/claim" and status == 204
        ACCESS.log(logging.DEBUG if idle else logging.INFO, "request", extra={"fields": fields})
        service = getattr(self.scope["app"].state, "service", None) if "app" in self.scope else None
        if service is not None:
            service.metrics.request(method, route, status, seconds, self.received, self.sent)
