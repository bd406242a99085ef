"""Downloads that are broken off, answered wrongly, redirected, or never end."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from aotcache.errors import CorruptArtifact, NotStored, ServiceError, ServiceUnavailable
from aotcache.store.download import download
from aotcache.store.session import Limits, ServiceSession
from aotcache.types import sha256
from tests.store.faulty import Answer, Asked, faulty

DATA = os.urandom(700_000)
DIGEST = sha256(DATA)
HALF = len(DATA) // 2
QUICK = Limits(connect=2, read=0.5, call=5, attempts=3)


def get(url: str, dest: Path, *, size: int | None = None, token: str | None = None) -> None:
    session = ServiceSession(url, token, limits=QUICK)
    try:
        download(session, f"/v1/blobs/{DIGEST}", DIGEST, dest, size=size)
    finally:
        session.close()


def offset(asked: Asked) -> int:
    return int(asked.headers["range"].removeprefix("bytes=").rstrip("-")) if "range" in asked.headers else 0


def part(answer: Answer, first: int, stop: int = len(DATA), *, length: int | None = None) -> None:
    said = f"bytes {first}-{len(DATA) - 1}/{len(DATA)}"
    answer.send(206, DATA[first:stop], length=length, Content_Range=said)


def whole_or_cut(answer: Answer, asked: Asked) -> None:
    """The first answer ends half-way; later ones serve ranges."""
    first = offset(asked)
    if first:
        part(answer, first)
    else:
        answer.send(200, DATA[:HALF], length=len(DATA), ETag=f'"{DIGEST}"')


def test_a_download_that_breaks_off_goes_on_from_there(tmp_path: Path) -> None:
    with faulty(whole_or_cut) as server:
        get(server.url, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == DATA
    assert [offset(asked) for asked in server.asked] == [0, HALF]
    assert server.asked[1].headers["if-range"] == f'"{DIGEST}"'
    assert os.listdir(tmp_path) == ["copy"]


def test_what_an_earlier_process_left_is_gone_on_from(tmp_path: Path) -> None:
    (tmp_path / ".copy.part").write_bytes(DATA[:1000])
    with faulty(lambda answer, asked: part(answer, offset(asked))) as server:
        get(server.url, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == DATA
    assert [offset(asked) for asked in server.asked] == [1000]


def test_a_draft_with_wrong_bytes_costs_one_more_read(tmp_path: Path) -> None:
    (tmp_path / ".copy.part").write_bytes(b"x" * 1000)

    def answer(answer: Answer, asked: Asked) -> None:
        if offset(asked):
            part(answer, offset(asked))
        else:
            answer.send(200, DATA)

    with faulty(answer) as server:
        get(server.url, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == DATA
    assert [offset(asked) for asked in server.asked] == [1000, 0]


def test_a_server_that_ignores_ranges_is_read_from_the_beginning(tmp_path: Path) -> None:
    def answer(answer: Answer, asked: Asked) -> None:
        if len(server.asked) == 1:
            answer.send(200, DATA[:HALF], length=len(DATA))
        else:
            answer.send(200, DATA)

    with faulty(answer) as server:
        get(server.url, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == DATA
    assert offset(server.asked[1]) == HALF


@pytest.mark.parametrize(
    "said",
    [
        f"bytes 7-{len(DATA) - 1}/{len(DATA)}",
        f"bytes {HALF}-{len(DATA) - 1}/{len(DATA) + 1}",
        f"bytes {HALF}-{len(DATA)}/{len(DATA)}",
        "bytes */5",
        "nonsense",
    ],
)
def test_a_wrong_range_is_dropped_and_no_more_are_asked_for(tmp_path: Path, said: str) -> None:
    def answer(answer: Answer, asked: Asked) -> None:
        if offset(asked):
            answer.send(206, DATA[HALF:], Content_Range=said)
        elif len(server.asked) == 1:
            answer.send(200, DATA[:HALF], length=len(DATA))
        else:
            answer.send(200, DATA)

    with faulty(answer) as server:
        get(server.url, tmp_path / "copy", size=len(DATA))
    assert (tmp_path / "copy").read_bytes() == DATA
    assert [offset(asked) for asked in server.asked] == [0, HALF, 0]


def test_a_body_longer_than_the_archive_is_cut_at_once(tmp_path: Path) -> None:
    sent = [0]

    def answer(answer: Answer, asked: Asked) -> None:
        answer.send_response(200)
        answer.send_header("Connection", "close")
        answer.end_headers()
        answer.close_connection = True
        for _ in range(2000):
            answer.wfile.write(b"x" * 65536)
            sent[0] += 65536

    with faulty(answer) as server:
        with pytest.raises(ServiceError, match=f"more than the announced {len(DATA)} bytes"):
            get(server.url, tmp_path / "copy", size=len(DATA))
    assert sent[0] < 2000 * 65536
    assert os.listdir(tmp_path) == []


def test_an_announced_size_other_than_the_manifests_is_no_archive(tmp_path: Path) -> None:
    with faulty(lambda answer, asked: answer.send(200, DATA + b"x")) as server:
        with pytest.raises(ServiceError, match=f"announces {len(DATA) + 1} bytes"):
            get(server.url, tmp_path / "copy", size=len(DATA))


def test_wrong_bytes_are_read_once_more_and_then_an_error_with_both_digests(tmp_path: Path) -> None:
    wrong = bytes(len(DATA))
    with faulty(lambda answer, asked: answer.send(200, wrong)) as server:
        with pytest.raises(CorruptArtifact, match=DIGEST) as caught:
            get(server.url, tmp_path / "copy")
    assert sha256(wrong) in str(caught.value)
    assert len(server.asked) == 2
    assert os.listdir(tmp_path) == []


def test_a_server_that_stalls_is_given_up_and_what_came_is_kept(tmp_path: Path) -> None:
    def answer(answer: Answer, asked: Asked) -> None:
        if offset(asked) == 0:
            answer.send(200, DATA[:HALF], length=len(DATA))
        else:
            time.sleep(1)

    with faulty(answer) as server:
        began = time.monotonic()
        with pytest.raises(ServiceUnavailable, match=r"not a byte for 0\.5 s"):
            get(server.url, tmp_path / "copy")
        assert time.monotonic() - began < 10
    assert os.listdir(tmp_path) == [".copy.part"]
    assert (tmp_path / ".copy.part").read_bytes() == DATA[:HALF]
    assert [offset(asked) for asked in server.asked] == [0, HALF, HALF, HALF]


def test_a_trickle_is_given_up(tmp_path: Path) -> None:
    def answer(answer: Answer, asked: Asked) -> None:
        answer.send(200, b"", length=len(DATA))
        for _ in range(100):
            answer.wfile.write(b"x")
            time.sleep(0.05)

    with faulty(answer) as server:
        session = ServiceSession(server.url, limits=Limits(read=1, call=0.2, attempts=1))
        with pytest.raises(ServiceUnavailable, match="slower than"):
            download(session, f"/v1/blobs/{DIGEST}", DIGEST, tmp_path / "copy")
        session.close()


def test_zstd_is_decoded_and_taken_up_again_in_plain_bytes(tmp_path: Path) -> None:
    text = bytes(range(256)) * 20_000
    digest = sha256(text)
    packed = zstandard.compress(text)

    def answer(answer: Answer, asked: Asked) -> None:
        first = offset(asked)
        if asked.headers["accept-encoding"] == "zstd":
            cut = len(packed) // 2
            answer.send(200, packed[:cut], length=len(packed), Content_Encoding="zstd")
        else:
            answer.send(206, text[first:], Content_Range=f"bytes {first}-{len(text) - 1}/{len(text)}")

    with faulty(answer) as server:
        session = ServiceSession(server.url, limits=QUICK)
        download(session, f"/v1/blobs/{digest}", digest, tmp_path / "copy", size=len(text))
        session.close()
    assert (tmp_path / "copy").read_bytes() == text
    assert len(server.asked) <= 3
    assert server.asked[-1].headers["accept-encoding"] == "identity"


def test_a_zstd_bomb_ends_at_the_manifests_size_and_in_little_memory(tmp_path: Path) -> None:
    packed = zstandard.ZstdCompressor().compress(bytes(300_000_000))
    with faulty(lambda answer, asked: answer.send(200, packed, Content_Encoding="zstd")) as server:
        session = ServiceSession(server.url, limits=QUICK)
        tracemalloc.start()
        with pytest.raises(ServiceError, match="more than the announced 1000 bytes"):
            download(session, f"/v1/blobs/{DIGEST}", DIGEST, tmp_path / "copy", size=1000)
        assert tracemalloc.get_traced_memory()[1] < 12_000_000
        tracemalloc.stop()
        session.close()


@pytest.fixture
def bucket() -> Iterator[tuple[list[str], list[Asked], str]]:
    """A second server, in a bucket's place; the first list holds the signatures that it takes."""
    valid: list[str] = []

    def answer(answer: Answer, asked: Asked) -> None:
        signature = asked.path.partition("Signature=")[2]
        if signature not in valid:
            answer.send(403, b"<Error><Code>AccessDenied</Code>" + asked.path.encode() + b"</Error>")
        elif offset(asked):
            part(answer, offset(asked))
        else:
            valid.clear()
            answer.send(200, DATA[:HALF], length=len(DATA), ETag='"other"')

    with faulty(answer) as server:
        yield valid, server.asked, server.url


