"""The store over objects: `refs/<key[:2]>/<key>/<variant>.json`, `blobs/<digest[:2]>/<digest>`."""

from __future__ import annotations

import hashlib
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from aotcache.config import Settings
from aotcache.errors import CorruptArtifact, ManifestError, NotStored, StoreError
from aotcache.key import KeyParts
from aotcache.manifest import Manifest
from aotcache.passing import late
from aotcache.recall import recall_problem
from aotcache.store import layout
from aotcache.store.base import Entry, Usage
from aotcache.store.clients import CHUNK, Client, Info
from aotcache.store.files import FileClient
from aotcache.store.local import make_dirs
from aotcache.store.pins import LARGEST_PIN, Pin, read_pin
from aotcache.store.recalls import RecallObjects
from aotcache.types import CacheKey, Digest, Mode, Variant

logger = logging.getLogger(__name__)

LARGEST_DOCUMENT = 16 << 20
"""Bytes of a ref, which is read into memory; whoever can write to a bucket can put any there."""

_COMPARED = 200
"""Entries of a bucket that a missing key is compared with: each is a request."""


class ObjectStore:
    """A `Store`; its contract is in `store/base.py`. Holds no state but its client."""

    def __init__(self, url: str, client: Client) -> None:
        self._url = url
        self._client = client
        self._recalls = RecallObjects(url, client)

    def __repr__(self) -> str:
        return f"ObjectStore({self._url!r})"

    @property
    def url(self) -> str:
        """See `Store`."""
        return self._url

    @property
    def own(self) -> bool:
        """See `Store`. A directory with a file `origin` holds copies from there."""
        if isinstance(self._client, FileClient):
            return not self._client.has_name(layout.ORIGIN)
        return self._url.startswith("memory:")

    def require_own(self, manifest: Manifest) -> None:
        """See `Store`. Looks at the ref's file and the folders above it."""
        self._client.trusted_path(layout.ref(manifest.key, str(manifest.variant)))

    def lookup(self, key: CacheKey) -> list[Manifest]:
        """See `Store`."""
        found = []
        for entry in self.variants(key):
            if entry.usable is not None:
                found.append(entry.usable)
            else:
                where = layout.ref(key, entry.variant)
                logger.warning("%s: %s is taken for a miss: %s", self._url, where, entry.problem)
        return found

    def resolve(self, keys: Iterable[CacheKey]) -> dict[CacheKey, list[Manifest]]:
        """See `Store`."""
        return {key: self.lookup(key) for key in dict.fromkeys(keys)}

    def publish(self, manifest: Manifest, archive: Path, *, replace: bool = False) -> bool:
        """See `Store`."""
        check_archive(manifest, archive)
        ref = layout.ref(manifest.key, str(manifest.variant))
        if not replace:
            entry = self.entry(manifest.key, manifest.variant)
            if entry is not None and _stands(entry):
                return False
            # A ref that is a miss to everyone is nobody's loss. Looked at before the
            # archive is put, which may be the very one that the ref lacked.
            replace = entry is not None
        self._put_blob(manifest.digest, archive)
        stored = self._client.put(ref, manifest.document(), create=not replace)
        if stored and not self._claim(manifest.digest):
            self._put_blob(manifest.digest, archive)
        return stored

    def variants(self, key: CacheKey) -> Iterator[Entry]:
        """See `Store`."""
        found = (self._entry(ref) for ref in self._client.list(layout.refs_of(key)))
        return (entry for entry in found if entry is not None)

    def entry(self, key: CacheKey, variant: Variant | str) -> Entry | None:
        """One ref, also one that is a miss; None if there is none."""
        there = self._client.head(layout.ref(key, str(variant)))
        return None if there is None else self._entry(there)

    def put_ref(self, manifest: Manifest, *, replace: bool = False) -> bool:
        """The second half of `publish`: the ref alone, where the archive is stored already.

        Returns:
            As `publish`.

        Raises:
            NotStored: if there is no such archive.
            CorruptArtifact: if the stored one is not of the manifest's size.
            StoreError: if it could not be written.
        """
        size = self.blob_size(manifest.digest)
        if size is None:
            raise NotStored(
                f"store {self._url} has no archive {manifest.digest}; store that before its manifest",
                digest=manifest.digest,
            )
        if size != manifest.size:
            raise CorruptArtifact(
                f"the manifest says that archive {manifest.digest} has {manifest.size} bytes, the stored one has "
                f"{size}; build it again",
                expected=manifest.size,
                found=size,
            )
        if not replace:
            entry = self.entry(manifest.key, manifest.variant)
            if entry is not None and entry.problem is None:
                return False
            replace = entry is not None
        path = layout.ref(manifest.key, str(manifest.variant))
        stored = self._client.put(path, manifest.document(), create=not replace)
        if stored and not self._claim(manifest.digest):
            raise NotStored(
                f"archive {manifest.digest} was collected from {self._url} a moment ago; store it again",
                digest=manifest.digest,
            )
        return stored

    def _claim(self, digest: Digest) -> bool:
        """Say that a ref which was put just now names an archive; whether that is there still.

        A collection that saw no such ref may be removing it: see `store/collect.py`. Without its marker
        it does not, or puts back what it took; what it took before that is seen to be gone here.
        """
        mark = layout.mark(digest)
        if self._client.head(mark) is not None:
            self._client.delete(mark)
        # Opened: what a network file system says of a file may be seconds old, until it is opened.
        first = self._client.chunks(layout.blob(digest), 0, 1)
        return first is not None and sum(map(len, first)) >= 0

    def used(self, digest: Digest) -> None:
        """See `Store`. The time of the archive's file; a bucket only knows when it was written."""
        if isinstance(self._client, FileClient):
            self._client.touch(layout.blob(digest))

    def pins(self) -> Sequence[Pin]:
        """See `Store`."""
        found = ((layout.pinned(info.path), info) for info in self._client.list(layout.PINS))
        return [
            read_pin(what, self._client.get(info.path) if info.size <= LARGEST_PIN else None)
            for what, info in found
            if what is not None
        ]

    def pin(self, what: str, reason: str) -> Pin:
        """See `Store`."""
        made = Pin(what, reason, time.time())
        self._client.put(layout.pin(what), made.to_json(), create=False)
        return made

    def unpin(self, what: str) -> bool:
        """See `Store`."""
        return self._client.delete(layout.pin(what))

    def is_pinned(self, *names: str | None) -> bool:
        """Whether any of these keys and digests is pinned now."""
        return any(self._client.head(layout.pin(name)) is not None for name in names if name is not None)

    @property
    def client(self) -> Client:
        """What keeps the objects, for `store/collect.py`."""
        return self._client

    @property
    def drafts(self) -> Path | None:
        """The folder from which files move into the store without a copy; None for a bucket."""
        return self._client.drafts if isinstance(self._client, FileClient) else None

    def mark_origin(self, url: str) -> None:
        """Say that what lies here are copies from the store at `url`; the first word stands."""
        if self._client.head(layout.ORIGIN) is None:
            self._client.put(layout.ORIGIN, url.encode() + b"\n", create=True)

    def put_blob(self, digest: Digest, archive: Path) -> None:
        """The first half of `publish`: an archive that the caller has hashed.

        The file is the store's from here on: one that lies in `drafts` is moved, not copied.
        """
        self._client.put(layout.blob(digest), archive, create=False, consume=True)

    def blob_size(self, digest: Digest) -> int | None:
        """Bytes of a stored archive, by what the store says of it; None if there is none."""
        found = self._client.head(layout.blob(digest))
        return None if found is None else found.size

    def blob_chunks(self, digest: Digest, start: int, stop: int) -> Iterator[bytes] | None:
        """A part of an archive as it is stored, unchecked; None if there is none."""
        return self._client.chunks(layout.blob(digest), start, stop)

    def blob_url(self, digest: Digest, seconds: float) -> str | None:
        """An address in the bucket that anybody can GET the archive at; None if the store is no bucket."""
        return self._client.signed_url(layout.blob(digest), seconds)

    def fetch(self, digest: Digest, dest: Path) -> None:
        """See `Store`."""
        path = layout.blob(digest)
        self._client.trusted_path(path)
        make_dirs(dest.parent)
        draft = dest.with_name(f".{dest.name}.{uuid.uuid4().hex}")
        try:
            self._read_checked(digest, draft)
            os.replace(draft, dest)
        except OSError as error:
            raise StoreError(f"cannot write {dest}: {error.strerror}", path=str(dest)) from error
        finally:
            draft.unlink(missing_ok=True)

    def blob_path(self, digest: Digest) -> Path | None:
        """See `Store`."""
        path = self._client.trusted_path(layout.blob(digest))
        if path is not None:
            self._read_checked(digest, None)
        return path

    def list(self, *, code: Digest | None = None) -> Iterator[Manifest]:
        """See `Store`."""
        for entry in self.entries():
            found = entry.usable
            if found is not None and (code is None or _code(found) == code):
                yield found

    def near(self, parts: KeyParts, mode: Mode) -> Iterator[Manifest]:
        """See `Store`."""
        refs: Iterable[Info] = self._client.list("refs")
        if not self.own:
            refs = sorted(refs, key=lambda info: info.modified, reverse=True)[:_COMPARED]
        entries = (self._entry(ref) for ref in refs)
        usable = (entry.usable for entry in entries if entry is not None)
        return (manifest for manifest in usable if manifest is not None and manifest.mode == mode)

    def entries(self) -> Iterator[Entry]:
        """See `Store`."""
        for ref in self._client.list("refs"):
            entry = self._entry(ref)
            if entry is not None:
                yield entry

    def delete(self, key: CacheKey, variant: Variant | str) -> bool:
        """See `Store`. Reads every ref: nothing else knows whether another entry names the archive."""
        entry = self.entry(key, variant)
        existed = self.delete_ref(key, variant)
        if entry is not None and entry.manifest is not None:
            digest = entry.manifest.digest
            if not any(e.manifest is not None and e.manifest.digest == digest for e in self.entries()):
                self.delete_blob(digest)
        return existed

    def delete_ref(self, key: CacheKey, variant: Variant | str) -> bool:
        """The first half of `delete`: the ref alone; whether it was there."""
        return self._client.delete(layout.ref(key, str(variant)))

    def delete_blob(self, digest: Digest) -> None:
        """The second half of `delete`: an archive that the caller knows no entry to name."""
        self._client.delete(layout.blob(digest))

    def recalls(self, of: Callable[[str], bool] | None = None) -> Sequence[bytes]:
        """See `Store`."""
        return self._recalls.read(of)

    def put_recall(self, document: bytes, signer: str) -> None:
        """See `Store`."""
        self._recalls.put(document, signer)

    def usage(self) -> Usage:
        """See `Store`."""
        refs = sum(1 for _ in self._client.list("refs"))
        sizes = [info.size for info in self._client.list("blobs")]
        return Usage(refs, len(sizes), sum(sizes))

    def _entry(self, ref: Info) -> Entry | None:
        """What one ref says; None if it vanished meanwhile or is no ref."""
        named = layout.entry_of(ref.path)
        if named is None:
            return None
        key, variant = named
        if ref.size > LARGEST_DOCUMENT:
            why = f"its manifest has {ref.size} bytes, expected at most {LARGEST_DOCUMENT}"
            return Entry(key, variant, None, None, ref.modified, why)
        data = late(lambda: self._client.get(ref.path), ref.path)
        if data is None:
            return None
        try:
            manifest = Manifest.from_json(data, where=f"{self._url}/{ref.path}")
        except ManifestError as error:
            return Entry(key, variant, None, None, ref.modified, str(error))
        problem: str | None = None
        if (manifest.key, str(manifest.variant)) != (key, variant):
            problem = f"it is filed under another name than its own, {manifest.key}/{manifest.variant}"
        place = layout.blob(manifest.digest)
        blob = late(lambda: self._client.head(place), place)
        if blob is None:
            problem = problem or f"its archive {manifest.digest} is gone"
        elif blob.size != manifest.size:
            # Cut off, or without end: nobody has to read it to know.
            problem = problem or (
                f"its archive {manifest.digest} has {blob.size} bytes, the manifest says {manifest.size}"
            )
        return Entry(key, variant, manifest, blob.size if blob else None, ref.modified, problem)

    def _put_blob(self, digest: Digest, archive: Path) -> None:
        path = layout.blob(digest)
        there = self._client.head(path)
        if there is not None and there.size == archive.stat().st_size:
            chunks = self._client.chunks(path)
            if chunks is not None and _digest(chunks)[0] == digest:
                return
        # Bytes that are there and wrong are replaced: this heals the entry.
        self._client.put(path, archive, create=False)

    def _read_checked(self, digest: Digest, draft: Path | None) -> None:
        """Read a blob, into a file or for the check alone; twice if it does not match."""
        path = layout.blob(digest)
        found: Digest | None = None
        for _ in range(2):
            chunks = late(lambda: self._client.chunks(path), path)
            if chunks is None:
                raise NotStored(
                    f"store {self._url} has no archive {digest}; warm again to build it", digest=digest
                )
            found, _size = _digest(chunks, draft)
            if found == digest:
                return
        self._drop(path)
        raise CorruptArtifact(
            f"store {self._url}: the bytes at {path} do not match their name: "
            f"expected {digest}, found {found}, twice; "
            "a copy on this host has been dropped: fetch or warm it again",
            expected=digest,
            found=found,
        )

    def _drop(self, path: str) -> None:
        # Only a copy on this host is ours to drop; a bucket is other people's too.
        if isinstance(self._client, FileClient):
            try:
                self._client.delete(path)
            except StoreError as error:
                logger.warning("%s", error)


