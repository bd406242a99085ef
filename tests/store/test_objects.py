"""One contract suite over every kind of store, then what only directories can suffer."""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
import stat
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest

from aotcache.errors import CorruptArtifact, NotStored, RejectedArtifact, StoreError
from aotcache.manifest import Manifest
from aotcache.store import Store, open_store
from aotcache.store.clients import Client
from aotcache.types import Digest, sha256
from tests.manifests import make_manifest, write_archive


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_store((tmp_path / "store").as_uri() if request.param == "file" else "memory:///")


@pytest.fixture
def files(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


def put(store: Store, tmp_path: Path, data: bytes, **what: Any) -> Manifest:
    manifest = make_manifest(data, **what)
    assert store.publish(manifest, write_archive(tmp_path, data))
    return manifest


def client(store: Store) -> Client:
    return store._client  # type: ignore[attr-defined, no-any-return]


def blob(manifest: Manifest) -> str:
    return f"blobs/{manifest.digest[:2]}/{manifest.digest}"


def ref(manifest: Manifest) -> str:
    return f"refs/{manifest.key[:2]}/{manifest.key}/{manifest.variant}.json"


def visible(root: Path) -> list[Path]:
    return [p for p in root.rglob("*") if p.is_file()]


def test_an_unknown_key_is_a_miss(store: Store) -> None:
    key = make_manifest().key
    assert store.lookup(key) == []
    assert store.resolve([key]) == {key: []}
    assert list(store.entries()) == []
    assert store.usage().bytes == 0


def test_what_was_published_is_found_and_fetched(store: Store, tmp_path: Path) -> None:
    data = os.urandom(3_000_000)
    manifest = put(store, tmp_path, data)
    assert store.lookup(manifest.key) == [manifest]
    dest = tmp_path / "deep" / "copy.pt2"
    store.fetch(manifest.digest, dest)
    assert dest.read_bytes() == data
    assert [p.name for p in dest.parent.iterdir()] == ["copy.pt2"]


def test_layout_is_the_documented_one(store: Store, tmp_path: Path) -> None:
    manifest = put(store, tmp_path, b"bytes")
    assert client(store).get(blob(manifest)) == b"bytes"
    assert client(store).get(ref(manifest)) == manifest.to_json()


def test_variants_of_one_key_are_found_together(store: Store, tmp_path: Path) -> None:
    wide = put(store, tmp_path, b"wide", target="cpu:x86_64-avx512")
    narrow = put(store, tmp_path, b"narrow", target="cpu:x86_64-avx2")
    assert wide.key == narrow.key
    found = sorted(store.lookup(wide.key), key=lambda m: str(m.target))
    assert found == [narrow, wide]


def test_resolve_answers_every_key_once(store: Store, tmp_path: Path) -> None:
    one = put(store, tmp_path, b"one", call="one")
    absent = make_manifest(call="absent").key
    assert store.resolve([one.key, absent, one.key]) == {one.key: [one], absent: []}


def test_a_published_entry_is_left_alone_unless_replaced(store: Store, tmp_path: Path) -> None:
    first = put(store, tmp_path, b"first")
    second = make_manifest(b"second")
    archive = write_archive(tmp_path, b"second")
    assert not store.publish(second, archive)
    assert store.lookup(first.key) == [first]
    assert store.publish(second, archive, replace=True)
    assert store.lookup(first.key) == [second]


def test_an_archive_that_is_not_what_the_manifest_says_is_not_published(store: Store, tmp_path: Path) -> None:
    manifest = make_manifest(b"right")
    with pytest.raises(CorruptArtifact, match=manifest.digest) as caught:
        store.publish(manifest, write_archive(tmp_path, b"wrong"))
    assert sha256(b"wrong") in str(caught.value)
    assert store.lookup(manifest.key) == []
    assert store.usage().blobs == 0


def test_a_ref_whose_bytes_are_gone_is_a_miss_until_published_again(store: Store, tmp_path: Path) -> None:
    manifest = put(store, tmp_path, b"bytes")
    client(store).delete(blob(manifest))
    assert store.lookup(manifest.key) == []
    [entry] = store.entries()
    assert entry.size is None
    assert entry.problem is not None
    assert manifest.digest in entry.problem
    with pytest.raises(NotStored, match=manifest.digest):
        store.fetch(manifest.digest, tmp_path / "copy")
    assert store.publish(manifest, write_archive(tmp_path, b"bytes"))
    assert store.lookup(manifest.key) == [manifest]


@pytest.mark.parametrize("junk", [b"", b"{", b"[]", b'{"schema": 99}', b"\xff\xfe"])
def test_a_manifest_that_cannot_be_read_is_a_miss_and_can_be_published_over(
    store: Store, tmp_path: Path, junk: bytes
) -> None:
    manifest = put(store, tmp_path, b"bytes")
    client(store).put(ref(manifest), junk, create=False)
    assert store.lookup(manifest.key) == []
    [entry] = store.entries()
    assert entry.manifest is None
    assert entry.problem
    assert store.publish(manifest, write_archive(tmp_path, b"bytes"))
    assert store.lookup(manifest.key) == [manifest]


def test_a_manifest_filed_under_another_key_is_a_miss(store: Store, tmp_path: Path) -> None:
    manifest = put(store, tmp_path, b"bytes")
    other = make_manifest(b"bytes", call="other")
    client(store).put(ref(other), manifest.to_json(), create=False)
    assert store.lookup(other.key) == []
    assert list(store.list()) == [manifest]


def test_changed_bytes_are_never_handed_out(store: Store, tmp_path: Path) -> None:
    manifest = put(store, tmp_path, b"right bytes")
    client(store).put(blob(manifest), b"wrong bytes", create=False)
    dest = tmp_path / "copy"
    with pytest.raises(CorruptArtifact) as caught:
        store.fetch(manifest.digest, dest)
    assert manifest.digest in str(caught.value)
    assert sha256(b"wrong bytes") in str(caught.value)
    assert not dest.exists()


def test_changed_bytes_are_healed_by_replacing(store: Store, tmp_path: Path) -> None:
    manifest = put(store, tmp_path, b"right bytes")
    client(store).put(blob(manifest), b"wrong bytes", create=False)
    assert store.publish(manifest, write_archive(tmp_path, b"right bytes"), replace=True)
    store.fetch(manifest.digest, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"right bytes"


def test_a_listing_has_sizes_and_counts_shared_archives_once(store: Store, tmp_path: Path) -> None:
    put(store, tmp_path, b"12345", call="one")
    put(store, tmp_path, b"12345", call="two")
    put(store, tmp_path, b"123", call="three")
    assert sorted(e.size for e in store.entries() if e.size is not None) == [3, 5, 5]
    keys = [e.key for e in store.entries()]
    assert keys == sorted(keys)
    usage = store.usage()
    assert (usage.refs, usage.blobs, usage.bytes) == (3, 2, 8)


def test_delete_keeps_an_archive_that_another_ref_names(store: Store, tmp_path: Path) -> None:
    one = put(store, tmp_path, b"shared", call="one")
    two = put(store, tmp_path, b"shared", call="two")
    assert store.delete(one.key, one.variant)
    assert store.lookup(one.key) == []
    assert store.lookup(two.key) == [two]
    assert store.delete(two.key, str(two.variant))
    assert not store.delete(two.key, two.variant)
    assert store.usage().blobs == 0


def test_a_text_that_is_no_digest_is_not_stored(store: Store, tmp_path: Path) -> None:
    with pytest.raises(NotStored, match="64"):
        store.fetch(Digest("../../etc/passwd"), tmp_path / "copy")


def test_threads_that_publish_one_entry_agree(store: Store, tmp_path: Path) -> None:
    contents = (b"a", b"bb", b"ccc", b"dddd")
    archives = [(make_manifest(data), write_archive(tmp_path, data)) for data in contents]
    start = threading.Barrier(len(archives))
    stored: list[bool] = []

    def publish(manifest: Manifest, archive: Path) -> None:
        start.wait()
        stored.append(store.publish(manifest, archive))

    threads = [threading.Thread(target=publish, args=pair) for pair in archives]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stored.count(True) == 1
    [winner] = store.lookup(archives[0][0].key)
    store.fetch(winner.digest, tmp_path / "copy")


def test_an_archive_that_is_not_there_is_a_typed_error(store: Store, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"nothing\.pt2"):
        store.publish(make_manifest(), tmp_path / "nothing.pt2")


# Directories


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


def test_memory_has_no_file_to_hand_out() -> None:
    assert open_store("memory:///").blob_path(sha256(b"x")) is None


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
    read_bytes = Path.read_bytes

    def stale(self: Path) -> bytes:
        if left[0] > 0:
            left[0] -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return read_bytes(self)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", stale)
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


@pytest.mark.parametrize(
    ("url", "said"),
    [("ftp://host/x", "ftp"), ("file://host/x", "three slashes"), ("http://host/x", "http"), ("az://only", "az://")],
)
def test_addresses_of_other_kinds_are_refused(url: str, said: str) -> None:
    with pytest.raises(StoreError, match=said):
        open_store(url)


def test_urls_and_paths_open_the_same_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "with space"
    assert open_store(place).url == open_store("with space").url == open_store(place.as_uri()).url
    assert open_store(open_store(place).url).url == place.as_uri()
    monkeypatch.setenv("AOTCACHE_STORE", place.as_uri())
    assert open_store().url == place.as_uri()


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
    answers.put((worker, problems, {step: store.lookup(make_manifest(call=f"key {step}").key)[0].digest
                                    for step in range(6)}))


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
            cwd=Path(__file__).parents[2], check=False, capture_output=True, text=True,
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


_FORKED = """
import os, sys
from aotcache.errors import StoreError
from aotcache.store import open_store
url = sys.argv[1]
store = open_store(url)
list(store.entries())
pid = os.fork()
if pid == 0:
    answers = []
    for open_one in (lambda: store, lambda: open_store(url)):
        try:
            answers.append(str(len(list(open_one().entries()))))
        except StoreError as error:
            answers.append("spawn" if "spawn" in str(error) else str(error))
    print(" ".join(answers), flush=True)
    os._exit(0)
os.waitpid(pid, 0)
"""


@pytest.mark.parametrize(("kind", "said"), [("file", "0 0"), ("memory", "spawn spawn")])
def test_a_fork_works_on_a_directory_and_is_refused_on_a_bucket(tmp_path: Path, kind: str, said: str) -> None:
    url = (tmp_path / "store").as_uri() if kind == "file" else "memory:///"
    done = subprocess.run(
        [sys.executable, "-c", _FORKED, url], cwd=Path(__file__).parents[2], capture_output=True, text=True,
        timeout=60, check=True,
    )
    assert done.stdout.strip() == said
