"""A way to a server that can break: what is sent through a port of its own goes on to the server's."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

_SECONDS = 60.0


class Line:
    """Connections to one server. Any number of threads may use it.

    Args:
        url: The server's address, on loopback.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._target = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._cuts: list[tuple[bool, int]] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def cut(self, *after: int, answers: bool = False) -> None:
        """Reset the next connections that carry more than so many bytes: the first number is for the first of them.

        Args:
            after: Bytes towards the server; none to cut nothing any more.
            answers: Bytes of its answers instead.
        """
        with self._lock:
            self._cuts = [(answers, number) for number in after]

    @property
    def cuts_left(self) -> int:
        """How many of the cuts asked for have not happened."""
        with self._lock:
            return len(self._cuts)

    def close(self) -> None:
        """End all connections, and refuse new ones: the server is away."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            left = list(self._open)
        for end in left:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._thread.join(_SECONDS)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target, timeout=_SECONDS)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            with self._lock:
                self._open |= {client, server}
            threading.Thread(target=self._connection, args=(client, server), daemon=True).start()

    def _connection(self, client: socket.socket, server: socket.socket) -> None:
        back = threading.Thread(target=self._carry, args=(True, server, client), daemon=True)
        back.start()
        self._carry(False, client, server)
        back.join()
        with self._lock:
            self._open -= {client, server}
        client.close()
        server.close()

    def _carry(self, answers: bool, source: socket.socket, target: socket.socket) -> None:
        carried = 0
        try:
            while data := source.recv(65536):
                left = self._left(answers, carried, len(data))
                target.sendall(data[:left])
                if left < len(data):
                    self._reset(source, target)
                    return
                carried += len(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            self._reset(source, target)

    def _left(self, answers: bool, carried: int, size: int) -> int:
        """How many of the next bytes go through; a cut that is due is used up."""
        with self._lock:
            if self._cuts and self._cuts[0][0] == answers and carried + size > self._cuts[0][1]:
                return max(0, self._cuts.pop(0)[1] - carried)
        return size

    def _reset(self, *ends: socket.socket) -> None:
        for end in ends:
            with suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextmanager
def line_to(url: str) -> Iterator[Line]:
    """A line to the server at an address of loopback, until the block ends."""
    made = Line(url)
    try:
        yield made
    finally:
        made.close()