def test_a_signed_address_that_expired_is_asked_for_anew(
    tmp_path: Path, bucket: tuple[list[str], list[Asked], str]
) -> None:
    valid, seen, address = bucket
    given = [0]

    def answer(answer: Answer, asked: Asked) -> None:
        given[0] += 1
        # The second address that is handed out has expired already.
        if given[0] != 2:
            valid[:] = [f"secret{given[0]}"]
        answer.send(307, Location=f"{address}/bucket/{DIGEST}?Signature=secret{given[0]}")

    with faulty(answer) as server:
        get(server.url, tmp_path / "copy", token="aot_token")
    assert (tmp_path / "copy").read_bytes() == DATA
    assert given[0] == 3
    assert [offset(asked) for asked in seen] == [0, HALF, HALF]
    assert all("authorization" not in asked.headers and "if-range" not in asked.headers for asked in seen)
    assert all(asked.headers["authorization"] == "Bearer aot_token" for asked in server.asked)


def test_a_bucket_that_keeps_refusing_is_an_error_without_the_signature(
    tmp_path: Path, bucket: tuple[list[str], list[Asked], str]
) -> None:
    _, seen, address = bucket
    with faulty(lambda a, asked: a.send(307, Location=f"{address}/b?Signature=topsecret")) as server:
        with pytest.raises(ServiceError, match=f"{address}/b answered 403") as caught:
            get(server.url, tmp_path / "copy")
    assert "topsecret" not in str(caught.value) + repr(caught.value.details)
    assert len(seen) == QUICK.attempts
    assert os.listdir(tmp_path) == []


