"""Which store an address means."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from urllib.parse import unquote

from aotcache.config import Settings
from aotcache.errors import StoreError
from aotcache.store.answers import shown, split
from aotcache.store.base import Store
from aotcache.store.clients import ObstoreClient
from aotcache.store.files import FileClient
from aotcache.store.objects import ObjectStore

BUCKETS = ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss")
"""URL schemes of the buckets that obstore serves."""

SERVICES = ("http", "https")


def open_store(url: str | os.PathLike[str] | None = None, *, tier: bool = True) -> Store:
    """Open a store; makes nothing, asks for nothing and, for a directory, touches nothing.

    Args:
        url: `file:///path`, a plain path, a bucket (`s3://bucket/prefix`, `gs://`, `az://`), a
            service (`http://`, `https://`) or `memory:///`, which ends with the process.
            Default: the `store` setting.
        tier: Keep what comes from a bucket or a service on this host, below `home`, and use it
            from there; without, the remote store alone.

    Raises:
        StoreError: for an address of another kind, or one that cannot be opened.
        ConfigError: if a service's token cannot be used.
    """
    current = Settings()
    text = current.store if url is None else os.fspath(url)
    if "://" not in text:
        return _directory(Path(text).expanduser().absolute(), current, text)
    parts = split(text)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path:
            raise StoreError(f"store {shown(text)!r}: expected file:///absolute/path, with three slashes")
        return _directory(Path(unquote(parts.path)), current, text)
    if parts.scheme == "memory":
        return ObjectStore(text, ObstoreClient(text))
    remote: Store
    if parts.scheme in BUCKETS:
        if parts.password is not None or parts.query:
            raise StoreError(
                f"store {parts.scheme}://{parts.hostname}{parts.path}: the address holds a password or a query, "
                "which would end up in logs; give credentials by the variables of the bucket's own tools instead"
            )
        remote = ObjectStore(text, ObstoreClient(text))
    elif parts.scheme in SERVICES:
        from aotcache.store.http import HttpStore

        remote = HttpStore(text)
    else:
        known = ", ".join(f"{scheme}://" for scheme in ("memory", *BUCKETS, *SERVICES))
        raise StoreError(
            f"store {shown(text)!r}: scheme {parts.scheme!r} is not supported; "
            f"expected a path, file:///path or one of {known}"
        )
    if not tier:
        return remote
    from aotcache.store.tiered import TieredStore

    return TieredStore(_directory(_tier(remote.url, current), current), remote, current.locks)


def directory(root: Path) -> ObjectStore:
    """The store in a directory, which may have any name."""
    return _directory(root, Settings())


def tier_folder(url: str) -> Path:
    """Where this host keeps its copies of a store elsewhere.

    Raises:
        StoreError: for an address of which none are kept.
    """
    remote = open_store(url, tier=False)
    if isinstance(remote, ObjectStore) and remote.url.startswith(("file:", "memory:")):
        raise StoreError(f"store {remote.url} is on this host: no copies are kept of it", url=remote.url)
    return _tier(remote.url, Settings())


def _tier(url: str, settings: Settings) -> Path:
    return settings.home / "tiers" / hashlib.sha256(url.encode()).hexdigest()[:16]


def _directory(root: Path, settings: Settings, text: str | None = None) -> ObjectStore:
    # Not by Path, which raises where this user may not look: reading says that, with the reason.
    if os.path.exists(root) and not os.path.isdir(root):
        raise StoreError(
            f"store {text or str(root)!r}: {root} is a file, expected a directory, or a path to make one at"
        )
    return ObjectStore(root.as_uri(), FileClient(root, trust_shared=settings.trust_shared_store))
