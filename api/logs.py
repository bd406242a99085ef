"""Logs of the server: one JSON object per line on stderr, and no secret in any of them."""

from __future__ import annotations

import json
import logging
import re
import sys
from typing import Any, TextIO

ACCESS = logging.getLogger("aotcache.access")
"""One record per request; its fields are in `record.fields`."""

_TOKEN = re.compile(r"aot_[A-Za-z0-9_-]{8,}")
_QUERY = re.compile(r"(https?://[^\s?\"']+)\?[^\s\"']*")
_PASSWORD = re.compile(r"(\w+://[^\s:/@]+):[^\s@/]+@")


def redacted(text: str) -> str:
    """`text` without tokens, passwords of addresses, and query strings, which can hold signatures."""
    text = _TOKEN.sub("aot_***", text)
    text = _PASSWORD.sub(r"\1:***@", text)
    return _QUERY.sub(r"\1?***", text)


class JsonLines(logging.Formatter):
    """A record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        line: dict[str, Any] = {"time": round(record.created, 3), "level": record.levelname.lower()}
        fields = getattr(record, "fields", None)
        if fields is not None:
            line |= {"event": "request", **fields}
        else:
            line |= {"logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps({k: redacted(v) if isinstance(v, str) else v for k, v in line.items()}, default=str)


def configure(stream: TextIO | None = None, level: int = logging.INFO) -> None:
    """Send all logs of this process to `stream` (default: stderr). For the program that serves alone."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    # These write the addresses of requests, queries included, or a line for each look at the database.
    for name in ("httpx", "httpcore", "sse_starlette", "alembic"):
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
