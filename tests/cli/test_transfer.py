"""`fetch` and `verify` over real stores, good and damaged."""

from __future__ import annotations

import io
import json
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from aotcache.cli import transfer
from aotcache.lockfile import Lock, LockedCell, write_lock
from aotcache.manifest import Manifest
from aotcache.store import ObjectStore, Store, open_store
from aotcache.types import Digest, sha256
from tests.cli.conftest import publish
from tests.manifests import make_manifest, write_archive


def blob(store: Path, digest: Digest) -> Path:
    return store / "blobs" / digest[:2] / digest


def lock_of(*manifests: Manifest) -> Lock:
    cells = [
        LockedCell(m.region, m.mode, m.bucket, str(m.target), str(m.toolchain), m.key, m.digest)
        for m in manifests
    ]
    return Lock("drafter", cells)


def test_fetch_copies_an_entry_to_another_store(run: Any, store: Store, tmp_path: Path) -> None:
    manifest = publish(store, tmp_path)
    other = tmp_path / "other"
    done = run("fetch", manifest.key[:8], "--store", store.url, "--to", other, "--json")
    assert done.code == 0
    assert [a["copied"] for a in done.json["artifacts"]] == [True]
    assert open_store(other).lookup(manifest.key) == [manifest]
    again = run("fetch", manifest.key[:8], "--store", store.url, "--to", other, "--json")
    assert [a["copied"] for a in again.json["artifacts"]] == [False]


def test_fetch_writes_archives_to_a_folder(run: Any, store: Store, tmp_path: Path) -> None:
    manifest = publish(store, tmp_path)
    done = run("fetch", manifest.digest, "--store", store.url, "--out", tmp_path / "out")
    assert done.code == 0
    assert sha256((tmp_path / "out" / f"{manifest.digest}.pt2").read_bytes()) == manifest.digest


def test_fetch_takes_what_a_lock_file_names(run: Any, store: Store, tmp_path: Path) -> None:
    first, second = publish(store, tmp_path, "one", call="a"), publish(store, tmp_path, "two", call="b")
    publish(store, tmp_path, "three", call="c")
    write_lock(tmp_path / "spec.toml.lock", lock_of(first, second))
    other = tmp_path / "other"
    done = run("fetch", "--lock", tmp_path / "spec.toml.lock", "--store", store.url, "--to", other)
    assert done.code == 0
    assert open_store(other).usage().refs == 2


def test_fetch_names_what_the_store_lacks_of_a_lock_file(run: Any, store: Store, tmp_path: Path) -> None:
    manifest = publish(store, tmp_path)
    write_lock(tmp_path / "a.lock", lock_of(manifest))
    assert store.delete(manifest.key, manifest.variant)
    done = run("fetch", "--lock", tmp_path / "a.lock", "--store", store.url, "--to", tmp_path / "other")
    assert done.code == 1
    assert manifest.digest in done.err


@pytest.mark.parametrize(
    "arguments",
    [["fetch", "abc"], ["fetch", "--to", "x"], ["fetch", "abc", "--to", "x", "--out", "y"]],
    ids=["nowhere", "nothing", "two places"],
)
def test_fetch_needs_one_source_and_one_place(run: Any, arguments: list[str]) -> None:
    assert run(*arguments).code == 2


def test_fetch_onto_itself_is_wrong_usage(run: Any, store: Store) -> None:
    assert run("fetch", "abc", "--store", store.url, "--to", store.url).code == 2


def test_verify_finds_nothing_wrong_with_a_good_store(run: Any, store: Store, tmp_path: Path) -> None:
    publish(store, tmp_path)
    done = run("verify", "--store", store.url, "--json")
    assert done.code == 0
    assert done.json["ok"] is True
    assert [e["problems"] for e in done.json["entries"]] == [[]]


