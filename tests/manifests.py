"""Manifests for tests of what handles manifests: whole and valid, with no artifact behind."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from aotcache.key import COMPONENTS, Component, KeyParts
from aotcache.manifest import (
    Certificate,
    HostContract,
    InputSlot,
    Manifest,
    Measurement,
    OutputSlot,
    PairContract,
    Provenance,
)
from aotcache.store import open_store
from aotcache.store.layout import ORIGIN
from aotcache.store.objects import ObjectStore
from aotcache.types import Digest, Target, Toolchain

TOOLCHAIN = Toolchain("2.13.0", "c" * 40, None)
HOST = HostContract((), "2.17", "3.4.21", ("libtorch.so",), {})


def make_manifest(
    archive: bytes = b"archive",
    *,
    call: str = "x float32[2, 3]",
    target: str = "cpu:x86_64-avx2",
    toolchain: Toolchain = TOOLCHAIN,
    host: HostContract = HOST,
    **changes: Any,
) -> Manifest:
    parts = KeyParts(tuple(Component(name, (("item", call),)) for name in COMPONENTS))
    digest = Digest(hashlib.sha256(archive).hexdigest())
    manifest = Manifest(
        key=parts.key,
        components=tuple(parts.to_json()),
        target=Target.parse(target),
        toolchain=toolchain,
        region="layers.0",
        mode="train",
        bucket={"seq": 256},
        digest=digest,
        size=len(archive),
        members={"forward.so": digest},
        host=host,
        inputs=(InputSlot("input", "x", "float32", (2, 3), (3, 1), True),),
        outputs=(OutputSlot("float32", (2, 3), (3, 1), True),),
        output_tree="*",
        pair=PairContract((0,), 1, (0,), (0,)),
        content=digest,
        runner="native",
        certificate=Certificate(2, 1e-4, (Measurement("output 0", 1e-7, 2e-7),)),
        provenance=Provenance("2.13.0+cpu", "3.11.7", None, "g++ 12", 1.0, {"export": 0.5}),
    )
    return replace(manifest, **changes)


def write_archive(folder: Path, data: bytes) -> Path:
    path = folder / f"{hashlib.sha256(data).hexdigest()[:12]}.pt2"
    path.write_bytes(data)
    return path


def copies(folder: Path) -> ObjectStore:
    """A directory of copies from elsewhere: no store of the user's own."""
    folder.mkdir(mode=0o700)
    (folder / ORIGIN).write_text("https://cache.example.org")
    store = open_store(folder)
    assert isinstance(store, ObjectStore)
    return store
