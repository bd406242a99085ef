"""Copies on this host in front of a remote store: outages, single downloads, what is kept and where it is from."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from aotcache.config import Settings
from aotcache.errors import NotStored, ServiceUnavailable, StoreError
from aotcache.manifest import Manifest
from aotcache.store import ObjectStore, Store, open_store
from aotcache.store.circuit import circuit_for
from aotcache.store.http import HttpStore
from aotcache.store.session import Limits, ServiceSession
from aotcache.store.tiered import TieredStore
from aotcache.trust import SigningKey, sign, trusted_keys
from aotcache.types import sha256
from tests.manifests import make_manifest, write_archive
from tests.services.building import until
from tests.services.s3 import S3, s3_server
from tests.services.serving import Serving
from tests.store.faulty import Answer, Asked, faulty

ROOT = Path(__file__).resolve().parents[2]


def tiered(tmp_path: Path, remote: Store, name: str = "copies") -> TieredStore:
    copies = open_store(tmp_path / name)
    assert isinstance(copies, ObjectStore)
    return TieredStore(copies, remote, tmp_path / "locks")


@pytest.fixture
def remote(tmp_path: Path) -> ObjectStore:
    opened = open_store(tmp_path / "remote")
    assert isinstance(opened, ObjectStore)
    return opened


def put(store: Store, tmp_path: Path, data: bytes = b"bytes", key: SigningKey | None = None) -> Manifest:
    manifest = make_manifest(data, call=data.hex()[:40])
    if key is not None:
        manifest = sign(manifest, key)
    assert store.publish(manifest, write_archive(tmp_path, data))
    return manifest


def test_a_service_or_bucket_is_opened_with_copies_below_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket: str
) -> None:
    monkeypatch.setenv("AOTCACHE_HOME", str(tmp_path))
    folders = set()
    for url in (bucket, "http://127.0.0.1:1", "https://host/cache"):
        opened = open_store(url)
        assert isinstance(opened, TieredStore)
        assert opened.url == url
        assert not opened.own
        folders.add(opened.local.url)
        assert not isinstance(open_store(url, tier=False), TieredStore)
    assert len(folders) == 3
    assert all(url.startswith((tmp_path / "tiers").as_uri()) for url in folders)
    assert list(tmp_path.iterdir()) == []


def test_copies_say_where_they_are_from_and_are_not_the_users_own(
    tmp_path: Path, remote: ObjectStore
) -> None:
    manifest = put(remote, tmp_path)
    store = tiered(tmp_path, remote)
    assert store.lookup(manifest.key) == [manifest]
    path = store.blob_path(manifest.digest)
    assert path is not None
    assert path.is_relative_to(tmp_path / "copies")
    assert (tmp_path / "copies" / "origin").read_text() == f"{remote.url}\n"
    assert not store.local.own
    assert store.local.lookup(manifest.key) == [manifest]
    assert remote.own


def test_a_signed_manifest_is_kept_with_its_signature(tmp_path: Path, remote: ObjectStore) -> None:
    manifest = sign(make_manifest(b"bytes"), SigningKey.generate())
    assert remote.publish(manifest, write_archive(tmp_path, b"bytes"))
    store = tiered(tmp_path, remote)
    store.resolve([manifest.key])
    store.blob_path(manifest.digest)
    [copy] = store.local.lookup(manifest.key)
    assert copy.envelope == manifest.envelope is not None


def test_two_keys_of_one_archive_are_both_kept(tmp_path: Path, remote: ObjectStore) -> None:
    archive = write_archive(tmp_path, b"shared")
    manifests = [make_manifest(b"shared", call=call) for call in ("one", "two")]
    for manifest in manifests:
        assert remote.publish(manifest, archive)
    store = tiered(tmp_path, remote)
    for manifest in manifests:
        store.lookup(manifest.key)
        store.blob_path(manifest.digest)
        assert store.local.lookup(manifest.key) == [manifest]


def test_a_copy_that_went_bad_is_fetched_again(tmp_path: Path, remote: ObjectStore) -> None:
    manifest = put(remote, tmp_path, b"right")
    store = tiered(tmp_path, remote)
    path = store.blob_path(manifest.digest)
    assert path is not None
    path.write_bytes(b"wrong")
    again = store.blob_path(manifest.digest)
    assert again is not None
    assert again.read_bytes() == b"right"


def test_the_remote_entry_wins_over_a_copy_of_an_older_one(tmp_path: Path, remote: ObjectStore) -> None:
    old = make_manifest(b"old")
    new = make_manifest(b"new")
    store = tiered(tmp_path, remote)
    assert store.publish(old, write_archive(tmp_path, b"old"))
    assert remote.publish(new, write_archive(tmp_path, b"new"), replace=True)
    assert store.lookup(new.key) == [new]
    store.blob_path(new.digest)
    assert store.local.lookup(new.key) == [new]


def test_what_nobody_trusted_signed_neither_hides_nor_replaces_a_copy_that_is_trusted(
    tmp_path: Path, remote: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AOTCACHE_CONFIG_HOME", str(tmp_path / "config"))
    trusted = trusted_keys(Settings())
    key = SigningKey.generate()
    trusted.add(key.public, "team")
    good, forged = sign(make_manifest(b"good"), key), make_manifest(b"forged")
    store = tiered(tmp_path, remote)
    assert store.publish(good, write_archive(tmp_path, b"good"))
    assert remote.publish(forged, write_archive(tmp_path, b"forged"), replace=True)
    assert store.lookup(good.key) == [forged, good]
    store.blob_path(forged.digest)
    assert store.local.lookup(good.key) == [good]
    # A newer one that the team signed takes its place.
    newer = sign(make_manifest(b"newer"), key)
    assert remote.publish(newer, write_archive(tmp_path, b"newer"), replace=True)
    assert store.lookup(good.key) == [newer]
    store.blob_path(newer.digest)
    assert store.local.lookup(good.key) == [newer]


def test_what_lies_here_is_not_sent_again_and_what_was_replaced_is(
    tmp_path: Path, service: Serving, signing_key: SigningKey
) -> None:
    remote = HttpStore(service.url, ServiceSession(service.url))
    kept = [put(remote, tmp_path, b"bytes %d" % n, signing_key) for n in range(5)]
    store = tiered(tmp_path, remote)
    keys = [manifest.key for manifest in kept]
    assert store.resolve(keys) == {manifest.key: [manifest] for manifest in kept}
    for manifest in kept:
        store.blob_path(manifest.digest)

    def manifests_sent() -> int:
        return sum(request["route"] == "/v1/artifacts/{key}" for request in service.requests())

    before = manifests_sent()
    again = tiered(tmp_path, remote).resolve(keys)
    assert again == {manifest.key: [manifest] for manifest in kept}
    assert all(found.envelope is not None for (found,) in again.values())
    assert manifests_sent() == before

    newer = sign(make_manifest(b"newer", call=b"bytes 3".hex()[:40]), signing_key)
    assert newer.key == keys[3]
    assert remote.publish(newer, write_archive(tmp_path, b"newer"), replace=True)
    before = manifests_sent()
    assert tiered(tmp_path, remote).resolve(keys)[newer.key] == [newer]
    until(lambda: manifests_sent() > before)
    assert manifests_sent() == before + 1
    remote.session.close()


def test_what_only_this_host_has_is_found_beside_what_the_remote_has(
    tmp_path: Path, remote: ObjectStore
) -> None:
    here = make_manifest(b"here", target="cpu:x86_64-avx512")
    there = make_manifest(b"there", target="cpu:x86_64-avx2")
    store = tiered(tmp_path, remote)
    assert store.local.publish(here, write_archive(tmp_path, b"here"))
    assert remote.publish(there, write_archive(tmp_path, b"there"))
    assert store.lookup(here.key) == [there, here]


def test_a_copy_that_cannot_be_kept_does_not_fail_a_publish(
    tmp_path: Path, remote: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "copies").mkdir()
    (tmp_path / "copies" / "blobs").write_text("a file in the way")
    manifest = put(tiered(tmp_path, remote), tmp_path)
    assert remote.lookup(manifest.key) == [manifest]
    assert "no copy could be kept here" in caplog.text


def test_a_lease_is_for_a_service_alone(tmp_path: Path, remote: ObjectStore) -> None:
    with pytest.raises(StoreError, match="knows no leases"):
        tiered(tmp_path, remote).publish(make_manifest(), write_archive(tmp_path, b"archive"), lease=("l", 1))
    assert list(remote.entries()) == []


def test_delete_is_from_both(tmp_path: Path, remote: ObjectStore) -> None:
    store = tiered(tmp_path, remote)
    manifest = put(store, tmp_path)
    assert store.delete(manifest.key, manifest.variant)
    assert store.lookup(manifest.key) == []
    assert store.local.usage().blobs == remote.usage().blobs == 0


def test_without_the_bucket_copies_go_on_working_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with s3_server(tmp_path / "s3") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        url = server.bucket()
        kept = put(open_store(url, tier=False), tmp_path, b"kept")
        other = put(open_store(url, tier=False), tmp_path, b"other")
        first = tiered(tmp_path, open_store(url, tier=False))
        first.lookup(kept.key)
        first.blob_path(kept.digest)
    fresh = tiered(tmp_path, open_store(url, tier=False))
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            assert fresh.lookup(kept.key) == [kept]
            assert fresh.lookup(other.key) == []
        assert list(fresh.list()) == [kept]
        assert list(fresh.near(kept.parts, kept.mode)) == [kept]
        assert [entry.usable for entry in (*fresh.variants(kept.key), *fresh.entries())] == [kept, kept]
        assert fresh.usage().blobs == 1
    path = fresh.blob_path(kept.digest)
    assert path is not None
    assert path.read_bytes() == b"kept"
    with pytest.raises(ServiceUnavailable, match="not asked again"):
        fresh.blob_path(other.digest)
    with pytest.raises(ServiceUnavailable):
        fresh.publish(other, write_archive(tmp_path, b"other"))
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "only what this host has is used" in warnings[0].getMessage()


def test_without_the_service_the_copies_are_all_that_is_listed_compared_and_found(tmp_path: Path) -> None:
    with faulty(lambda answer, asked: None) as server:
        pass  # nobody listens there any more
    limits = Limits(connect=1, call=2, attempts=1)
    store = tiered(tmp_path, HttpStore(server.url, ServiceSession(server.url, limits=limits)))
    kept = put(store.local, tmp_path)
    assert store.lookup(kept.key) == [kept]
    assert list(store.list()) == list(store.near(kept.parts, kept.mode)) == [kept]
    assert [entry.usable for entry in (*store.variants(kept.key), *store.entries())] == [kept, kept]


def test_a_wrong_token_is_an_error_and_no_outage(tmp_path: Path) -> None:
    body = (
        b'{"error": {"type": "unauthorized", "message": "no such token", "details": {}, "request_id": "r"}}'
    )
    with faulty(lambda answer, asked: answer.send(401, body)) as server:
        session = ServiceSession(server.url, "aot_wrong")
        store = tiered(tmp_path, HttpStore(server.url, session))
        with pytest.raises(StoreError, match=r"no such token.*set AOTCACHE_TOKEN"):
            store.lookup(make_manifest().key)
        session.close()


def test_a_download_that_another_process_broke_off_is_gone_on_with(tmp_path: Path) -> None:
    data = os.urandom(200_000)
    digest = sha256(data)
    ranges: list[str | None] = []

    def answer(answer: Answer, asked: Asked) -> None:
        ranges.append(asked.headers.get("range"))
        if len(ranges) == 1:
            answer.send(200, data[:70_000], length=len(data))
        elif len(ranges) == 2:
            answer.send(503, b"")
        else:
            first = int(asked.headers["range"][6:-1])
            said = f"bytes {first}-{len(data) - 1}/{len(data)}"
            answer.send(206, data[first:], Content_Range=said)

    with faulty(answer) as server:
        broken = ServiceSession(server.url, limits=Limits(attempts=1))
        with pytest.raises(ServiceUnavailable):
            tiered(tmp_path, HttpStore(server.url, broken)).blob_path(digest)
        broken.close()
        circuit_for(server.url).reached()
        session = ServiceSession(server.url)
        path = tiered(tmp_path, HttpStore(server.url, session)).blob_path(digest)
        session.close()
    assert path is not None
    assert path.read_bytes() == data
    assert ranges == [None, "bytes=70000-", "bytes=70000-"]
    assert os.listdir(tmp_path / "copies" / "tmp") == []


def test_a_process_that_is_killed_while_it_downloads_holds_up_nobody(tmp_path: Path) -> None:
    data = os.urandom(400_000)
    digest = sha256(data)
    killed = threading.Event()
    ranges: list[str | None] = []

    def answer(answer: Answer, asked: Asked) -> None:
        ranges.append(asked.headers.get("range"))
        if len(ranges) == 1:
            answer.send(200, data[:300_000], length=len(data))
            killed.wait(30)
        else:
            first = int(asked.headers["range"][6:-1])
            said = f"bytes {first}-{len(data) - 1}/{len(data)}"
            answer.send(206, data[first:], Content_Range=said)

    with faulty(answer) as server:
        child = os.fork()
        if child == 0:
            tiered(tmp_path, HttpStore(server.url, ServiceSession(server.url))).blob_path(digest)
            os._exit(0)
        draft = tmp_path / "copies" / "tmp" / f".{digest}.pt2.part"
        until = time.monotonic() + 30
        while not draft.exists() or draft.stat().st_size < 200_000:
            assert time.monotonic() < until
            time.sleep(0.01)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        killed.set()
        session = ServiceSession(server.url)
        path = tiered(tmp_path, HttpStore(server.url, session)).blob_path(digest)
        session.close()
    assert path is not None
    assert path.read_bytes() == data
    assert len(ranges) == 2
    assert int(str(ranges[1])[6:-1]) >= 200_000


_WITHOUT_A_SERVER = """
import sys
from pathlib import Path
from aotcache.store import open_store
from tests.manifests import make_manifest, write_archive
store = open_store()
manifest = make_manifest(b"bytes")
print(store.publish(manifest, write_archive(Path(sys.argv[1]), b"bytes")), store.url, flush=True)
print(open_store().blob_path(manifest.digest), open_store(tier=False).lookup(manifest.key) == [manifest])
"""


def test_a_bucket_named_by_the_environment_is_a_store_without_any_service(tmp_path: Path, s3: S3) -> None:
    url = s3.bucket()
    home = tmp_path / "home"
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_A_SERVER, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, **s3.environment, "AOTCACHE_STORE": url, "AOTCACHE_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == f"True {url}"
    path, _, found = second.partition(" ")
    assert Path(path).is_relative_to(home / "tiers")
    assert found == "True"


@pytest.mark.parametrize(
    ("url", "kind", "holder", "name"),
    [
        ("gs://models/cache", "GCSStore", "bucket", "models"),
        ("az://models/cache", "AzureStore", "container_name", "models"),
        ("abfss://models@account.dfs.core.windows.net/cache", "AzureStore", "container_name", "models"),
        ("s3://models/cache", "S3Store", "bucket", "models"),
    ],
)
def test_addresses_of_other_clouds_name_their_bucket_and_folder(
    monkeypatch: pytest.MonkeyPatch, url: str, kind: str, holder: str, name: str
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    store = open_store(url, tier=False)
    assert isinstance(store, ObjectStore)
    assert not store.own
    bucket = store._client._bucket  # type: ignore[attr-defined]
    assert type(bucket).__name__ == kind
    assert bucket.prefix == "cache"
    assert bucket.config[holder] == name


def run_workers(url: str, manifests: list[Manifest], folder: Path, environment: dict[str, str]) -> None:
    listed = folder / "digests"
    listed.write_text("\n".join(manifest.digest for manifest in manifests))
    done = subprocess.run(
        [sys.executable, "-m", "tests.store.many_processes", url, "32", str(folder), str(listed)],
        cwd=ROOT,
        env={**os.environ, **environment, "AOTCACHE_HOME": str(folder / "home")},
        capture_output=True,
        text=True,
        timeout=240,
    )
    failed = [path.read_text() for path in folder.glob("*.failed")]
    assert done.returncode == 0, (failed[:1], done.stderr)


@pytest.fixture
def forty(tmp_path: Path, signing_key: SigningKey) -> Callable[[Store], list[Manifest]]:
    return lambda store: [put(store, tmp_path, os.urandom(20_000), signing_key) for _ in range(40)]


def test_32_processes_download_each_of_40_archives_once_from_a_service(
    tmp_path: Path, service: Serving, forty: Callable[[Store], list[Manifest]]
) -> None:
    store = open_store(service.url, tier=False)
    assert isinstance(store, HttpStore)

    def published() -> int:
        return sum((r["method"], r["route"]) == ("PUT", "/v1/artifacts/{key}") for r in service.requests())

    earlier = published()
    manifests = forty(store)
    store.session.close()
    # A line is written after its answer was sent: the last publish is logged a moment later.
    until(lambda: published() == earlier + 40)
    before = len(service.requests())
    run_workers(service.url, manifests, tmp_path, {})
    # Each worker has had all 40, so 40 downloads are one of each.
    asked = [(r["method"], r["route"]) for r in service.requests()[before:]]
    assert asked == [("GET", "/v1/blobs/{digest}")] * 40


def test_32_processes_download_each_of_40_archives_once_from_a_bucket(
    tmp_path: Path, s3: S3, bucket: str, forty: Callable[[Store], list[Manifest]]
) -> None:
    manifests = forty(open_store(bucket, tier=False))
    run_workers(bucket, manifests, tmp_path, dict(s3.environment))
    asked = Counter({manifest.digest: len(s3.requests("GET", manifest.digest)) for manifest in manifests})
    assert asked == {manifest.digest: 1 for manifest in manifests}


def test_an_archive_that_neither_has_is_not_stored(tmp_path: Path, remote: ObjectStore) -> None:
    with pytest.raises(NotStored):
        tiered(tmp_path, remote).blob_path(sha256(b"nowhere"))
