"""What a worker's successor tells a service of, and what the service tells of it."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from aotcache.runtime.openings import known_deaths, look_back
from aotcache.store import open_store
from aotcache.store.deaths import Report, counted, send
from aotcache.store.http import HttpStore
from aotcache.store.session import ServiceSession
from aotcache.trust import SigningKey, sign
from tests.manifests import make_manifest, write_archive
from tests.services.serving import Serving

LIMIT = 60.0


def published(service: Serving, key: SigningKey, folder: Path) -> str:
    """An entry there; the digest of its archive."""
    store = HttpStore(service.url, ServiceSession(service.url))
    manifest = sign(make_manifest(b"deadly"), key)
    assert store.publish(manifest, write_archive(folder, b"deadly"))
    store.session.close()
    return manifest.digest


def test_a_service_is_told_by_the_next_process_and_lists_what_it_was_told(
    service: Serving, signing_key: SigningKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("AOTCACHE_HOME", str(home))
    digest = published(service, signing_key, tmp_path)
    marks = home / "opening"
    marks.mkdir(parents=True)
    said = {"digest": digest, "key": "b" * 64, "region": "layers.0", "store": service.url, "stage": "open"}
    (marks / f"{'1' * 32}.json").write_text(json.dumps(said | {"at": 5.0, "pid": 1, "host": "here"}))
    store = open_store(service.url)
    for _ in range(2):
        look_back(home, store)
        for thread in threading.enumerate():
            if thread.name == "aotcache-deaths":
                thread.join(LIMIT)
    assert [known.reports for known in known_deaths(home)] == [()]
    assert counted(store) == {digest: 1}
    store.remote.session.close()  # type: ignore[attr-defined]


def test_two_hundred_deaths_are_told_in_parts_and_each_once(
    service: Serving, signing_key: SigningKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AOTCACHE_HOME", str(tmp_path / "home"))
    digest = published(service, signing_key, tmp_path)
    store = open_store(service.url)
    reports = [Report(f"{n:032x}", digest, "forward", 5.0, service.url) for n in range(201)]  # type: ignore[arg-type]
    for _ in range(2):
        assert send(store, reports)
    assert counted(store) == {digest: 201}
    store.remote.session.close()  # type: ignore[attr-defined]


def test_where_there_is_no_service_nobody_is_told(tmp_path: Path) -> None:
    for url in (str(tmp_path / "store"), "memory:///deaths"):
        store = open_store(url)
        assert not send(store, [])
        assert counted(store) == {}
