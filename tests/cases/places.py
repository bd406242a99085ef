"""The kinds of stores that a worker can meet, each a real one: requirement cases run over all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from aotcache.manifest import Manifest
from aotcache.runtime import registry
from aotcache.store import ObjectStore, open_store
from aotcache.store.base import Store
from aotcache.store.session import session_for
from aotcache.store.tiered import TieredStore
from aotcache.trust import SigningKey, TrustedKeys, sign
from aotcache.types import Digest
from tests.services.line import line_to
from tests.services.s3 import S3
from tests.services.serving import Serving

REMOTE = ("bucket", "service", "copies of a bucket", "copies of a service")
"""`copies` are what a host has in its tier while the store that they are from is out of reach."""

KINDS = ("own directory", *REMOTE)


@dataclass(frozen=True)
class Place:
    """A store as a worker opens it, which holds what the test has put there.

    Attributes:
        kind: One of `KINDS`.
        url: What the worker is given.
        home: The worker's AOTCACHE_HOME; nothing is unpacked there yet.
        behind: The objects themselves: those of the store, or the copies.
        environment: Variables that lead another process there.
    """

    kind: str
    url: str
    home: Path
    behind: ObjectStore
    environment: Mapping[str, str]

    def left(self) -> list[str]:
        """Files that came of archives on this host: unpacked, or copied where there were no copies before."""
        found = [self.home.glob("unpacked/**/*")]
        if not self.kind.startswith("copies"):
            found += [self.home.glob(f"tiers/*/{part}/**/*") for part in ("blobs", "tmp")]
        return [str(path) for paths in found for path in paths if path.is_file()]


class Places:
    """Makes them. One bucket server and one service are there for all.

    Args:
        s3: Has the buckets.
        service: Trusts `key`.
        key: Signs what goes anywhere but into the user's own directory.
    """

    def __init__(self, s3: S3, service: Serving, key: SigningKey) -> None:
        self._s3, self._service, self._key = s3, service, key

    @contextmanager
    def place(
        self,
        kind: str,
        folder: Path,
        source: str,
        manifests: Iterable[Manifest],
        change: Callable[[Manifest], Manifest] = lambda manifest: manifest,
    ) -> Iterator[Place]:
        """A store of a kind, and this process as a host of its own that uses it.

        Args:
            kind: One of `KINDS`.
            folder: For the host, and for a store of its own.
            source: The store that archives are from.
            manifests: What the store is to hold.
            change: Applied to each before it is signed.
        """
        origin = open_store(source)
        archives = {manifest.digest: origin.blob_path(manifest.digest) for manifest in manifests}
        wanted = [change(manifest) for manifest in manifests]
        own = {"AOTCACHE_HOME": str(folder / "home"), "AOTCACHE_CONFIG_HOME": str(folder / "config")}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in own.items():
                patch.setenv(name, value)
            # What this process has opened from elsewhere does not count here.
            patch.setattr(registry, "_opened", {})
            TrustedKeys(folder / "config" / "trusted").add(self._key.public, "builder")
            if kind == "own directory":
                store = open_store(folder / "store")
                assert isinstance(store, ObjectStore)
                _fill(store, wanted, archives)
                yield Place(kind, store.url, folder / "home", store, own)
                return
            bucket = kind.endswith("bucket")
            signed = [sign(manifest, self._key) for manifest in wanted]
            with line_to(self._s3.url if bucket else self._service.url) as line:
                environment = {**self._s3.environment, "AWS_ENDPOINT_URL": line.url} if bucket else {}
                for name, value in environment.items():
                    patch.setenv(name, value)
                url = self._s3.bucket() if bucket else line.url
                behind = open_store(url if bucket else self._service.store, tier=False)
                _fill(open_store(url, tier=False), signed, archives)
                if kind.startswith("copies"):
                    tiered = open_store(url)
                    assert isinstance(tiered, TieredStore)
                    for manifest in signed:
                        assert manifest in tiered.lookup(manifest.key)
                        tiered.blob_path(manifest.digest)
                    behind = tiered.local
                    line.close()
                assert isinstance(behind, ObjectStore)
                try:
                    yield Place(kind, url, folder / "home", behind, {**own, **environment})
                finally:
                    if not bucket:
                        session_for(url).close()
                        self._forget(signed)

    def _forget(self, manifests: Iterable[Manifest]) -> None:
        service = open_store(self._service.url, tier=False)
        for manifest in manifests:
            service.delete(manifest.key, manifest.variant)


def _fill(store: Store, manifests: Iterable[Manifest], archives: Mapping[Digest, Path | None]) -> None:
    for manifest in manifests:
        archive = archives[manifest.digest]
        assert archive is not None
        assert store.publish(manifest, archive, replace=True)
