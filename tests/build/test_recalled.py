"""What was recalled is built again and replaced; what comes out the same is not published."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import aotcache
from aotcache.build import Cell, plan
from aotcache.config import settings
from aotcache.errors import BuildError
from aotcache.host import host_toolchain
from aotcache.lockfile import lock_path, read_lock
from aotcache.manifest import Manifest
from aotcache.recall import Recalls, publish_list
from aotcache.store import open_store
from aotcache.store.base import Store
from aotcache.trust import SigningKey, sign, trusted_keys
from tests.manifests import make_manifest, write_archive
from tests.services.building import Building, write_spec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

DAY = 86400.0


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SigningKey:
    """An operator's, trusted here."""
    monkeypatch.setenv("AOTCACHE_CONFIG_HOME", str(tmp_path / "config"))
    made = SigningKey.generate()
    trusted_keys(settings()).add(made.public, "operator")
    return made


def recall(store: Store, key: SigningKey, folder: Path, what: str, *, lift: bool = False) -> None:
    known = Recalls(folder / "operator")
    known.learn(store)
    reasons = None if lift else {what: "wrong gradients"}
    publish_list(store, key, known, recall=reasons, lift=[what] if lift else (), seconds=DAY)


def bad(cell: Cell, folder: Path) -> tuple[Manifest, Path]:
    """An entry of a cell that no builder made."""
    archive = write_archive(folder, f"not {cell.key}".encode())
    made = make_manifest(archive.read_bytes(), target=str(cell.target), toolchain=host_toolchain())
    return replace(made, key=cell.key, components=tuple(cell.parts.to_json())), archive


def test_what_was_recalled_is_built_and_replaced_and_never_by_the_same(
    key: SigningKey, tmp_path: Path, importable: None
) -> None:
    spec, store = write_spec(tmp_path / "spec", "a"), open_store(tmp_path / "store")
    (row,) = plan(spec, store=store)
    old, archive = bad(row.cell, tmp_path)
    assert store.publish(old, archive)
    (row,) = plan(spec, store=store)
    assert (row.state, row.digest, row.recalled) == ("covered", old.digest, None)

    recall(store, key, tmp_path, old.digest)
    report = aotcache.warm(spec, store=store)
    assert report.ok, [str(b.error) for b in report.failed]
    (found,) = store.lookup(row.cell.key)
    assert found.digest != old.digest
    assert report.plan.rows[0].recalled is None
    assert {cell.digest for cell in read_lock(lock_path(spec.path)).cells} == {found.digest}

    # Builds are the same byte for byte where nothing has changed, and what was recalled must not come back so.
    recall(store, key, tmp_path, found.digest)
    report = aotcache.warm(spec, store=store)
    (failed,) = report.failed
    assert isinstance(failed.error, BuildError)
    assert (
        f"the build gave what was taken back, byte for byte, and is not published: archive {found.digest}"
        in str(failed.error)
    )
    assert (report.ok, report.lock) == (False, None)
    assert f"archive {found.digest} is recalled: wrong gradients" in str(report.plan.rows[0].recalled)
    assert store.lookup(row.cell.key) == [found]

    recall(store, key, tmp_path, found.digest, lift=True)
    recall(store, key, tmp_path, row.cell.key)
    (failed,) = aotcache.warm(spec, store=store, force=True).failed
    assert "is not built: key" in str(failed.error)
    assert failed.seconds < 5


def test_a_services_builder_replaces_what_was_recalled_there(
    client: Building, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, store = write_spec(tmp_path / "here", "f"), open_store(client.url)
    (row,) = plan(spec, store=store)
    made, archive = bad(row.cell, tmp_path)
    old = sign(made, client.server.signing_key)
    assert store.publish(old, archive)
    assert aotcache.warm(spec, store=store, remote=True).built == ()
    recall(store, client.server.signing_key, tmp_path, old.digest)
    report = aotcache.warm(spec, store=store, remote=True)
    assert report.ok, [str(b.error) for b in report.failed]
    (found,) = store.lookup(row.cell.key)
    assert found.digest != old.digest
    store.remote.session.close()  # type: ignore[attr-defined]
