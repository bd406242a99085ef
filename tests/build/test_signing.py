"""Who signs what a warm publishes, and what of it is taken for an identical graph. Nothing is built here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from aotcache.build.content import ContentIndex
from aotcache.build.plan import Cell
from aotcache.build.session import Session, open_session
from aotcache.config import settings
from aotcache.errors import BuildError, ConfigError
from aotcache.manifest import Manifest
from aotcache.store import open_store
from aotcache.store.base import Store
from aotcache.trust import SigningKey, TrustedKeys, sign, signing_key_path, trusted_keys
from tests.manifests import copies, make_manifest, write_archive
from tests.services.serving import serving

SPEC = """
[drafter]
name = "drafter"
factory = "nowhere:build"
batch = "nowhere:batch"
regions = ["*"]
modes = ["train"]
"""


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AOTCACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AOTCACHE_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def key() -> SigningKey:
    made = SigningKey.generate()
    made.save(signing_key_path(settings()))
    trusted_keys(settings()).add(made.public, "me")
    return made


@pytest.fixture
def elsewhere(tmp_path: Path) -> Store:
    return copies(tmp_path / "copies")


def opened(tmp_path: Path, store: Store) -> Iterator[Session]:
    (tmp_path / "drafter.toml").write_text(SPEC)
    with open_session(tmp_path / "drafter.toml", store, ["cpu:x86_64-avx2"], None) as session:
        yield session


@pytest.fixture
def session(tmp_path: Path, elsewhere: Store) -> Iterator[Session]:
    """A session that publishes to where signatures are asked for."""
    yield from opened(tmp_path, elsewhere)


def built(session: Session) -> tuple[Cell, Manifest]:
    """A cell, and what an honest builder answers for it."""
    manifest = make_manifest(toolchain=session.toolchain)
    return Cell("layers.0", "train", (("seq", 256),), manifest.target, manifest.parts), manifest


def test_what_goes_elsewhere_is_signed_with_this_hosts_key(session: Session, key: SigningKey) -> None:
    cell, manifest = built(session)
    session.prepare_to_publish()
    signed = session._sign(cell, manifest)
    assert signed == manifest
    assert trusted_keys(settings()).problem(signed) is None


def test_what_stays_here_is_not_signed_and_needs_no_key(tmp_path: Path) -> None:
    for session in opened(tmp_path, open_store(tmp_path / "own")):
        cell, manifest = built(session)
        session.prepare_to_publish()
        assert session._sign(cell, manifest).envelope is None


def test_without_a_key_nothing_begins(session: Session) -> None:
    with pytest.raises(ConfigError, match="aotcache keygen"):
        session.prepare_to_publish()


def test_with_a_key_that_the_service_does_not_trust_nothing_begins(tmp_path: Path, key: SigningKey) -> None:
    with serving(tmp_path / "service") as server:
        for session in opened(tmp_path, open_store(server.url)):
            with pytest.raises(ConfigError, match=f"trust add {re.escape(key.public.to_text())}"):
                session.require_trusted_key()
            TrustedKeys(server.config_home / "trusted").add(key.public, "me")
            session.require_trusted_key()
            cell, manifest = built(session)
            assert trusted_keys(settings()).problem(session._sign(cell, manifest)) is None


def test_a_service_that_is_away_does_not_keep_its_builders_from_waiting_for_it(
    tmp_path: Path, key: SigningKey
) -> None:
    for session in opened(tmp_path, open_store("http://127.0.0.1:1")):
        session.require_trusted_key()


@pytest.mark.parametrize("what", ["key", "target", "toolchain", "signature"])
def test_a_builder_gets_nothing_signed_but_the_cell_that_it_was_asked_for(
    session: Session, key: SigningKey, what: str
) -> None:
    cell, manifest = built(session)
    session.prepare_to_publish()
    answer = {
        "key": make_manifest(call="of another drafter", toolchain=session.toolchain),
        "target": make_manifest(target="cpu:x86_64-avx512", toolchain=session.toolchain),
        "toolchain": make_manifest(toolchain=replace(session.toolchain, torch="2.12.0")),
        "signature": sign(manifest, SigningKey.generate()),
    }[what]
    with pytest.raises(BuildError, match="it is not published"):
        session._sign(cell, answer)


@pytest.mark.parametrize(
    ("who", "expected"), [("me", "reuse"), ("stranger", "compile"), ("nobody", "compile")]
)
def test_an_identical_graph_is_taken_from_whom_is_trusted_alone(
    tmp_path: Path, elsewhere: Store, key: SigningKey, who: str, expected: str
) -> None:
    manifest = make_manifest(b"bytes")
    if who != "nobody":
        manifest = sign(manifest, key if who == "me" else SigningKey.generate())
    elsewhere.publish(manifest, write_archive(tmp_path, b"bytes"))
    note = tmp_path / "home" / "content" / f"{manifest.content}.json"
    note.parent.mkdir(parents=True)
    note.write_text(json.dumps({"key": manifest.key}))
    staging = tmp_path / "staging"
    staging.mkdir()
    index = ContentIndex(settings(), elsewhere, staging)
    try:
        assert index.claim(manifest.content, force=False)["do"] == expected
        assert index.reused is (expected == "reuse")
        assert bool(list(staging.iterdir())) is (expected == "reuse")
    finally:
        index.close()
