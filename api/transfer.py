"""Bytes in and out, in pieces: nothing here ever holds more than a few of them.

Files are read, hashed and written by threads, one piece of `PIECE` bytes at a time; the event
loop only hands pieces to sockets. Every wait for the other side has a limit.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import anyio
import zstandard
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from aotcache.api.errors import Refused
from aotcache.errors import NotStored, StoreError
from aotcache.store.local import make_dirs
from aotcache.types import Digest

T = TypeVar("T")

PIECE = 1 << 19
"""Bytes read, hashed, written or sent at a time."""

LARGEST = 1 << 21
"""Bytes of one piece while a file or two are sent: the fewer pieces, the less each byte costs."""

STALL_SECONDS = 60.0
"""How long the other side may neither send nor take anything."""

COMPRESSING = 4
"""How many bodies are compressed at once: each takes a core and some MB. Further ones go out as they are."""

_LEVEL = 3


class Workers:
    """The threads that touch blobs: apart from those of other requests, which so never wait for disks."""

    def __init__(self, threads: int = 8) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="blobs")
        self.sending = 0
        self.compressing = threading.BoundedSemaphore(COMPRESSING)

    @property
    def piece(self) -> int:
        """How many bytes of a file to read at a time, for now."""
        return LARGEST if self.sending <= 2 else PIECE

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, done in a thread."""
        return await asyncio.wrap_future(self.submit(work))

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Begin `work` in a thread."""
        return self._pool.submit(work)

    def close(self) -> None:
        """End the threads; what they are doing is finished."""
        self._pool.shutdown()


class Pieces(Response):
    """A response whose body is an iterator of pieces, each made in a thread.

    A body that ends early or fails closes the connection, so that no client takes a part for
    the whole.

    Args:
        pieces: Closed at the end, also when the client goes away.
        workers: Where they are made.
    """

    def __init__(
        self, pieces: Iterator[bytes], workers: Workers, status: int, headers: dict[str, str]
    ) -> None:
        self._pieces = pieces
        self._workers = workers
        self.status_code = status
        self.background = None
        self.init_headers(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        gone = asyncio.ensure_future(_until_disconnect(receive))
        making: Future[bytes | None] | None = None
        self._workers.sending += 1
        try:
            while not gone.done():
                making = self._workers.submit(self._next)
                piece = await asyncio.wrap_future(making)
                with anyio.fail_after(STALL_SECONDS):
                    body = {
                        "type": "http.response.body",
                        "body": piece or b"",
                        "more_body": piece is not None,
                    }
                    await send(body)
                if piece is None:
                    return
        finally:
            self._workers.sending -= 1
            gone.cancel()
            if making is None:
                _close(self._pieces)
            else:
                # A cancelled wait leaves the thread at work: it closes what it reads when it is done.
                making.add_done_callback(lambda _: _close(self._pieces))

    def _next(self) -> bytes | None:
        return next(self._pieces, None)


def _close(pieces: Iterator[bytes]) -> None:
    close = getattr(pieces, "close", None)
    if close is not None:
        close()


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class FilePieces(Iterator[bytes]):
    """The bytes of a file from `start` to before `stop`.

    Raises:
        NotStored: if it has been deleted.
    """

    def __init__(self, path: Path, start: int, stop: int, workers: Workers) -> None:
        self._at, self._stop, self._workers = start, stop, workers
        try:
            self._file = path.open("rb", buffering=0)
        except FileNotFoundError:
            raise NotStored(f"{path.name} was deleted a moment ago; warm again to build it") from None
        self._file.seek(start)

    def __next__(self) -> bytes:
        piece = self._file.read(min(self._workers.piece, self._stop - self._at))
        if not piece:
            raise StopIteration
        self._at += len(piece)
        return piece

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Compressed(Iterator[bytes]):
    """One zstd frame of some pieces, in pieces of other sizes.

    Args:
        pieces: Closed with this one.
        end: Called once when it is closed.
    """

    def __init__(self, pieces: Iterator[bytes], end: Callable[[], None]) -> None:
        self._pieces: Iterator[bytes] | None = pieces
        self._end = end
        self._frame = zstandard.ZstdCompressor(level=_LEVEL).compressobj()
        self._flushed = False

    def __next__(self) -> bytes:
        while self._pieces is not None and not self._flushed:
            piece = next(self._pieces, None)
            if piece is None:
                self._flushed = True
                return self._frame.flush()
            done = self._frame.compress(piece)
            if done:
                return done
        raise StopIteration

    def close(self) -> None:
        """Close what it reads."""
        if self._pieces is not None:
            _close(self._pieces)
            self._pieces = None
            self._end()


class Draft:
    """A temporary file that is hashed while it is written; removed at the end unless it was moved away."""

    def __init__(self, folder: Path) -> None:
        make_dirs(folder)
        self.path = folder / f"upload-{uuid.uuid4().hex}"
        self.size = 0
        self._hash = hashlib.sha256()
        try:
            self._file = self.path.open("xb", buffering=0)
        except OSError as error:
            raise StoreError(
                f"cannot write to {folder}: {error.strerror}; nothing was stored; free space or permissions, then "
                "try again"
            ) from error

    def write(self, data: bytes) -> None:
        """Append `data`. Raises StoreError."""
        try:
            # On a disk that is nearly full a write takes a part and says so; the next one is the error.
            rest = memoryview(data)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise StoreError(
                f"cannot write {self.path}: {error.strerror}; nothing was stored; free space, then try again"
            ) from error
        self._hash.update(data)
        self.size += len(data)

    @property
    def digest(self) -> Digest:
        """Of what was written."""
        return Digest(self._hash.hexdigest())

    def __enter__(self) -> Draft:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self.path.unlink(missing_ok=True)


async def receive_into(draft: Draft, request: Request, workers: Workers, limit: int) -> None:
    """Write a request's body to a draft.

    Raises:
        ClientDisconnect: it was cut off.
        Refused: it has more than `limit` bytes, or nothing came for too long.
    """
    announced = request.headers.get("content-length")
    if announced is not None and int(announced) > limit:
        raise _too_large(limit)
    held, pending = bytearray(), 0
    stream = request.stream()
    while True:
        try:
            with anyio.fail_after(STALL_SECONDS):
                chunk = await anext(stream, None)
        except TimeoutError:
            raise Refused(
                "bad_request",
                f"no byte of the body came for {STALL_SECONDS:g} s; nothing was stored: send it again",
            ) from None
        if chunk:
            held += chunk
            pending += len(chunk)
            if pending > limit:
                raise _too_large(limit)
        if len(held) >= PIECE or (chunk is None and held):
            piece = bytes(held)
            held.clear()
            await workers.run(lambda piece=piece: draft.write(piece))  # type: ignore[misc]
        if chunk is None:
            return


def _too_large(limit: int) -> Refused:
    return Refused(
        "too_large", f"the archive has more than the {limit} bytes that this service takes", limit=limit
    )
