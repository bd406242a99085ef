"""What was built and cannot be stored is kept, and stored once there is room (D11). Nothing is compiled here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from aotcache.build.content import UNSTORED
from aotcache.build.plan import Cell
from aotcache.build.session import Session, open_session
from aotcache.config import settings
from aotcache.errors import StoreError
from aotcache.store import open_store
from tests.faults.disks import mounted
from tests.manifests import make_manifest

SPEC = """
[drafter]
name = "drafter"
factory = "nowhere:build"
batch = "nowhere:batch"
regions = ["*"]
modes = ["train"]
"""
DATA = bytes(range(256)) * 2000


class Builder:
    """Answers as a builder process does that has compiled `DATA`, or takes what it is told to."""

    def __init__(self, folder: Path, session: Session) -> None:
        self.manifest = make_manifest(DATA, toolchain=session.toolchain)
        self._archive = folder / "built.pt2"
        self._archive.write_bytes(DATA)
        self.compiled = 0

    def request(self, message: Any, on_event: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        step = on_event({"event": "prepared", "content": self.manifest.content})
        if step["do"] == "reuse":
            assert Path(step["archive"]).read_bytes() == DATA
            return {"manifest": self.manifest.to_json().decode(), "archive": step["archive"]}
        self.compiled += 1
        return {"manifest": self.manifest.to_json().decode(), "archive": str(self._archive)}


@contextmanager
def session_for(folder: Path, store: Path) -> Iterator[tuple[Session, Builder, Cell]]:
    (folder / "drafter.toml").write_text(SPEC)
    with open_session(folder / "drafter.toml", open_store(store), ["cpu:x86_64-avx2"], None) as session:
        builder = Builder(folder, session)
        manifest = builder.manifest
        yield session, builder, Cell("layers.0", "train", (("seq", 256),), manifest.target, manifest.parts)


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AOTCACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AOTCACHE_CONFIG_HOME", str(tmp_path / "config"))


def test_a_finished_compile_outlives_a_full_store_and_is_stored_without_another(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=1m,mode=700") as disk:
        (disk / "ballast").write_bytes(bytes(700_000))
        with session_for(tmp_path, disk / "store") as (session, builder, cell):
            with pytest.raises(StoreError, match=r"No space left.*What was built is kept in .*unstored"):
                session.build(cell, builder, False)  # type: ignore[arg-type]
            assert list(session.store.entries()) == []
        (disk / "ballast").unlink()
        with session_for(tmp_path, disk / "store") as (session, builder, cell):
            built = session.build(cell, builder, False)  # type: ignore[arg-type]
            assert built.error is None
            assert built.reused
            assert builder.compiled == 0
            (entry,) = session.store.entries()
            assert entry.usable == builder.manifest
    kept = open_store(settings().home / UNSTORED)
    assert list(kept.entries()) == []
    assert kept.usage().blobs == 0


def test_without_room_anywhere_the_stores_own_error_is_raised(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=1m,mode=700") as disk:
        (disk / "ballast").write_bytes(bytes(700_000))
        (tmp_path / "home").mkdir(mode=0o700)
        (tmp_path / "home" / UNSTORED).write_bytes(b"a file where the folder would be")
        with session_for(tmp_path, disk / "store") as (session, builder, cell):
            with pytest.raises(StoreError, match="No space left") as caught:
                session.build(cell, builder, False)  # type: ignore[arg-type]
    assert "is kept" not in str(caught.value)
