"""Keeping what httpx and httpcore log of our requests out of logs: whole addresses, and headers that hold more."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_ours: ContextVar[bool] = ContextVar("aotcache_request", default=False)

_LOGGERS = ("httpx", "httpcore.connection", "httpcore.http11", "httpcore.proxy", "httpcore.socks")


@contextmanager
def unlogged() -> Iterator[None]:
    """Drop what those libraries log in this thread meanwhile; requests of others are not touched."""
    for name in _LOGGERS:
        # Adding the same filter again changes nothing.
        logging.getLogger(name).addFilter(_wanted)
    mark = _ours.set(True)
    try:
        yield
    finally:
        _ours.reset(mark)


def _wanted(record: logging.LogRecord) -> bool:
    return not _ours.get()
