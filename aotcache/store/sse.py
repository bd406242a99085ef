"""Server-sent events, read from lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from aotcache.errors import ServiceError


def parse_events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Events as `id`, `event` (default "message") and the JSON of `data`. An event that is cut off is dropped.

    The format: https://html.spec.whatwg.org/multipage/server-sent-events.html.

    Raises:
        ServiceError: for data that is not JSON.
    """
    last, kind, data = "", "", list[str]()
    for line in lines:
        if not line:
            if data:
                yield {"id": last, "event": kind or "message", "data": _value("\n".join(data))}
            kind, data = "", []
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            data.append(value)
        elif name == "event":
            kind = value
        elif name == "id" and value.isascii() and value.isprintable():  # it goes back in a header
            last = value


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ServiceError(f"an event of the service holds {text[:80]!r}, expected JSON") from None
