"""What a connection may send before there is a request: over a real server, on bare sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn

from aotcache.api import protocol
from aotcache.api.protocol import HEAD_BYTES, LimitedHeads

SECONDS = 20.0


async def answers(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
    """Reads the body; of `/slow` it answers after a second."""
    while (await receive()).get("more_body"):
        pass
    if scope["path"] == "/slow":
        await asyncio.sleep(1.0)
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(answers, http=LimitedHeads, ws="none", lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield listener.getsockname()
        server.should_exit = True
        thread.join(SECONDS)


def connect(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, timeout=SECONDS)


def everything(connection: socket.socket) -> bytes:
    """What comes until the server closes."""
    found = b""
    try:
        while part := connection.recv(1 << 16):
            found += part
    except ConnectionResetError:
        pass
    return found


@pytest.mark.parametrize("begin", [b"GET /", b"GET / HTTP/1.1\r\nX-A: ", b"GET / HTTP/1.1\r\nX: y\r\n"])
def test_a_head_without_end_is_refused_after_some_bytes(address: tuple[str, int], begin: bytes) -> None:
    piece = b"x: y\r\n" * 1000 if begin.endswith(b"\n") else b"a" * 6000
    with connect(address) as connection:
        connection.sendall(begin)
        sent = 0
        try:
            while sent < 100 * HEAD_BYTES:
                connection.sendall(piece)
                sent += len(piece)
                time.sleep(0.001)
        except OSError:
            pass
        answer = everything(connection)
    assert sent < 100 * HEAD_BYTES
    if answer:  # a reset can overtake it
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "bad_request"


@pytest.mark.parametrize("begin", [b"", b"\r\n", b"GET / HTTP/1.1\r\nHost: lo"])
def test_a_head_that_does_not_come_is_not_waited_for(
    address: tuple[str, int], begin: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.3)
    with connect(address) as connection:
        connection.sendall(begin)
        assert everything(connection) == b""


def test_an_answer_that_takes_longer_than_a_head_may_is_given(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.3)
    with connect(address) as connection:
        # The half of the next head comes while the first request is answered.
        connection.sendall(b"GET /slow HTTP/1.1\r\n\r\nGET /")
        assert connection.recv(1000).startswith(b"HTTP/1.1 204 ")
        assert everything(connection) == b""


def test_a_connection_serves_many_requests_with_large_bodies(address: tuple[str, int]) -> None:
    body = b"b" * (4 * HEAD_BYTES)
    with connect(address) as connection:
        for _ in range(5):
            connection.sendall(b"PUT / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            assert connection.recv(1000).startswith(b"HTTP/1.1 204 ")


def test_what_is_not_http_has_the_one_error_body(address: tuple[str, int]) -> None:
    with connect(address) as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        head, _, body = everything(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    error = json.loads(body)["error"]
    assert error["type"] == "bad_request"
    assert error["request_id"].encode() in head
