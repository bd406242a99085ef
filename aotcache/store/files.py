"""Objects as files below a directory, also on a network file system.

obstore could do this as well, but it renames without fsync, so that a host that
loses power can be left with empty files under valid names, and its threads make
every call in a forked child hang.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TypeVar

from aotcache.errors import RejectedArtifact, StoreError
from aotcache.ownership import way_out
from aotcache.passing import again, late
from aotcache.store.clients import CHUNK, Info
from aotcache.store.local import is_dir, make_dirs, require_private, sync_dir

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ABANDONED_SECONDS = 24 * 3600.0

_TOUCH_SECONDS = 3600.0
"""How old a file's time may be before its use is noted: what is opened all the time costs nothing."""

_ABSENT = (errno.ENOENT, errno.ENOTDIR)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


class FileClient:
    """See `clients.Client`. Writes are durable when they return.

    A symbolic link below the root that leads out of it is not followed: what it stands for is not
    there for readers, is replaced by a writer of that name, and nothing is written through it.

    Attributes:
        drafts: Where files are written: beside the objects, so that a rename stays within one
            file system, and outside the folders that are ever listed. What is a day old is swept.

    Args:
        root: The directory; made by the first write.
        trust_shared: Hand out files that other users could have written.
    """

    def __init__(self, root: Path, *, trust_shared: bool) -> None:
        self._root = root
        self.drafts = root / "tmp"
        self._trust_shared = trust_shared
        self._told: set[str] = set()

    def get(self, path: str) -> bytes | None:
        """See `Client`."""
        return self._read(path, _bytes)

    def chunks(self, path: str, start: int = 0, stop: int | None = None) -> Iterator[bytes] | None:
        """See `Client`."""
        opened = self._read(path, _opened)
        return None if opened is None else self._pieces(path, opened, start, stop)

    def _pieces(self, path: str, opened: IO[bytes], start: int, stop: int | None) -> Iterator[bytes]:
        """Read a file on, opened anew where its handle has become stale: what has a digest for a name is the same."""
        with ExitStack() as stack:
            stack.enter_context(opened)
            file, at = opened, start

            def piece() -> bytes:
                nonlocal file
                try:
                    file.seek(at)
                    return file.read(CHUNK if stop is None else min(CHUNK, stop - at))
                except OSError as error:
                    if error.errno == errno.ESTALE:
                        file = stack.enter_context(_opened(self._root / path))
                    raise

            while True:
                try:
                    chunk = again(piece, path)
                except OSError as error:
                    raise StoreError(
                        f"cannot read {self._root / path}: {error.strerror}", path=str(self._root / path)
                    ) from error
                if not chunk:
                    return
                at += len(chunk)
                yield chunk

    def head(self, path: str) -> Info | None:
        """See `Client`."""
        status = self._read(path, lambda file: file.stat())
        return None if status is None else Info(path, status.st_size, status.st_mtime)

    def has_name(self, path: str) -> bool:
        """Whether anything lies there, be it a link that is not followed. Raises StoreError if nobody can tell."""
        target = self._root / path
        try:
            again(target.lstat, target)
        except OSError as error:
            if error.errno in _ABSENT:
                return False
            raise StoreError(f"cannot read {target}: {error.strerror}", path=str(target)) from error
        return True

    def put(self, path: str, source: bytes | Path, *, create: bool, consume: bool = False) -> bool:
        """See `Client`."""
        target = self._root / path
        make_dirs(target.parent)
        make_dirs(self.drafts)
        for folder in (target.parent, self.drafts):
            if (astray := self._way_out(folder)) is not None:
                raise StoreError(
                    f"cannot write {target}: {astray}, and is not followed; nothing was stored; put a folder "
                    "in its place, or name the place that it leads to as the store",
                    path=str(target),
                )
        # A link that no reader follows, or that leads to nothing, keeps nobody's object; nor does a pipe.
        create = create and self._way_out(target) is None and not self._is_none(path)
        sweep(self.drafts)
        draft = self.drafts / uuid.uuid4().hex
        try:
            if not (consume and isinstance(source, Path) and _taken(source, draft)):
                self._write(draft, source)
            stored = _place(draft, target, create=create)
            sync_dir(target.parent)
        except OSError as error:
            raise StoreError(
                f"cannot write {target}: {error.strerror}; nothing was stored; free space or "
                "permissions, then try again",
                path=str(target),
            ) from error
        finally:
            draft.unlink(missing_ok=True)
        return stored

    def list(self, prefix: str) -> Iterator[Info]:
        """See `Client`."""
        for name in self._read(prefix, lambda folder: sorted(os.listdir(folder))) or ():
            path = f"{prefix}/{name}"
            target = self._root / path
            if is_dir(target):
                # Not even one that stays within: it would list objects twice, or for ever.
                if self._read(path, Path.is_symlink):
                    self._tell(f"{target} is a symbolic link to a folder")
                else:
                    yield from self.list(path)
            elif (info := late(lambda path=path: self.head(path), target)) is not None:  # type: ignore[misc]
                yield info

    def delete(self, path: str) -> bool:
        """See `Client`."""
        target = self._root / path
        if self._way_out(target.parent) is not None:
            return False
        try:
            target.unlink()
        except OSError as error:
            if error.errno in _ABSENT:
                return False
            raise StoreError(f"cannot delete {target}: {error.strerror}", path=str(target)) from error
        return True

    def move(self, path: str, to: str, *, create: bool = False) -> bool:
        """See `Client`."""
        source, target = self._root / path, self._root / to
        if self._way_out(source.parent) is not None:
            return False
        make_dirs(target.parent)
        try:
            _place(source, target, create=create)
            if create:
                # A link to it was made, or what was at the new path stays. (Otherwise it is gone, and what
                # lies there by now is somebody's newer object.)
                source.unlink(missing_ok=True)
            sync_dir(target.parent)
        except OSError as error:
            if error.errno in _ABSENT:
                return False
            raise StoreError(
                f"cannot move {source} to {target}: {error.strerror}", path=str(source)
            ) from error
        return True

    def touch(self, path: str) -> None:
        """Note that a file is used now, see `touch`."""
        touch(self._root / path)

    def signed_url(self, path: str, seconds: float) -> str | None:
        """None: a file has no address that others can reach."""
        return None

    def trusted_path(self, path: str) -> Path | None:
        """See `Client`."""
        target = self._root / path
        astray = self._way_out(target)
        if astray is not None:
            raise RejectedArtifact(
                f"{target} is not opened: {astray}, and who can write there is not known; put the file itself "
                "there, or name the place that the link leads to as the store",
                path=str(target),
            )
        if not self._trust_shared:
            self._read(path, lambda file: require_private(file, self._root))
        return target

    def _tell(self, what: str) -> None:
        """Say once of a link that it is not followed."""
        if what not in self._told:
            self._told.add(what)
            logger.warning("%s, and is not followed: what it stands for is taken for not stored", what)

    def _is_none(self, path: str) -> bool:
        """Whether something lies there that no reader takes for a file."""
        return bool(self._read(path, lambda target: os.path.lexists(target) and not target.is_file()))

    def _way_out(self, target: Path) -> str | None:
        try:
            return way_out(target, self._root)
        except OSError as error:
            raise StoreError(f"cannot read {target}: {error.strerror}", path=str(target)) from error

    def _read(self, path: str, action: Callable[[Path], T]) -> T | None:
        target = self._root / path
        astray = self._way_out(target)
        if astray is not None:
            self._tell(astray)
            return None
        try:
            return again(lambda: action(target), target)
        except OSError as error:
            if error.errno in (*_ABSENT, errno.ESTALE):
                return None
            raise StoreError(f"cannot read {target}: {error.strerror}", path=str(target)) from error

    def _write(self, draft: Path, source: bytes | Path) -> None:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        with os.fdopen(descriptor, "wb") as file:
            # The umask may have left it writable to the group.
            os.fchmod(descriptor, os.fstat(descriptor).st_mode & 0o755)
            if isinstance(source, bytes):
                file.write(source)
            else:
                with source.open("rb") as data:
                    shutil.copyfileobj(data, file, CHUNK)
            file.flush()
            os.fsync(descriptor)


