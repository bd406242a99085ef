"""An archive from the service to a file: checked, and taken up again where it broke off.

The service answers with the bytes, or sends on to a bucket. Neither is believed: a server may
ignore the range, answer another one, send more than it announced, or end early. What counts
is the digest at the end. A signed address that has expired is asked for anew: every try
begins at the service.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

import zstandard

from aotcache.errors import CorruptArtifact, ServiceError, ServiceUnavailable, StoreError
from aotcache.store.answers import origin, shown
from aotcache.store.clients import CHUNK
from aotcache.store.local import make_dirs
from aotcache.store.session import Failed, ServiceSession, pause
from aotcache.types import Digest

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger(__name__)

_LARGEST = 64 << 30
"""Bytes; no archive is larger."""

_WINDOW = 8 << 20
"""Bytes that a zstd stream may ask to be kept for looking back (RFC 9659)."""

_MOST_RESTARTS = 2
_MOST_TRIES = 64
_RANGE = re.compile(r"bytes (?:(\d{1,18})-(\d{1,18})|\*)/(\d{1,18})\Z")


def download(
    session: ServiceSession, path: str, digest: Digest, dest: Path, *, size: int | None = None
) -> None:
    """Write an archive's checked bytes to `dest`, which appears whole or not at all.

    Meanwhile they are in `.<name>.part` beside it. A download that was broken off or killed
    leaves that file, and the next one for the same `dest` goes on from there; two at once do
    not share it.

    Args:
        session: The way to the service.
        path: Of the archive, below the service's address.
        digest: What the bytes must have.
        dest: The file; its folder is made.
        size: Bytes of the archive, if they are known.

    Raises:
        CorruptArtifact: the bytes do not match, also when read again.
        NotStored: the service has no such bytes.
        ServiceUnavailable: not reached, or broken off too often.
        ServiceError: the service answers with another error.
        StoreError: the file cannot be written.
    """
    make_dirs(dest.parent)
    try:
        with _draft(dest) as (draft, file):
            transfer = _Transfer(session, path, digest, file, size)
            try:
                transfer.run()
                os.replace(draft, dest)
            finally:
                if transfer.offset == 0:
                    draft.unlink(missing_ok=True)
    except OSError as error:  # closing the file writes as well
        raise StoreError(
            f"cannot write {dest}: {error.strerror}; free space or permissions, then try again",
            path=str(dest),
        ) from error


@contextmanager
def _draft(dest: Path) -> Iterator[tuple[Path, IO[bytes]]]:
    """The draft of `dest`, held by this download alone; one of its own if another holds that."""
    shared = dest.with_name(f".{dest.name}.part")
    own = dest.with_name(f".{dest.name}.{uuid.uuid4().hex}")
    for draft in (shared, own):
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            file = os.fdopen(os.open(draft, flags, 0o644), "r+b")
        except OSError as error:
            raise StoreError(f"cannot write {draft}: {error.strerror}", path=str(draft)) from error
        with file:
            if draft == shared and not _held(draft, file):
                continue
            try:
                yield draft, file
            finally:
                if draft == own:
                    draft.unlink(missing_ok=True)
            return


def _held(draft: Path, file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The one who held it may have put it in its place meanwhile.
        return os.path.samestat(os.fstat(file.fileno()), draft.stat())
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.ENOENT, errno.ENOLCK, errno.EOPNOTSUPP):
            return False
        raise


class _Anew(Exception):
    """What came cannot be a part of the archive: drop it and begin again.

    Attributes:
        found: The digest of what came, if all of it did.
    """

    def __init__(self, why: str, found: str | None = None) -> None:
        super().__init__(why)
        self.found = found


class _Transfer:
    def __init__(
        self, session: ServiceSession, path: str, digest: Digest, file: IO[bytes], size: int | None
    ) -> None:
        self._session, self._path, self._digest = session, path, digest
        self._file, self._size = file, size
        self._hash = hashlib.sha256()
        self.offset = 0
        self._ranges, self._coded = True, size is not None

    def run(self) -> None:
        """Until all of it is there and right, or an error."""
        self._take_up()
        fruitless, restarts, best = 0, 0, self.offset
        for _ in range(_MOST_TRIES):
            broken: Failed | None = None
            try:
                if self._whole():
                    return
            except Failed as failed:
                broken = failed
            except _Anew as anew:
                logger.warning("%s: %s is read again from its beginning: %s", self._where, self._digest, anew)
                self._restart()
                # Bytes that are wrong twice are wrong there; of answers that make no sense the next may.
                restarts += 1 if anew.found is None else 2
                if restarts > _MOST_RESTARTS:
                    raise self._given_up(anew) from None
                continue
            fruitless = 0 if self.offset > best else fruitless + 1
            best = max(best, self.offset)
            if fruitless >= self._session.limits.attempts:
                break
            if broken is not None:
                asked = min(broken.wait or 0.0, self._session.limits.retry_after)
                time.sleep(asked + (pause(fruitless) if fruitless else 0.0))
        if broken is None:
            raise ServiceUnavailable(
                f"{self._where}: archive {self._digest} comes in pieces, and no more of it after {self.offset} bytes",
                digest=self._digest,
            )
        if broken.down:
            self._session.circuit.failed(str(broken), probe=False)
        raise broken.error from None

    @property
    def _where(self) -> str:
        return self._session.url

    def _given_up(self, anew: _Anew) -> StoreError:
        if anew.found is not None:
            return CorruptArtifact(
                f"{self._where}: the bytes of archive {self._digest} do not match their name: found {anew.found}, "
                "also when read again; nothing was kept: tell whoever runs the service, or warm it again",
                expected=self._digest,
                found=anew.found,
            )
        return ServiceError(
            f"{self._where}: archive {self._digest} cannot be read: {anew}; nothing was kept",
            digest=self._digest,
        )

    def _take_up(self) -> None:
        """Hash what an earlier download has left in the draft."""
        while chunk := self._file.read(CHUNK):
            self._hash.update(chunk)
            self.offset += len(chunk)
        if self._size is not None and self.offset > self._size:
            self._restart()

    def _restart(self) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._hash, self.offset = hashlib.sha256(), 0

    def _whole(self) -> bool:
        """One try; whether the archive is all there, and right."""
        total = self._size if self.offset and self.offset == self._size else self._once()
        if total is not None and self.offset < total:
            return False
        found = self._hash.hexdigest()
        if found != self._digest:
            self._coded = False
            raise _Anew(f"its bytes hash to {found}", found)
        self._file.flush()
        return True

    def _once(self) -> int | None:
        """One request; the archive's size as far as it is known now."""
        limits = self._session.limits
        self._session.circuit.enter(limits.connect + limits.read)
        if not self._ranges:
            self._restart()
        headers = {"Accept-Encoding": "identity"}
        if self.offset:
            headers |= {"Range": f"bytes={self.offset}-", "If-Range": f'"{self._digest}"'}
        elif self._coded:
            headers = {"Accept-Encoding": "zstd"}
        try:
            with self._session.stream("GET", self._path, headers=headers) as response:
                self._session.circuit.reached()
                return self._receive(response)
        except ServiceError as error:
            # A bucket refuses a signed address that has expired in one of these ways.
            if error.details.get("status") in (400, 403) and self._is_elsewhere(error.details.get("url")):
                raise Failed(error, down=False) from None
            raise

    def _is_elsewhere(self, url: object) -> bool:
        return isinstance(url, str) and origin(url) != origin(self._session.url)

    def _receive(self, response: httpx.Response) -> int | None:
        status = response.status_code
        if status == 416:
            match = _RANGE.match(response.headers.get("Content-Range", ""))
            total = int(match[3]) if match is not None else self._size
            if total is None or total != self.offset:
                raise _Anew(f"of {total} bytes the service has none after {self.offset}")
            return total
        if status == 206:
            stop, total = self._range(response)
            self._write(self._arriving(response), stop)
            return total
        if status != 200:
            raise ServiceError(
                f"GET {shown(str(response.url))} answered {status}, expected 200 or 206", status=status
            )
        # A whole answer, whatever was asked for.
        self._restart()
        coding = response.headers.get("Content-Encoding", "identity").strip().lower()
        if coding == "zstd":
            self._write(_decoded(self._arriving(response)), self._size)
            return self._size
        if coding != "identity":
            raise ServiceError(
                f"GET {shown(str(response.url))} is coded as {coding[:40]!r}, expected the bytes as they are",
                status=status,
            )
        length = response.headers.get("Content-Length", "")
        announced = int(length) if length.isdigit() else None
        if self._size is not None and announced not in (None, self._size):
            raise _Anew(f"the service announces {announced} bytes, the manifest says {self._size}")
        total = announced if self._size is None else self._size
        self._write(self._arriving(response), total)
        return total

    def _range(self, response: httpx.Response) -> tuple[int, int]:
        """Before which byte the answer ends, and the archive's size."""
        text = response.headers.get("Content-Range", "")
        match = _RANGE.match(text)
        if match is not None and match[1] is not None:
            first, last, total = int(match[1]), int(match[2]), int(match[3])
            if first == self.offset <= last < total and self._size in (None, total):
                return last + 1, total
        self._ranges = False
        raise _Anew(f"asked for what follows byte {self.offset}, the service answers {text[:80]!r}")

    def _arriving(self, response: httpx.Response) -> Iterator[bytes]:
        """The pieces of an answer as they are sent: zstd can go on for ever without a byte of the archive."""
        limits, began, first, came = self._session.limits, time.monotonic(), self.offset, 0
        most = _LARGEST if self._size is None else self._size + self._size // 64 + CHUNK
        for chunk in response.iter_raw():
            yield chunk
            came += len(chunk)
            if came > most:
                raise _Anew(f"more than {most} bytes came for the archive")
            seconds = time.monotonic() - began - limits.call
            if seconds > 0 and max(came, self.offset - first) < seconds * limits.slowest:
                slow = (
                    f"{self._where}: archive {self._digest} comes slower than {limits.slowest} bytes a second"
                )
                raise Failed(ServiceUnavailable(slow, digest=self._digest))

    def _write(self, chunks: Iterable[bytes], stop: int | None) -> None:
        most = _LARGEST if stop is None else stop
        for chunk in chunks:
            if self.offset + len(chunk) > most:
                raise _Anew(f"more than the announced {most} bytes came")
            self._file.write(chunk)
            self._hash.update(chunk)
            self.offset += len(chunk)


class _Source:
    """Pieces as a file, for the decoder."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks

    def read(self, size: int) -> bytes:
        """The next piece."""
        return next(self._chunks, b"")


def _decoded(chunks: Iterator[bytes]) -> Iterator[bytes]:
    reader = zstandard.ZstdDecompressor(max_window_size=_WINDOW).stream_reader(
        _Source(chunks),  # type: ignore[arg-type]
        read_across_frames=True,
    )
    try:
        while piece := reader.read1(CHUNK):
            yield piece
    except zstandard.ZstdError as error:
        raise _Anew(f"it is not the zstd that it says it is: {error}") from None
