"""A limit on the time until an answer begins.

httpx limits the time without a byte. A server that sends a line of headers every few seconds, or
"103 Early Hints" again and again, is within that for ever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpcore
import httpx

if TYPE_CHECKING:
    import ssl


LATE = "the answer had not begun after"
"""How the text of a timeout begins that is for this reason."""


class _Wait(threading.local):
    """This thread's request.

    Attributes:
        seconds: How long its answer may take to begin; None for no limit.
        until: When that is over, by `time.monotonic`; None while the request is being sent.
    """

    seconds: float | None = None
    until: float | None = None


_wait = _Wait()


@contextmanager
def answered_within(seconds: float) -> Iterator[None]:
    """Limit the time between what this thread sends meanwhile and the end of what it reads: httpcore.ReadTimeout."""
    before = _wait.seconds, _wait.until
    _wait.seconds, _wait.until = seconds, None
    try:
        yield
    finally:
        _wait.seconds, _wait.until = before


def make_patient(client: httpx.Client) -> None:
    """Have `answered_within` count for a client. httpx has no public place for it."""
    for transport in (client._transport, *client._mounts.values()):
        if isinstance(transport, httpx.HTTPTransport):
            pool = transport._pool
            pool._network_backend = _Backend(pool._network_backend)


class _Backend(httpcore.NetworkBackend):
    def __init__(self, inner: httpcore.NetworkBackend) -> None:
        self._inner = inner

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        return _Stream(self._inner.connect_tcp(host, port, timeout, local_address, socket_options))


class _Stream(httpcore.NetworkStream):
    def __init__(self, inner: httpcore.NetworkStream) -> None:
        self._inner = inner

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        if _wait.seconds is None:
            return self._inner.read(max_bytes, timeout)
        now = time.monotonic()
        if _wait.until is None:
            _wait.until = now + _wait.seconds
        left = _wait.until - now
        try:
            if left > 0:
                return self._inner.read(max_bytes, left if timeout is None else min(timeout, left))
        except httpcore.ReadTimeout:
            if timeout is not None and timeout <= left:
                raise
        raise httpcore.ReadTimeout(f"{LATE} {_wait.seconds:g} s")

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        _wait.until = None
        self._inner.write(buffer, timeout)

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        return _Stream(self._inner.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)
