"""Which of a store's files may be served: those whose bytes match their digest."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from aotcache.errors import CorruptArtifact, NotStored
from aotcache.store.objects import ObjectStore
from aotcache.types import Digest

_REMEMBERED = 1 << 16
"""Files whose check is remembered."""


@dataclass(frozen=True, slots=True)
class _Seen:
    path: Path
    inode: int
    modified: int
    size: int

    @classmethod
    def of(cls, path: Path) -> _Seen:
        status = os.stat(path)
        return cls(path, status.st_ino, status.st_mtime_ns, status.st_size)


class CheckedFiles:
    """The store's files whose bytes were found to match their digest, and have not changed since.

    The first answer for an archive reads it once; later ones look at its inode, time and size.
    Threads may share it.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._seen: OrderedDict[Digest, _Seen] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, digest: Digest) -> tuple[Path, int] | None:
        """The file and its bytes; None if the store's archives are no files.

        Raises:
            NotStored: there are no such bytes, or they were wrong and have been dropped.
            RejectedArtifact: other users could have written them.
        """
        with self._lock:
            seen = self._seen.get(digest)
        try:
            if seen is not None and _Seen.of(seen.path) == seen:
                return seen.path, seen.size
            path = self._store.blob_path(digest)
            if path is None:
                return None
            seen = _Seen.of(path)
        except CorruptArtifact as error:
            raise NotStored(f"{error}; it is not served", digest=digest) from error
        except FileNotFoundError:
            raise no_blob(digest) from None
        with self._lock:
            self._seen[digest] = seen
            self._seen.move_to_end(digest)
            while len(self._seen) > _REMEMBERED:
                self._seen.popitem(last=False)
        return seen.path, seen.size


def no_blob(digest: Digest) -> NotStored:
    """The error for an archive that is not stored."""
    return NotStored(f"there is no archive {digest} here; warm again to build it", digest=digest)
