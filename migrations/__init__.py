"""Versions of the database, found by `aotcache.db.migrate`. Ships as `aotcache.migrations`."""
