"""Warming through a service: who builds, what is shown and reported, and who waits for whom."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import aotcache
from aotcache import host
from aotcache.build import Cell, Plan, plan
from aotcache.cli.app import app
from aotcache.errors import AotcacheError, ConfigError, LeaseHeld, LeaseLost, SpecError, UnsupportedGraph
from aotcache.lockfile import read_lock
from aotcache.store import open_store
from aotcache.store.builds import BuildService, Lease
from aotcache.types import CacheKey, Variant
from tests.services.building import Building, write_spec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@dataclass
class Shown:
    """A display that keeps what it was told, and can act on a stage."""

    act_on: str = ""
    stages: list[tuple[str | None, str]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    reached: threading.Event = field(default_factory=threading.Event)

    def planned(self, plan: Plan, builds: Sequence[Cell]) -> None:
        pass

    def stage(self, cell: Cell | None, stage: str) -> None:
        self.stages.append((None if cell is None else cell.region, stage))
        if self.act_on and stage.startswith(self.act_on):
            self.reached.set()

    def finished(self, cell: Cell, seconds: float, error: AotcacheError | None) -> None:
        self.ended.append(cell.region)


def only(folder: Path, layers: str) -> aotcache.spec.Spec:
    """A client's own spec of the served name, with some of its layers."""
    return write_spec(folder / "here", layers)


def key_of(spec: Any, store: str) -> CacheKey:
    (row,) = plan(spec, store=store)
    return row.cell.key


VARIANT = str(Variant(host.native_target(), host.host_toolchain()))


def lease_of(url: str, key: CacheKey, service: BuildService) -> bool:
    """Whether somebody holds the lease of a key now."""
    try:
        lease = service.acquire(key, VARIANT, "a look")
    except LeaseHeld:
        return True
    service.release(lease)
    return False


def test_the_service_builds_what_is_missing_and_the_report_is_as_of_a_warm_here(
    client: Building, tmp_path: Path
) -> None:
    spec, shown = only(tmp_path, "ab"), Shown()
    report = aotcache.warm(spec, store=client.url, remote=True, progress=shown)
    assert report.ok, [str(b.error) for b in report.failed]
    assert [b.cell.region for b in report.built] == ["layers.a", "layers.b"]
    assert sorted(shown.ended) == ["layers.a", "layers.b"]
    assert any(stage.startswith("compile") for _, stage in shown.stages)
    assert report.lock is not None
    digests = {cell.region: cell.digest for cell in read_lock(report.lock).cells}
    for built in report.built:
        assert built.manifest is not None
        assert digests[built.cell.region] == built.manifest.digest
        assert built.manifest.envelope is not None
    again = aotcache.warm(spec, store=client.url, remote=True)
    assert (again.ok, again.built) == (True, ())


def test_a_build_that_fails_there_is_reported_with_the_error_of_its_builder(
    client: Building, service: BuildService, tmp_path: Path
) -> None:
    report = aotcache.warm(only(tmp_path, "z"), store=client.url, remote=True)
    assert report.lock is None
    (failed,) = report.failed
    assert isinstance(failed.error, UnsupportedGraph)
    assert "region 'layers.z'" in str(failed.error)
    assert "serviced.py" in str(failed.error)
    build = service.get(str(failed.error.details["build"]))
    assert (build.state, build.attempts) == ("failed", 2)
    assert "UnsupportedGraph" in build.log  # the child's traceback


def test_several_specs_are_warmed_one_after_the_other_and_reported_each(
    client: Building, tmp_path: Path
) -> None:
    unknown = write_spec(tmp_path / "other", "a", name="nobodys")
    known = only(tmp_path, "a")
    done = CliRunner().invoke(
        app, ["warm", str(unknown.path), str(known.path), "--remote", "--store", client.url, "--json"]
    )
    assert done.exit_code == 1, done.stderr
    first, second = json.loads(done.stdout)
    assert first["spec"] == str(unknown.path)
    assert first["error"]["type"] == "SpecError"
    assert "nobodys" in first["error"]["message"]
    assert "'serviced'" in first["error"]["message"]
    assert (second["ok"], second["missing"]) == (True, 0)


def test_remote_needs_a_service_and_leaves_jobs_to_it(client: Building, tmp_path: Path) -> None:
    spec = only(tmp_path, "a")
    with pytest.raises(ConfigError, match="is none"):
        aotcache.warm(spec, store=str(tmp_path / "store"), remote=True)
    with pytest.raises(ConfigError, match="jobs"):
        aotcache.warm(spec, store=client.url, remote=True, jobs=2)
    with pytest.raises(SpecError, match="nobodys"):
        aotcache.warm(write_spec(tmp_path, "a", name="nobodys"), store=client.url, remote=True)


def test_a_warm_waits_for_the_builder_that_has_the_lease_and_builds_nothing(
    client: Building, service: BuildService, tmp_path: Path
) -> None:
    spec = only(tmp_path, "c")
    key = key_of(spec, client.url)
    asked = service.request("serviced", key, host.native_target(), host.host_toolchain())
    while not lease_of(client.url, key, service):
        time.sleep(0.1)
    shown = Shown()
    report = aotcache.warm(spec, store=client.url, progress=shown)
    assert asked.id is not None
    assert service.get(asked.id).state == "done"
    assert (report.ok, report.built) == (True, ())
    assert any(stage.startswith("wait for ") for _, stage in shown.stages)
    assert shown.ended == ["layers.c"]
    assert report.lock is not None


def test_a_warm_whose_lease_is_lost_publishes_nothing(
    client: Building, service: BuildService, tmp_path: Path
) -> None:
    spec, shown = only(tmp_path, "d"), Shown(act_on="compile")
    taken: list[Lease] = []
    key = key_of(spec, client.url)

    def take_over() -> None:
        shown.reached.wait(300)
        # An operator, or a database brought back from a copy: the lease is another's now.
        taken.append(_steal(client, key, service))

    thief = threading.Thread(target=take_over)
    thief.start()
    report = aotcache.warm(spec, store=client.url, progress=shown)
    thief.join(60)
    (failed,) = report.failed
    assert isinstance(failed.error, LeaseLost), failed.error
    assert open_store(client.url).lookup(key) == []
    service.release(taken[0])


def _steal(served: Building, key: CacheKey, service: BuildService) -> Lease:
    from sqlalchemy import delete

    from aotcache.db.engine import Database
    from aotcache.db.models import LeaseRow

    database = Database(served.server.database)
    try:
        with database.session(write=True) as session:
            session.execute(delete(LeaseRow).where(LeaseRow.key == key))
    finally:
        database.close()
    return service.acquire(key, VARIANT, "a thief")
