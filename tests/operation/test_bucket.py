"""A service over a bucket, as docker-compose.yml runs it: clients that cannot reach the bucket are served, too."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from aotcache.types import sha256
from tests.services.s3 import S3, s3_server
from tests.services.serving import serving

BODY = b"an archive in a bucket" * 100_000


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


def ask(url: str, method: str, body: bytes | None = None, **headers: str) -> tuple[int, str, bytes]:
    """Status, Location and body of an answer; redirects are not followed."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    try:
        connection.request(method, urlsplit(url).path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.headers.get("Location", ""), answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize("seconds", ["0", "600"])
def test_bytes_come_through_the_service_where_it_hands_out_no_addresses(
    s3: S3, tmp_path: Path, seconds: str
) -> None:
    environment = {**s3.environment, "AOTCACHE_SIGNED_URL_SECONDS": seconds}
    with serving(tmp_path / "service", store=s3.bucket(), environment=environment) as service:
        url = f"{service.url}/v1/blobs/{sha256(BODY)}"
        assert ask(url, "PUT", BODY)[0] == 201
        status, location, body = ask(url, "GET")
        if seconds == "0":
            assert (status, location, body) == (200, "", BODY)
            assert ask(url, "GET", Range="bytes=5-9")[::2] == (206, BODY[5:10])
        else:
            assert status == 307
            assert location.startswith(s3.url)
            assert body == b""
