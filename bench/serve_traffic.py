"""The servers that bench.serve measures, started as processes of their own, and its clients.

The client of a download is a plain socket that reads into one buffer: it costs both servers
the same, and less than either of them.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from bench.serve_rows import key_of

_BUFFER = 1 << 20
_COME_UP = 60.0
"""Seconds."""


def free_port() -> int:
    """A port of loopback that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextmanager
def serving(folder: Path, *, store: Path, database: str | None = None) -> Iterator[tuple[int, int]]:
    """`aotcache serve`, as anybody would start it; its port and process id."""
    port = free_port()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("AOTCACHE_")},
        "AOTCACHE_HOME": str(folder / "home"),
        "AOTCACHE_CONFIG_HOME": str(folder / "config"),
        "AOTCACHE_STORE": store.as_uri(),
        "PYTHONPATH": str(Path(__file__).resolve().parent.parent),
        **({} if database is None else {"AOTCACHE_DATABASE": database}),
    }
    command = [sys.executable, "-m", "aotcache", "serve", "--port", str(port)]
    with _process(command, port, folder / "serve.log", environment) as pid:
        yield port, pid


@contextmanager
def nginx(folder: Path, root: Path) -> Iterator[int]:
    """nginx over the files in `root`, one worker, sendfile; its port.

    Raises:
        RuntimeError: it is not installed.
    """
    program = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        raise RuntimeError("nginx is not installed; on Debian: apt-get install nginx-light")
    port = free_port()
    folder.mkdir(exist_ok=True)
    config = folder / "nginx.conf"
    config.write_text(
        ("user root;\n" if os.getuid() == 0 else "")
        + f"""daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 512; }}
http {{
  access_log {folder}/access.log; sendfile on; tcp_nopush on; default_type application/octet-stream;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  server {{ listen 127.0.0.1:{port}; root {root}; }}
}}
"""
    )
    command = [program, "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(config)]
    with _process(command, port, folder / "nginx.log", dict(os.environ)):
        yield port


@contextmanager
def _process(command: list[str], port: int, log: Path, environment: dict[str, str]) -> Iterator[int]:
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
        try:
            until = time.monotonic() + _COME_UP
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                    break
                except OSError:
                    if process.poll() is not None or time.monotonic() > until:
                        raise RuntimeError(
                            f"{command[0]} did not come up:\n{log.read_text()[-2000:]}"
                        ) from None
                    time.sleep(0.05)
            yield process.pid
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def download(port: int, path: str) -> tuple[int, float]:
    """GET a path; bytes of the body and seconds until the last of them."""
    start = perf_counter()
    buffer = bytearray(_BUFFER)
    with socket.create_connection(("127.0.0.1", port), timeout=300) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
        head = b""
        while b"\r\n\r\n" not in head:
            head += connection.recv(4096)
        head, _, first = head.partition(b"\r\n\r\n")
        if b" 200 " not in head.splitlines()[0]:
            raise RuntimeError(f"{path}: {head.splitlines()[0].decode()}")
        found = len(first)
        while count := connection.recv_into(buffer):
            found += count
    return found, perf_counter() - start


def upload(port: int, path: str, file: Path) -> int:
    """PUT a file; the status."""
    with socket.create_connection(("127.0.0.1", port), timeout=300) as connection, file.open("rb") as source:
        head = f"PUT {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        connection.sendall(f"{head}Content-Length: {file.stat().st_size}\r\n\r\n".encode())
        connection.sendfile(source)
        answer = b""
        while data := connection.recv(4096):
            answer += data
    return int(answer.split(None, 2)[1])


def together(count: int, work: Any) -> float:
    """`work` in so many threads at once; seconds until the last has ended."""
    barrier = threading.Barrier(count + 1)
    errors: list[Exception] = []

    def one() -> None:
        barrier.wait()
        try:
            work()
        except Exception as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=one) for _ in range(count)]
    for thread in threads:
        thread.start()
    barrier.wait()
    start = perf_counter()
    for thread in threads:
        thread.join()
    if errors:
        raise RuntimeError(f"{len(errors)} of {count} failed: {errors[0]}") from errors[0]
    return perf_counter() - start


def peak_memory(pid: int) -> int:
    """The most resident memory that a process and its children ever had at once, in bytes (sum of peaks)."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    total = 0
    for each in [str(pid), *(children.read_text().split() if children.exists() else ())]:
        for line in Path(f"/proc/{each}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                total += int(line.split()[1]) * 1024
    return total


def resolve_times(port: int, rows: int, clients: int, requests: int) -> list[float]:
    """Seconds of each POST /v1/resolve of 1,000 keys, by `clients` that ask one request after another."""
    times: list[float] = []

    def client() -> None:
        draw = random.Random(threading.get_ident())
        bodies = [
            json.dumps({"keys": [key_of(draw.randrange(rows + rows // 10)) for _ in range(1000)]})
            for _ in range(5)
        ]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            for turn in range(requests):
                start = perf_counter()
                connection.request(
                    "POST", "/v1/resolve", bodies[turn % 5], {"Content-Type": "application/json"}
                )
                answer = connection.getresponse()
                answer.read()
                times.append(perf_counter() - start)
                if answer.status != 200:
                    raise RuntimeError(f"resolve answered {answer.status}")
        finally:
            connection.close()

    together(clients, client)
    return times


def page_times(port: int, limit: int) -> list[float]:
    """Seconds of each page of GET /v1/artifacts, from the first to the last."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    times: list[float] = []
    cursor: str | None = None
    try:
        while True:
            start = perf_counter()
            connection.request(
                "GET", f"/v1/artifacts?limit={limit}" + (f"&cursor={cursor}" if cursor else "")
            )
            answer = connection.getresponse()
            body = answer.read()
            times.append(perf_counter() - start)
            if answer.status != 200:
                raise RuntimeError(f"the listing answered {answer.status}: {body[:200]!r}")
            cursor = json.loads(body)["next"]
            if cursor is None:
                return times
    finally:
        connection.close()
