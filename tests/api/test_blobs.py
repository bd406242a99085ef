"""Archives over HTTP, apart from what needs a real server."""

from __future__ import annotations

import hashlib
import os
import resource
from pathlib import Path

import pytest
import zstandard

from aotcache.types import Digest
from tests.api.conftest import Api, Start

DATA = bytes(range(256)) * 9000
"""More than four pieces, and not a whole number of them."""


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def address(data: bytes) -> str:
    return f"/v1/blobs/{digest(data)}"


@pytest.fixture
def stored(api: Api) -> Api:
    assert api.client.put(address(DATA), content=DATA).json() == {"stored": True}
    return api


def blob_file(api: Api, data: bytes) -> Path:
    found = api.service.store.blob_path(Digest(digest(data)))
    assert found is not None
    return found


def test_what_was_put_comes_back_whole(stored: Api) -> None:
    answer = stored.client.get(address(DATA), headers={"Accept-Encoding": "identity"})
    assert answer.status_code == 200
    assert answer.content == DATA
    assert answer.headers["content-length"] == str(len(DATA))
    assert answer.headers["etag"] == f'"{digest(DATA)}"'
    assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert answer.headers["accept-ranges"] == "bytes"


def test_an_archive_that_is_there_is_not_stored_twice(stored: Api) -> None:
    answer = stored.client.put(address(DATA), content=DATA)
    assert (answer.status_code, answer.json()) == (200, {"stored": False})


def test_bytes_that_do_not_match_are_refused_and_leave_nothing(api: Api) -> None:
    answer = api.client.put(address(DATA), content=DATA[:-1] + b"!")
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert error["type"] == "corrupt"
    assert error["details"]["expected"] == digest(DATA)
    assert api.client.get(address(DATA)).status_code == 404
    assert list(api.service.uploads.iterdir()) == []


def test_an_empty_archive_is_one_too(api: Api) -> None:
    assert api.client.put(address(b""), content=b"").status_code == 201
    answer = api.client.get(address(b""))
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize(
    ("asked", "start", "stop"), [("0-0", 0, 1), ("1048570-1048580", 1048570, 1048581), ("-7", -7, None)]
)
def test_a_range_is_a_part(stored: Api, asked: str, start: int, stop: int | None) -> None:
    answer = stored.client.get(address(DATA), headers={"Range": f"bytes={asked}", "Accept-Encoding": "zstd"})
    assert answer.status_code == 206
    assert answer.content == DATA[start:stop]
    assert "content-encoding" not in answer.headers
    first = start if start >= 0 else len(DATA) + start
    assert answer.headers["content-range"] == f"bytes {first}-{first + len(answer.content) - 1}/{len(DATA)}"


def test_a_range_behind_the_end_is_416_with_the_size(stored: Api) -> None:
    answer = stored.client.get(address(DATA), headers={"Range": f"bytes={len(DATA)}-"})
    assert answer.status_code == 416
    assert answer.headers["content-range"] == f"bytes */{len(DATA)}"
    assert answer.json()["error"]["type"] == "range"


def test_several_ranges_are_answered_with_the_whole(stored: Api) -> None:
    answer = stored.client.get(address(DATA), headers={"Range": "bytes=0-1,4-5"})
    assert (answer.status_code, answer.content) == (200, DATA)


def test_if_range_with_another_tag_gets_the_whole(stored: Api) -> None:
    part = {"Range": "bytes=0-9", "Accept-Encoding": "identity"}
    same = stored.client.get(address(DATA), headers={**part, "If-Range": f'"{digest(DATA)}"'})
    other = stored.client.get(address(DATA), headers={**part, "If-Range": f'"{digest(DATA)}-zstd"'})
    assert (same.status_code, same.content) == (206, DATA[:10])
    assert (other.status_code, other.content) == (200, DATA)


@pytest.mark.parametrize("suffix", ["", "-zstd"])
def test_a_client_that_has_it_gets_304(stored: Api, suffix: str) -> None:
    answer = stored.client.get(address(DATA), headers={"If-None-Match": f'"{digest(DATA)}{suffix}"'})
    assert (answer.status_code, answer.content) == (304, b"")
    assert answer.headers["etag"] == f'"{digest(DATA)}"'


