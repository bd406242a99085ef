"""D1 without a service in between: a publish into a bucket, and a download into a host's copies, that are cut off."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from aotcache.errors import CorruptArtifact, StoreError
from aotcache.manifest import Manifest
from aotcache.store import ObjectStore, open_store
from aotcache.store.circuit import circuit_for
from aotcache.store.session import session_for
from aotcache.store.tiered import TieredStore
from aotcache.trust import SigningKey, TrustedKeys, sign
from tests.manifests import make_manifest, write_archive
from tests.services.line import Line, line_to
from tests.services.s3 import S3, s3_server
from tests.services.serving import Serving, serving

DATA = random.Random(2).randbytes(3_000_001)
HALF = len(DATA) // 2
ALWAYS = 1000


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with s3_server(tmp_path_factory.mktemp("s3")) as found:
        yield found


@pytest.fixture(scope="module")
def key() -> SigningKey:
    return SigningKey.generate()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, key: SigningKey) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("service")
    TrustedKeys(folder / "config" / "trusted").add(key.public, "builder")
    with serving(folder) as found:
        yield found


@dataclass(frozen=True)
class Far:
    """A store at the other end of a line that can be cut.

    Attributes:
        line: The line.
        store: What clients are given; its requests take the line.
        manifest, archive: What is published there.
    """

    line: Line
    store: TieredStore
    manifest: Manifest
    archive: Path

    def after_a_while(self) -> None:
        """The line is whole again, and the wait before the next try is over."""
        self.line.cut()
        circuit_for(self.store.remote.url).reached()

    def copies(self) -> list[str]:
        """What this host's copies hold that anybody could see."""
        return [info.path for part in ("refs", "blobs") for info in self.store.local._client.list(part)]


@contextmanager
def _far(
    kind: str, tmp_path: Path, key: SigningKey, request: pytest.FixtureRequest, patch: pytest.MonkeyPatch
) -> Iterator[Far]:
    patch.setenv("AOTCACHE_HOME", str(tmp_path / "home"))
    server = request.getfixturevalue("s3" if kind == "bucket" else "service")
    # An entry of the test's own: all share one service.
    data = DATA + request.node.name.encode()
    manifest = sign(make_manifest(data, call=request.node.name), key)
    with line_to(server.url) as line:
        if kind == "bucket":
            for name, value in {**server.environment, "AWS_ENDPOINT_URL": line.url}.items():
                patch.setenv(name, value)
        store = open_store(server.bucket() if kind == "bucket" else line.url)
        assert isinstance(store, TieredStore)
        try:
            yield Far(line, store, manifest, write_archive(tmp_path, data))
        finally:
            if kind == "service":
                session_for(line.url).close()


@pytest.fixture(params=["bucket", "service"])
def far(
    request: pytest.FixtureRequest, tmp_path: Path, key: SigningKey, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Far]:
    with _far(request.param, tmp_path, key, request, monkeypatch) as found:
        yield found


@pytest.fixture
def bucket(
    request: pytest.FixtureRequest, tmp_path: Path, key: SigningKey, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Far]:
    with _far("bucket", tmp_path, key, request, monkeypatch) as found:
        yield found


def objects(far: Far) -> list[str]:
    assert isinstance(far.store.remote, ObjectStore)
    return [info.path for part in ("refs", "blobs") for info in far.store.remote._client.list(part)]


def test_a_publish_into_a_bucket_that_is_always_cut_off_leaves_nothing(bucket: Far) -> None:
    bucket.line.cut(*[HALF] * ALWAYS)
    with pytest.raises(StoreError, match=str(bucket.store.url)):
        bucket.store.publish(bucket.manifest, bucket.archive)
    assert bucket.line.cuts_left < ALWAYS
    bucket.after_a_while()
    assert objects(bucket) == []
    assert bucket.copies() == []
    assert bucket.store.lookup(bucket.manifest.key) == []

    assert bucket.store.publish(bucket.manifest, bucket.archive)
    assert bucket.store.remote.lookup(bucket.manifest.key) == [bucket.manifest]
    copy = bucket.archive.with_suffix(".copy")
    bucket.store.remote.fetch(bucket.manifest.digest, copy)
    assert copy.read_bytes() == bucket.archive.read_bytes()


def test_a_publish_that_is_cut_off_once_is_sent_again(far: Far) -> None:
    far.line.cut(HALF)
    assert far.store.publish(far.manifest, far.archive)
    assert far.line.cuts_left == 0
    copy = far.archive.with_suffix(".copy")
    far.store.remote.fetch(far.manifest.digest, copy)
    assert copy.read_bytes() == far.archive.read_bytes()


def test_bytes_that_are_not_the_manifests_never_leave_this_host(far: Far) -> None:
    data = bytearray(far.archive.read_bytes())
    data[HALF] ^= 1
    far.archive.write_bytes(data)
    with pytest.raises(CorruptArtifact, match=far.manifest.digest):
        far.store.publish(far.manifest, far.archive)
    assert far.store.remote.lookup(far.manifest.key) == []
    assert far.copies() == []
    if isinstance(far.store.remote, ObjectStore):
        assert objects(far) == []
    data[HALF] ^= 1
    far.archive.write_bytes(data)
    assert far.store.publish(far.manifest, far.archive)
    assert far.store.remote.lookup(far.manifest.key) == [far.manifest]


def test_wrong_bytes_in_a_bucket_are_never_copied_and_the_next_publish_heals_them(bucket: Far) -> None:
    assert bucket.store.remote.publish(bucket.manifest, bucket.archive)
    data = bytearray(bucket.archive.read_bytes())
    data[HALF] ^= 1
    remote, digest = bucket.store.remote, bucket.manifest.digest
    assert isinstance(remote, ObjectStore)
    remote._client.put(f"blobs/{digest[:2]}/{digest}", bytes(data), create=False)
    assert bucket.store.lookup(bucket.manifest.key) == [bucket.manifest]
    with pytest.raises(CorruptArtifact, match="do not match their name"):
        bucket.store.blob_path(digest)
    assert bucket.copies() == []

    bucket.store.publish(bucket.manifest, bucket.archive, replace=True)
    path = bucket.store.blob_path(digest)
    assert path is not None
    assert path.read_bytes() == bucket.archive.read_bytes()


def test_a_download_that_is_cut_off_is_never_seen_and_can_be_made_again(far: Far) -> None:
    assert far.store.remote.publish(far.manifest, far.archive)
    assert far.store.lookup(far.manifest.key) == [far.manifest]
    far.line.cut(HALF, *[100] * ALWAYS, answers=True)
    with pytest.raises(StoreError):
        far.store.blob_path(far.manifest.digest)
    assert far.line.cuts_left < ALWAYS
    assert far.copies() == []

    far.after_a_while()
    path = far.store.blob_path(far.manifest.digest)
    assert path is not None
    assert path.read_bytes() == far.archive.read_bytes()
    assert far.store.local.lookup(far.manifest.key) == [far.manifest]


def test_a_download_that_is_cut_off_once_is_gone_on_with(far: Far) -> None:
    assert far.store.remote.publish(far.manifest, far.archive)
    far.line.cut(HALF, answers=True)
    path = far.store.blob_path(far.manifest.digest)
    assert far.line.cuts_left == 0
    assert path is not None
    assert path.read_bytes() == far.archive.read_bytes()
