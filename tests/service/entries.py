"""Shorthands of the service's tests."""

from __future__ import annotations

from typing import Any

from sqlalchemy import text

from aotcache.db.engine import Database
from aotcache.manifest import Manifest
from aotcache.service.index import Index
from aotcache.types import CacheKey
from tests.manifests import make_manifest

KEY = CacheKey("ab" * 32)
VARIANT = "cpu-x86_64-avx2+torch2.13.0-cccccccc-cpu"
OTHER = "cuda-sm_90+torch2.13.0-cccccccc-cu12.8"


def enter(index: Index, archive: bytes = b"archive", **changes: Any) -> Manifest:
    """Index a manifest that no store has."""
    manifest = make_manifest(archive, **changes)
    index.add(manifest, manifest.document(), modified=5.0)
    return manifest


def run_out(database: Database) -> None:
    """Every lease that is held has run out a second ago."""
    with database.session(write=True) as session:
        session.execute(text("UPDATE leases SET expires = expires - 100000"))
