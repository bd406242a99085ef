"""Servers that the tests of stores share: one of the S3 protocol, and one `aotcache serve`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from aotcache.store import ObjectStore, open_store
from aotcache.store.session import ServiceSession
from aotcache.trust import SigningKey, TrustedKeys
from tests.services.s3 import S3, s3_server
from tests.services.serving import Serving, serving


@pytest.fixture(scope="session")
def signing_key() -> SigningKey:
    """A key that the service trusts."""
    return SigningKey.generate()


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def bucket(s3: S3, monkeypatch: pytest.MonkeyPatch) -> str:
    """Address of an empty bucket; the environment leads to its server."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    return s3.bucket()


@pytest.fixture(scope="session")
def serving_process(tmp_path_factory: pytest.TempPathFactory, signing_key: SigningKey) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("service")
    TrustedKeys(folder / "config" / "trusted").add(signing_key.public, "tests")
    with serving(folder) as server:
        yield server


@pytest.fixture
def service(serving_process: Serving) -> Iterator[Serving]:
    """A service with nothing stored, over a directory."""
    yield serving_process
    session = ServiceSession(serving_process.url)
    while rows := session.json("GET", "/v1/artifacts")["artifacts"]:
        for row in rows:
            session.json("DELETE", f"/v1/artifacts/{row['key']}")
    session.close()
    behind = open_store(serving_process.store)
    assert isinstance(behind, ObjectStore)
    for entry in list(behind.entries()):
        behind.delete(entry.key, entry.variant)
    root = Path(serving_process.store.removeprefix("file://"))
    for name in ("blobs", "refs"):
        shutil.rmtree(root / name, ignore_errors=True)
