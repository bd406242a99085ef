"""What an artifact's archive may look like, judged before a byte of it is unpacked. Pure but for reading the file.

An archive is a zip file, and a zip file is a program for whoever unpacks it: it says where to
write, how much, and as what. Here its table of contents is read and judged as a whole first;
only then are members read, each no further than it said that it goes.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import stat
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from aotcache.errors import CorruptArtifact
from aotcache.types import Digest, printable


@dataclass(frozen=True, slots=True)
class Limits:
    """How large an archive may be once it is unpacked.

    Attributes:
        members: Files in it.
        table: Bytes of its table of contents, which is read into memory.
        size: Bytes of all members together.
        harmless: Bytes up to which nobody asks how well they were compressed.
        ratio: How many times the archive's own size all members may have, beyond that.
    """

    members: int = 4096
    table: int = 8 << 20
    size: int = 16 << 30
    harmless: int = 256 << 20
    ratio: int = 100


LIMITS = Limits()
"""An archive of aotcache has a dozen members, compressed to a third."""

CHUNK = 1 << 20
"""Bytes read at once."""

_SHOWN = 5
"""Flaws that an error lists."""
_LONGEST_NAME = 500
_LONGEST_PART = 255
_SHOWN_NAME = 100

_FLAGS = 0x1 | 0x20 | 0x40 | 0x2000
"""Encrypted, patched, strongly encrypted, masked: what would not be read as it is."""

_PACKED = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}

_UNREADABLE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
    OverflowError,
    IndexError,
)
"""What reading a zip file raises that somebody made to be read badly."""


class _File(io.BufferedReader):
    """A file of which nothing is read that would not fit in memory, whatever it says of itself."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0 or size > LIMITS.table:
            left = os.fstat(self.fileno()).st_size - self.tell()
            if left > LIMITS.table:
                raise zipfile.BadZipFile(f"its table of contents has more than {LIMITS.table} bytes")
        return super().read(-1 if size is None else size)


@contextmanager
def judged(path: Path, members: Mapping[str, Digest], *, what: str) -> Iterator[zipfile.ZipFile]:
    """An archive that may be unpacked: its members are those expected, and none would do harm.

    Args:
        path: The file.
        members: sha256 of every member by its name, as the manifest has them.
        what: What to call it in an error.

    Raises:
        CorruptArtifact: naming what is wrong; also for whatever goes wrong with the zip file within the block.
        OSError: the file cannot be read.
    """
    with readable(path, what=what) as package:
        found = [*flaws(package, path.stat().st_size), *differences(package, members)]
        if found:
            more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            said = "; ".join(found[:_SHOWN]) + more
            raise CorruptArtifact(
                f"{what} is not unpacked: {said}; delete it from its store and warm it again", flaws=found
            )
        yield package


@contextmanager
def readable(path: Path, *, what: str) -> Iterator[zipfile.ZipFile]:
    """A file as a zip archive, which nobody has judged yet. Raises as `judged`."""
    try:
        with _File(io.FileIO(path)) as file, zipfile.ZipFile(file) as package:
            yield package
    except _UNREADABLE as error:
        raise _unreadable(what, error) from error
    except OSError as error:
        # A place that no file has: the zip file sent its reader there.
        if error.errno != errno.EINVAL:
            raise
        raise _unreadable(what, error) from error


def _unreadable(what: str, error: Exception) -> CorruptArtifact:
    why = printable(str(error) or type(error).__name__, 300)
    return CorruptArtifact(
        f"{what} is not a zip archive that can be read: {why}; delete it from its store and warm it again"
    )


