"""One contract suite over every kind of store."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aotcache.errors import CorruptArtifact, NotStored, StoreError
from aotcache.key import Component, KeyParts
from aotcache.manifest import Manifest
from aotcache.store import ObjectStore, Store, open_store
from aotcache.store.http import HttpStore
from aotcache.store.tiered import TieredStore
from aotcache.trust import SigningKey, sign
from aotcache.types import Digest, sha256
from tests.manifests import make_manifest, write_archive

SIGNING: list[SigningKey] = []
BEHIND: dict[str, Store] = {}
"""The directory of each service that was asked."""


@pytest.fixture(autouse=True)
def _signed(signing_key: SigningKey) -> None:
    SIGNING[:] = [signing_key]


@pytest.fixture(params=["file", "memory", "s3", "http", "tiered file", "tiered s3", "tiered http"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    kind = request.param.removeprefix("tiered ")
    if kind == "file":
        opened = open_store(tmp_path / "store")
    elif kind == "memory":
        opened = open_store("memory:///")
    elif kind == "s3":
        opened = open_store(request.getfixturevalue("bucket"), tier=False)
    else:
        service = request.getfixturevalue("service")
        opened = open_store(service.url, tier=False)
        BEHIND[service.url] = open_store(service.store)
    copies = open_store(tmp_path / "copies")
    assert isinstance(copies, ObjectStore)
    yield opened if request.param == kind else TieredStore(copies, opened, tmp_path / "locks")
    if isinstance(opened, HttpStore):
        opened.session.close()


def make(data: bytes = b"archive", **what: Any) -> Manifest:
    """Signed, as everything is that leaves a host: the service takes nothing else."""
    return sign(make_manifest(data, **what), SIGNING[0])


def put(store: Store, tmp_path: Path, data: bytes, **what: Any) -> Manifest:
    manifest = make(data, **what)
    assert store.publish(manifest, write_archive(tmp_path, data))
    return manifest


def places(store: Store) -> list[ObjectStore]:
    """Where the objects really are; of a tiered store both, the original first."""
    if isinstance(store, TieredStore):
        return [*places(store.remote), store.local]
    if isinstance(store, HttpStore):
        store = BEHIND[store.url]
    assert isinstance(store, ObjectStore)
    return [store]


def lose(store: Store, path: str) -> None:
    for place in places(store):
        place._client.delete(path)


def spoil(store: Store, path: str, data: bytes) -> None:
    for place in places(store):
        place._client.put(path, data, create=False)


def blob(manifest: Manifest) -> str:
    return f"blobs/{manifest.digest[:2]}/{manifest.digest}"


def ref(manifest: Manifest) -> str:
    return f"refs/{manifest.key[:2]}/{manifest.key}/{manifest.variant}.json"


def test_an_unknown_key_is_a_miss(store: Store) -> None:
    key = make().key
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
    for place in places(store):
        assert place._client.get(blob(manifest)) == b"bytes"
        assert place._client.get(ref(manifest)) == manifest.document()


def test_variants_of_one_key_are_found_together(store: Store, tmp_path: Path) -> None:
    wide = put(store, tmp_path, b"wide", target="cpu:x86_64-avx512")
    narrow = put(store, tmp_path, b"narrow", target="cpu:x86_64-avx2")
    assert wide.key == narrow.key
    found = sorted(store.lookup(wide.key), key=lambda m: str(m.target))
    assert found == [narrow, wide]


def test_resolve_answers_every_key_once(store: Store, tmp_path: Path) -> None:
    one = put(store, tmp_path, b"one", call="one")
    absent = make(call="absent").key
    assert store.resolve([one.key, absent, one.key]) == {one.key: [one], absent: []}


def test_a_list_can_be_of_one_code_alone(store: Store, tmp_path: Path) -> None:
    one, other = put(store, tmp_path, b"one", call="one"), put(store, tmp_path, b"two", call="two")
    codes = {part.name: part.digest for part in one.parts.components}
    assert [m.key for m in store.list(code=codes["code"])] == [one.key]
    assert list(store.list(code=Digest("0" * 64))) == []
    assert {m.key for m in store.list()} == {one.key, other.key}


def test_what_comes_near_a_missing_key_can_be_compared_with_it(store: Store, tmp_path: Path) -> None:
    near = put(store, tmp_path, b"near", call="near")
    put(store, tmp_path, b"infer", call="near", mode="infer", target="cpu:x86_64-avx512")
    missing = KeyParts(
        tuple(
            Component(part.name, (("item", "another"),)) if part.name == "call" else part
            for part in near.parts.components
        )
    )
    assert store.lookup(missing.key) == []
    assert [m for m in store.near(missing, "train") if m.key == near.key] == [near]
    assert all(m.mode == "train" for m in store.near(missing, "train"))


def test_the_refs_of_a_key_are_there_also_where_they_are_misses(store: Store, tmp_path: Path) -> None:
    good = put(store, tmp_path, b"good")
    gone = put(store, tmp_path, b"gone", target="cpu:x86_64-avx512")
    assert good.key == gone.key
    assert [(e.variant, e.problem) for e in store.variants(good.key)] == [
        (str(m.variant), None) for m in (good, gone)
    ]
    lose(store, blob(gone))
    assert [e.variant for e in store.variants(good.key) if e.usable is not None] == [str(good.variant)]
    assert list(store.variants(make(call="absent").key)) == []


def test_a_published_entry_is_left_alone_unless_replaced(store: Store, tmp_path: Path) -> None:
    first = put(store, tmp_path, b"first")
    second = make(b"second")
    archive = write_archive(tmp_path, b"second")
    assert not store.publish(second, archive)
    assert store.lookup(first.key) == [first]
    assert store.publish(second, archive, replace=True)
    assert store.lookup(first.key) == [second]


def test_an_archive_that_is_not_what_the_manifest_says_is_not_published(store: Store, tmp_path: Path) -> None:
    manifest = make(b"right")
    with pytest.raises(CorruptArtifact, match=manifest.digest) as caught:
        store.publish(manifest, write_archive(tmp_path, b"wrong"))
    assert sha256(b"wrong") in str(caught.value)
    assert store.lookup(manifest.key) == []
    assert store.usage().blobs == 0


def test_a_ref_whose_bytes_are_gone_is_a_miss_until_published_again(store: Store, tmp_path: Path) -> None:
    manifest = put(store, tmp_path, b"bytes")
    lose(store, blob(manifest))
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
    spoil(store, ref(manifest), junk)
    assert store.lookup(manifest.key) == []
    [entry] = store.entries()
    assert entry.manifest is None
    assert entry.problem
    assert store.publish(manifest, write_archive(tmp_path, b"bytes"))
    assert store.lookup(manifest.key) == [manifest]


def test_a_manifest_filed_under_another_key_is_a_miss(store: Store, tmp_path: Path) -> None:
    manifest = put(store, tmp_path, b"bytes")
    other = make(b"bytes", call="other")
    spoil(store, ref(other), manifest.document())
    assert store.lookup(other.key) == []
    assert list(store.list()) == [manifest]


def test_changed_bytes_are_never_handed_out(store: Store, tmp_path: Path) -> None:
    manifest = put(store, tmp_path, b"right bytes")
    spoil(store, blob(manifest), b"wrong bytes")
    dest = tmp_path / "copy"
    # A service drops them and has no such archive then; it names both digests as well.
    with pytest.raises((CorruptArtifact, NotStored)) as caught:
        store.fetch(manifest.digest, dest)
    assert manifest.digest in str(caught.value)
    assert sha256(b"wrong bytes") in str(caught.value)
    assert not dest.exists()


def test_changed_bytes_are_healed_by_replacing(store: Store, tmp_path: Path) -> None:
    manifest = put(store, tmp_path, b"right bytes")
    spoil(store, blob(manifest), b"wrong bytes")
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
    archives = [(make(data), write_archive(tmp_path, data)) for data in contents]
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
        store.publish(make(), tmp_path / "nothing.pt2")


def test_only_a_directory_or_memory_of_this_host_is_the_users_own(store: Store, tmp_path: Path) -> None:
    put(store, tmp_path, b"bytes")
    bare = isinstance(store, ObjectStore) and not store.url.startswith("s3:")
    assert store.own is bare
    if isinstance(store, TieredStore):
        assert not store.local.own


def test_memory_has_no_file_to_hand_out() -> None:
    assert open_store("memory:///").blob_path(sha256(b"x")) is None


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ftp://host/x", "ftp"),
        ("file://host/x", "three slashes"),
        ("http://user:pass@host/x", "password"),
        ("s3://key:pass@bucket/x", "password"),
        ("https://host/x?token=1", r"without \?"),
        ("az://only", "az://"),
    ],
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
        [sys.executable, "-c", _FORKED, url],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == said


def test_a_manifest_too_large_for_the_memory_is_a_miss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path / "store")
    manifest = put(store, tmp_path, b"archive")
    ref = tmp_path / "store" / "refs" / manifest.key[:2] / manifest.key / f"{manifest.variant}.json"
    os.truncate(ref, (16 << 20) + 1)
    assert store.lookup(manifest.key) == []
    assert "expected at most 16777216" in caplog.text
    put(store, tmp_path, b"archive")
    assert store.lookup(manifest.key) == [manifest]


def test_a_ref_whose_archive_has_no_name_hides_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path / "store")
    good = put(store, tmp_path, b"archive")
    bad = replace(make(b"other", call="other"), digest=Digest("../../x"))
    folder = tmp_path / "store" / "refs" / bad.key[:2] / bad.key
    folder.mkdir(parents=True)
    (folder / f"{bad.variant}.json").write_bytes(bad.to_json())
    assert list(store.list()) == [good]
    assert store.lookup(bad.key) == []
    assert "its archive is '../../x'" in caplog.text
