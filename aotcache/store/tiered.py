"""A remote store with this host's copies in front of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TypeVar

from aotcache.config import Settings
from aotcache.errors import AotcacheError, CorruptArtifact, NotStored, ServiceUnavailable, StoreError
from aotcache.key import KeyParts
from aotcache.manifest import Manifest
from aotcache.store.base import Entry, Store, Usage
from aotcache.store.circuit import circuit_for
from aotcache.store.http import HttpStore
from aotcache.store.local import make_dirs, once
from aotcache.store.objects import ObjectStore
from aotcache.store.pins import Pin
from aotcache.trust import trust_problem
from aotcache.types import CacheKey, Digest, Mode, Variant, sha256

logger = logging.getLogger(__name__)

T = TypeVar("T")


class TieredStore:
    """A `Store`; its contract is in `store/base.py`. Any number of threads and processes share the copies.

    What is there, the remote store says; while it is out of reach, the copies. An archive is
    fetched once for all processes of this host, and kept with the manifests that led to it.
    Copies that do not match their digest are dropped and fetched again. Nothing here is the
    user's own: the copies are verified like the originals.

    Args:
        local: A directory for the copies, of this remote store's alone.
        remote: Where they come from.
        locks: The directory of lock files, on a local disk.
    """

    def __init__(self, local: ObjectStore, remote: Store, locks: Path) -> None:
        self.local, self.remote = local, remote
        self._locks = locks
        self._seen: dict[Digest, dict[tuple[CacheKey, str], Manifest]] = {}
        self._kept: set[tuple[CacheKey, str, bytes]] = set()

    def __repr__(self) -> str:
        return f"TieredStore({self.local!r}, {self.remote!r})"

    @property
    def url(self) -> str:
        """See `Store`: the remote one's."""
        return self.remote.url

    @property
    def own(self) -> bool:
        """See `Store`."""
        return False

    def require_own(self, manifest: Manifest) -> None:
        """See `Store`. Nothing here is the user's own."""

    def lookup(self, key: CacheKey) -> list[Manifest]:
        """See `Store`. Variants that only this host has are found as well."""
        return self.resolve([key])[key]

    def resolve(self, keys: Iterable[CacheKey]) -> dict[CacheKey, list[Manifest]]:
        """See `Store`."""
        wanted = list(dict.fromkeys(keys))
        copies = self.local.resolve(wanted)
        found = self._reachable(lambda: self._asked(wanted, copies))
        if found is None:
            return copies
        answer = {}
        for key in wanted:
            there = {str(manifest.variant): manifest for manifest in found[key]}
            only_here = [m for m in copies[key] if _outlasts(m, there.get(str(m.variant)))]
            for manifest in there.values():
                self._remember(manifest)
            answer[key] = [*there.values(), *only_here]
        return answer

    def publish(
        self,
        manifest: Manifest,
        archive: Path,
        *,
        replace: bool = False,
        lease: tuple[str, int] | None = None,
    ) -> bool:
        """See `Store`. To the remote store first; a copy that cannot be kept is only a warning.

        Args:
            manifest: As there.
            archive: As there.
            replace: As there.
            lease: See `HttpStore.publish`; for a service alone.
        """
        if lease is None:
            stored = self.remote.publish(manifest, archive, replace=replace)
        elif isinstance(self.remote, HttpStore):
            stored = self.remote.publish(manifest, archive, replace=replace, lease=lease)
        else:
            raise StoreError(f"store {self.url} knows no leases; only a service does", url=self.url)
        if stored:
            try:
                self.local.mark_origin(self.url)
                self.local.publish(manifest, archive, replace=True)
            except StoreError as error:
                logger.warning("%s has it, but no copy could be kept here: %s", self.url, error)
        return stored

    def fetch(self, digest: Digest, dest: Path) -> None:
        """See `Store`."""
        self.blob_path(digest)
        self.local.fetch(digest, dest)

    def blob_path(self, digest: Digest) -> Path | None:
        """See `Store`. Fetched by whichever process comes first; the others wait for it."""
        path = once(
            self._locks,
            f"{self.local.url} {digest}",
            Settings().lock_seconds,
            ready=lambda: self._copy(digest),
            make=lambda: self._fetched(digest),
        )
        self._keep_manifests(digest)
        return path

    def variants(self, key: CacheKey) -> Iterator[Entry]:
        """See `Store`; the copies while the remote store is out of reach."""
        return self._each(lambda store: store.variants(key))

    def list(self, *, code: Digest | None = None) -> Iterator[Manifest]:
        """See `Store`; the copies while the remote store is out of reach."""
        for manifest in self._each(lambda store: store.list(code=code)):
            self._remember(manifest)
            yield manifest

    def near(self, parts: KeyParts, mode: Mode) -> Iterator[Manifest]:
        """See `Store`; the copies while the remote store is out of reach."""
        return self._each(lambda store: store.near(parts, mode))

    def entries(self) -> Iterator[Entry]:
        """See `Store`; the copies while the remote store is out of reach."""
        for entry in self._each(lambda store: store.entries()):
            if entry.usable is not None:
                self._remember(entry.usable)
            yield entry

    def _each(self, of: Callable[[Store], Iterator[T]]) -> Iterator[T]:
        def begun() -> tuple[list[T], Iterator[T]]:
            # Some ask when they are called, others when the first item is wanted.
            found = iter(of(self.remote))
            return list(islice(found, 1)), found

        answered = self._reachable(begun)
        return of(self.local) if answered is None else chain(*answered)

    def delete(self, key: CacheKey, variant: Variant | str) -> bool:
        """See `Store`. From both."""
        there = self.remote.delete(key, variant)
        here = self.local.delete(key, variant)
        return there or here

    def used(self, digest: Digest) -> None:
        """See `Store`. Of the copy; a service counts what it is asked for by itself."""
        self.local.used(digest)

    def pins(self) -> Sequence[Pin]:
        """See `Store`: the remote one's. Copies can be fetched again, no pin keeps them."""
        return self.remote.pins()

    def pin(self, what: str, reason: str) -> Pin:
        """See `Store`."""
        return self.remote.pin(what, reason)

    def unpin(self, what: str) -> bool:
        """See `Store`."""
        return self.remote.unpin(what)

    def recalls(self, of: Callable[[str], bool] | None = None) -> Sequence[bytes]:
        """See `Store`. The remote store's alone: what they say, `Recalls` keeps for all of this host."""
        found = self._reachable(lambda: self.remote.recalls(of))
        if found is None:
            raise ServiceUnavailable(
                f"{self.url} is out of reach, its recall lists are not known", url=self.url
            )
        return found

    def put_recall(self, document: bytes, signer: str) -> None:
        """See `Store`. To the remote store."""
        self.remote.put_recall(document, signer)

    def put_ref(self, manifest: Manifest, *, replace: bool = False) -> bool:
        """See `Store`. To the remote store; the copy follows when it is looked up."""
        return self.remote.put_ref(manifest, replace=replace)

    def usage(self) -> Usage:
        """See `Store`; of the copies while the remote store is out of reach."""
        return self._reachable(self.remote.usage) or self.local.usage()

    def _reachable(self, ask: Callable[[], T]) -> T | None:
        """What the remote store answers; None, and one warning for each outage, if it is out of reach."""
        circuit = circuit_for(self.remote.url)
        try:
            found = ask()
        except ServiceUnavailable as error:
            circuit.announce(f"only what this host has is used for a while: {error}")
            return None
        circuit.reached()
        return found

    def _asked(
        self, wanted: Sequence[CacheKey], copies: Mapping[CacheKey, Sequence[Manifest]]
    ) -> Mapping[CacheKey, Sequence[Manifest]]:
        """The remote store's answer; a service need not send what lies here already."""
        if not isinstance(self.remote, HttpStore):
            return self.remote.resolve(wanted)
        known = {sha256(m.document()): m for manifests in copies.values() for m in manifests}
        return self.remote.resolve(wanted, known=known)

    def _remember(self, manifest: Manifest) -> None:
        self._seen.setdefault(manifest.digest, {})[manifest.key, str(manifest.variant)] = manifest

    def _copy(self, digest: Digest) -> Path | None:
        if self.local.blob_size(digest) is None:
            return None
        try:
            return self.local.blob_path(digest)
        except (NotStored, CorruptArtifact):
            # Bytes that were wrong are dropped by now.
            return None

    def _fetched(self, digest: Digest) -> Path:
        self.local.mark_origin(self.url)
        folder = self.local.drafts
        assert folder is not None
        make_dirs(folder)
        # One name for all processes and times, so that a download which was broken off goes on.
        draft = folder / f"{digest}.pt2"
        try:
            self.remote.fetch(digest, draft)
            self.local.put_blob(digest, draft)
        finally:
            draft.unlink(missing_ok=True)
        path = self.local.blob_path(digest)
        assert path is not None
        return path

    def _keep_manifests(self, digest: Digest) -> None:
        """Keep the manifests that led to an archive, so that they are found without the remote store."""
        for manifest in list(self._seen.get(digest, {}).values()):
            mark = (manifest.key, str(manifest.variant), manifest.document())
            if mark in self._kept:
                continue
            try:
                entry = self.local.entry(manifest.key, manifest.variant)
                copy = None if entry is None else entry.usable
                if copy is None or (copy.document() != mark[2] and not _outlasts(copy, manifest)):
                    self.local.put_ref(manifest, replace=True)
            except AotcacheError as error:
                logger.warning("no copy of manifest %s/%s could be kept: %s", *mark[:2], error)
            self._kept.add(mark)


def _outlasts(copy: Manifest, original: Manifest | None) -> bool:
    """Whether a copy is still wanted beside what the remote store has under its name: there is nothing, or
    something else that no trusted key has signed, which must neither hide nor replace what one has."""
    if original is None:
        return True
    if original.document() == copy.document():
        return False
    return not _vouched(original) and _vouched(copy)


def _vouched(manifest: Manifest) -> bool:
    return trust_problem(manifest, own=False, config=Settings()) is None
