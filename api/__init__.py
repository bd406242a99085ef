"""The service: a store over HTTP. Ships as `aotcache.api`."""
