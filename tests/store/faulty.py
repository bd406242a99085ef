"""A real HTTP server for the faults that a client has to live through. Each test says what it answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Asked:
    """One request as it came: `headers` by lower-case name."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Faulty:
    """The running server; `asked` holds every request, in order."""

    url: str
    asked: list[Asked] = field(default_factory=list)


class Answer(BaseHTTPRequestHandler):
    """What a test's function gets to answer with."""

    protocol_version = "HTTP/1.1"
    timeout = 20

    def send(self, status: int, body: bytes = b"", *, length: int | None = None, **headers: str) -> None:
        """An answer; `length` announces another one than the body's."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        if length is not None:
            self.close_connection = True

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def faulty(answer: Callable[[Answer, Asked], None]) -> Iterator[Faulty]:
    """Run a server on a free port of loopback that answers every request by `answer`."""

    class Handler(Answer):
        def _any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            asked = Asked(self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body)
            running.asked.append(asked)
            try:
                answer(self, asked)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _any

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    running = Faulty(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield running
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
