"""Small files that appear whole or not at all, and leave nothing when their writer is killed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from aotcache import trust
from aotcache.config import settings
from aotcache.drafts import clear, draft, name_new, replace_file
from aotcache.errors import ConfigError
from aotcache.trust import SigningKey, make_signing_key, trusted_keys, unfinished_key


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_a_file_is_replaced_and_no_draft_remains(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for data in (b"first", b"second, longer", b"3"):
        replace_file(path, data, 0o600)
        assert path.read_bytes() == data
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert hidden(tmp_path) == []


def test_what_a_killed_writer_left_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "file"
    (tmp_path / ".file.draft").write_bytes(b"much longer than what comes, and open to all")
    (tmp_path / ".file.draft").chmod(0o666)
    replace_file(path, b"short", 0o600)
    assert path.read_bytes() == b"short"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert hidden(tmp_path) == []


def test_two_writers_at_once_do_not_share_a_draft(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with draft(path) as (first, one):
        with draft(path) as (second, other):
            assert first != second
            one.write(b"one")
            other.write(b"other")
            other.flush()
            os.replace(second, path)
        assert path.read_bytes() == b"other"
        one.flush()
        os.replace(first, path)
        # The name is free again: the next one's draft is not the first one's to remove.
        with draft(path) as (third, _):
            assert third == first
    assert path.read_bytes() == b"one"


def test_a_draft_that_has_its_final_name_already_is_not_written_to(tmp_path: Path) -> None:
    """Killed between the two names of a file, which are one file."""
    path = tmp_path / "file"
    path.write_bytes(b"final")
    os.link(path, tmp_path / ".file.draft")
    replace_file(path, b"newer")
    assert path.read_bytes() == b"newer"
    os.link(path, tmp_path / ".file.draft")
    clear(path)
    assert path.read_bytes() == b"newer"
    assert hidden(tmp_path) == []


def test_a_name_that_is_taken_stays_so(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "b").write_bytes(b"b")
    with pytest.raises(FileExistsError):
        name_new(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"b"


def test_a_key_whose_making_was_cut_short_is_finished_and_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signing key that is there and not trusted would have everything refused that it signs."""
    monkeypatch.setenv("AOTCACHE_CONFIG_HOME", str(tmp_path))
    path, trusted = tmp_path / "signing.pem", trusted_keys(settings())

    class Killed(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(trust.TrustedKeys, "add", killed)
        with pytest.raises(Killed):
            make_signing_key(path, trusted, "me")
    assert not path.exists()
    left = SigningKey.load(unfinished_key(path)).public

    key = make_signing_key(path, trusted, "me")
    assert key.public == left == SigningKey.load(path).public
    assert [found.key for found in trusted.list()] == [left]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["signing.pem", "trusted"]
    with pytest.raises(ConfigError, match="is there already"):
        make_signing_key(path, trusted, "me")
    assert SigningKey.load(path).public == left
