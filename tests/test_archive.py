"""An archive is judged as a whole, before a byte of it is unpacked."""

from __future__ import annotations

import io
import stat
import struct
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aotcache import archive
from aotcache.errors import CorruptArtifact
from aotcache.types import Digest, sha256

CONTENT = {"a/forward.so": b"library" * 50, "a/forward.json": b"{}"}
MEMBERS = {name: sha256(data) for name, data in CONTENT.items()}


def packed(
    content: dict[str, bytes] = CONTENT,
    *,
    method: int = zipfile.ZIP_DEFLATED,
    change: Callable[[zipfile.ZipInfo], Any] = lambda info: None,
) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as package:
        for name, data in content.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = 0o644 << 16
            change(info)
            package.writestr(info, data, method)
    return out.getvalue()


def judge(tmp_path: Path, data: bytes, members: dict[str, Digest] = MEMBERS) -> dict[str, Digest]:
    path = tmp_path / "archive.pt2"
    path.write_bytes(data)
    with archive.judged(path, members, what="artifact x") as package:
        return archive.contents(package)


def why(tmp_path: Path, data: bytes, members: dict[str, Digest] = MEMBERS) -> str:
    with pytest.raises(CorruptArtifact) as refused:
        judge(tmp_path, data, members)
    return str(refused.value)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_an_archive_of_the_named_members_is_read(tmp_path: Path, method: int) -> None:
    assert judge(tmp_path, packed(method=method)) == MEMBERS


@pytest.mark.parametrize(
    "name",
    ["../a.so", "a/../../b.so", "/etc/passwd", "a//b.so", "./a.so", "a/./b.so", "..", "a/", "a/..", ""],
)
def test_a_name_that_leads_out_is_refused_although_the_manifest_has_it(tmp_path: Path, name: str) -> None:
    assert "leads out of its folder" in why(tmp_path, packed({name: b"x"}), {name: sha256(b"x")})


@pytest.mark.parametrize("name", ["a\\..\\b.so", "C:\\a.so", "a\x00.so", "a\n.so", "a\x1b[2J.so"])
def test_a_name_with_other_characters_is_refused_and_moves_no_cursor(tmp_path: Path, name: str) -> None:
    text = why(
        tmp_path, packed({name.replace("\x00", "~"): b"x"}).replace(b"~", b"\x00"), {name: sha256(b"x")}
    )
    assert "characters that no member's name has" in text
    assert text.isprintable()


@pytest.mark.parametrize("name", ["x" * 501, "a/" + "é" * 200 + ".so"])
def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path, name: str) -> None:
    assert "too long" in why(tmp_path, packed({name: b"x"}), {name: sha256(b"x")})


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (stat.S_IFLNK, "a symbolic link"),
        (stat.S_IFDIR, "a folder"),
        (stat.S_IFCHR, "a device"),
        (stat.S_IFIFO, "a pipe"),
        (stat.S_IFSOCK, "a socket"),
    ],
)
def test_what_is_no_plain_file_is_refused(tmp_path: Path, kind: int, said: str) -> None:
    data = packed(change=lambda info: setattr(info, "external_attr", (kind | 0o777) << 16))
    assert f"is no plain file but {said}" in why(tmp_path, data)


def test_a_member_twice_is_refused(tmp_path: Path) -> None:
    data = packed({**CONTENT, "a/forward.jsoX": b"other"}).replace(b"a/forward.jsoX", b"a/forward.json")
    assert "2 members named 'a/forward.json'" in why(tmp_path, data)


def test_a_member_that_is_a_folder_of_another_is_refused(tmp_path: Path) -> None:
    content = {"a": b"x", "a/b.so": b"y"}
    assert "'a' is a file and a folder" in why(
        tmp_path, packed(content), {name: sha256(data) for name, data in content.items()}
    )


def test_members_that_are_unknown_or_missing_are_all_named(tmp_path: Path) -> None:
    text = why(tmp_path, packed({**CONTENT, "more.so": b""}), {**MEMBERS, "gone.so": sha256(b"")})
    assert "'more.so' that its manifest does not name" in text
    assert "lacks the member 'gone.so'" in text