def test_an_archive_that_is_not_there_is_not_stored(tmp_path: Path) -> None:
    body = b'{"error": {"type": "not_stored", "message": "no archive", "details": {}, "request_id": "r1"}}'
    with faulty(lambda answer, asked: answer.send(404, body)) as server:
        with pytest.raises(NotStored, match=r"no archive.*r1"):
            get(server.url, tmp_path / "copy")
    assert os.listdir(tmp_path) == []
    assert len(server.asked) == 1


def test_two_downloads_to_one_place_do_not_share_a_draft(tmp_path: Path) -> None:
    inner: list[str] = []

    def answer(answer: Answer, asked: Asked) -> None:
        if not inner:
            inner.append("running")
            get(server.url, tmp_path / "copy")
            inner.append("done" if (tmp_path / "copy").read_bytes() == DATA else "wrong")
        answer.send(200, DATA)

    with faulty(answer) as server:
        session = ServiceSession(server.url, limits=Limits(read=10))
        download(session, f"/v1/blobs/{DIGEST}", DIGEST, tmp_path / "copy")
        session.close()
    assert inner == ["running", "done"]
    assert (tmp_path / "copy").read_bytes() == DATA
    assert os.listdir(tmp_path) == ["copy"]


def test_a_large_archive_passes_through_little_memory(tmp_path: Path) -> None:
    data = os.urandom(1 << 20) * 40
    digest = sha256(data)
    with faulty(lambda answer, asked: answer.send(200, data)) as server:
        session = ServiceSession(server.url)
        tracemalloc.start()
        download(session, f"/v1/blobs/{digest}", digest, tmp_path / "copy")
        assert tracemalloc.get_traced_memory()[1] < 3 << 20
        tracemalloc.stop()
        session.close()
    assert sha256((tmp_path / "copy").read_bytes()) == digest


def test_a_zstd_stream_without_a_byte_of_the_archive_ends(tmp_path: Path) -> None:
    nothing = struct.pack("<II", 0x184D2A50, 1 << 16) + bytes(1 << 16)  # a frame to be skipped

    def answer(answer: Answer, asked: Asked) -> None:
        answer.send_response(200)
        answer.send_header("Content-Encoding", "zstd")
        answer.end_headers()
        answer.close_connection = True
        for _ in range(1000):
            answer.wfile.write(nothing)

    with faulty(answer) as server:
        with pytest.raises(ServiceError, match=r"more than \d+ bytes came for the archive"):
            get(server.url, tmp_path / "copy", size=len(DATA))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("size", [100, 3 << 20], ids=["all in a buffer", "many writes"])
def test_a_full_disk_is_a_typed_error(tmp_path: Path, size: int) -> None:
    data = bytes(size)
    program = """if True:
        import resource, sys
        from pathlib import Path
        from aotcache.errors import StoreError
        from aotcache.store.download import download
        from aotcache.store.session import ServiceSession
        session = ServiceSession(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))
        try:
            download(session, "/v1/x", sys.argv[2], Path(sys.argv[3]))
        except StoreError as error:
            print(error)
        session.close()
    """
    with faulty(lambda answer, asked: answer.send(200, data)) as server:
        done = subprocess.run(
            [sys.executable, "-c", program, server.url, sha256(data), str(tmp_path / "copy")],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert f"cannot write {tmp_path / 'copy'}: File too large" in done.stdout, done.stderr
    assert not (tmp_path / "copy").exists()
