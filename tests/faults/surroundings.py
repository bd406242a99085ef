"""What stages share: servers, a key, and the process that others come from."""

from __future__ import annotations

import socket
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from aotcache.trust import SigningKey, TrustedKeys
from tests.faults.hatchery import Child, Ended, Hatchery, hatchery
from tests.services.postgres import Postgres
from tests.services.s3 import S3, s3_server

_BOOT = 30.0


@dataclass
class Surroundings:
    """What stages share.

    Attributes:
        folder: For everything.
        hatched: Where processes come from.
    """

    folder: Path
    hatched: Hatchery
    stack: ExitStack

    @cached_property
    def s3(self) -> S3:
        """A server of buckets."""
        return self.stack.enter_context(s3_server(self.folder / "s3"))

    @cached_property
    def postgres(self) -> Postgres:
        """A database server."""
        made = Postgres()
        self.stack.callback(made.close)
        return made

    @cached_property
    def key(self) -> SigningKey:
        """The key of every process here, which all of them trust."""
        made = SigningKey.generate()
        made.save(self.folder / "config" / "signing.pem")
        TrustedKeys(self.folder / "config" / "trusted").add(made.public, "faults")
        return made

    def place(self) -> Path:
        """A new folder."""
        made = self.folder / uuid.uuid4().hex[:12]
        made.mkdir()
        return made


@dataclass
class Server:
    """`aotcache serve` from the hatchery, which can be started again where it was killed."""

    around: Surroundings
    folder: Path
    environment: Mapping[str, str | None] = field(default_factory=dict)
    store: str | None = None
    database: str | None = None
    before: Mapping[str, Any] = field(default_factory=dict)
    counted: bool = False
    port: int = 0
    child: Child | None = None

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Child:
        """Start it, on the port that it had, and wait until it is ready."""
        if not self.port:
            with socket.socket() as held:
                held.bind(("127.0.0.1", 0))
                self.port = held.getsockname()[1]
        home = {"AOTCACHE_HOME": str(self.folder / "home"), **self.environment}
        arguments = {"folder": str(self.folder), "port": self.port}
        arguments |= {"store": self.store, "database": self.database}
        self.child = self.around.hatched.begin(
            "tests.faults.acts:serve",
            arguments,
            environment=home,
            armed=False,
            counted=self.counted,
            limit=3600,
            before=self.before,
        )
        until = time.monotonic() + _BOOT
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/readyz", timeout=_BOOT):
                    return self.child
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                ended = self.child.poll()
                assert ended is None, f"the server ended with {ended.status}: {ended.log}"
                assert time.monotonic() < until, "the server did not start"
                time.sleep(0.02)

    def stop(self) -> Ended | None:
        """Kill it if it runs."""
        if self.child is None:
            return None
        self.child.kill()
        ended, self.child = self.child.wait(), None
        return ended


@contextmanager
def surroundings(folder: Path) -> Iterator[Surroundings]:
    """Where stages live: a home and a key of their own, and the process that forks."""
    with ExitStack() as stack:
        environment = {
            "AOTCACHE_HOME": str(folder / "home"),
            "AOTCACHE_CONFIG_HOME": str(folder / "config"),
            "AOTCACHE_LEASE_SECONDS": "2",
            "AOTCACHE_LOCK_SECONDS": "20",
        }
        hatched = stack.enter_context(hatchery(folder / "logs", environment=environment))
        yield Surroundings(folder, hatched, stack)
