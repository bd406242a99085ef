"""D11: the cache directory is full, foreign, noexec or read-only, or the user has no name."""

from __future__ import annotations

import os
import shutil
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults import entries
from tests.faults.disks import mounted, remount
from tests.faults.hatchery import Ended, Hatchery, hatchery

ONE, OTHER, NAMELESS = 20_001, 20_002, 54_321
SIZE = 600_000
"""Bytes of an archive: two of them do not fit into 1 MB."""

as_root = pytest.mark.skipif(os.getuid() != 0, reason="becoming another user takes root")


@pytest.fixture(scope="module")
def hatched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hatchery]:
    folder = tmp_path_factory.mktemp("d11")
    with hatchery(folder / "logs") as made:
        yield made


@pytest.fixture
def open_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that every user can enter: pytest's own are for one user alone."""
    made = Path(tempfile.mkdtemp(prefix="aotcache-d11-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made, ignore_errors=True)


def publish(hatched: Hatchery, root: Path, folder: Path, seed: int, size: int = SIZE, **how: Any) -> Ended:
    archive = entries.written(folder / "archives", seed, size)
    arguments = {"url": root.as_uri(), "archive": str(archive), "seed": seed, "size": size}
    return hatched.run("tests.faults.acts:publish", arguments, **{"counted": False, **how})


def at(home: Path) -> dict[str, Any]:
    return {"environment": {"AOTCACHE_HOME": str(home)}, "counted": False}


def examine(hatched: Hatchery, root: Path, keys: dict[str, str], home: Path) -> list[str]:
    arguments = {"url": root.as_uri(), "acknowledged": keys}
    found: list[str] = hatched.run("tests.faults.acts:examine", arguments, **at(home)).answer
    return found


def test_a_full_disk_fails_the_publish_alone_and_is_forgotten(hatched: Hatchery, tmp_path: Path) -> None:
    home = tmp_path / "home"
    with mounted(tmp_path / "disk", "size=1m,mode=700") as disk:
        root = disk / "store"
        (first,) = publish(hatched, root, tmp_path, 1, **at(home)).acknowledged
        for _ in range(2):
            full = publish(hatched, root, tmp_path, 2, **at(home))
            assert full.error is not None
            assert full.error.startswith("StoreError: ")
            assert str(root) in full.error
            assert "No space left" in full.error
            assert hatched.run("tests.faults.acts:drafts", {"root": str(root)}).answer == []
            assert examine(hatched, root, {first["key"]: first["digest"]}, home) == []
        (entry,) = root.glob("blobs/*/*")
        entry.unlink()
        next(root.glob("refs/*/*/*.json")).unlink()
        (second,) = publish(hatched, root, tmp_path, 2, **at(home)).acknowledged
        assert second["stored"]
        assert examine(hatched, root, {second["key"]: second["digest"]}, home) == []


def test_a_home_that_is_full_is_named_and_opens_once_there_is_room(hatched: Hatchery, tmp_path: Path) -> None:
    root = tmp_path / "store"
    (entry,) = publish(hatched, root, tmp_path, 1, **at(tmp_path / "home")).acknowledged
    arguments = {"url": root.as_uri(), "key": entry["key"]}
    with mounted(tmp_path / "disk", "size=1m,mode=700") as disk:
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(700_000))
        full = hatched.run("tests.faults.acts:unpack", arguments, **at(disk / "home"))
        assert full.error is not None
        assert full.error.startswith("StoreError: ")
        assert str(disk / "home") in full.error
        assert "AOTCACHE_HOME" in full.error
        assert "No space left on device" in full.error
        assert list((disk / "home" / "unpacked").iterdir()) == []
        ballast.unlink()
        assert hatched.run("tests.faults.acts:unpack", arguments, **at(disk / "home")).status == 0
        assert hatched.run("tests.faults.acts:examine_unpacked", arguments, **at(disk / "home")).answer == []


def test_a_read_only_directory_serves_what_it_has(hatched: Hatchery, tmp_path: Path) -> None:
    home = tmp_path / "home"
    with mounted(tmp_path / "disk", "size=4m,mode=700") as disk:
        root = disk / "store"
        (entry,) = publish(hatched, root, tmp_path, 1, **at(home)).acknowledged
        remount(disk, "ro")
        assert examine(hatched, root, {entry["key"]: entry["digest"]}, home) == []
        arguments = {"url": root.as_uri(), "key": entry["key"]}
        assert hatched.run("tests.faults.acts:unpack", arguments, **at(home)).status == 0
        # What is there already need not be written; what is not is refused with the path and the reason.
        assert publish(hatched, root, tmp_path, 1, **at(home)).answer is False
        refused = publish(hatched, root, tmp_path, 2, **at(home))
        assert refused.error is not None
        assert refused.error.startswith("StoreError: ")
        assert str(root) in refused.error
        assert "Read-only file system" in refused.error
        # A home there is no home.
        refused = hatched.run("tests.faults.acts:unpack", arguments, **at(disk / "home"))
        assert refused.error is not None
        assert refused.error.startswith("StoreError: ")
        assert str(disk / "home") in refused.error
        assert "Read-only file system" in refused.error
        remount(disk, "rw")
        assert publish(hatched, root, tmp_path, 2, **at(home)).answer is True


def test_libraries_on_a_noexec_mount_are_refused_with_the_way_out(hatched: Hatchery, tmp_path: Path) -> None:
    library = next(Path(sysconfig.get_config_var("DESTSHARED")).glob("*.so"))
    archive = tmp_path / "archive.pt2"
    with zipfile.ZipFile(archive, "w") as package:
        package.write(library, entries.MEMBERS[0])
    arguments = {"url": (tmp_path / "store").as_uri(), "archive": str(archive), "member": library.name}
    key = hatched.run("tests.faults.acts:publish_file", arguments, **at(tmp_path / "home")).answer
    with mounted(tmp_path / "disk", "size=16m,mode=700,noexec") as disk:
        wanted = {"url": (tmp_path / "store").as_uri(), "key": key}
        refused = hatched.run("tests.faults.acts:open_entry", wanted, **at(disk / "home"))
        assert refused.error is not None
        assert refused.error.startswith("RejectedArtifact: ")
        assert str(disk / "home") in refused.error
        assert "noexec: set AOTCACHE_HOME" in refused.error
        # Elsewhere it is mapped, and then is not what it says: any library would do for that.
        other = hatched.run("tests.faults.acts:open_entry", wanted, **at(tmp_path / "home"))
        assert other.error is not None
        assert "mounted noexec" not in other.error
        assert "AOTInductorModelContainer" in other.error


@as_root
def test_two_users_with_umask_077_get_reasons_and_no_tracebacks(hatched: Hatchery, open_path: Path) -> None:
    """Everything of the one is out of the other's reach; neither harms the other, and neither waits."""
    root = open_path / "shared"
    root.mkdir()
    root.chmod(0o1777)
    for uid in (ONE, OTHER):
        (open_path / str(uid)).mkdir()
        os.chown(open_path / str(uid), uid, uid)
        entries.written(open_path / "archives", uid, 10_000)
    (open_path / "archives").chmod(0o755)

    def user(uid: int, **more: Any) -> dict[str, Any]:
        environment = {"AOTCACHE_HOME": str(open_path / str(uid) / "home"), **more}
        return {"uid": uid, "umask": 0o077, "environment": environment, "limit": 20.0}

    (mine,) = publish(hatched, root, open_path, ONE, 10_000, **user(ONE)).acknowledged
    refused = publish(hatched, root, open_path, OTHER, 10_000, **user(OTHER))
    read = hatched.run(
        "tests.faults.acts:take", {"url": root.as_uri(), "key": mine["key"]}, counted=False, **user(OTHER)
    )
    for ended in (refused, read):
        assert not ended.late
        assert ended.error is not None
        assert ended.error.startswith(("StoreError: ", "RejectedArtifact: "))
        assert str(root) in ended.error
        assert "Permission denied" in ended.error
    # The first one's home is no better for the second one, who has one of their own to fall back to.
    foreign = user(OTHER, AOTCACHE_HOME=str(open_path / str(ONE) / "home"))
    ended = hatched.run("tests.faults.acts:hold", {"name": "x", "seconds": 0}, counted=False, **foreign)
    assert ended.error is not None
    assert ended.error.startswith("StoreError: ")
    assert str(open_path / str(ONE)) in ended.error
    assert (
        hatched.run(
            "tests.faults.acts:hold", {"name": "x", "seconds": 0}, counted=False, **user(OTHER)
        ).status
        == 0
    )
    # And what the first one has is as it was.
    arguments = {"url": root.as_uri(), "acknowledged": {mine["key"]: mine["digest"]}}
    seen = hatched.run("tests.faults.acts:examine", arguments, **user(ONE, AOTCACHE_TRUST_SHARED_STORE="1"))
    assert seen.answer == []


@as_root
def test_a_directory_of_another_user_is_refused_unless_the_user_says_otherwise(
    hatched: Hatchery, open_path: Path
) -> None:
    root = open_path / "theirs"
    entries.written(open_path / "archives", 7, 10_000)
    root.mkdir()
    os.chown(root, ONE, ONE)
    home = open_path / "home"
    home.mkdir()
    os.chown(home, OTHER, OTHER)
    theirs = {"uid": ONE, "umask": 0o022, "environment": {"AOTCACHE_HOME": "/nonexistent"}}
    (entry,) = publish(hatched, root, open_path, 7, 10_000, **theirs).acknowledged
    arguments = {"url": root.as_uri(), "key": entry["key"]}
    refused = hatched.run("tests.faults.acts:take", arguments, uid=OTHER, **at(home))
    assert refused.error is not None
    assert refused.error.startswith("RejectedArtifact: ")
    assert f"belongs to uid {ONE}, expected uid {OTHER}" in refused.error
    trusting = {"AOTCACHE_HOME": str(home), "AOTCACHE_TRUST_SHARED_STORE": "1"}
    taken = hatched.run("tests.faults.acts:take", arguments, uid=OTHER, counted=False, environment=trusting)
    assert taken.status == 0


@as_root
def test_a_user_without_a_name_or_a_home_works_in_a_place_of_their_own(
    hatched: Hatchery, open_path: Path
) -> None:
    temporary = open_path / "tmp"
    temporary.mkdir()
    temporary.chmod(0o1777)
    entries.written(open_path / "archives", 3, 10_000)
    gone = (
        "HOME",
        "XDG_CACHE_HOME",
        "XDG_CONFIG_HOME",
        "AOTCACHE_HOME",
        "AOTCACHE_CONFIG_HOME",
        "USER",
        "LOGNAME",
    )
    environment = {**dict.fromkeys(gone), "TMPDIR": str(temporary)}
    who: dict[str, Any] = {"uid": NAMELESS, "umask": 0o077, "environment": environment, "counted": False}
    found = hatched.run("tests.faults.acts:whoami", {}, **who).answer
    assert found["uid"] == NAMELESS
    home = Path(found["home"])
    assert home == temporary / f"aotcache-{NAMELESS}"
    who.pop("counted")
    (entry,) = publish(hatched, home / "store", open_path, 3, 10_000, **who).acknowledged
    arguments = {"url": found["store"], "key": entry["key"]}
    assert hatched.run("tests.faults.acts:unpack", arguments, **who).status == 0
    assert hatched.run("tests.faults.acts:make_key", {}, **who).status == 0
    (finding,) = hatched.run("tests.faults.acts:findings", {}, **who).answer
    assert finding["state"] == "ok", finding
    assert home.stat().st_uid == NAMELESS
