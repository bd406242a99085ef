"""A real server of the S3 protocol (moto's), in a process of its own on loopback."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_SECONDS = 60.0


@dataclass
class S3:
    """The running server.

    Attributes:
        url: Its address.
        log: Every request, a line each, as its web server writes them.
        process: To kill it.
    """

    url: str
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def environment(self) -> Mapping[str, str]:
        """The AWS_* variables that lead to it."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "tester",
            "AWS_SECRET_ACCESS_KEY": "secret-of-tester",
            "AWS_REGION": "us-east-1",
        }

    def bucket(self) -> str:
        """A new bucket; its `s3://` address with a prefix."""
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        request = urllib.request.Request(f"{self.url}/{name}", method="PUT")
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            assert answer.status == 200
        return f"s3://{name}/cache"

    def requests(self, method: str, part: str) -> list[str]:
        """The logged requests with this method whose line holds `part`."""
        return [line for line in self.log.read_text().splitlines() if f'"{method} ' in line and part in line]


@contextmanager
def s3_server(folder: Path) -> Iterator[S3]:
    """Start a server with no buckets, and end it with the block; its log lies in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    log = folder / "s3.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(url, process, log)
        yield S3(url, log, process)
    finally:
        process.terminate()
        try:
            process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + _SECONDS
    while True:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < until, f"no answer from {url}:\n{log.read_text()}"
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.05)
