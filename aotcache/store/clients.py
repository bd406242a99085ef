"""The few operations that a store needs from whatever keeps its objects.

`ObstoreClient` does them on every kind of bucket that obstore knows. Directories
have a client of their own in `files.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from aotcache.errors import ServiceUnavailable, StoreError
from aotcache.store.circuit import circuit_for

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import ObjectStore as Bucket

CHUNK = 1 << 20
"""Bytes read at a time."""

_TRIES = {"max_retries": 3, "retry_timeout": timedelta(seconds=20)}
"""Of one request to a bucket. obstore's own timeouts are 5 s for a connection and 30 s for a request."""

_TRIES_SECONDS = 60.0
_LONGEST_CAUSE = 1000

_OUT_OF_REACH = re.compile(r"HTTP error: |status code: (?:5\d\d|429|408) ")
_QUERY = re.compile(r"(https?://[^\s?]*)\?\S*")
_ANSWER = re.compile(r"(status code: \d{3} [^:]{0,60}):.*", re.DOTALL)
_CODE = re.compile(r"<Code>([A-Za-z]{1,60})</Code>")


@dataclass(frozen=True, slots=True)
class Info:
    """One object: its path in the store, bytes, and seconds since the epoch.

    The tag, where the store has such a thing, is another one after every write.
    """

    path: str
    size: int
    modified: float
    tag: str = ""


class Client(Protocol):
    """Objects by `/`-separated path. Absence is a value; anything else a StoreError."""

    def get(self, path: str) -> bytes | None:
        """All bytes of a small object."""

    def chunks(self, path: str, start: int = 0, stop: int | None = None) -> Iterator[bytes] | None:
        """The bytes of a large object, or those from `start` to before `stop`, piece by piece."""

    def head(self, path: str) -> Info | None:
        """Its size and time."""

    def put(self, path: str, source: bytes | Path, *, create: bool, consume: bool = False) -> bool:
        """Write an object whole or not at all, to last.

        With `create`, an object that is there is left alone and the answer is False. With
        `consume`, a file is the client's to move into its place, and may be gone afterwards.
        """

    def list(self, prefix: str) -> Iterator[Info]:
        """Every object below a folder, in the order of paths."""

    def delete(self, path: str) -> bool:
        """Remove an object; whether it was there."""

    def move(self, path: str, to: str, *, create: bool = False) -> bool:
        """Give an object another path; whether it was there.

        In a directory there is no moment with both or neither; in a bucket there is one with both.
        With `create`, what is at the new path already is left alone, and the old one removed.
        """

    def trusted_path(self, path: str) -> Path | None:
        """The file that is the object, if it is one on this host.

        Raises:
            RejectedArtifact: if other users could have written it.
        """

    def signed_url(self, path: str, seconds: float) -> str | None:
        """An address that anybody can GET the object at for a while; None where there are none."""


@cache
def _obstore_process() -> int:
    """The process that used obstore first, also when asked in one forked from it.

    obstore's threads do not survive a fork: a call in the child waits for them for ever.
    """
    return os.getpid()


