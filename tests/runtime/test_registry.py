"""The registry: unpacked once per host, opened once per process, and never unverified."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from aotcache.errors import CorruptArtifact, NotStored, RejectedArtifact, StoreError
from aotcache.manifest import Manifest
from aotcache.runtime import registry
from aotcache.runtime.function import Executable
from aotcache.store.base import Store
from aotcache.types import Digest
from tests.runtime import artifacts
from tests.runtime.artifacts import Artifact, close, inputs, loss, reference

WORKER = """
import json, os, sys
from pathlib import Path
import torch
from aotcache.manifest import Manifest
from aotcache.runtime import registry
from aotcache.runtime.tripwire import forbid_tracing
from aotcache.store import open_store

manifest = Manifest.from_json(Path(sys.argv[1]).read_bytes(), where="manifest")
with forbid_tracing("process") as receipt:
    executable, _ = registry.open_artifact(manifest, open_store(sys.argv[2]), Path(sys.argv[3]))
    tensors = torch.load(sys.argv[4])
    outputs = executable.train(tensors)
    (outputs[0].square().sum() + 0.5 * outputs[1].square().sum()).backward()
print(json.dumps({
    "grads": [t.grad.tolist() for t in tensors[:3]],
    "traces": receipt.total,
    "libraries": sorted(p.stat().st_ino for p in Path(sys.argv[3]).rglob("*.so")),
    "compilers": [m for m in ("torch._inductor", "torch._dynamo", "triton", "aotcache.compile") if m in sys.modules],
}))
"""


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return artifacts.pair(tmp_path_factory)


@pytest.fixture(scope="session")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return artifacts.proxied(tmp_path_factory)


class Counting:
    """The store, counting how often the bytes are asked for."""

    def __init__(self, artifact: Artifact) -> None:
        self._store = artifact.store
        self._lock = threading.Lock()
        self.asked = 0

    def blob_path(self, digest: Digest) -> Path | None:
        with self._lock:
            self.asked += 1
        return self._store.blob_path(digest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class Remote(Counting):
    """The store as if it lay on another host: bytes have to be fetched."""

    def blob_path(self, digest: Digest) -> Path | None:
        super().blob_path(digest)
        return None


def _unpack(artifact: Artifact, home: Path, manifest: Manifest | None = None) -> Path:
    return registry.unpack(manifest or artifact.manifest, registry._AtHand(artifact.archive), home)


def _library(folder: Path) -> Path:
    return next(folder.rglob("forward.wrapper.so"))


@pytest.mark.slow
def test_eight_threads_open_once_in_each_of_fifty_cold_rounds(pair: Artifact, tmp_path: Path) -> None:
    tensors = inputs(1)
    values, grads = reference(tensors, (1.0, 0.5))
    opened = registry.opened()
    with ThreadPoolExecutor(8) as pool:
        for index in range(50):
            home, store = tmp_path / str(index), Counting(pair)
            manifest = pair.renamed(f"round {index}")
            start = threading.Barrier(8)

            def work(
                _: int,
                home: Path = home,
                store: Any = store,
                manifest: Manifest = manifest,
                start: Any = start,
            ) -> tuple[int, bool, bool]:
                start.wait()
                executable, first = registry.open_artifact(manifest, store, home)
                own = inputs(1)
                outputs = executable.train(own)
                loss(outputs).backward()
                found = [*outputs, *(t.grad for t in own[:3])]
                right = all(close(t, w) for t, w in zip(found, [*values, *grads], strict=True))
                return id(executable), first, right

            done = list(pool.map(work, range(8)))
            assert len({which for which, _, _ in done}) == 1
            assert sum(first for _, first, _ in done) == 1
            assert all(right for _, _, right in done)
            assert store.asked == 1
            assert [p.name for p in (home / "unpacked").iterdir()] == [pair.manifest.digest]
    assert registry.opened() == opened + 50


@pytest.mark.slow
def test_worker_processes_without_a_compiler_share_one_unpacked_folder(
    pair: Artifact, tmp_path: Path
) -> None:
    (tmp_path / "manifest.json").write_bytes(pair.manifest.to_json())
    tensors = inputs(2)
    torch.save(tensors, tmp_path / "tensors")
    empty = tmp_path / "empty"
    empty.mkdir()
    environment = {k: v for k, v in os.environ.items() if k not in ("CXX", "CC")} | {"PATH": str(empty)}
    arguments = [tmp_path / "manifest.json", pair.store.url, tmp_path / "home", tmp_path / "tensors"]
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, *map(str, arguments)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    found = [json.loads(worker.communicate(timeout=200)[0]) for worker in workers]
    _, wanted = reference(tensors, (1.0, 0.5))
    for answer in found:
        assert all(close(torch.tensor(g), w) for g, w in zip(answer["grads"], wanted, strict=True))
        assert answer["traces"] == 0
        assert answer["compilers"] == []
        assert answer["libraries"] == found[0]["libraries"]
    assert len(found[0]["libraries"]) == 2


def test_two_keys_of_one_archive_share_its_libraries(pair: Artifact, tmp_path: Path) -> None:
    one, _ = registry.open_artifact(pair.renamed("one"), pair.store, tmp_path)
    libraries = set(registry._libraries)
    two, first = registry.open_artifact(pair.renamed("two"), pair.store, tmp_path)
    assert first
    assert one is not two
    assert set(registry._libraries) == libraries


def test_a_folder_outlives_its_archive(pair: Artifact, tmp_path: Path) -> None:
    folder = _unpack(pair, tmp_path)
    unpacked_again = registry.unpack(pair.manifest, registry._AtHand(tmp_path / "gone"), tmp_path)
    assert unpacked_again == folder


def test_an_archive_on_another_host_is_fetched_and_not_kept_twice(pair: Artifact, tmp_path: Path) -> None:
    folder = registry.unpack(pair.manifest, registry._Fetched(Remote(pair)), tmp_path)
    assert _library(folder).is_file()
    assert not list(tmp_path.rglob("*.pt2"))


def test_a_library_changed_on_disk_is_made_anew(pair: Artifact, tmp_path: Path) -> None:
    library = _library(_unpack(pair, tmp_path))
    good = library.read_bytes()
    library.unlink()
    library.write_bytes(good[:-1] + b"\0\0")
    assert _library(_unpack(pair, tmp_path)).read_bytes() == good
    library.unlink()
    assert _library(_unpack(pair, tmp_path)).read_bytes() == good


def test_many_threads_that_find_it_changed_repair_it_once(pair: Artifact, tmp_path: Path) -> None:
    library = _library(_unpack(pair, tmp_path))
    library.unlink()
    library.write_bytes(b"changed")
    store, start = Counting(pair), threading.Barrier(8)

    def work(_: int) -> Path:
        start.wait()
        return registry.unpack(pair.manifest, registry._Fetched(store), tmp_path)

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(work, range(8)))) == 1
    assert store.asked == 1
    assert hashlib.sha256(library.read_bytes()).hexdigest() in pair.manifest.members.values()


def test_the_archive_that_torchs_loader_reads_is_checked_too(proxied: Artifact, tmp_path: Path) -> None:
    archive = _unpack(proxied, tmp_path) / "archive.pt2"
    good = archive.read_bytes()
    assert hashlib.sha256(good).hexdigest() == proxied.manifest.digest
    archive.unlink()
    archive.write_bytes(b"changed")
    assert (_unpack(proxied, tmp_path) / "archive.pt2").read_bytes() == good


def test_an_artifact_for_torchs_loader_runs(proxied: Artifact, tmp_path: Path) -> None:
    executable, _ = registry.open_artifact(proxied.manifest, proxied.store, tmp_path)
    (out,) = executable.infer([torch.full((3, 4), 2.0)])
    assert out.unique().tolist() == [5.0]


def test_what_a_killed_process_left_is_cleared_away(pair: Artifact, tmp_path: Path) -> None:
    draft = tmp_path / "unpacked" / f".unpacking-{pair.manifest.digest}"
    draft.mkdir(parents=True, mode=0o700)
    (draft.parent).chmod(0o700)
    (draft / "half.so").write_bytes(b"half")
    folder = _unpack(pair, tmp_path)
    assert list((tmp_path / "unpacked").iterdir()) == [folder]
    assert not (folder / "half.so").exists()


def test_a_group_writable_umask_does_not_make_folders_others_can_write(
    pair: Artifact, tmp_path: Path
) -> None:
    before = os.umask(0o002)
    try:
        folder = _unpack(pair, tmp_path / "home")
    finally:
        os.umask(before)
    assert not any(p.stat().st_mode & 0o022 for p in [folder, *folder.rglob("*")])


def test_a_folder_others_can_write_to_is_not_opened(pair: Artifact, tmp_path: Path) -> None:
    library = _library(_unpack(pair, tmp_path))
    library.parent.chmod(0o777)
    with pytest.raises(RejectedArtifact, match="other users could have changed it"):
        _unpack(pair, tmp_path)


def _forged(pair: Artifact, folder: Path, changes: dict[str, bytes]) -> tuple[Manifest, Path]:
    """The archive with members replaced or added, under a manifest that names them all."""
    path = folder / "forged.pt2"
    members = dict(pair.manifest.members)
    with zipfile.ZipFile(pair.archive) as source, zipfile.ZipFile(path, "w") as sink:
        for name in source.namelist():
            if name not in changes:
                sink.writestr(name, source.read(name))
        for name, data in changes.items():
            sink.writestr(name, data)
            members[name] = Digest(hashlib.sha256(data).hexdigest())
    digest = Digest(hashlib.sha256(path.read_bytes()).hexdigest())
    return replace(pair.manifest, digest=digest, members=members), path


@pytest.mark.parametrize("name", ["../outside.so", "a/../../outside.so", "/tmp/outside-of-aotcache.so"])
def test_members_that_lead_out_of_the_folder_are_refused(pair: Artifact, tmp_path: Path, name: str) -> None:
    manifest, archive = _forged(pair, tmp_path, {name: b"outside"})
    with pytest.raises(CorruptArtifact, match="leads out of its folder"):
        registry.unpack(manifest, registry._AtHand(archive), tmp_path / "home")
    assert not list((tmp_path / "home" / "unpacked").iterdir())
    assert not list(tmp_path.rglob("outside*"))
    assert not Path("/tmp/outside-of-aotcache.so").exists()


def test_a_member_the_manifest_does_not_name_is_refused(pair: Artifact, tmp_path: Path) -> None:
    manifest, archive = _forged(pair, tmp_path, {"extra.so": b"extra"})
    known = replace(manifest, members=pair.manifest.members)
    with pytest.raises(CorruptArtifact, match=r"member 'extra\.so' that its manifest does not name"):
        registry.unpack(known, registry._AtHand(archive), tmp_path / "home")


def test_a_member_with_other_bytes_is_refused_with_both_digests(pair: Artifact, tmp_path: Path) -> None:
    name = next(n for n in pair.manifest.members if n.endswith("forward.wrapper.so"))
    manifest, archive = _forged(pair, tmp_path, {name: b"other"})
    known = replace(manifest, members=pair.manifest.members)
    with pytest.raises(CorruptArtifact) as refused:
        registry.unpack(known, registry._AtHand(archive), tmp_path / "home")
    assert pair.manifest.members[name] in str(refused.value)
    assert hashlib.sha256(b"other").hexdigest() in str(refused.value)
    assert not list((tmp_path / "home" / "unpacked").iterdir())


def test_a_member_that_is_not_in_the_archive_is_noticed(pair: Artifact, tmp_path: Path) -> None:
    members = {**pair.manifest.members, "more/more.so": pair.manifest.digest}
    with pytest.raises(CorruptArtifact, match=r"it lacks the member 'more/more\.so'"):
        _unpack(pair, tmp_path, replace(pair.manifest, members=members))


def test_what_is_no_archive_is_refused(pair: Artifact, tmp_path: Path) -> None:
    path = tmp_path / "text.pt2"
    path.write_bytes(b"text")
    with pytest.raises(CorruptArtifact, match="is not a zip archive"):
        registry.unpack(pair.manifest, registry._AtHand(path), tmp_path / "home")


def test_bytes_the_store_has_lost_are_an_error_and_can_be_opened_later(
    pair: Artifact, tmp_path: Path
) -> None:
    manifest = replace(pair.renamed("lost"), digest=Digest("0" * 64))
    for _ in range(2):
        with pytest.raises(NotStored):
            registry.open_artifact(manifest, pair.store, tmp_path)
    assert registry.open_artifact(pair.renamed("lost"), pair.store, tmp_path)[1]


@pytest.fixture
def full_home(tmp_path: Path) -> Path:
    """A home in whose place for unpacked artifacts nothing can be made, even by root: a file is in the way."""
    (tmp_path / "unpacked").write_bytes(b"")
    return tmp_path


def test_a_home_that_cannot_be_written_to_is_an_error_that_names_it(pair: Artifact, full_home: Path) -> None:
    with pytest.raises(StoreError, match="unpacked is a file, expected a directory"):
        _unpack(pair, full_home)


def test_what_a_collection_removes_while_it_is_opened_is_unpacked_once_more(
    pair: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, opened, really = pair.renamed("collected"), [], registry._open_marked

    def collected(manifest: Manifest, folder: Path, store: Store, home: Path) -> Executable:
        opened.append(folder)
        if len(opened) <= times:
            shutil.rmtree(folder)
        return really(manifest, folder, store, home)

    monkeypatch.setattr(registry, "_open_marked", collected)
    times = 2
    with pytest.raises((RejectedArtifact, OSError)):
        registry.open_artifact(manifest, pair.store, tmp_path / "home")
    assert len(opened) == 2
    opened.clear()
    times = 1
    assert registry.open_artifact(manifest, pair.store, tmp_path / "home")[1]
    assert len(opened) == 2


def test_opening_notes_the_use_of_the_archive_and_of_what_is_unpacked(pair: Artifact, tmp_path: Path) -> None:
    folder = _unpack(pair, tmp_path)
    blob = pair.store.blob_path(pair.manifest.digest)
    assert blob is not None
    for path in (blob, folder):
        os.utime(path, (1e9, 1e9))
    registry.open_artifact(pair.renamed("used"), pair.store, tmp_path)
    assert all(path.stat().st_mtime > time.time() - 600 for path in (blob, folder))