@pytest.mark.parametrize("bit", [0x1, 0x20, 0x40])
def test_encrypted_and_patched_members_are_refused(tmp_path: Path, bit: int) -> None:
    data = bytearray(packed())
    at = data.index(b"PK\1\2")
    data[at + 8] |= bit
    assert "encrypted or patched" in why(tmp_path, bytes(data))


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compression_is_refused(tmp_path: Path, method: int) -> None:
    assert f"compressed by method {method}" in why(tmp_path, packed(method=method))


def test_a_bomb_is_refused_by_what_it_says_of_itself(tmp_path: Path) -> None:
    data = packed({"a.so": bytes(300 << 20)})
    assert len(data) < 1 << 20
    assert "more than 100 times those of the archive" in why(tmp_path, data, {"a.so": Digest("0" * 64)})


def test_a_bomb_that_says_less_than_it_holds_yields_no_byte_more(tmp_path: Path) -> None:
    """Its sizes are lies: what is read ends where it says, and does not match its checksum."""
    data = bytearray(packed({"a.so": bytes(8 << 20)}))
    at = data.index(b"PK\1\2")
    data[at + 24 : at + 28] = struct.pack("<I", 1000)
    path = tmp_path / "archive.pt2"
    path.write_bytes(data)
    read: list[int] = []
    with pytest.raises(CorruptArtifact, match="not a zip archive that can be read"):
        with archive.judged(path, {"a.so": Digest("0" * 64)}, what="artifact x") as package:
            read.extend(len(chunk) for chunk in archive.chunks(package, package.infolist()[0]))
    assert sum(read) <= 1000


def test_a_member_that_is_shorter_than_it_says_is_refused(tmp_path: Path) -> None:
    data = bytearray(packed())
    at = data.index(b"PK\1\2")
    data[at + 24 : at + 28] = struct.pack("<I", 5000)
    assert "not a zip archive that can be read" in why(tmp_path, bytes(data))


def test_absurd_sizes_are_refused(tmp_path: Path) -> None:
    data = bytearray(packed())
    at = data.index(b"PK\1\2")
    data[at + 24 : at + 28] = struct.pack("<I", 0xFFFFFFFE)
    assert "more than 100 times" in why(tmp_path, bytes(data))
    data[at + 20 : at + 24] = struct.pack("<I", 0xFFFFFFFE)
    assert f"of a file of {len(data)}" in why(tmp_path, bytes(data))


def test_members_that_share_their_bytes_are_refused(tmp_path: Path) -> None:
    """How a small file stands for terabytes: many members over one stream."""
    one = packed({"a.so": bytes(100_000)}, method=zipfile.ZIP_STORED)
    at, end = one.index(b"PK\1\2"), one.index(b"PK\5\6")
    listed = one[at:end]
    names = [f"{n:04}" for n in range(50)]
    table = b"".join(listed.replace(b"a.so", name.encode()) for name in names)
    tail = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 50, 50, len(table), at, 0)
    assert "bytes of a file of" in why(
        tmp_path, one[:at] + table + tail, dict.fromkeys(names, Digest("0" * 64))
    )


def test_too_many_members_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "LIMITS", replace(archive.LIMITS, members=1))
    assert "it has 2 members, expected at most 1" in why(tmp_path, packed())


def test_a_vast_table_of_contents_is_not_read_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "LIMITS", replace(archive.LIMITS, table=10_000))
    data = packed({f"{'x' * 200}{n}": b"" for n in range(100)})
    assert "table of contents has more than 10000 bytes" in why(tmp_path, data)


def test_a_comment_is_refused(tmp_path: Path) -> None:
    data = bytearray(packed())
    data[-2:] = struct.pack("<H", 5)
    assert "it has a comment" in why(tmp_path, bytes(data) + b"hello")


@pytest.mark.parametrize(
    "data", [b"", b"text", b"PK\5\6" + bytes(17), b"PK\5\6" + b"\xff" * 18, b"PK\1\2" * 30]
)
def test_what_is_no_archive_is_a_typed_error(tmp_path: Path, data: bytes) -> None:
    assert "is not a zip archive that can be read" in why(tmp_path, data)


def test_only_the_first_of_many_flaws_are_told(tmp_path: Path) -> None:
    content = {f"../{n}.so": b"" for n in range(100)}
    text = why(tmp_path, packed(content), {name: sha256(b"") for name in content})
    assert "and 95 more" in text
    assert len(text) < 2000


def test_a_file_that_cannot_be_read_is_said_as_that(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        with archive.readable(tmp_path / "gone", what="artifact x"):
            pass
