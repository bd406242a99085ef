"""What a plan expects a build to take."""

from __future__ import annotations

from pathlib import Path

import pytest

from aotcache.build.plan import Cell, make_plan
from aotcache.config import settings
from aotcache.key import KeyParts
from aotcache.manifest import Provenance
from aotcache.store import open_store
from aotcache.trust import SigningKey, sign, trusted_keys
from aotcache.types import Target
from tests.manifests import TOOLCHAIN, copies, make_manifest, write_archive


def took(seconds: dict[str, float], created: float) -> Provenance:
    return Provenance("2.13.0+cpu", "3.11.7", None, "g++ 12", created, seconds)


def test_what_an_identical_graph_spared_is_not_expected_of_a_build(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    compiled = took({"export": 2.0, "compile": 40.0}, created=1.0)
    reused = took({"export": 2.0}, created=2.0)  # newer, and so the more alike
    for archive, provenance in ((b"compiled", compiled), (b"reused", reused)):
        manifest = make_manifest(archive, call=archive.decode(), provenance=provenance)
        assert store.publish(manifest, write_archive(tmp_path, archive))
    parts = KeyParts(make_manifest(call="another").parts.components)
    cell = Cell("layers.0", "train", (("seq", 256),), Target.parse("cpu:x86_64-avx2"), parts)
    (row,) = make_plan([cell], store, TOOLCHAIN)
    assert (row.state, row.seconds) == ("missing", 42.0)


def test_what_nobody_trusted_signed_covers_a_cell_and_the_row_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AOTCACHE_CONFIG_HOME", str(tmp_path / "config"))
    store = copies(tmp_path / "copies")
    key, stranger = SigningKey.generate(), SigningKey.generate()
    trusted_keys(settings()).add(key.public, "me")
    for archive, signer in ((b"mine", key), (b"theirs", stranger)):
        manifest = sign(make_manifest(archive, call=archive.decode()), signer)
        assert store.publish(manifest, write_archive(tmp_path, archive))
    cells = [
        Cell("layers.0", "train", (), Target.parse("cpu:x86_64-avx2"), KeyParts(made.parts.components))
        for made in (make_manifest(call="mine"), make_manifest(call="theirs"))
    ]
    mine, theirs = make_plan(cells, store, TOOLCHAIN)
    assert (mine.state, mine.untrusted) == ("covered", None)
    assert theirs.state == "covered"
    assert stranger.public.fingerprint in (theirs.untrusted or "")
    assert theirs.to_json()["untrusted"] == theirs.untrusted