def _opened(path: Path) -> IO[bytes]:
    return open(path, "rb", opener=_file_alone)


def _file_alone(path: str, flags: int) -> int:
    """Open what is a file. Whoever opened a pipe would wait for its other end for ever: it is not there."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "it is no file", path)
    return descriptor


def _bytes(path: Path) -> bytes:
    with _opened(path) as file:
        return file.read()


def touch(path: Path) -> None:
    """Note in the time of a file or folder that it is used now, to the hour; nobody fails for that."""
    try:
        if abs(time.time() - path.stat().st_mtime) > _TOUCH_SECONDS:
            os.utime(path)
    except OSError:
        # It is gone, or in a place where this user may only read.
        return


def sweep(folder: Path) -> None:
    """Remove what writers that were killed left behind, once it is a day old."""
    before = time.time() - _ABANDONED_SECONDS
    try:
        drafts = os.scandir(folder)
    except OSError:
        # Nothing is there yet; or whoever writes there next says why that is not possible.
        return
    with drafts:
        for draft in drafts:
            try:
                if draft.stat().st_mtime < before:
                    os.unlink(draft.path)
            except OSError:
                # Another process was faster, or the file is another user's.
                continue


def _taken(source: Path, draft: Path) -> bool:
    """Whether a file could be moved to where drafts lie, durable and not writable to others."""
    try:
        os.rename(source, draft)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return False
    with draft.open("rb") as file:
        os.fchmod(file.fileno(), 0o644)
        os.fsync(file.fileno())
    return True


def _place(draft: Path, target: Path, *, create: bool) -> bool:
    if create:
        try:
            os.link(draft, target)
            return True
        except FileExistsError:
            return False
        except OSError as error:
            # Without hard links the check and the rename are two steps: of two
            # writers at once the later one wins, and both files were whole.
            if error.errno not in _NO_LINKS:
                raise
            if target.exists():
                return False
    os.replace(draft, target)
    return True