def test_verify_names_both_digests_of_a_flipped_byte(run: Any, store: Store, tmp_path: Path) -> None:
    manifest = publish(store, tmp_path)
    path = blob(tmp_path / "store", manifest.digest)
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    done = run("verify", "--store", store.url, "--json")
    assert done.code == 1
    (problem,) = done.json["entries"][0]["problems"]
    assert manifest.digest in problem
    assert sha256(bytes(data)) in problem


def test_verify_sees_an_archive_that_is_gone(run: Any, store: Store, tmp_path: Path) -> None:
    manifest = publish(store, tmp_path)
    blob(tmp_path / "store", manifest.digest).unlink()
    done = run("verify", manifest.key, "--store", store.url)
    assert done.code == 1
    assert f"its archive {manifest.digest} is gone" in done.out


def test_verify_checks_every_member(run: Any, store: Store, tmp_path: Path) -> None:
    publish(store, tmp_path, members={"forward.so": sha256(b"other"), "backward.so": sha256(b"")})
    done = run("verify", "--store", store.url, "--json")
    assert done.code == 1
    problems = done.json["entries"][0]["problems"]
    assert any("backward.so is missing" in p for p in problems)
    assert any("forward.so has sha256" in p for p in problems)


def test_verify_sees_a_manifest_whose_key_is_not_its_own(run: Any, store: Store, tmp_path: Path) -> None:
    manifest = publish(store, tmp_path)
    ref = tmp_path / "store" / "refs" / manifest.key[:2] / manifest.key / f"{manifest.variant}.json"
    document = json.loads(ref.read_bytes())
    document["components"][3]["items"] = [["item", "another call"]]
    for said in ("the manifest is damaged", "its components hash to"):
        ref.write_text(json.dumps(document))
        done = run("verify", "--store", store.url)
        assert done.code == 1
        assert said in done.out
        document.pop("unsigned_sha256", None)  # somebody who changed that as well


def spoilt(how: str) -> bytes:
    """A zip file whose one member must not be read, or cannot be."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_LZMA if how == "lzma" else zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("forward.so", bytes(5000))
    data = bytearray(made.getvalue())
    listed = data.index(b"PK\1\2")
    if how == "encrypted":
        data[6] |= 1
        data[listed + 8] |= 1
    elif how == "unknown method":
        data[8] = data[listed + 10] = 99
    else:
        data[45:60] = b"\xff" * 15
    return bytes(data)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("encrypted", "is encrypted or patched"),
        ("unknown method", "is compressed by method 99"),
        ("lzma", "is compressed by method 14"),
        ("deflate", "is not a zip archive that can be read"),
    ],
)
def test_verify_outlives_archives_that_cannot_be_unpacked(
    run: Any, store: Store, tmp_path: Path, how: str, said: str
) -> None:
    data = spoilt(how)
    assert store.publish(make_manifest(data), write_archive(tmp_path, data))
    done = run("verify", "--store", store.url, "--json")
    assert done.code == 1
    assert said in done.json["entries"][0]["problems"][0]


def test_verify_reads_each_archive_of_a_remote_store_once_and_keeps_none(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    fetched: list[int] = []
    remote = open_store("memory:///verify")
    fetch = ObjectStore.fetch

    def counted(store: ObjectStore, digest: Digest, dest: Path) -> None:
        fetched.append(sum(1 for path in folder.rglob("*") if path.is_file()))
        fetch(store, digest, dest)

    monkeypatch.setattr(ObjectStore, "fetch", counted)
    monkeypatch.setattr(transfer, "open_store", lambda store, tier: remote)
    for call, data in (("1", "one"), ("2", "one"), ("3", "three")):
        publish(remote, tmp_path, data, call=call)
    assert len(run("verify", "--json").json["entries"]) == 3
    assert fetched == [0, 0]


def test_names_in_a_store_move_no_cursor(run: Any, store: Store, tmp_path: Path) -> None:
    publish(store, tmp_path, region="a\x1b[2J\nfake  line")
    done = run("ls", "--store", store.url)
    assert "a?[2J?fake  line" in done.out
    assert "\x1b" not in done.out + run("verify", "--store", store.url).out
