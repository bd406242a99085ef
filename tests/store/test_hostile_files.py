"""Links that lead out of a store, and files of absurd sizes in it: none is followed, none is read whole."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest

from aotcache.errors import NotStored, RejectedArtifact, StoreError
from aotcache.manifest import Manifest
from aotcache.ownership import first_link, way_out
from aotcache.store import Store, open_store
from aotcache.store.collect import collect
from aotcache.store.local import require_private
from tests.manifests import make_manifest, write_archive


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> Store:
    return open_store(root)


@pytest.fixture
def manifest(store: Store, tmp_path: Path) -> Manifest:
    made = make_manifest(b"bytes")
    assert store.publish(made, write_archive(tmp_path, b"bytes"))
    return made


def moved_out(path: Path, outside: Path) -> None:
    """Put a link in a path's place, to where it is now."""
    outside.mkdir(exist_ok=True)
    shutil.move(path, outside / path.name)
    path.symlink_to(outside / path.name)


def ref(root: Path, manifest: Manifest) -> Path:
    return root / "refs" / manifest.key[:2] / manifest.key / f"{manifest.variant}.json"


def blob(root: Path, manifest: Manifest) -> Path:
    return root / "blobs" / manifest.digest[:2] / manifest.digest


@pytest.mark.parametrize("depth", range(4))
def test_a_ref_behind_a_link_out_is_not_there_and_said_once(
    store: Store, root: Path, manifest: Manifest, tmp_path: Path, depth: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = [ref(root, manifest), *ref(root, manifest).parents][depth]
    moved_out(path, tmp_path / "outside")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert store.lookup(manifest.key) == []
            assert list(store.entries()) == []
    told = [record.getMessage() for record in caplog.records if str(path) in record.getMessage()]
    assert 1 <= len(told) <= 2  # as a file that is asked for, and in a listing
    assert all("is not followed" in text for text in told)


@pytest.mark.parametrize("depth", range(3))
def test_an_archive_behind_a_link_out_is_a_miss_and_is_never_opened(
    store: Store, root: Path, manifest: Manifest, tmp_path: Path, depth: int
) -> None:
    path = [blob(root, manifest), *blob(root, manifest).parents][depth]
    moved_out(path, tmp_path / "outside")
    assert store.lookup(manifest.key) == []
    for read in (
        lambda: store.blob_path(manifest.digest),
        lambda: store.fetch(manifest.digest, tmp_path / "x"),
    ):
        with pytest.raises(RejectedArtifact, match="symbolic link out of"):
            read()
    assert not (tmp_path / "x").exists()


@pytest.mark.timeout(30)
def test_pipes_in_the_place_of_files_keep_nobody_waiting(
    store: Store, root: Path, manifest: Manifest, tmp_path: Path
) -> None:
    store.pin(manifest.digest, "")
    for path in (ref(root, manifest), root / "pins" / f"{manifest.digest}.json"):
        path.unlink()
        os.mkfifo(path)
    assert store.lookup(manifest.key) == []
    assert [pin.what for pin in store.pins()] == [manifest.digest]
    assert collect(store, max_bytes=0).problems == ()
    assert store.publish(manifest, write_archive(tmp_path, b"bytes"))
    blob(root, manifest).unlink()
    os.mkfifo(blob(root, manifest))
    with pytest.raises(NotStored):
        store.fetch(manifest.digest, tmp_path / "copy")


def test_a_pin_of_an_absurd_size_pins_and_is_not_read(store: Store, root: Path, manifest: Manifest) -> None:
    store.pin(manifest.digest, "release")
    os.truncate(root / "pins" / f"{manifest.digest}.json", 1 << 40)
    assert [(pin.what, pin.reason) for pin in store.pins()] == [(manifest.digest, "")]


def test_trust_in_a_shared_store_does_not_reach_beyond_it(
    root: Path, store: Store, manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved_out(blob(root, manifest), tmp_path / "outside")
    monkeypatch.setenv("AOTCACHE_TRUST_SHARED_STORE", "1")
    with pytest.raises(RejectedArtifact, match="symbolic link out of"):
        open_store(root).blob_path(manifest.digest)


@pytest.mark.parametrize("part", ["refs", "blobs", "tmp"])
def test_nothing_is_written_through_a_link_out(
    store: Store, root: Path, manifest: Manifest, tmp_path: Path, part: str
) -> None:
    moved_out(root / part, tmp_path / "outside")
    before = sorted(p for p in (tmp_path / "outside").rglob("*") if p.is_file())
    other = make_manifest(b"other", call="another")
    with pytest.raises(StoreError, match="symbolic link out of"):
        store.publish(other, write_archive(tmp_path, b"other"))
    assert sorted(p for p in (tmp_path / "outside").rglob("*") if p.is_file()) == before


def test_nothing_is_deleted_behind_a_link_out(
    store: Store, root: Path, manifest: Manifest, tmp_path: Path
) -> None:
    moved_out(root / "refs", tmp_path / "outside")
    assert not store.delete(manifest.key, manifest.variant)
    assert [p.name for p in (tmp_path / "outside").rglob("*.json")] == [f"{manifest.variant}.json"]


@pytest.mark.parametrize("to", ["out", "nothing", "itself"])
def test_a_publish_puts_the_file_in_the_place_of_a_link(
    store: Store, root: Path, manifest: Manifest, tmp_path: Path, to: str
) -> None:
    """Nobody has to remove the link first."""
    for path in (ref(root, manifest), blob(root, manifest)):
        moved_out(path, tmp_path / "outside")
        if to != "out":
            path.unlink()
            path.symlink_to("gone" if to == "nothing" else path.name)
    assert store.publish(manifest, write_archive(tmp_path, b"bytes"))
    assert store.lookup(manifest.key) == [manifest]
    assert not ref(root, manifest).is_symlink()
    assert not blob(root, manifest).is_symlink()


@pytest.mark.parametrize("to", ["out", "nothing", "itself"])
def test_copies_whose_origin_is_a_link_that_is_not_followed_are_not_the_users_own(
    store: Store, root: Path, manifest: Manifest, tmp_path: Path, to: str
) -> None:
    """What lies in a store of one's own needs no signature."""
    assert store.own
    (tmp_path / "origin").write_text("https://cache.example.org")
    target = {"out": tmp_path / "origin", "nothing": tmp_path / "gone", "itself": root / "origin"}[to]
    (root / "origin").symlink_to(target)
    assert not store.own


def test_links_in_circles_end_nothing(store: Store, root: Path, manifest: Manifest) -> None:
    """Each folder of the store holds links to all of it: whoever followed them would never come back."""
    for folder in (root / "refs", ref(root, manifest).parent, root / "blobs"):
        for number in range(3):
            (folder / f"loop{number}").symlink_to(root)
            (folder / f"self{number}").symlink_to(f"self{number}")
    assert store.lookup(manifest.key) == [manifest]
    assert [entry.manifest for entry in store.entries()] == [manifest]
    assert store.usage().refs == 1


def test_a_link_that_stays_within_is_followed(store: Store, root: Path, manifest: Manifest) -> None:
    path = blob(root, manifest)
    path.rename(path.with_name("kept"))
    path.symlink_to("kept")
    assert store.lookup(manifest.key) == [manifest]
    assert store.blob_path(manifest.digest) == path


def test_a_root_that_is_a_link_is_whoever_names_its_choice(
    root: Path, manifest: Manifest, tmp_path: Path
) -> None:
    (tmp_path / "short").symlink_to(root)
    store = open_store(tmp_path / "short")
    assert store.lookup(manifest.key) == [manifest]
    assert store.blob_path(manifest.digest) is not None


@pytest.mark.parametrize("where", ["root", "behind a link within"])
def test_a_folder_that_others_can_write_to_is_refused_behind_a_link(
    root: Path, manifest: Manifest, tmp_path: Path, where: str
) -> None:
    if where == "root":
        (tmp_path / "short").symlink_to(root)
        store, open_to_others = open_store(tmp_path / "short"), root
    else:
        path, kept = blob(root, manifest), root / "kept"
        kept.mkdir()
        path.rename(kept / path.name)
        path.symlink_to(kept / path.name)
        store, open_to_others = open_store(root), kept
    open_to_others.chmod(0o777)
    with pytest.raises(RejectedArtifact, match="has mode 0777"):
        store.blob_path(manifest.digest)


def test_where_paths_lead(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "folder").mkdir(parents=True)
    (root / "inner").symlink_to("folder")
    (root / "outer").symlink_to(tmp_path)
    (root / "nowhere").symlink_to("gone")
    (root / "circle").symlink_to("circle")
    assert way_out(root, root) is None
    assert way_out(root / "folder" / "not there", root) is None
    assert way_out(root / "inner", root) is None
    assert way_out(root / "inner" / "not there", root) is None
    assert "out of" in (way_out(root / "outer" / "not there", root) or "")
    assert f"to {tmp_path}" in (way_out(root / "outer", root) or "")
    assert way_out(root / "nowhere", root) is None
    assert "in circles" in (way_out(root / "circle", root) or "")
    assert ".. in it" in (way_out(root / "folder" / ".." / ".." / "x", root) or "")
    assert first_link(root / "inner" / "x", root) == root / "inner"
    with pytest.raises(RejectedArtifact, match="symbolic link out of"):
        require_private(root / "outer", root)


def test_a_vast_document_is_not_read_into_memory(
    store: Store, root: Path, manifest: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    os.truncate(ref(root, manifest), 1 << 40)
    (entry,) = store.entries()
    assert "expected at most" in (entry.problem or "")
    assert store.lookup(manifest.key) == []


@pytest.mark.parametrize("size", [0, 3, 1 << 40])
def test_an_archive_of_another_size_is_a_miss_before_a_byte_of_it_is_read(
    store: Store, root: Path, manifest: Manifest, tmp_path: Path, size: int
) -> None:
    os.truncate(blob(root, manifest), size)
    assert store.lookup(manifest.key) == []
    (entry,) = store.entries()
    assert f"has {size} bytes, the manifest says {manifest.size}" in (entry.problem or "")
    assert store.publish(manifest, write_archive(tmp_path, b"bytes"))  # and that heals it
    assert store.lookup(manifest.key) == [manifest]