def check_archive(manifest: Manifest, archive: Path) -> None:
    """Raise CorruptArtifact if a file is not the archive that a manifest is of, StoreError if it cannot be read."""
    found, size = _measure(archive)
    if (found, size) != (manifest.digest, manifest.size):
        raise CorruptArtifact(
            f"{archive} is not published: its manifest says {manifest.digest} and {manifest.size} bytes, "
            f"the file has {found} and {size} bytes; build it again",
            expected=manifest.digest,
            found=found,
        )


def _stands(entry: Entry) -> bool:
    """Whether an entry is left alone by who publishes another one: a lookup finds it, and nobody recalled it."""
    found = entry.usable
    return found is not None and recall_problem(found, home=Settings().home) is None


def _code(manifest: Manifest) -> Digest | None:
    part = manifest.component("code")
    return None if part is None else part.digest


def _digest(chunks: Iterable[bytes], draft: Path | None = None) -> tuple[Digest, int]:
    """sha256 and size of what is read, written to `draft` on the way."""
    hashed, size = hashlib.sha256(), 0
    if draft is None:
        for chunk in chunks:
            hashed.update(chunk)
            size += len(chunk)
    else:
        with draft.open("wb") as file:
            for chunk in chunks:
                hashed.update(chunk)
                size += len(chunk)
                file.write(chunk)
    return Digest(hashed.hexdigest()), size


def _measure(archive: Path) -> tuple[Digest, int]:
    try:
        with archive.open("rb") as file:
            return _digest(iter(lambda: file.read(CHUNK), b""))
    except OSError as error:
        raise StoreError(f"cannot read archive {archive}: {error.strerror}", path=str(archive)) from error