def flaws(package: zipfile.ZipFile, size: int) -> list[str]:
    """What is wrong with an archive's table of contents, whatever its manifest says.

    Args:
        package: The archive.
        size: Bytes of its file.
    """
    infos = package.infolist()
    if len(infos) > LIMITS.members:
        return [f"it has {len(infos)} members, expected at most {LIMITS.members}"]
    found = [f"member {_name(info)} {flaw}" for info in infos for flaw in _member(info)]
    for name, times in Counter(info.filename for info in infos).items():
        if times > 1:
            found.append(f"it has {times} members named {_shown(name)}")
    names = {info.filename for info in infos}
    folders = {str(parent) for name in names for parent in PurePosixPath(name).parents}
    found += [f"member {_shown(name)} is a file and a folder" for name in sorted(names & folders)]
    if package.comment:
        found.append("it has a comment, which no archive of aotcache has")
    found += _sizes(infos, size)
    return found


def differences(package: zipfile.ZipFile, members: Mapping[str, Digest]) -> list[str]:
    """In which names an archive's table of contents differs from its manifest's."""
    names = {info.filename for info in package.infolist()}
    return [
        *(
            f"it has a member {_shown(name)} that its manifest does not name"
            for name in sorted(names - set(members))
        ),
        *(f"it lacks the member {_shown(name)} of its manifest" for name in sorted(set(members) - names)),
    ]


def _member(info: zipfile.ZipInfo) -> Iterator[str]:
    name = info.orig_filename
    parts = name.split("/")
    if name != info.filename or "\\" in name or not name.isprintable():
        yield "has a name with characters that no member's name has"
    if name.startswith("/") or any(part in ("", ".", "..") for part in parts):
        yield "has a name that leads out of its folder, or is none of a file"
    if len(name) > _LONGEST_NAME or any(len(part.encode(errors="replace")) > _LONGEST_PART for part in parts):
        yield "has a name that is too long"
    kind = stat.S_IFMT(info.external_attr >> 16)
    if kind not in (0, stat.S_IFREG):
        yield f"is no plain file but {_KINDS.get(kind, 'something else')}"
    if info.flag_bits & _FLAGS:
        yield "is encrypted or patched"
    if info.compress_type not in _PACKED:
        yield f"is compressed by method {info.compress_type}, expected stored or deflated"
    elif info.compress_type == zipfile.ZIP_STORED and info.compress_size != info.file_size:
        yield f"is stored in {info.compress_size} bytes and has {info.file_size}"


_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


def _sizes(infos: Iterable[zipfile.ZipInfo], size: int) -> Iterator[str]:
    packed = sum(info.compress_size for info in infos)
    whole = sum(info.file_size for info in infos)
    if packed > size:
        # Members that share their bytes are how a small file stands for terabytes.
        yield f"its members take {packed} bytes of a file of {size}"
    if whole > LIMITS.size:
        yield f"its members have {whole} bytes, expected at most {LIMITS.size}"
    elif whole > max(LIMITS.harmless, LIMITS.ratio * size):
        yield f"its members have {whole} bytes, more than {LIMITS.ratio} times those of the archive ({size})"


def chunks(package: zipfile.ZipFile, info: zipfile.ZipInfo) -> Iterator[bytes]:
    """A member's bytes, piece by piece; at most as many as it says that it has.

    Raises:
        BadZipFile: it is longer or shorter. Within `judged` or `readable`: CorruptArtifact.
    """
    left = info.file_size
    with package.open(info) as data:
        while chunk := data.read(CHUNK):
            left -= len(chunk)
            if left < 0:
                raise zipfile.BadZipFile(
                    f"member {_name(info)} has more bytes than the {info.file_size} it says"
                )
            yield chunk
    if left:
        raise zipfile.BadZipFile(
            f"member {_name(info)} has {left} bytes less than the {info.file_size} it says"
        )


def contents(package: zipfile.ZipFile) -> dict[str, Digest]:
    """sha256 of every member by its name. Reads all of it: to be asked of what has no `flaws`."""
    found: dict[str, Digest] = {}
    for info in package.infolist():
        hashed: Any = hashlib.sha256()
        for chunk in chunks(package, info):
            hashed.update(chunk)
        found[info.filename] = Digest(hashed.hexdigest())
    return found


def _name(info: zipfile.ZipInfo) -> str:
    return _shown(info.orig_filename)


def _shown(name: str) -> str:
    return repr(printable(name, _SHOWN_NAME))
