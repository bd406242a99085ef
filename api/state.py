"""What one running service holds: its settings, its store, its database, and how they are reached."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import anyio
from fastapi import Depends, Request

from aotcache.api.blob_files import CheckedFiles
from aotcache.api.metrics import Metrics
from aotcache.api.transfer import Workers
from aotcache.api.watching import Watching
from aotcache.db.engine import Database
from aotcache.errors import ConfigError
from aotcache.service.builds import Builds
from aotcache.service.deaths import Deaths
from aotcache.service.gc import Collector
from aotcache.service.index import Index
from aotcache.service.leases import Leases
from aotcache.service.publishes import Publishes
from aotcache.service.recalls import ServiceRecalls
from aotcache.service.specs import Specs
from aotcache.service.tokens import Tokens
from aotcache.service.usage import Usage
from aotcache.store import ObjectStore, open_store
from aotcache.trust import TrustedKeys

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """How a service runs.

    Attributes:
        store: URL of the store whose entries it serves: a directory or a bucket.
        database: URL of its database.
        trusted: Keys whose signatures its entries carry; others are not taken.
        uploads: Where uploads are written if the store is a bucket.
        specs: Names of the specs that are registered from the start.
        loopback: Whether it listens on loopback alone. Only then, and only while there is no
            live token, requests without a token are served.
        blob_bytes: The largest archive taken, in bytes.
        signed_url_seconds: How long the addresses in a bucket are good that it hands out; 0 for none.
        lease_seconds: How long a builder keeps its build without a sign of life.
        failed_seconds: How long a failed build is remembered.
    """

    store: str
    database: str
    trusted: TrustedKeys
    uploads: Path
    specs: tuple[str, ...] = ()
    loopback: bool = True
    blob_bytes: int = 8 * GIB
    signed_url_seconds: float = 600.0
    lease_seconds: float = 60.0
    failed_seconds: float = 600.0


ASKING = 4
"""Requests for builds that are looked into at once; more of them wait for these."""


class Service:
    """Everything that handlers use. Threads may share it; `close` ends it."""

    def __init__(self, config: ServiceConfig) -> None:
        store = open_store(config.store, tier=False)
        if not isinstance(store, ObjectStore):
            raise ConfigError(
                f"store {config.store!r} cannot be served: expected a directory or a bucket, not another service"
            )
        self.config = config
        self.store = store
        self.uploads = store.drafts or config.uploads
        self.checked = CheckedFiles(store)
        self.workers = Workers()
        self.asking = anyio.CapacityLimiter(ASKING)
        self.database = Database(config.database)
        self.index = Index(self.database)
        self.leases = Leases(self.database, seconds=config.lease_seconds)
        self.publishes = Publishes(self.database, self.index, store)
        self.collector = Collector(self.database, self.index, self.leases, store)
        self.builds = Builds(self.database, self.leases, failed_seconds=config.failed_seconds)
        self.watching = Watching(self.builds)
        self.tokens = Tokens(self.database)
        self.usage = Usage(self.database)
        self.deaths = Deaths(self.database)
        self.metrics = Metrics()
        self.specs = Specs(self.database, config.specs)
        self.recalls = ServiceRecalls(self.database)

    def flush(self) -> None:
        """Write what was counted and noted since the last time. Raises DatabaseError."""
        self.usage.flush()
        self.tokens.flush()
        self.specs.flush()

    def close(self) -> None:
        """Write what is counted, and let go of threads and connections."""
        self.workers.close()
        try:
            self.usage.flush()
            self.tokens.flush()
        finally:
            self.database.close()


async def _service(request: Request) -> Service:
    found = request.app.state.service
    assert isinstance(found, Service)
    return found


ServiceOf = Annotated[Service, Depends(_service)]
"""The service, in a handler's signature."""
