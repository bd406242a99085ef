"""The builder of a service: what it does not build, and how its builds end before they are done."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from aotcache import host
from aotcache.build import plan
from aotcache.build.builder import Builder
from aotcache.errors import BuildError, ConfigError, ServiceError
from aotcache.key import KeyParts
from aotcache.store import open_store
from aotcache.store.builds import Build, BuildService
from aotcache.types import CacheKey
from tests.homes import new_home
from tests.services.building import ROOT, Building, building, children, client_of, until, write_spec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def request(service: BuildService, key: CacheKey) -> Build:
    return service.request("serviced", key, host.native_target(), host.host_toolchain())


def ended(service: BuildService, build: Build) -> Build:
    assert build.id is not None
    found = build
    while not found.ended:
        time.sleep(0.2)
        found = service.get(build.id)
    return found


@pytest.fixture(scope="module")
def key(served: Building, tmp_path_factory: pytest.TempPathFactory) -> CacheKey:
    """A key of the served spec that nothing has built yet."""
    folder = tmp_path_factory.mktemp("key")
    with client_of(served, folder / "home"):
        (row,) = plan(write_spec(folder, "e"), store=str(folder / "store"))
    return row.cell.key


def test_a_key_that_the_spec_does_not_lead_to_fails_at_once_with_what_it_leads_to(
    served: Building, service: BuildService, key: CacheKey
) -> None:
    other = KeyParts.from_json([{"name": "nobody", "items": [["has", "this"]]}]).key
    failed = ended(service, request(service, other))
    assert (failed.state, failed.attempts) == ("failed", 1)
    error = failed.failure()
    assert isinstance(error, BuildError)
    assert other in str(error)
    assert "the service builds this key again for whoever asks after" in str(error)
    assert f"layers.e infer rows=3 {host.native_target()}: {key}" in str(error)


def test_a_cancelled_build_ends_its_process_at_once_and_the_next_one_is_built(
    served: Building, service: BuildService, key: CacheKey
) -> None:
    (parent,) = children(served.server.process.pid, "builder")
    build = request(service, key)
    assert build.id is not None
    until(lambda: service.get(str(build.id)).stage == "compile")
    (running,) = children(parent)
    service.session.json("DELETE", f"/v1/builds/{build.id}")
    until(lambda: running not in children(parent))
    assert service.get(build.id).state == "cancelled"
    assert open_store(served.url, tier=False).lookup(key) == []
    until(lambda: request(service, key).id != build.id)
    again = request(service, key)
    assert again.id is not None
    # Ended before it is built: the next test goes on with it.
    service.session.json("DELETE", f"/v1/builds/{again.id}")


@pytest.fixture
def alone(served: Building, service: BuildService, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A second builder, of another spec of the same service."""
    spec = write_spec(tmp_path, "f", name="alone")
    home = new_home(tmp_path / "home")
    command = ["builder", "--service", served.url, "--spec", str(spec.path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "aotcache", *command],
        env={**os.environ, **served.environment, "AOTCACHE_HOME": str(home), "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
    )
    try:
        until(lambda: "alone" in service.specs())
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_builder_that_is_told_to_end_gives_its_build_back(
    served: Building, service: BuildService, alone: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    with client_of(served, tmp_path / "client"):
        (row,) = plan(write_spec(tmp_path / "here", "f", name="alone"), store=str(tmp_path / "store"))
    build = service.request("alone", row.cell.key, host.native_target(), host.host_toolchain())
    assert build.id is not None
    until(lambda: service.get(str(build.id)).stage in ("export", "pair", "compile"))
    working = children(alone.pid)
    alone.send_signal(signal.SIGTERM)
    assert alone.wait(30) == 0
    assert len(working) == 1
    assert not Path(f"/proc/{working[0]}").exists()
    assert not list((tmp_path / "home").glob("warm-*"))
    back = service.get(build.id)
    assert (back.state, back.attempts, back.error) == ("queued", 0, None)
    service.session.json("DELETE", f"/v1/builds/{build.id}")


def test_a_builder_asks_again_while_the_service_is_away_and_ends_when_it_is_refused(tmp_path: Path) -> None:
    with building(tmp_path / "service", "a", builder=False) as first:
        port = int(first.url.rpartition(":")[2])
        with client_of(first, tmp_path / "home"):
            made = Builder([first.spec], first.url)
        first.server.kill()
    refused: list[str] = []

    def run() -> None:
        try:
            made.run()
        except ServiceError as error:
            refused.append(str(error))

    runner = threading.Thread(target=run)
    runner.start()
    try:
        with building(tmp_path / "service", "a", builder=False, port=port) as second:
            # Claims without work are not logged.
            until(lambda: 'route="/v1/builds/claim"' in httpx.get(f"{second.url}/metrics").text)
            assert runner.is_alive()
            second.server.token("read")  # from now on nobody is served without one
            runner.join(60)
    finally:
        made.stop()
        runner.join(60)
    assert "401" in refused[0]
    assert not list((tmp_path / "home").glob("warm-*"))


def test_two_specs_of_one_name_and_no_service_are_refused(served: Building, tmp_path: Path) -> None:
    with client_of(served, tmp_path / "home"):
        one, two = write_spec(tmp_path / "one", "a"), write_spec(tmp_path / "two", "a")
        with pytest.raises(ConfigError, match="both named 'serviced'"):
            Builder([one, two], served.url)
        with pytest.raises(ConfigError, match="no service"):
            Builder([one], str(tmp_path / "store"))
    assert not list((tmp_path / "home").glob("warm-*"))
