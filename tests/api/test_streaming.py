"""Large transfers against a real server: its memory stays flat, and it ends in good order."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import zstandard

from tests.services.serving import Serving, serving

MB = 1_000_000
CLIENTS = 10
SIZE = 50 * MB
GROWTH = 80 * MB
"""Of 500 MB that are sent; 65 were seen."""
BLOCK = bytes(range(250)) * 4000
SECONDS = 120.0


def pieces(number: int) -> Iterator[bytes]:
    """The archive with this number, one MB at a time: all differ."""
    for index in range(SIZE // MB):
        yield b"%8d %8d" % (number, index) + BLOCK[17:]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    with serving(tmp_path) as found:
        yield found


def resident(server: Serving, field: str) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.split(field)[1].split()[0]) * 1024


@pytest.mark.slow
def test_memory_stays_flat_under_many_large_transfers(server: Serving) -> None:
    digests = [hashlib.sha256(b"".join(pieces(number))).hexdigest() for number in range(CLIENTS)]
    together = threading.Barrier(CLIENTS)
    codings: set[str | None] = set()

    def up(number: int) -> int:
        together.wait(SECONDS)
        with httpx.Client(base_url=server.url, timeout=SECONDS) as client:
            return client.put(f"/v1/blobs/{digests[number]}", content=pieces(number)).status_code

    def down(number: int, coding: str) -> str:
        together.wait(SECONDS)
        found = hashlib.sha256()
        with httpx.Client(base_url=server.url, timeout=SECONDS) as client:
            headers = {"Accept-Encoding": coding}
            with client.stream("GET", f"/v1/blobs/{digests[number]}", headers=headers) as answer:
                used = answer.headers.get("content-encoding")
                codings.add(used)
                unpack = zstandard.ZstdDecompressor().decompressobj()
                for piece in answer.iter_raw(MB):
                    found.update(unpack.decompress(piece) if used == "zstd" else piece)
        return found.hexdigest()

    with ThreadPoolExecutor(CLIENTS) as pool:
        assert down_one(server) == 404  # Whatever is imported and made at a first request is there now.
        before = resident(server, "VmRSS:")
        assert list(pool.map(up, range(CLIENTS))) == [201] * CLIENTS
        for coding in ("identity", "zstd"):
            assert list(pool.map(down, range(CLIENTS), [coding] * CLIENTS)) == digests
    assert codings == {None, "zstd"}
    growth = resident(server, "VmHWM:") - before
    assert growth < GROWTH, f"{growth / MB:.0f} MB"


def held(server: Serving, digest: str) -> list[Path]:
    """Open files of the server that are this archive."""
    links = Path(f"/proc/{server.process.pid}/fd").iterdir()
    return [link for link in links if os.path.realpath(link).endswith(digest)]


def down_one(server: Serving) -> int:
    return httpx.get(f"{server.url}/v1/blobs/{'0' * 64}", timeout=SECONDS).status_code


def test_a_client_that_leaves_in_the_middle_costs_nothing(server: Serving) -> None:
    data = b"".join(pieces(0))
    digest = hashlib.sha256(data).hexdigest()
    path = f"/v1/blobs/{digest}"
    with httpx.Client(base_url=server.url, timeout=SECONDS) as client:
        assert client.put(path, content=data).status_code == 201
    for _ in range(3):
        with httpx.Client(base_url=server.url, timeout=SECONDS) as client:
            with client.stream("GET", path, headers={"Accept-Encoding": "identity"}) as answer:
                assert next(answer.iter_raw(1000))
    ends = time.monotonic() + SECONDS
    while held(server, digest):
        assert time.monotonic() < ends, "files of downloads that nobody waits for stay open"
        time.sleep(0.02)
    with httpx.Client(base_url=server.url, timeout=SECONDS) as client:
        assert client.get(path).content == data
    assert server.close() == 0
    assert "Traceback" not in server.log


def test_a_download_that_runs_is_finished_when_the_server_ends(server: Serving) -> None:
    data = b"".join(pieces(0))
    path = f"/v1/blobs/{hashlib.sha256(data).hexdigest()}"
    with httpx.Client(base_url=server.url, timeout=SECONDS) as client:
        client.put(path, content=data)
        with client.stream("GET", path, headers={"Accept-Encoding": "identity"}) as answer:
            chunks = answer.iter_raw(MB)
            got = next(chunks)
            server.process.terminate()
            got += b"".join(chunks)
    assert got == data
    assert server.process.wait(SECONDS) == 0
