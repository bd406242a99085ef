"""Pins: what no collection removes. One small document each, `pins/<key or digest>.json`."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

FORMAT = 1

MOST_REASON = 500
"""Characters of a reason."""

LARGEST_PIN = 64 << 10
"""Bytes of a document that are read."""


@dataclass(frozen=True, slots=True)
class Pin:
    """A key whose entries stay, or a digest whose entries and archive do.

    Attributes:
        what: The key or digest.
        reason: Why, for people.
        at: When it was pinned, in seconds since the epoch; 0 where the document does not say.
    """

    what: str
    reason: str
    at: float

    def to_json(self) -> bytes:
        """The document."""
        values = {"format": FORMAT, "what": self.what, "reason": self.reason, "at": self.at}
        return json.dumps(values, sort_keys=True).encode()


def read_pin(what: str, document: bytes | None) -> Pin:
    """The pin of a key or digest. Its name alone counts: one that cannot be read pins all the same."""
    try:
        found = json.loads(document or b"")
        at = float(found["at"])
        return Pin(what, str(found["reason"])[:MOST_REASON], at if math.isfinite(at) else 0.0)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return Pin(what, "", 0.0)


__all__ = ["FORMAT", "Pin", "read_pin"]
