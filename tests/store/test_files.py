"""What only a store in a directory can suffer: users, disks, processes and their ends."""

from __future__ import annotations

import builtins
import errno
import hashlib
import json
import multiprocessing
import os
import stat
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from aotcache.errors import CorruptArtifact, NotStored, RejectedArtifact, StoreError
from aotcache.manifest import Manifest
from aotcache.store import Store, open_store
from aotcache.types import sha256
from tests.manifests import make_manifest, write_archive


@pytest.fixture
def files(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


def put(store: Store, tmp_path: Path, data: bytes, **what: Any) -> Manifest:
    manifest = make_manifest(data, **what)
    assert store.publish(manifest, write_archive(tmp_path, data))
    return manifest


def visible(root: Path) -> list[Path]:
    return [p for p in root.rglob("*") if p.is_file()]


def test_opening_and_reading_make_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path / "nowhere")
    assert store.lookup(make_manifest().key) == []
    assert not (tmp_path / "nowhere").exists()


def test_a_directory_hands_out_the_file_itself(files: Store, tmp_path: Path) -> None:
    manifest = put(files, tmp_path, b"bytes")
    path = files.blob_path(manifest.digest)
    assert path is not None
    assert path.read_bytes() == b"bytes"
    with pytest.raises(NotStored):
        files.blob_path(sha256(b"other"))


def test_a_directory_drops_changed_bytes_so_that_the_next_lookup_misses(files: Store, tmp_path: Path) -> None:
    manifest = put(files, tmp_path, b"right bytes")
    path = files.blob_path(manifest.digest)
    assert path is not None
    path.write_bytes(b"right byteS")
    with pytest.raises(CorruptArtifact):
        files.blob_path(manifest.digest)
    assert files.lookup(manifest.key) == []
    assert files.publish(manifest, write_archive(tmp_path, b"right bytes"))


def test_a_full_disk_stores_nothing_and_is_forgotten(
    files: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = make_manifest(b"bytes")
    archive = write_archive(tmp_path, b"bytes")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StoreError, match="No space left"):
            files.publish(manifest, archive)
    assert visible(tmp_path / "store") == []
    assert files.publish(manifest, archive)


