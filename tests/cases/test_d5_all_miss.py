"""D5: 64 clients miss one key together; a build that fails; a builder and a server that die half-way."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from aotcache import host
from aotcache.build import plan
from aotcache.errors import StoreError
from aotcache.manifest import Manifest
from aotcache.store import open_store
from aotcache.store.builds import Build, BuildService
from aotcache.store.session import ServiceSession
from aotcache.types import CacheKey
from tests.services.building import Building, building, children, client_of, until, write_spec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CLIENTS = 64
LEASE_SECONDS = "10"
"""Long enough for a builder that has to share two cores with 64 clients."""
LAYERS = "abcz"


class Case:
    """The service, and keys of its spec that nothing has built yet."""

    def __init__(self, made: Building, keys: dict[str, CacheKey]) -> None:
        self.made = made
        self.keys = keys
        self.store = open_store(made.url, tier=False)
        self.service = made.service

    def ask(self, service: BuildService, layer: str) -> Build:
        return service.request("serviced", self.keys[layer], host.native_target(), host.host_toolchain())

    def end(self, build: Build, service: BuildService | None = None) -> Build:
        """Wait for a build as a client that meets nothing but HTTP; the service may be away for a while."""
        found = build
        while not found.ended:
            assert found.id is not None
            time.sleep(1)
            try:
                found = (service or self.service).get(found.id)
            except StoreError:
                continue
        return found

    def events(self, build: Build) -> list[dict[str, Any]]:
        assert build.id is not None
        return [event["data"] for event in self.service.events(build.id)]

    def builder(self) -> int:
        (found,) = children(self.made.server.process.pid, "builder")
        return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, importable: None) -> Path:
    return tmp_path_factory.mktemp("d5")


@pytest.fixture(scope="module")
def case(folder: Path) -> Iterator[Case]:
    with building(folder / "service", LAYERS, environment={"AOTCACHE_LEASE_SECONDS": LEASE_SECONDS}) as made:
        with client_of(made, folder / "client"):
            rows = plan(write_spec(folder / "here", LAYERS), store=str(folder / "none"))
            found = Case(made, {row.cell.region.removeprefix("layers."): row.cell.key for row in rows})
            try:
                yield found
            finally:
                found.service.session.close()
                open_store(made.url, tier=False).session.close()  # type: ignore[attr-defined]


def all_at_once(case: Case, layer: str) -> list[Build]:
    """What 64 clients, each with connections of its own, get who ask for one key at the same moment."""
    start = threading.Barrier(CLIENTS)

    def client(_: int) -> Build:
        service = BuildService(ServiceSession(case.made.url))
        try:
            start.wait(60)
            return case.end(case.ask(service, layer), service)
        finally:
            service.session.close()

    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(client, range(CLIENTS)))


def test_64_clients_get_one_compile(case: Case) -> None:
    builds = all_at_once(case, "a")
    assert {build.state for build in builds} == {"done"}
    assert len({build.id for build in builds} - {None}) == 1
    assert max(build.attempts for build in builds) == 1
    manifests = case.store.lookup(case.keys["a"])
    assert len(manifests) == 1
    # The builder says of every compile that it begins.
    assert [e["stage"] for e in case.events(builds[0]) if "stage" in e].count("compile") == 1


def test_64_clients_get_the_same_error_after_two_attempts_at_most(case: Case) -> None:
    builds = all_at_once(case, "z")
    assert {build.state for build in builds} == {"failed"}
    assert len({build.id for build in builds}) == 1
    assert len({build.error for build in builds}) == 1
    assert {build.attempts for build in builds} <= {1, 2}
    kind, text = builds[0].error or ("", "")
    assert kind == "UnsupportedGraph"
    assert "region 'layers.z'" in text
    assert case.ask(case.service, "z").id == builds[0].id  # who comes later is told the same


def compiles(build: Build) -> bool:
    assert not build.ended, build
    return build.stage == "compile"


def test_a_builder_that_dies_is_taken_over_once_and_other_keys_are_served_meanwhile(case: Case) -> None:
    served = case.store.lookup(case.keys["a"])
    build = case.ask(case.service, "b")
    over = threading.Event()
    answers: list[list[Manifest]] = []

    def reader() -> None:
        while not over.is_set():
            answers.append(case.store.lookup(case.keys["a"]))
            time.sleep(0.02)

    readers = [threading.Thread(target=reader) for _ in range(4)]
    for thread in readers:
        thread.start()
    try:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(all_at_once, case, "b")
            until(lambda: compiles(case.service.get(str(build.id))))
            first = case.builder()
            os.kill(first, signal.SIGKILL)
            ends = waiting.result()
    finally:
        over.set()
        for thread in readers:
            thread.join()
    assert {(end.id, end.state, end.attempts) for end in ends} == {(build.id, "done", 2)}
    done = ends[0]
    assert case.builder() != first
    begun = [event for event in case.events(done) if event.get("state") == "running"]
    assert len(begun) == 2
    assert len({event["holder"] for event in begun}) == 2
    assert len(case.store.lookup(case.keys["b"])) == 1
    assert len(answers) > 100  # how long they take is a figure of bench.misses
    assert all(answer == served for answer in answers)


def test_a_server_that_dies_forgets_no_build(case: Case, folder: Path) -> None:
    build = case.ask(case.service, "c")
    assert not build.ended
    builder = case.builder()
    case.made.server.kill()
    until(lambda: not Path(f"/proc/{builder}").exists())  # a builder ends with the service that started it
    port = int(case.made.url.rpartition(":")[2])
    with building(folder / "service", LAYERS, port=port) as again:
        service = again.service
        until(_answers(service, str(build.id)))
        done = case.end(build, service)
        assert done.state == "done"
        service.session.close()
    manifests = open_store((folder / "service" / "store").as_uri()).lookup(case.keys["c"])
    assert len(manifests) == 1


def _answers(service: BuildService, build: str) -> Callable[[], bool]:
    def asked() -> bool:
        try:
            return service.get(build).id == build
        except StoreError:
            return False

    return asked
