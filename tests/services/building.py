"""A service with a builder beside it, a small spec that it builds, and clients that trust it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from aotcache.spec import Spec, load_spec
from aotcache.store.builds import BuildService
from aotcache.store.session import ServiceSession
from aotcache.trust import SigningKey, TrustedKeys
from tests.homes import new_home
from tests.services.serving import ROOT, Serving, serving

LIMIT = 240.0
"""Seconds."""

MODULE = "tests.build.specs.serviced"
LEASE_SECONDS = 3


def write_spec(folder: Path, layers: str, name: str | None = None) -> Spec:
    """A spec of `tests.build.specs.serviced` with one region, and so one key, for each letter."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name or 'serviced'}.toml"
    path.write_text(
        f'[drafter]\nname = "{name or "serviced"}"\nfactory = "{MODULE}:build"\nbatch = "{MODULE}:batch"\n'
        f'regions = ["layers.*"]\nmodes = ["infer"]\nkwargs = {{ names = "{layers}" }}\n[buckets]\nrows = [3]\n'
    )
    return load_spec(path)


@dataclass(frozen=True)
class Building:
    """A service that builds.

    Attributes:
        server: Its process.
        spec: What it builds.
    """

    server: Serving
    spec: Spec

    @property
    def url(self) -> str:
        """Its address."""
        return self.server.url

    @property
    def service(self) -> BuildService:
        """Calls of it. Close `service.session`."""
        return BuildService(ServiceSession(self.url))

    @property
    def environment(self) -> dict[str, str]:
        """What makes a client trust it, and sign what it takes."""
        return {"AOTCACHE_CONFIG_HOME": str(self.server.config_home), "AOTCACHE_STORE": self.url}


@contextmanager
def building(
    folder: Path,
    layers: str,
    *,
    builder: bool = True,
    port: int = 0,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Building]:
    """Start a service, and a builder beside it, which share compiled headers with this run."""
    spec = write_spec(folder / "spec", layers)
    new_home(folder / "home")
    if not builder and not (folder / "config" / "signing.pem").exists():
        key = SigningKey.generate()  # which a service without a builder does not make
        key.save(folder / "config" / "signing.pem")
        TrustedKeys(folder / "config" / "trusted").add(key.public, "builder")
    with serving(
        folder,
        port=port,
        arguments=["--spec", str(spec.path), *([] if builder else ["--no-builder"])],
        environment={
            "AOTCACHE_LEASE_SECONDS": str(LEASE_SECONDS),
            "PYTHONPATH": str(ROOT),
            **(environment or {}),
        },
    ) as server:
        yield Building(server, spec)


@contextmanager
def client_of(made: Building, home: Path) -> Iterator[None]:
    """This process as a host of its own that uses the service."""
    new_home(home)
    patch = pytest.MonkeyPatch()
    patch.setenv("AOTCACHE_HOME", str(home))
    patch.setenv("PYTHONPATH", str(ROOT))
    for name, value in made.environment.items():
        patch.setenv(name, value)
    try:
        yield
    finally:
        patch.undo()


def until(true: Callable[[], bool]) -> None:
    """Wait for it, for so long as a build may take on a busy machine."""
    ends = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < ends, f"it did not come in {LIMIT:g} s"
        time.sleep(0.05)


def children(pid: int, module: str = "aotcache.build.worker") -> list[int]:
    """Builder processes that a process has started."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            command = (entry / "cmdline").read_text()
        except OSError:
            continue
        if parent == pid and module in command:
            found.append(int(entry.name))
    return found
