"""Entries whose right bytes anybody can make again from what their manifest says."""

from __future__ import annotations

import hashlib
import io
import random
import zipfile
from pathlib import Path

from aotcache.config import Settings
from aotcache.manifest import Manifest
from aotcache.trust import SigningKey, sign, signing_key_path
from aotcache.types import Digest
from tests.manifests import make_manifest

MEMBERS = ("data/aotinductor/forward/model.so", "data/aotinductor/forward/meta.json")


def archive_of(seed: int, size: int) -> bytes:
    """A zip file with one library of `size` random bytes, always the same for a seed."""
    return _packed(_members(seed, size))


def _members(seed: int, size: int) -> dict[str, bytes]:
    data = random.Random(seed).randbytes(size)
    return {MEMBERS[0]: data, MEMBERS[1]: b'{"seed": %d}' % seed}


def _packed(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as package:
        for name, data in members.items():
            package.writestr(zipfile.ZipInfo(name), data)
    return out.getvalue()


def manifest_of(seed: int, size: int, name: str | None = None) -> Manifest:
    """The manifest of `archive_of(seed, size)`.

    Args:
        seed, size: As there; both are in the manifest's region.
        name: Entries of one name have one key. Default: the seed.
    """
    members = _members(seed, size)
    return make_manifest(
        _packed(members),
        call=name or f"seed {seed}",
        region=f"entry-{seed}-{size}",
        mode="infer",
        pair=None,
        members={name: Digest(hashlib.sha256(data).hexdigest()) for name, data in members.items()},
    )


def right_archive(manifest: Manifest) -> bytes:
    """The bytes that an entry must have, by the region of its manifest."""
    _, seed, size = manifest.region.split("-")
    return archive_of(int(seed), int(size))


def written(folder: Path, seed: int, size: int) -> Path:
    """The archive as a file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{seed}-{size}.pt2"
    if not path.exists():
        path.write_bytes(archive_of(seed, size))
    return path


def signed(manifest: Manifest) -> Manifest:
    """With the signature of the key of this process's config home."""
    return sign(manifest, SigningKey.load(signing_key_path(Settings())))
