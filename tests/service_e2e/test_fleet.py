"""Builder, service and workers as processes of their own: what a team does in a day, in a minute."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from aotcache.build import plan
from aotcache.lockfile import lock_path, write_lock
from aotcache.store.http import HttpStore
from aotcache.store.session import ServiceSession
from aotcache.trust import SigningKey, TrustedKeys
from tests.service_e2e.conftest import LIMIT, Host, Topology, Warmed, finish, repackaged
from tests.services.serving import Serving, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LAYERS = 40
STEPS = 2


def check(answers: list[dict[str, Any]], *, processes: int, threads: int, layers: int) -> None:
    """Every worker trained on artifacts alone, as eager would have, and traced nothing."""
    assert len(answers) == processes
    for answer in answers:
        assert "error" not in answer, answer["error"]
        assert answer["compilers"] == []
        assert answer["builder_half"] == []
        assert answer["traces"] == 0
        assert answer["worst"] < 1e-4
        assert len(answer["threads"]) == threads
        for stats in answer["threads"]:
            assert stats == {"hits": layers * STEPS, "misses": 0, "eager_calls": 0, "traces": 0}


def test_a_builder_builds_what_a_host_without_a_compiler_asks_for(
    topology: Topology, warmed: Warmed, tmp_path: Path
) -> None:
    service = topology.service
    # On the host that has built the graph already: a third layer is another key, and no compile.
    builder = Host.make(tmp_path / "builder", compiler=True, layers=3, **warmed.host.variables)
    builder.variables |= {
        "AOTCACHE_HOME": str(warmed.host.home),
        "AOTCACHE_CONFIG_HOME": str(warmed.host.folder / "config"),
    }
    host = Host.make(
        tmp_path / "host",
        compiler=False,
        layers=3,
        AOTCACHE_STORE=service.url,
        AOTCACHE_TOKEN=service.token("read", "build"),
    )
    host.aotcache("trust", "add", service.url, "--fingerprint", warmed.fingerprint)
    with builder.running("builder", "--service", service.url, "--spec", str(builder.spec.parent)):
        until_known(service, "fleet")
        report = host.aotcache("warm", "fleet.toml", "--remote")
    assert report["ok"]
    assert [built["region"] for built in report["built"]] == ["layers.2"]
    check(finish(host.fleet(processes=1, threads=4)), processes=1, threads=4, layers=3)


def until_known(service: Serving, spec: str) -> None:
    """Wait until a builder has told the service of a spec."""
    session = ServiceSession(service.url, service.token("read"))
    ends = time.monotonic() + LIMIT
    while spec not in {row["name"] for row in session.json("GET", "/v1/specs")["specs"]}:
        assert time.monotonic() < ends
        time.sleep(0.2)
    session.close()


def test_hosts_without_a_compiler_train_from_the_service_and_go_on_when_it_is_gone(
    topology: Topology, warmed: Warmed, tmp_path: Path
) -> None:
    assert sorted(built["reused"] for built in warmed.report["built"]) == [False, True]
    service = topology.service
    hosts = []
    for number in (1, 2):
        host = Host.make(
            tmp_path / f"worker{number}",
            compiler=False,
            AOTCACHE_STORE=service.url,
            AOTCACHE_TOKEN=service.token("read"),
        )
        shutil.copy(lock_path(warmed.host.spec), host.spec.parent)
        host.aotcache("trust", "add", service.url, "--fingerprint", warmed.fingerprint)
        hosts.append(host)

    first = [host.fleet(processes=1, threads=4) for host in hosts]
    for process in first:
        check(finish(process), processes=1, threads=4, layers=2)

    topology.kill()
    # The second host has to unpack again: its archives, too, are there without the service.
    shutil.rmtree(hosts[1].home / "unpacked")
    again = [host.fleet(processes=1, threads=4) for host in hosts]
    for process in again:
        check(finish(process), processes=1, threads=4, layers=2)


def test_32_processes_of_a_host_fetch_each_of_40_archives_once(warmed: Warmed, tmp_path: Path) -> None:
    spec = Host.make(tmp_path / "planner", compiler=False, layers=LAYERS).spec
    cells = [row.cell for row in plan(spec, store=str(tmp_path / "empty")).rows]
    key = SigningKey.generate()
    entries, lock = repackaged(warmed, cells, tmp_path, key)
    assert len({manifest.key for manifest, _ in entries}) == LAYERS
    assert len({manifest.digest for manifest, _ in entries}) == LAYERS
    with serving(tmp_path / "service") as service:
        TrustedKeys(service.config_home / "trusted").add(key.public, "the fleet's")
        remote = HttpStore(service.url)
        for manifest, archive in entries:
            assert remote.publish(manifest, archive)
        remote.session.close()
        host = Host.make(tmp_path / "host", compiler=False, layers=LAYERS, AOTCACHE_STORE=service.url)
        write_lock(lock_path(host.spec), lock)
        host.aotcache("trust", "add", service.url, "--fingerprint", key.public.fingerprint)

        check(finish(host.fleet(processes=32, threads=1)), processes=32, threads=1, layers=LAYERS)

        fetched = [
            r["status"]
            for r in service.requests()
            if r["route"] == "/v1/blobs/{digest}" and r["method"] == "GET"
        ]
    # Each archive was needed, or not all would have trained: so many answers in all are one for each.
    assert fetched == [200] * LAYERS
