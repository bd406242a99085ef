"""Stores: keys to manifests, digests to bytes, wherever the bytes are."""

from __future__ import annotations

from aotcache.store.base import Entry, Store, Usage
from aotcache.store.objects import ObjectStore
from aotcache.store.opening import open_store

__all__ = ["Entry", "ObjectStore", "Store", "Usage", "open_store"]
