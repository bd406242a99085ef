"""The service as a store: manifests and archives over its REST interface, version 1."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from aotcache.config import Settings
from aotcache.errors import (
    ManifestError,
    NotStored,
    RecallConflict,
    ServiceError,
    ServiceUnavailable,
    StoreError,
)
from aotcache.key import KeyParts
from aotcache.manifest import Manifest
from aotcache.recall import recall_problem
from aotcache.store.base import Entry, Usage
from aotcache.store.download import download
from aotcache.store.objects import check_archive
from aotcache.store.pins import Pin
from aotcache.store.session import ServiceSession, session_for
from aotcache.types import CacheKey, Digest, Mode, Variant, is_digest, printable, sha256

logger = logging.getLogger(__name__)

T = TypeVar("T")

_KEYS = 1000
"""Of one resolve request."""

_MOST_PAGES = 10_000
"""Of a listing; a service that goes on for ever is none."""
_PAGE = 500
_LONGEST_NAME = 300
"""Characters of a variant."""

_LATEST = 253_402_300_800.0
"""The end of the year 9999."""

_THREADS = 8

_TOLD_SECONDS = 1.0
"""How long the word of a look-up holds that the recall lists are those that were read."""


class HttpStore:
    """A `Store`; its contract is in `store/base.py`. Threads share it; a fork gets its own connections.

    Args:
        url: Address of the service.
        session: The way there; by default this process's own, with the token from the settings.
    """

    def __init__(self, url: str, session: ServiceSession | None = None) -> None:
        self.session = session_for(url) if session is None else session
        self._sizes: dict[Digest, int] = {}
        self._lists: tuple[str | None, Sequence[bytes]] | None = None
        self._told: tuple[str | None, float] | None = None

    def __repr__(self) -> str:
        return f"HttpStore({self.url!r})"

    @property
    def url(self) -> str:
        """See `Store`."""
        return self.session.url

    @property
    def own(self) -> bool:
        """See `Store`."""
        return False

    def require_own(self, manifest: Manifest) -> None:
        """See `Store`. Nothing here is the user's own."""

    def lookup(self, key: CacheKey) -> list[Manifest]:
        """See `Store`."""
        found = []
        for entry in self.variants(key):
            if entry.usable is not None:
                found.append(entry.usable)
            else:
                logger.warning(
                    "%s: %s/%s is taken for a miss: %s", self.url, key, entry.variant, entry.problem
                )
        return found

    def resolve(
        self, keys: Iterable[CacheKey], *, known: Mapping[Digest, Manifest] | None = None
    ) -> dict[CacheKey, list[Manifest]]:
        """See `Store`. One request for 1,000 keys, and one for each key that is there and not known.

        Args:
            keys: As there.
            known: Manifests that the caller has, by the sha256 of their documents: they are not sent again.
        """
        wanted = list(dict.fromkeys(keys))
        answered: dict[CacheKey, list[Manifest]] = {key: [] for key in wanted}
        there: list[CacheKey] = []
        for first in range(0, len(wanted), _KEYS):
            part = wanted[first : first + _KEYS]
            answer = self.session.json("POST", "/v1/resolve", body={"keys": part})
            found = _of(answer, "found", dict, self.url)
            tag = answer.get("recalls")
            self._told = (tag if isinstance(tag, str) else None, time.monotonic())
            for key in part:
                manifests = _all_known(key, found.get(key), known or {})
                if manifests is None:
                    there.append(key)
                else:
                    answered[key] = manifests
                    self._sizes |= {manifest.digest: manifest.size for manifest in manifests}
        return answered | dict(zip(there, _each(self.lookup, there), strict=True))

    def publish(
        self,
        manifest: Manifest,
        archive: Path,
        *,
        replace: bool = False,
        lease: tuple[str, int] | None = None,
    ) -> bool:
        """See `Store`.

        Args:
            manifest: As there; with a signature that the service trusts.
            archive: As there.
            replace: As there; needs the scope admin.
            lease: Lease and fencing token under which it was built.

        Raises:
            LeaseLost: if the lease is no longer held; nothing was published.
            LeaseHeld: if somebody else holds one.
            ServiceError: if the service does not trust the signature, or the token lacks the right.
        """
        check_archive(manifest, archive)
        there = None if replace else self._there(manifest)
        # A service that was killed between storing an entry and listing it has it, and nobody finds it
        # until it is published once more.
        if there is not None and self._listed(there) and recall_problem(there, home=Settings().home) is None:
            return False
        path = _blob(manifest.digest)
        # Sent in any case to replace: what is there may have gone bad.
        if replace or self._size(path) != manifest.size:
            self.session.upload(path, archive, manifest.digest)
        try:
            answer = self._enter(manifest, replace, lease)
        except ServiceError as error:
            if error.details.get("type") != "conflict" or self._size(path) is not None:
                raise
            # Somebody deleted the last other entry with this archive in between, and it went along.
            self.session.upload(path, archive, manifest.digest)
            answer = self._enter(manifest, replace, lease)
        if _of(answer, "stored", bool, self.url):
            return True
        # An earlier try whose answer was lost has stored it, or the archive made its old ref whole.
        there = self._there(manifest)
        return there is not None and there.document() == manifest.document()

    def _enter(self, manifest: Manifest, replace: bool, lease: tuple[str, int] | None) -> Any:
        return self.session.json(
            "PUT",
            f"/v1/artifacts/{manifest.key}",
            body=manifest.document(),
            params={"replace": "true"} if replace else None,
            headers=None if lease is None else {"Aotcache-Lease": f"{lease[0]}:{lease[1]}"},
        )

    def fetch(self, digest: Digest, dest: Path) -> None:
        """See `Store`. What was broken off is gone on with, see `store/download.py`."""
        download(self.session, _blob(digest), digest, dest, size=self._sizes.get(digest))

    def blob_path(self, digest: Digest) -> Path | None:
        """None: the bytes are the service's."""
        return None

    def list(self, *, code: Digest | None = None) -> Iterator[Manifest]:
        """See `Store`."""
        return (entry.usable for entry in self._entries(code) if entry.usable is not None)

    def near(self, parts: KeyParts, mode: Mode) -> Iterator[Manifest]:
        """See `Store`."""
        path = f"/v1/keys/{parts.key}/why"
        answer = self.session.json("POST", path, body={"mode": mode, "components": parts.to_json()})
        try:
            keys = [CacheKey(str(near["key"])) for near in _of(answer, "nearest", list, self.url)]
        except (KeyError, TypeError) as error:
            raise _unlike(self.url, path, error) from None
        for manifests in _each(self.lookup, keys):
            yield from (manifest for manifest in manifests if manifest.mode == mode)

    def entries(self) -> Iterator[Entry]:
        """See `Store`. Read page by page, with a request for each key."""
        return self._entries(None)

    def _entries(self, code: Digest | None) -> Iterator[Entry]:
        for rows in self._pages(code):
            keys = list(dict.fromkeys(row.key for row in rows))
            found = {
                (entry.key, entry.variant): entry
                for entries in _each(self.variants, keys)
                for entry in entries
            }
            for row in rows:
                why = f"the service lists it, but its manifest or its archive {row.digest} is gone"
                gone = Entry(row.key, row.variant, None, None, 0.0, why)
                yield found.get((row.key, row.variant), gone)

    def delete(self, key: CacheKey, variant: Variant | str) -> bool:
        """See `Store`. Needs the scope admin."""
        try:
            answer = self.session.json(
                "DELETE", f"/v1/artifacts/{quote(key, safe='')}", params={"variant": str(variant)}
            )
        except NotStored:
            return False
        return _of(answer, "deleted", int, self.url) > 0

    def used(self, digest: Digest) -> None:
        """See `Store`. The service counts what it is asked for."""

    def pins(self) -> Sequence[Pin]:
        """See `Store`."""
        answer = self.session.json("GET", "/v1/pins")
        return [self._pin(found) for found in _of(answer, "pins", list, self.url)]

    def pin(self, what: str, reason: str) -> Pin:
        """See `Store`. Needs the scope admin."""
        return self._pin(self.session.json("PUT", f"/v1/pins/{what}", body={"reason": reason}))

    def unpin(self, what: str) -> bool:
        """See `Store`. Needs the scope admin."""
        return _of(self.session.json("DELETE", f"/v1/pins/{what}"), "deleted", int, self.url) > 0

    def _pin(self, found: Any) -> Pin:
        try:
            return Pin(str(found["what"]), str(found["reason"]), float(found["at"]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise _unlike(self.url, "/v1/pins", error) from None

    def recalls(self, of: Callable[[str], bool] | None = None) -> Sequence[bytes]:
        """See `Store`. `resolve` is told whether there are other lists than those that were read last."""
        told, known = self._told, self._lists
        if told is not None and told[0] in (None, known and known[0]):
            # Of a look-up that found nothing, it may lie here since long before a recall.
            told = told if time.monotonic() - told[1] < _TOLD_SECONDS else None
        if told is not None and told[0] is None:
            known = (None, [])
        elif told is None or known is None or known[0] != told[0]:
            try:
                known = self._read_lists()
            except ServiceUnavailable as error:
                if told is None:
                    raise
                raise StoreError(
                    f"{self.url} says that there are other recall lists than before, and does not show them: {error}",
                    url=self.url,
                ) from error
        assert known is not None
        self._told, self._lists = None, known
        return known[1]

    def _read_lists(self) -> tuple[str | None, Sequence[bytes]]:
        answer = self.session.json("GET", "/v1/recalls")
        tag = answer.get("tag") if isinstance(answer, dict) else None
        try:
            documents = [
                json.dumps(found["document"], sort_keys=True, separators=(",", ":")).encode()
                for found in _of(answer, "recalls", list, self.url)
            ]
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise _unlike(self.url, "/v1/recalls", error) from None
        return (tag if isinstance(tag, str) else None), documents

    def put_recall(self, document: bytes, signer: str) -> None:
        """See `Store`. Needs the scope admin; the service has to trust the signer."""
        try:
            self.session.json("PUT", "/v1/recalls", body=document)
        except ServiceError as error:
            if error.details.get("type") != "conflict":
                raise
            raise RecallConflict(str(error), **error.details) from error

    def put_ref(self, manifest: Manifest, *, replace: bool = False) -> bool:
        """See `Store`. To replace needs the scope admin."""
        return bool(_of(self._enter(manifest, replace, None), "stored", bool, self.url))

    def usage(self) -> Usage:
        """See `Store`."""
        refs, blobs = 0, dict[Digest, int]()
        for rows in self._pages(None):
            refs += len(rows)
            blobs |= {row.digest: row.size for row in rows}
        return Usage(refs, len(blobs), sum(blobs.values()))

    def deaths(self) -> dict[Digest, int]:
        """How many workers are known to have died with an archive, for those that any died with."""
        return {row.digest: row.deaths for rows in self._pages(None) for row in rows if row.deaths}

    def _pages(self, code: Digest | None) -> Iterator[Sequence[_Row]]:
        cursor: str | None = None
        for _ in range(_MOST_PAGES):
            params = {"limit": _PAGE, "cursor": cursor, "code": code}
            answer = self.session.json("GET", "/v1/artifacts", params=params)
            try:
                rows = [_row(row) for row in answer["artifacts"]]
                following = answer["next"]
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise _unlike(self.url, "/v1/artifacts", error) from None
            yield rows
            if following is None:
                return
            if not rows or following == cursor or not isinstance(following, str):
                raise _unlike(self.url, "/v1/artifacts", "a page after which the next one is the same")
            cursor = following
        raise _unlike(self.url, "/v1/artifacts", f"more than {_MOST_PAGES} pages")

    def variants(self, key: CacheKey) -> Iterator[Entry]:
        """See `Store`."""
        path = f"/v1/artifacts/{quote(key, safe='')}"
        try:
            answer = self.session.json("GET", path)
        except NotStored:
            return iter(())
        return iter([self._entry(key, path, found) for found in _of(answer, "variants", list, self.url)])

    def _entry(self, key: CacheKey, path: str, found: Any) -> Entry:
        try:
            variant, expected = printable(str(found["variant"]), _LONGEST_NAME), found["document"]
            modified = _moment(found["modified"])
            document = json.dumps(found["envelope"], sort_keys=True, separators=(",", ":")).encode()
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise _unlike(self.url, path, error) from None
        try:
            manifest = Manifest.from_json(document, where=f"{self.url}{path}")
        except ManifestError as error:
            return Entry(key, variant, None, None, modified, str(error))
        problem: str | None = None
        if sha256(document) != expected:
            problem = f"its document hashes to {sha256(document)}, the service says {expected}"
        elif (manifest.key, str(manifest.variant)) != (key, variant):
            problem = f"it is filed under another name than its own, {manifest.key}/{manifest.variant}"
        else:
            self._sizes[manifest.digest] = manifest.size
        return Entry(key, variant, manifest, manifest.size, modified, problem)

    def _there(self, manifest: Manifest) -> Manifest | None:
        """The entry for a manifest's key and variant."""
        entries = (entry.usable for entry in self.variants(manifest.key))
        return next((m for m in entries if m is not None and m.variant == manifest.variant), None)

    def _listed(self, manifest: Manifest) -> bool:
        """Whether those who resolve many keys at once find a manifest that is there."""
        known = {sha256(manifest.document()): manifest}
        found = self.resolve([manifest.key], known=known)[manifest.key]
        return any(one.variant == manifest.variant for one in found)

    def _size(self, path: str) -> int | None:
        """Bytes of an archive that the service has; None if it has none."""

        def once() -> int | None:
            with self.session.stream("HEAD", path, headers={"Accept-Encoding": "identity"}) as response:
                length = response.headers.get("Content-Length", "")
                return int(length) if length.isdigit() else None

        try:
            return self.session.reliably(once)
        except StoreError as error:
            # An answer to HEAD has no body, so no type of its error.
            if error.details.get("status") == 404:
                return None
            raise


@dataclass(frozen=True, slots=True)
class _Row:
    """What of a listing's row is needed here."""

    key: CacheKey
    variant: str
    digest: Digest
    size: int
    deaths: int


def _row(found: Any) -> _Row:
    """A row of a listing. Raises KeyError, TypeError or ValueError for what is none."""
    if not (is_digest(found["key"]) and is_digest(found["digest"])):
        raise ValueError("a row without a key or a digest")
    variant = printable(str(found["variant"]), _LONGEST_NAME)
    deaths = int(found.get("deaths", 0))  # a service before that counts none
    return _Row(found["key"], variant, found["digest"], int(found["size"]), deaths)


def _moment(found: Any) -> float:
    """A time that the calendar knows. Raises TypeError or ValueError for another one."""
    moment = float(found)
    if not 0 <= moment < _LATEST:
        raise ValueError(f"no time: {moment}")
    return moment


def _each(action: Callable[[CacheKey], T], keys: Sequence[CacheKey]) -> Sequence[T]:
    """What `action` gives for every key, in their order; several at a time."""
    if len(keys) < 2:
        return [action(key) for key in keys]
    with ThreadPoolExecutor(min(_THREADS, len(keys)), thread_name_prefix="aotcache-http") as pool:
        return list(pool.map(action, keys))


def _all_known(key: CacheKey, references: Any, known: Mapping[Digest, Manifest]) -> list[Manifest] | None:
    """The manifests that a key's references name, if the caller has all of them already; none for a miss."""
    if not references:
        return []
    found: list[Manifest] = []
    for reference in references if isinstance(references, list) else [None]:
        named = reference if isinstance(reference, dict) else {}
        manifest = known.get(Digest(str(named.get("document"))))
        if manifest is None or (manifest.key, str(manifest.variant)) != (key, named.get("variant")):
            return None
        found.append(manifest)
    return found


def _blob(digest: Digest) -> str:
    if not is_digest(digest):
        raise NotStored(f"{digest!r} is not a digest: expected 64 lower-case hex characters")
    return f"/v1/blobs/{digest}"


def _of(answer: Any, name: str, kind: type[T], url: str) -> T:
    found = answer.get(name) if isinstance(answer, dict) else None
    if not isinstance(found, kind):
        raise _unlike(url, name, f"{type(found).__name__} where {kind.__name__} is expected")
    return found


def _unlike(url: str, what: str, why: object) -> ServiceError:
    return ServiceError(
        f"{url}: {what}: the answer is not of version 1 of the service ({why}); is it an older or a newer one?",
        url=url,
    )
