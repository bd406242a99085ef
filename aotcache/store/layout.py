"""Where things lie in a store, the same on disk and in a bucket."""

from __future__ import annotations

from aotcache.errors import NotStored
from aotcache.types import CacheKey, Digest, is_digest

REFS = "refs"
BLOBS = "blobs"
PINS = "pins"
COLLECTING = "collecting"
"""What a collection has begun to remove, see `store/collect.py`."""

ORIGIN = "origin"
"""Name of the file in a directory of copies: the address of the store that they are from."""

_JSON = ".json"
_REF = "ref"


def refs_of(key: CacheKey) -> str:
    """The folder of a key's refs."""
    return f"{REFS}/{key[:2]}/{key}"


def ref(key: CacheKey, variant: str) -> str:
    """The ref of an entry."""
    return f"{refs_of(key)}/{variant}{_JSON}"


def entry_of(path: str) -> tuple[CacheKey, str] | None:
    """Key and variant of the ref at a path; None if there can be none."""
    _, _, rest = path.partition(f"{REFS}/")
    parts = rest.split("/")
    if len(parts) != 3 or not is_digest(parts[1]) or not parts[2].endswith(_JSON):
        return None
    return CacheKey(parts[1]), parts[2].removesuffix(_JSON)


def blob(digest: Digest) -> str:
    """An archive. Raises NotStored for what is no digest."""
    if not is_digest(digest):
        raise NotStored(f"{digest!r} is not a digest: expected 64 lower-case hex characters")
    return f"{BLOBS}/{digest[:2]}/{digest}"


def digest_of(path: str) -> Digest | None:
    """The digest of the archive at a path; None if there can be none."""
    name = path.rpartition("/")[2]
    return Digest(name) if is_digest(name) and path.endswith(f"{BLOBS}/{name[:2]}/{name}") else None


def pin(what: str) -> str:
    """The pin of a key or digest."""
    return f"{PINS}/{what}{_JSON}"


def pinned(path: str) -> str | None:
    """The key or digest that the object at a path pins; None if it is no pin."""
    name = path.rpartition("/")[2]
    what = name.removesuffix(_JSON)
    return what if name.endswith(_JSON) and is_digest(what) else None


def mark(digest: Digest) -> str:
    """The marker of an archive that is being collected; holds who does it."""
    return f"{COLLECTING}/{digest}"


def aside(digest: Digest | None, who: str) -> str:
    """Where a collection puts an archive, or with None a ref, before it removes it."""
    return f"{COLLECTING}/{digest or _REF}.{who}"


def aside_of(path: str) -> Digest | None:
    """The digest of the archive that was put aside at a path; None if none was."""
    name, _, who = path.rpartition("/")[2].partition(".")
    return Digest(name) if who and is_digest(name) else None


def is_ref_aside(path: str) -> bool:
    """Whether a ref was put aside at a path."""
    return path.rpartition("/")[2].startswith(f"{_REF}.")
