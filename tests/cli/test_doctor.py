"""`doctor` on this host, and on one with something wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aotcache.host import cpu_features, host_target, host_toolchain
from aotcache.manifest import HostContract
from aotcache.store import Store
from tests.cli.conftest import publish

NOTHING = HostContract((), None, None, (), {})


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


def test_doctor_prints_the_verdict_of_every_artifact_as_a_table(
    run: Any, store: Store, tmp_path: Path
) -> None:
    here = {"target": str(host_target()), "toolchain": host_toolchain()}
    machine = str(host_target()).partition("-")[0]
    feature = next(iter(cpu_features()))
    kept = publish(
        store, tmp_path, "kept", host=HostContract((feature,), None, None, ("libc.so.6",), {}), **here
    )
    humble = publish(
        store, tmp_path, "humble", toolchain=host_toolchain(), target=f"{machine}-none", host=NOTHING
    )
    alien = publish(
        store,
        tmp_path,
        "alien",
        call="another",
        host=HostContract(("avx1024",), None, None, ("libno.so",), {}),
    )
    done = run("doctor", "--store", store.url)
    lines = {line.split()[4]: line for line in done.out.splitlines() if line.startswith(kept.key[:12])}
    assert lines[str(kept.variant)].endswith(" accepted")
    assert "a better variant of this key is taken" in lines[str(humble.variant)]
    (row, *reasons) = [line for line in done.out.splitlines() if line.startswith(alien.key[:12])]
    assert f"rejected: {len(reasons)} reasons, below" in row
    assert any("avx1024" in reason for reason in reasons)
    assert any("libno.so" in reason for reason in reasons)
    found = {a["variant"]: a for a in run("doctor", "--store", store.url, "--json").json["artifacts"]}
    assert found[str(kept.variant)]["taken"]
    assert not found[str(humble.variant)]["taken"]


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
