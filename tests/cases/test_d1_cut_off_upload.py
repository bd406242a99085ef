"""D1: a cut-off upload is never stored, and never served as good."""

from __future__ import annotations

import hashlib
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from aotcache.db.engine import Database
from aotcache.service.index import Index
from aotcache.store import ObjectStore, open_store
from tests.services.s3 import S3, s3_server
from tests.services.serving import Serving, serving

DATA = random.Random(1).randbytes(3_000_001)
DIGEST = hashlib.sha256(DATA).hexdigest()
PATH = f"/v1/blobs/{DIGEST}"
SECONDS = 30.0


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with s3_server(tmp_path_factory.mktemp("s3")) as found:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in found.environment.items():
                patch.setenv(name, value)
            yield found


@pytest.fixture(scope="module", params=["directory", "bucket"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A service over either kind of store."""
    store = request.getfixturevalue("s3").bucket() if request.param == "bucket" else None
    with serving(tmp_path_factory.mktemp("d1"), store=store) as found:
        yield found


def send(server: Serving, header: str, body: bytes, *, answered: bool = False) -> bytes:
    """Send a PUT by hand and close the connection; what the server said, if it was waited for."""
    parts = urlsplit(server.url)
    assert parts.hostname is not None
    with socket.create_connection((parts.hostname, parts.port), timeout=SECONDS) as connection:
        connection.sendall(f"PUT {PATH} HTTP/1.1\r\nHost: {parts.netloc}\r\n{header}\r\n\r\n".encode())
        connection.sendall(body)
        if not answered:
            return b""
        said = b""
        while b"\r\n\r\n" not in said and (more := connection.recv(65536)):
            said += more
        return said


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def half(server: Serving) -> None:
    """Announces all bytes, sends half of them, and hangs up."""
    send(server, f"Content-Length: {len(DATA)}", DATA[: len(DATA) // 2])


def half_reset(server: Serving) -> None:
    """The same with a reset instead of an orderly end."""
    parts = urlsplit(server.url)
    assert parts.hostname is not None
    connection = socket.create_connection((parts.hostname, parts.port), timeout=SECONDS)
    connection.sendall(
        f"PUT {PATH} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Length: {len(DATA)}\r\n\r\n".encode()
    )
    connection.sendall(DATA[: len(DATA) // 2])
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()


def flipped(server: Serving) -> None:
    """All bytes, one of them another."""
    wrong = bytearray(DATA)
    wrong[len(DATA) // 3] ^= 1
    said = send(server, f"Content-Length: {len(DATA)}", bytes(wrong), answered=True)
    assert b" 422 " in said.splitlines()[0]


def short(server: Serving) -> None:
    """A complete request with one byte less than the archive has."""
    said = send(server, f"Content-Length: {len(DATA) - 1}", DATA[:-1], answered=True)
    assert b" 422 " in said.splitlines()[0]


def chunked_early(server: Serving) -> None:
    """Chunks that end without the last one."""
    send(server, "Transfer-Encoding: chunked", chunked(DATA[:1_000_000]))


def chunked_in_a_chunk(server: Serving) -> None:
    """A chunk that ends before its own length."""
    send(server, "Transfer-Encoding: chunked", b"%x\r\n" % len(DATA) + DATA[:1_000_000])


def chunked_closed(server: Serving) -> None:
    """Chunks with a proper end, half of the archive in them."""
    body = chunked(DATA[: len(DATA) // 2]) + b"0\r\n\r\n"
    assert b" 422 " in send(server, "Transfer-Encoding: chunked", body, answered=True).splitlines()[0]


def kept(server: Serving) -> list[str]:
    """Everything that lies in the store, or where it is written before it gets there."""
    store = open_store(server.store, tier=False)
    assert isinstance(store, ObjectStore)
    objects = [info.path for part in ("blobs", "refs") for info in store._client.list(part)]
    return objects + [str(path) for path in drafts(server)]


def drafts(server: Serving) -> list[Path]:
    uploads = server.home / "service" / "uploads"
    if server.store.startswith("file:"):
        uploads = Path(urlsplit(server.store).path) / "tmp"
    return list(uploads.iterdir()) if uploads.exists() else []


@pytest.mark.parametrize(
    "cut", [half, half_reset, flipped, short, chunked_early, chunked_in_a_chunk, chunked_closed]
)
def test_what_was_cut_off_is_not_there_and_can_be_sent_again(
    server: Serving, cut: Callable[[Serving], None]
) -> None:
    with httpx.Client(base_url=server.url, timeout=SECONDS, follow_redirects=True) as client:
        before = len(server.requests())
        cut(server)
        _until(lambda: any(line["method"] == "PUT" for line in server.requests()[before:]))

        answer = client.get(PATH)
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_stored")
        assert client.head(PATH).status_code == 404
        assert kept(server) == []
        assert client.get("/v1/artifacts").json()["artifacts"] == []
        assert _blob_rows(server) == 0

        assert client.put(PATH, content=DATA).status_code == 201
        assert client.get(PATH).content == DATA
    _empty(server)


def test_what_a_server_that_was_killed_had_of_an_upload_is_not_there_and_goes(tmp_path: Path, s3: S3) -> None:
    for number, store in enumerate((None, s3.bucket())):
        folder = tmp_path / str(number)
        with serving(folder, store=store) as server:
            parts = urlsplit(server.url)
            with socket.create_connection((str(parts.hostname), parts.port), timeout=SECONDS) as connection:
                header = f"PUT {PATH} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Length: {len(DATA)}\r\n\r\n"
                connection.sendall(header.encode() + DATA[: len(DATA) // 2])
                _until(lambda server=server: any(path.stat().st_size for path in drafts(server)))  # type: ignore[misc]
                server.kill()
        with serving(folder, store=server.store) as server:
            (left,) = drafts(server)
            with httpx.Client(base_url=server.url, timeout=SECONDS, follow_redirects=True) as client:
                assert client.get(PATH).status_code == 404
                os.utime(left, (0, 0))  # more than a day ago
                assert client.put(PATH, content=DATA).status_code == 201
                assert client.get(PATH).content == DATA
            assert drafts(server) == []


def _empty(server: Serving) -> None:
    store = open_store(server.store, tier=False)
    assert isinstance(store, ObjectStore)
    for info in list(store._client.list("blobs")):
        assert store._client.delete(info.path)


def _blob_rows(server: Serving) -> int:
    database = Database(server.database)
    try:
        return Index(database).totals().blobs
    finally:
        database.close()


def _until(ready: Callable[[], bool]) -> None:
    ends = time.monotonic() + SECONDS
    while not ready():
        assert time.monotonic() < ends
        time.sleep(0.01)
