"""The topology of docker-compose.yml as plain processes, and hosts that have nothing but a home in common."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from aotcache.build.plan import Cell
from aotcache.lockfile import Lock, LockedCell
from aotcache.manifest import Manifest
from aotcache.store import open_store
from aotcache.trust import SigningKey, sign
from aotcache.types import sha256
from tests.homes import new_home
from tests.services.postgres import Postgres
from tests.services.s3 import S3, s3_server
from tests.services.serving import Serving, serving

ROOT = Path(__file__).resolve().parents[2]
SPECS = Path(__file__).parent / "specs"
FLEET = Path(__file__).parent / "fleet.py"
LIMIT = 300.0
"""Seconds that one command may take."""


@dataclass
class Host:
    """A machine, as far as aotcache can tell: a home, settings and specs of its own, and a PATH.

    Attributes:
        folder: Holds all of it.
        variables: AOTCACHE_* and others that are set there.
    """

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)

    @classmethod
    def make(cls, folder: Path, *, compiler: bool, layers: int = 2, **variables: str) -> Host:
        """A new one, whose drafter has `layers`; without `compiler` there is nothing on its PATH at all."""
        shutil.copytree(SPECS, folder / "specs", ignore=shutil.ignore_patterns("__pycache__"))
        spec = folder / "specs" / "fleet.toml"
        spec.write_text(spec.read_text().replace("layers = 2", f"layers = {layers}"))
        nothing = folder / "bin"
        nothing.mkdir()
        hidden = {} if compiler else {"PATH": str(nothing), "CC": "", "CXX": ""}
        return cls(folder, hidden | variables)

    @property
    def home(self) -> Path:
        """Its AOTCACHE_HOME."""
        return self.folder / "home"

    @property
    def spec(self) -> Path:
        """The fleet's spec."""
        return self.folder / "specs" / "fleet.toml"

    @contextmanager
    def running(self, *arguments: str) -> Iterator[None]:
        """A command of aotcache beside what else is done, ended with SIGTERM."""
        process = self.start("-m", "aotcache", *arguments)
        try:
            yield
            assert process.poll() is None, process.communicate()[1][-4000:]
            process.terminate()
            out, err = process.communicate(timeout=60)
            assert process.returncode == 0, f"{out[-2000:]}\n{err[-4000:]}"
        finally:
            if process.poll() is None:
                process.kill()
                process.communicate()

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start a program with Python there."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("AOTCACHE_")}
        own = {"AOTCACHE_HOME": str(self.home), "AOTCACHE_CONFIG_HOME": str(self.folder / "config")}
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", *command],
            env={**kept, "PYTHONPATH": str(ROOT), **own, **self.variables},
            cwd=self.spec.parent if self.spec.exists() else self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def aotcache(self, *arguments: str) -> Any:
        """Run a command of aotcache; its JSON."""
        return finish(self.start("-m", "aotcache", *arguments, "--json"))

    def fleet(self, processes: int, threads: int) -> subprocess.Popen[str]:
        """Start worker processes that train."""
        return self.start(str(FLEET), str(self.spec), str(processes), str(threads))


def finish(process: subprocess.Popen[str]) -> Any:
    """Wait for a program; the JSON of its last line, or of all of them."""
    try:
        out, err = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"not ended after {LIMIT:g} s:\n{out[-2000:]}\n{err[-4000:]}")
    assert process.returncode == 0, f"{out[-2000:]}\n{err[-4000:]}"
    try:
        return json.loads(out)
    except ValueError:
        return json.loads(out.splitlines()[-1])


@dataclass
class Topology:
    """The three services, and how they end."""

    service: Serving
    postgres: Postgres
    s3: S3

    def kill(self) -> None:
        """All of them as a power cut would: none gets to say good-bye."""
        self.service.kill()
        self.s3.process.kill()
        self.s3.process.wait(60)
        self.postgres._server.send_signal(signal.SIGKILL)
        self.postgres._server.wait(60)


@pytest.fixture(scope="module")
def topology(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topology]:
    """PostgreSQL, a bucket, and the service over both."""
    folder = tmp_path_factory.mktemp("topology")
    postgres = Postgres()
    try:
        with s3_server(folder / "s3") as s3:
            with serving(
                folder / "service",
                store=s3.bucket(),
                database=postgres.url(postgres.create()),
                environment=s3.environment,
            ) as service:
                yield Topology(service, postgres, s3)
    finally:
        postgres.close()


@dataclass
class Warmed:
    """A builder host that has built and published, and what its key is."""

    host: Host
    report: Any
    fingerprint: str

    def entry(self) -> tuple[Manifest, Path]:
        """One of those that it published, and its archive, as it kept a copy of them."""
        (tier,) = (self.host.home / "tiers").iterdir()
        store = open_store(tier)
        manifest = next(store.list())
        archive = store.blob_path(manifest.digest)
        assert archive is not None
        return manifest, archive


@pytest.fixture(scope="module")
def warmed(topology: Topology, tmp_path_factory: pytest.TempPathFactory) -> Warmed:
    """The one compile of this folder."""
    service = topology.service
    builder = Host.make(
        tmp_path_factory.mktemp("builder"),
        compiler=True,
        AOTCACHE_STORE=service.url,
        AOTCACHE_TOKEN=service.token("read", "publish"),
    )
    new_home(builder.home)
    key = builder.aotcache("keygen", "--name", "builder")
    operator = Host(service.folder, {})
    operator.aotcache("trust", "add", key["public"], "--name", "builder")
    report = builder.aotcache("warm", str(builder.spec))
    return Warmed(builder, report, key["fingerprint"])


def repackaged(
    warmed: Warmed, cells: Iterable[Cell], folder: Path, key: SigningKey
) -> tuple[list[tuple[Manifest, Path]], Lock]:
    """An entry for every cell, with an archive of its own: the same libraries, and one member that no other has.

    Forty archives with forty digests cost one compile so. Signed by `key`; the lock file names them.
    """
    manifest, archive = warmed.entry()
    made: list[tuple[Manifest, Path]] = []
    locked: list[LockedCell] = []
    for number, cell in enumerate(cells):
        path = folder / f"{number}.pt2"
        shutil.copyfile(archive, path)
        name, data = "aotcache/extra/number", str(number).encode()
        with zipfile.ZipFile(path, "a") as package:
            package.writestr(name, data)
        whole = path.read_bytes()
        own = replace(
            manifest,
            key=cell.key,
            components=tuple(cell.parts.to_json()),
            region=cell.region,
            digest=sha256(whole),
            size=len(whole),
            members={**manifest.members, name: sha256(data)},
        )
        made.append((sign(own, key), path))
        place = (own.region, own.mode, own.bucket, str(own.target), str(own.toolchain))
        locked.append(LockedCell(*place, own.key, own.digest))
    return made, Lock("fleet", locked)