def test_zstd_is_used_where_it_is_accepted(stored: Api) -> None:
    with stored.client.stream("GET", address(DATA), headers={"Accept-Encoding": "zstd"}) as answer:
        raw = b"".join(answer.iter_raw())
    assert answer.headers["content-encoding"] == "zstd"
    assert answer.headers["etag"] == f'"{digest(DATA)}-zstd"'
    assert "content-length" not in answer.headers
    assert len(raw) < len(DATA) / 10
    assert zstandard.ZstdDecompressor().decompressobj().decompress(raw) == DATA


def test_head_says_what_get_would(stored: Api) -> None:
    answer = stored.client.head(address(DATA), headers={"Accept-Encoding": "identity"})
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-length"] == str(len(DATA))
    assert stored.client.head(address(b"other")).status_code == 404


def test_bytes_gone_bad_on_disk_are_never_served(stored: Api) -> None:
    assert stored.client.get(address(DATA)).status_code == 200
    path = blob_file(stored, DATA)
    path.write_bytes(b"?" + DATA[1:])
    os.utime(path, (1, 1))
    answer = stored.client.get(address(DATA))
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "not_stored"
    # The copy is dropped, and a new upload heals it.
    assert stored.client.put(address(DATA), content=DATA).status_code == 201
    assert stored.client.get(address(DATA)).content == DATA


def test_an_upload_heals_bytes_gone_bad(stored: Api) -> None:
    path = blob_file(stored, DATA)
    path.write_bytes(b"?" + DATA[1:])
    stored.client.put(address(DATA), content=DATA)
    assert stored.client.get(address(DATA)).content == DATA


def test_an_archive_over_the_limit_is_413_by_what_it_announces_and_by_what_comes(start_api: Start) -> None:
    api = start_api(blob_bytes=1000)

    def unannounced():  # type: ignore[no-untyped-def]
        yield b"x" * 600
        yield b"x" * 600

    for body in (b"x" * 1200, unannounced()):
        answer = api.client.put(address(b"x" * 1200), content=body)
        assert answer.status_code == 413
        assert answer.json()["error"]["type"] == "too_large"
    assert list(api.service.uploads.iterdir()) == []
    assert api.client.put(address(b"x" * 1000), content=b"x" * 1000).status_code == 201


@pytest.mark.parametrize("name", ["..", "A" * 64, "a" * 63, "a" * 65, "g" * 64, "%2e%2e%2f" * 8])
def test_a_name_that_is_no_digest_never_reaches_the_store(api: Api, name: str) -> None:
    for method in ("GET", "HEAD", "PUT"):
        assert api.client.request(method, f"/v1/blobs/{name}").status_code in (404, 405, 422)


def test_a_store_in_memory_is_served_without_files(start_api: Start) -> None:
    api = start_api(store="memory:///")
    assert api.client.put(address(DATA), content=DATA).status_code == 201
    assert api.client.get(address(DATA), headers={"Range": "bytes=100-299"}).content == DATA[100:300]
    assert api.client.get(address(DATA)).content == DATA
    assert list(api.config.uploads.iterdir()) == []


def test_with_tokens_shared_caches_may_not_keep_it(stored: Api) -> None:
    headers = stored.bearer("read")
    answer = stored.client.get(address(DATA), headers=headers)
    assert answer.headers["cache-control"].startswith("private,")


def test_a_disk_that_takes_a_part_of_a_piece_is_no_archive_stored(api: Api, tmp_path: Path) -> None:
    data = b"x" * 300_000
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Files end here as they do on a full disk: a write takes what fits, and only the next one fails.
    resource.setrlimit(resource.RLIMIT_FSIZE, (250_000, hard))
    try:
        answer = api.client.put(address(data), content=data)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "unavailable")
    assert api.client.get(address(data)).status_code == 404
    assert list((tmp_path / "store" / "tmp").iterdir()) == []
