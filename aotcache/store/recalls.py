"""Recall lists as objects: `recalls/<signer>/<number>.json`, in a directory and in a bucket.

Numbers are never written twice, so of two operators with one key who follow the same list one is
told that the other was faster. What a later list covers is removed after that one is there.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from aotcache.errors import ManifestError, RecallConflict, StoreError
from aotcache.recall_list import LARGEST, SignedList
from aotcache.store.clients import Client, Info
from aotcache.types import is_digest

FOLDER = "recalls"

_NAME = re.compile(r"\d{16}\.json\Z")
_MOST = 16
"""Lists of one signer that are read. There is one, or one for each operator who did not know of the others."""
_LOOKS = 100
"""How often lists may be replaced while they are read, before nobody waits any longer."""


class RecallObjects:
    """The recall lists of one store. Remembers what it has read, by the objects' tags.

    Args:
        url: The store's, for messages.
        client: Keeps the objects.
    """

    def __init__(self, url: str, client: Client) -> None:
        self._url = url
        self._client = client
        self._known: dict[str, tuple[str, bytes]] = {}

    def read(self, of: Callable[[str], bool] | None = None) -> Sequence[bytes]:
        """See `Store.recalls`: one listing, and a request for each list that is new."""
        for _ in range(_LOOKS):
            found = self._read(of)
            if found is not None:
                return found
        raise StoreError(
            f"store {self._url}: recall lists were replaced {_LOOKS} times while they were read; try again",
            url=self._url,
        )

    def _read(self, of: Callable[[str], bool] | None) -> Sequence[bytes] | None:
        """None where a list was replaced while it was to be read."""
        read: dict[str, tuple[str, bytes]] = {}
        for info in self._objects(of):
            known = self._known.get(info.path)
            if known is None or not info.tag or known[0] != info.tag:
                document = self._client.get(info.path) if info.size <= LARGEST else b""
                if document is None:
                    return None
                known = (info.tag, document)
            read[info.path] = known
        self._known = read
        return [document for _, document in read.values()]

    def put(self, document: bytes, signer: str) -> None:
        """See `Store.put_recall`."""
        made = SignedList.from_document(document, where="the recall list")
        if made.signer != signer:
            raise ManifestError(f"the recall list is by ed25519:{made.signer}, expected ed25519:{signer}")
        path = f"{FOLDER}/{signer}/{made.listed.number:016d}.json"
        if not self._client.put(path, document, create=True) and self._client.get(path) != document:
            raise RecallConflict(
                f"{self._url} has another recall list number {made.listed.number} by ed25519:{signer}",
                number=made.listed.number,
            )
        for info in [*self._objects(lambda name: name == signer)]:
            if info.path != path and self._covered(info.path, made):
                self._client.delete(info.path)

    def _covered(self, path: str, made: SignedList) -> bool:
        try:
            other = SignedList.from_document(self._client.get(path) or b"", where=path)
        except ManifestError:
            return False
        return other.signer == made.signer and made.listed.covers(other.listed)

    def _objects(self, of: Callable[[str], bool] | None) -> Iterator[Info]:
        """The last few of each signer: whoever may write to a bucket can put any number there."""
        by_signer: dict[str, deque[Info]] = {}
        for info in self._client.list(FOLDER):
            signer, _, name = info.path.partition(f"{FOLDER}/")[2].partition("/")
            if is_digest(signer) and _NAME.match(name) is not None:
                by_signer.setdefault(signer, deque(maxlen=_MOST)).append(info)
        for signer, infos in by_signer.items():
            if of is None or of(signer):
                yield from infos


__all__ = ["RecallObjects"]
