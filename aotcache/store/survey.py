"""What lies in a store, as candidates for a collection. Reads every ref, and no archive."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from aotcache.envelope import MANIFEST_TYPE
from aotcache.errors import ManifestError
from aotcache.manifest import SCHEMA, Manifest
from aotcache.store import layout
from aotcache.store.clients import Client, Info
from aotcache.store.evict import Candidate, Held
from aotcache.store.objects import LARGEST_DOCUMENT
from aotcache.types import CacheKey, Digest, is_digest, sha256

T = TypeVar("T")

_HEX64 = re.compile(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
_BASE64 = re.compile(rb"[A-Za-z0-9+/]{64,}={0,2}")
_NAMES = {field.name for field in fields(Manifest)} | {"unsigned_sha256"}
_THREADS = 8
_BATCH = 256
"""Documents that are in memory at once."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What lies in a store.

    Attributes:
        candidates: Entries, and archives that no ref names.
        documents: sha256 of the ref of each entry, as it was read.
        archives: Every archive there is.
        unreadable: Why each ref that cannot be read cannot, by its path.
        marked: Archives that a collection had begun to remove, and when.
    """

    candidates: list[Candidate]
    documents: dict[tuple[CacheKey, str], Digest]
    archives: frozenset[Digest]
    unreadable: dict[str, str]
    marked: dict[Digest, float]


def survey(client: Client, place: str) -> Survey:
    """Look at all of a store.

    Args:
        client: What keeps its objects.
        place: What to call it in the candidates.

    Raises:
        StoreError: if it cannot be read.
    """
    marked = {
        Digest(name): info.modified
        for info in client.list(layout.COLLECTING)
        if is_digest(name := info.path.rpartition("/")[2])
    }
    # Refs before archives: an archive is there before its ref is.
    refs = list(_read_refs(client, place))
    blobs = {d: info for info in client.list(layout.BLOBS) if (d := layout.digest_of(info.path)) is not None}
    unclear = frozenset().union(*(ref.words for ref in refs if ref.problem is not None))
    candidates, named = [], set[Digest]()
    for ref in refs:
        entry = ref.candidate
        if entry is None:
            continue
        if entry.digest is not None:
            named.add(entry.digest)
            blob = blobs.get(entry.digest)
            entry = replace(
                entry,
                size=None if blob is None else blob.size,
                # An archive that is old can have been published under another key just now.
                used=entry.used if blob is None else max(blob.modified, entry.used),
                held="unclear" if entry.digest in unclear else entry.held,
            )
        candidates.append(entry)
    for digest, blob in blobs.items():
        if digest not in named:
            candidates.append(
                Candidate(
                    "archive",
                    None,
                    "",
                    digest,
                    blob.size,
                    blob.modified,
                    place,
                    "unclear" if digest in unclear else None,
                    resumed=digest in marked,
                )
            )
    return Survey(
        candidates,
        {ref.entry: ref.document for ref in refs if ref.entry is not None},
        frozenset(blobs),
        {ref.path: ref.problem for ref in refs if ref.problem is not None},
        marked,
    )


def still_named(client: Client, digests: frozenset[Digest]) -> set[Digest]:
    """Those of the archives that any ref, whatever its format, could name now."""
    found = set[Digest]()
    # Another collection may have put a ref aside by mistake, and be about to put it back.
    for folder in (layout.COLLECTING, layout.REFS, layout.COLLECTING):
        for info, data in _documents(client, folder):
            if folder == layout.REFS or layout.is_ref_aside(info.path):
                found |= digests & words(data)
    return found


def words(document: bytes) -> set[Digest]:
    """Every digest or key that stands in a document, also in what it holds in base64.

    More than what it means to name, and never less, also where a newer release has written it.
    """
    texts = [document]
    for text in _BASE64.findall(document):
        try:
            texts.append(base64.b64decode(text + b"=" * (-len(text) % 4)))
        except binascii.Error:
            continue
    return {Digest(word.decode()) for text in texts for word in _HEX64.findall(text)}


@dataclass(frozen=True, slots=True)
class _Ref:
    """One object of `refs/`. `words` and `problem` are of one that cannot be read, or is none of ours."""

    path: str
    document: Digest
    candidate: Candidate | None
    problem: str | None = None
    words: frozenset[Digest] = frozenset()

    @property
    def entry(self) -> tuple[CacheKey, str] | None:
        """Key and variant that its name says."""
        return layout.entry_of(self.path)


def _read_refs(client: Client, place: str) -> Iterator[_Ref]:
    for info, data in _documents(client, layout.REFS):
        named = layout.entry_of(info.path)
        document = sha256(data)
        if named is None:
            yield _Ref(info.path, document, None, "it has no name of a ref", frozenset(words(data)))
            continue
        key, variant = named
        try:
            manifest = Manifest.from_json(data, where=info.path)
        except ManifestError as error:
            held: Held | None = "newer" if is_newer(data) else None
            entry = Candidate("entry", key, variant, None, None, info.modified, place, held, str(error))
            yield _Ref(info.path, document, entry, str(error), frozenset(words(data)))
            continue
        entry = Candidate(
            "entry",
            key,
            variant,
            manifest.digest,
            None,
            info.modified,
            place,
            what=" ".join((manifest.region or "(whole drafter)", manifest.mode, _bucket(manifest))),
        )
        yield _Ref(info.path, document, entry)


def _bucket(manifest: Manifest) -> str:
    return ",".join(f"{name}={size}" for name, size in sorted(manifest.bucket.items()))


def is_newer(data: bytes) -> bool:
    """Whether an unreadable ref is one that a newer release wrote, and not a broken one."""
    try:
        found: Any = json.loads(data)
        if isinstance(found, dict) and "payloadType" in found:
            if found["payloadType"] != MANIFEST_TYPE:
                return True
            found = json.loads(base64.b64decode(found["payload"]))
        schema, named = found["schema"], set(found)
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
    return not isinstance(schema, int) or schema > SCHEMA or not named <= _NAMES


def _documents(client: Client, folder: str) -> Iterator[tuple[Info, bytes]]:
    """Every object of a folder with its bytes; of one that is too large to be a ref none."""

    def read(info: Info) -> bytes | None:
        return b"" if info.size > LARGEST_DOCUMENT else client.get(info.path)

    for info, data in _several(read, client.list(folder)):
        if data is not None:
            yield info, data


def _several(action: Callable[[Info], T], infos: Iterable[Info]) -> Iterator[tuple[Info, T]]:
    """What `action` gives for each object, in their order; several at a time, since each may be a request."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="aotcache-collect") as pool:
        batch: list[Info] = []
        for info in infos:
            batch.append(info)
            if len(batch) == _BATCH:
                yield from zip(batch, pool.map(action, batch), strict=True)
                batch = []
        yield from zip(batch, pool.map(action, batch), strict=True)


__all__ = ["Survey", "is_newer", "still_named", "survey", "words"]