class ObstoreClient:
    """Objects in a bucket (S3, GCS, Azure) or in this process's memory."""

    def __init__(self, url: str) -> None:
        from obstore.store import from_url

        self._url = url
        with self._typed("open", asks=False):
            self._bucket: Bucket = from_url(url, retry_config=_TRIES)  # type: ignore[call-overload]

    def get(self, path: str) -> bytes | None:
        """See `Client`."""
        import obstore

        with self._typed(path):
            try:
                return bytes(obstore.get(self._bucket, path).bytes())
            except FileNotFoundError:
                return None

    def chunks(self, path: str, start: int = 0, stop: int | None = None) -> Iterator[bytes] | None:
        """See `Client`."""
        import obstore

        options: GetOptions = {}
        if stop is not None:
            options = {"range": (start, stop)}
        elif start:
            options = {"range": {"offset": start}}
        with self._typed(path):
            try:
                stream = obstore.get(self._bucket, path, options=options).stream(min_chunk_size=CHUNK)
            except FileNotFoundError:
                return None
        return self._read(path, iter(stream))

    def _read(self, path: str, stream: Iterator[bytes]) -> Iterator[bytes]:
        while True:
            with self._typed(path):
                chunk = next(stream, None)
            if chunk is None:
                return
            yield bytes(chunk)

    def head(self, path: str) -> Info | None:
        """See `Client`."""
        import obstore

        with self._typed(path):
            try:
                meta = obstore.head(self._bucket, path)
            except FileNotFoundError:
                return None
        return Info(path, meta["size"], meta["last_modified"].timestamp())

    def put(self, path: str, source: bytes | Path, *, create: bool, consume: bool = False) -> bool:
        """See `Client`."""
        import obstore
        from obstore.exceptions import AlreadyExistsError

        with self._typed(path):
            try:
                # A conditional put has to be a single request.
                obstore.put(
                    self._bucket,
                    path,
                    source,
                    mode="create" if create else "overwrite",
                    use_multipart=False if create else None,
                )
            except (AlreadyExistsError, FileExistsError):
                return False
            except FileNotFoundError:
                raise StoreError(
                    f"store {self._url}: {path} cannot be written: there is no such bucket, or the file to "
                    "write has gone; make the bucket, or correct the address",
                    url=self._url,
                    path=path,
                ) from None
        return True

    def list(self, prefix: str) -> Iterator[Info]:
        """See `Client`."""
        import obstore

        found = []
        with self._typed(prefix):
            for batch in obstore.list(self._bucket, prefix):
                found += [
                    Info(m["path"], m["size"], m["last_modified"].timestamp(), m["e_tag"] or "")
                    for m in batch
                ]
        yield from sorted(found, key=lambda info: info.path)

    def delete(self, path: str) -> bool:
        """See `Client`."""
        import obstore

        # Buckets do not say whether what they deleted was there.
        existed = self.head(path) is not None
        with self._typed(path):
            try:
                obstore.delete(self._bucket, path)
            except FileNotFoundError:
                return False
        return existed

    def move(self, path: str, to: str, *, create: bool = False) -> bool:
        """See `Client`. Copies within the bucket, which is no request that every bucket can make conditional."""
        import obstore

        if not create or self.head(to) is None:
            with self._typed(path):
                try:
                    obstore.copy(self._bucket, path, to)
                except FileNotFoundError:
                    return False
        with self._typed(path):
            try:
                obstore.delete(self._bucket, path)
            except FileNotFoundError:
                return False
        return True

    def trusted_path(self, path: str) -> Path | None:
        """None: the bytes are elsewhere."""
        return None

    def signed_url(self, path: str, seconds: float) -> str | None:
        """See `Client`. None for the memory of this process."""
        import obstore
        from obstore.store import AzureStore, GCSStore, S3Store

        if not isinstance(self._bucket, AzureStore | GCSStore | S3Store):
            return None
        with self._typed(path, asks=False):
            return obstore.sign(self._bucket, "GET", path, timedelta(seconds=seconds))

    @contextmanager
    def _typed(self, path: str, *, asks: bool = True) -> Iterator[None]:
        """Turn obstore's errors into ours; `asks` says whether the bucket is asked for anything."""
        from obstore.exceptions import BaseError

        first = _obstore_process()
        if os.getpid() != first:
            raise StoreError(
                f"store {self._url} cannot be used in process {os.getpid()}, which was forked from process "
                f"{first} after that had used a bucket; start it with the spawn or forkserver method instead",
                url=self._url,
            )
        circuit = circuit_for(self._url) if asks else None
        probe = circuit is not None and circuit.enter(_TRIES_SECONDS)
        out_of_reach = False
        try:
            yield
        except (BaseError, OSError, ValueError) as error:
            if isinstance(error, FileNotFoundError):
                raise
            cause = _cause(str(error))
            message = (
                f"store {self._url}: {path}: {cause}; check the address, the credentials and the network"
            )
            if _OUT_OF_REACH.search(cause) is None:
                raise StoreError(message, url=self._url, path=path) from None
            out_of_reach = True
            if circuit is not None:
                circuit.failed(message, probe=probe)
            raise ServiceUnavailable(message, url=self._url, path=path) from None
        finally:
            if circuit is not None and not out_of_reach:
                circuit.reached()


def _cause(text: str) -> str:
    """What obstore says went wrong, without the query of any address and without the body of a bucket's answer,
    which can repeat the signature of the request. Of the body, S3's code for the error is left."""
    shown = _QUERY.sub(r"\1", text.partition("\n\nDebug source:")[0])
    code = _CODE.search(shown)
    return _ANSWER.sub(rf"\1 ({code[1]})" if code else r"\1", shown)[:_LONGEST_CAUSE]