def test_a_publish_is_on_disk_before_its_name_is(
    files: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsync comes before the file gets its name, and the archive before the ref."""
    events: list[str] = []
    fsync, link, replace = os.fsync, os.link, os.replace

    def folder(path: Any) -> str:
        return Path(path).relative_to(tmp_path / "store").parts[0]

    def seen_fsync(descriptor: int) -> None:
        events.append("dir" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def seen_link(a: Any, b: Any) -> None:
        events.append(folder(b))
        link(a, b)

    def seen_replace(a: Any, b: Any) -> None:
        events.append(folder(b))
        replace(a, b)

    archive = write_archive(tmp_path, b"x")
    put(files, tmp_path, b"first", call="makes the folders")
    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "link", seen_link)
    monkeypatch.setattr(os, "replace", seen_replace)
    files.publish(make_manifest(b"x"), archive)
    named = [event for event in events if event != "dir"]
    assert named == ["file", "blobs", "file", "refs"]
    assert events[-1] == "dir"


def test_a_file_system_without_hard_links_will_do(
    files: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(a: Any, b: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    first = put(files, tmp_path, b"first")
    assert not files.publish(make_manifest(b"second"), write_archive(tmp_path, b"second"))
    assert files.lookup(first.key) == [first]


@pytest.mark.parametrize("times", [1, 50])
def test_a_stale_handle_is_tried_again_and_then_a_miss(
    files: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    manifest = put(files, tmp_path, b"bytes")
    left = [times]
    opened = builtins.open

    def stale(path: Any, *arguments: Any, **options: Any) -> Any:
        if left[0] > 0:
            left[0] -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return opened(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "open", stale)
        assert files.lookup(manifest.key) == ([manifest] if times == 1 else [])
    assert files.lookup(manifest.key) == [manifest]


def test_what_a_killed_writer_left_is_invisible_and_swept_a_day_later(files: Store, tmp_path: Path) -> None:
    put(files, tmp_path, b"one", call="one")
    drafts = tmp_path / "store" / "tmp"
    old, young = drafts / uuid.uuid4().hex, drafts / uuid.uuid4().hex
    old.write_bytes(b"half")
    young.write_bytes(b"half")
    os.utime(old, (0, 0))
    assert files.usage().blobs == 1
    put(files, tmp_path, b"two", call="two")
    assert list(drafts.iterdir()) == [young]


def test_files_of_other_users_are_not_opened(files: Store, tmp_path: Path) -> None:
    manifest = put(files, tmp_path, b"bytes")
    root = tmp_path / "store"
    root.chmod(0o777)
    with pytest.raises(RejectedArtifact, match="0777"):
        files.blob_path(manifest.digest)
    with pytest.raises(RejectedArtifact, match="AOTCACHE_TRUST_SHARED_STORE"):
        files.fetch(manifest.digest, tmp_path / "copy")
    root.chmod(0o755)
    path = files.blob_path(manifest.digest)
    assert path is not None
    path.chmod(0o664)
    with pytest.raises(RejectedArtifact, match="0664"):
        files.blob_path(manifest.digest)


def test_a_shared_directory_is_opened_when_the_user_says_so(
    files: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = put(files, tmp_path, b"bytes")
    (tmp_path / "store").chmod(0o777)
    monkeypatch.setenv("AOTCACHE_TRUST_SHARED_STORE", "1")
    assert open_store(tmp_path / "store").blob_path(manifest.digest) is not None


def test_a_store_made_under_a_lax_umask_is_still_private(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        store = open_store(tmp_path / "store")
        manifest = put(store, tmp_path, b"bytes")
    finally:
        os.umask(before)
    assert store.blob_path(manifest.digest) is not None


def test_a_read_only_store_is_read(files: Store, tmp_path: Path) -> None:
    manifest = put(files, tmp_path, b"bytes")
    for path in sorted((tmp_path / "store").rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    assert files.lookup(manifest.key) == [manifest]
    assert files.blob_path(manifest.digest) is not None
    for path in sorted((tmp_path / "store").rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def test_a_store_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = open_store(tmp_path / "file" / "store")
    with pytest.raises(StoreError, match=str(tmp_path / "file")):
        store.publish(make_manifest(b"x"), write_archive(tmp_path, b"x"))
    assert store.lookup(make_manifest().key) == []


def _publish_and_read(root: str, folder: str, worker: int, start: Any, answers: Any) -> None:
    store = open_store(root)
    start.wait()
    problems: list[str] = []
    for step in range(6):
        data = json.dumps([worker, step]).encode() * 500
        manifest = make_manifest(data, call=f"key {step}")
        store.publish(manifest, write_archive(Path(folder), data))
        for found in store.lookup(manifest.key):
            copy = Path(folder) / f"copy-{worker}-{step}"
            store.fetch(found.digest, copy)
            if hashlib.sha256(copy.read_bytes()).hexdigest() != found.digest:
                problems.append(f"{step}: wrong bytes")
        if len(store.lookup(manifest.key)) != 1:
            problems.append(f"{step}: not one entry")
    answers.put(
        (
            worker,
            problems,
            {step: store.lookup(make_manifest(call=f"key {step}").key)[0].digest for step in range(6)},
        )
    )


def test_sixteen_processes_publish_and_read_the_same_keys(tmp_path: Path) -> None:
    """All of them always read whole entries, and end up with the same ones."""
    context = multiprocessing.get_context("fork")
    start, answers = context.Barrier(16), context.Queue()
    workers = [
        context.Process(
            target=_publish_and_read, args=(str(tmp_path / "store"), str(tmp_path), n, start, answers)
        )
        for n in range(16)
    ]
    for worker in workers:
        worker.start()
    found = [answers.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert [problems for _, problems, _ in found if problems] == []
    assert len({json.dumps(digests) for _, _, digests in found}) == 1
    assert len(list(open_store(tmp_path / "store").list())) == 6
    assert list((tmp_path / "store" / "tmp").iterdir()) == []


_KILLED = """
import os, signal, sys
from pathlib import Path
from aotcache.store import open_store
from tests.manifests import make_manifest, write_archive
moment, root, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
calls = 0
fsync = os.fsync
def dying(descriptor):
    global calls
    calls += 1
    if calls == moment:
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(descriptor)
os.fsync = dying
open_store(root).publish(make_manifest(b"bytes"), write_archive(folder, b"bytes"))
"""


def test_a_publish_killed_at_any_fsync_leaves_a_whole_entry_or_none(tmp_path: Path) -> None:
    manifest = make_manifest(b"bytes")
    outcomes = []
    for moment in range(1, 30):
        root = tmp_path / str(moment)
        done = subprocess.run(
            [sys.executable, "-c", _KILLED, str(moment), str(root), str(tmp_path)],
            cwd=Path(__file__).parents[2],
            check=False,
            capture_output=True,
            text=True,
        )
        assert done.returncode in (0, -9), done.stderr
        store = open_store(root)
        found = store.lookup(manifest.key)
        assert found in ([], [manifest])
        assert store.publish(manifest, write_archive(tmp_path, b"bytes")) == (found == [])
        assert store.lookup(manifest.key) == [manifest]
        outcomes.append((done.returncode, bool(found)))
        if done.returncode == 0:
            break
    assert outcomes[-1] == (0, True)
    assert outcomes[0] == (-9, False)
