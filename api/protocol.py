"""HTTP as uvicorn speaks it, with a limit on the head of a request: its bytes, and the time it may take.

uvicorn waits for the end of a head for ever and gathers it whatever its size, before any of the
application has seen the request.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

HEAD_BYTES = 64 << 10
"""The largest head taken; what comes in one read with the byte that is too many is looked at still."""

HEAD_SECONDS = 30.0
"""How long a head may take, from its first byte or from the connection to its end."""


class LimitedHeads(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._awaits_head = True
        self._head_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there."""
        super().connection_made(transport)
        self._begin_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._end_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a head, a body, or both."""
        if self._awaits_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if not self._awaits_head or self.transport.is_closing():
            return
        if self._head_bytes <= HEAD_BYTES:
            self._begin_waiting()
        elif self._answering():
            self.transport.close()
        else:
            self.send_400_response(
                f"the head of the request has more than the {HEAD_BYTES} bytes that are taken"
            )

    def on_message_begin(self) -> None:
        """The first byte of a head."""
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The last one."""
        self._awaits_head = False
        self._end_waiting()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The end of a body; what comes now is the next head."""
        self._awaits_head, self._head_bytes = True, 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """The one error body, for what is no request that the application could answer."""
        request = uuid.uuid4().hex
        error = {"type": "bad_request", "message": msg, "details": {}, "request_id": request}
        body = json.dumps({"error": error}).encode()
        head = (
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            f"x-request-id: {request}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(STATUS_LINE[400] + head.encode() + body)
        self.transport.close()

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _begin_waiting(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(HEAD_SECONDS, self._waited)

    def _end_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _waited(self) -> None:
        self._timer = None
        if self._answering():
            self._begin_waiting()
        elif not self.transport.is_closing():
            self.transport.close()
