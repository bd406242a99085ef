"""The fixtures of both databases, and the service's parts on them."""

from __future__ import annotations

import pytest

from aotcache.db.engine import Database
from aotcache.service.builds import Builds
from aotcache.service.index import Index
from aotcache.service.leases import Leases
from tests.services.postgres import (
    database,
    database_url,
    dialect,
    migrated_postgres,
    migrated_sqlite,
    postgres,
)

__all__ = ["database", "database_url", "dialect", "migrated_postgres", "migrated_sqlite", "postgres"]


@pytest.fixture
def index(database: Database) -> Index:
    return Index(database)


@pytest.fixture
def leases(database: Database) -> Leases:
    return Leases(database)


@pytest.fixture
def builds(database: Database, leases: Leases) -> Builds:
    return Builds(database, leases)
