"""The fixtures of both databases."""

from tests.services.postgres import (
    database,
    database_url,
    dialect,
    empty_url,
    migrated_postgres,
    migrated_sqlite,
    postgres,
)

__all__ = [
    "database",
    "database_url",
    "dialect",
    "empty_url",
    "migrated_postgres",
    "migrated_sqlite",
    "postgres",
]
