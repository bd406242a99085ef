"""The application in this process, over both databases and a store in a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from aotcache.api.app import create_app
from aotcache.api.state import Service, ServiceConfig
from aotcache.manifest import Manifest
from aotcache.trust import SigningKey, TrustedKeys, sign
from tests.manifests import make_manifest
from tests.services.postgres import (
    database,
    database_url,
    dialect,
    migrated_postgres,
    migrated_sqlite,
    postgres,
)

__all__ = ["database", "database_url", "dialect", "migrated_postgres", "migrated_sqlite", "postgres"]


@dataclass
class Api:
    """A running application.

    Attributes:
        client: Sends requests as from this host.
        key: A key that it trusts.
    """

    app: FastAPI
    client: TestClient
    config: ServiceConfig
    key: SigningKey

    @property
    def service(self) -> Service:
        """What the handlers use."""
        found: Service = self.app.state.service
        return found

    def manifest(self, archive: bytes = b"archive", **changes: object) -> Manifest:
        """A signed manifest."""
        return sign(make_manifest(archive, **changes), self.key)  # type: ignore[arg-type]

    def publish(self, archive: bytes = b"archive", **changes: object) -> Manifest:
        """Store an archive and an entry for it."""
        manifest = self.manifest(archive, **changes)
        assert self.client.put(f"/v1/blobs/{manifest.digest}", content=archive).status_code in (200, 201)
        answer = self.client.put(f"/v1/artifacts/{manifest.key}", content=manifest.document())
        assert answer.status_code == 201, answer.text
        return manifest

    def bearer(self, *scopes: str) -> dict[str, str]:
        """Headers with a new token."""
        text, _ = self.service.tokens.create(
            f"token of {', '.join(scopes)} {len(self.service.tokens.list())}", scopes
        )
        return {"Authorization": f"Bearer {text}"}


Start = Callable[..., Api]


@pytest.fixture
def start_api(database_url: str, tmp_path: Path) -> Iterator[Start]:
    """Starts applications over the test's database; arguments change the configuration."""
    running: list[TestClient] = []
    trusted = TrustedKeys(tmp_path / "trusted")
    key = SigningKey.generate()
    trusted.add(key.public, "tests")

    def begin(**changes: object) -> Api:
        config = ServiceConfig(
            store=(tmp_path / "store").as_uri(),
            database=database_url,
            trusted=trusted,
            uploads=tmp_path / "uploads",
            specs=("drafter",),
        )
        config = replace(config, **changes)  # type: ignore[arg-type]
        app = create_app(config)
        client = TestClient(
            app, base_url="http://127.0.0.1", follow_redirects=False, raise_server_exceptions=False
        )
        client.__enter__()
        running.append(client)
        return Api(app, client, config, key)

    yield begin
    for client in running:
        client.__exit__(None, None, None)


@pytest.fixture
def api(start_api: Start) -> Api:
    """An application without tokens."""
    return start_api()
