"""Cursors: where a page ended, as a text that clients hand back and need not understand."""

from __future__ import annotations

import base64
import json
from typing import Any

from aotcache.db.engine import clean
from aotcache.errors import BadCursor


def pack(*place: Any) -> str:
    """The cursor of a place in an order: the values that the order sorts by."""
    return base64.urlsafe_b64encode(json.dumps(place).encode()).decode().rstrip("=")


def unpack(cursor: str, *kinds: type) -> list[Any]:
    """The place of a cursor.

    Args:
        cursor: What a client sent.
        kinds: The type of each value.

    Raises:
        BadCursor: if it is not the cursor of such a place.
    """
    try:
        padded = cursor.encode("ascii") + b"=" * (-len(cursor) % 4)
        place = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
        fits = isinstance(place, list) and [type(value) for value in place] == list(kinds)
    except (ValueError, RecursionError):
        fits = False
    if not fits:
        raise BadCursor(
            f"cursor {cursor[:80]!r} is none that a page of this listing handed out; "
            "begin again without one, and pass `next` on as it came"
        )
    return [clean(value) if isinstance(value, str) else value for value in place]


__all__ = ["pack", "unpack"]
