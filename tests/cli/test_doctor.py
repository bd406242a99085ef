"""`doctor` on this host, and on one with something wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aotcache.host import host_target, host_toolchain
from aotcache.manifest import HostContract
from aotcache.store import Store
from tests.cli.conftest import publish


def findings(report: dict[str, Any], what: str) -> list[dict[str, str]]:
    return [f for f in report["findings"] if f["what"] == what]


def test_doctor_reports_target_and_toolchain(run: Any) -> None:
    done = run("doctor", "--json")
    assert done.code == 0
    assert [f["detail"] for f in findings(done.json, "target")] == [str(host_target())]
    assert findings(done.json, "torch")[0]["detail"] == str(host_toolchain())
    assert findings(done.json, "home")[0]["state"] == "ok"


def test_doctor_judges_every_stored_artifact(run: Any, store: Store, tmp_path: Path) -> None:
    publish(store, tmp_path, host=HostContract(("avx1024",), None, None, (), {}))
    done = run("doctor", "--store", store.url, "--json")
    assert done.code == 0  # an artifact for other hosts is no fault of this one
    (artifact,) = done.json["artifacts"]
    assert artifact["accepted"] is False
    assert findings(done.json, "artifacts")[0]["detail"] == "0 accepted here, 1 rejected"
    assert "avx1024" in run("doctor", "--store", store.url).out


def test_doctor_notes_a_missing_compiler(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = run("doctor", "--json")
    assert done.code == 0  # a worker needs none
    (compiler,) = findings(done.json, "compiler")
    assert compiler["state"] == "note"
    assert "cannot build" in compiler["detail"]


def test_doctor_fails_where_the_home_cannot_be_written(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AOTCACHE_HOME", "/proc/self/aotcache")
    done = run("doctor", "--json")
    assert done.code == 1
    assert done.json["ok"] is False
    assert "AOTCACHE_HOME" in findings(done.json, "home")[0]["detail"]


def test_doctor_fails_on_a_store_that_workers_refuse(run: Any, store: Store, tmp_path: Path) -> None:
    publish(store, tmp_path)
    (tmp_path / "store").chmod(0o777)
    done = run("doctor", "--store", store.url, "--json")
    assert done.code == 1
    (found,) = findings(done.json, "store")
    assert "has mode 0777" in found["detail"]
    assert "chmod go-w" in found["detail"]


def test_doctor_fails_on_a_store_that_cannot_be_opened(run: Any) -> None:
    done = run("doctor", "--store", "ftp://somewhere", "--json")
    assert done.code == 1
    assert "ftp" in findings(done.json, "store")[0]["detail"]
