"""The command line in this process, and stores to point it at."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from aotcache.cli.app import app
from aotcache.config import settings
from aotcache.manifest import Manifest
from aotcache.store import Store, open_store
from aotcache.trust import SigningKey, signing_key_path
from aotcache.types import sha256
from tests.manifests import make_manifest, write_archive


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Outcome]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command with a home and keys of its own; a bug in a command surfaces as itself."""
    monkeypatch.setenv("AOTCACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AOTCACHE_CONFIG_HOME", str(tmp_path / "config"))

    def invoke(*arguments: str) -> Outcome:
        result = CliRunner().invoke(app, [str(a) for a in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Outcome(result.exit_code, result.stdout, result.stderr)

    return invoke


@pytest.fixture
def key(run: Run) -> SigningKey:
    """This host's signing key."""
    assert run("keygen", "--name", "me").code == 0
    return SigningKey.load(signing_key_path(settings()))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


def publish(store: Store, folder: Path, content: str = "code", **what: Any) -> Manifest:
    """Store a real archive (a zip file of one member) under a valid manifest."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("forward.so", content)
    data = buffer.getvalue()
    what.setdefault("members", {"forward.so": sha256(content.encode())})
    manifest = make_manifest(data, **what)
    assert store.publish(manifest, write_archive(folder, data))
    return manifest
