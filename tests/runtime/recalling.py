"""Two ranks of which one has heard of a recall."""

from __future__ import annotations

from typing import Any

from aotcache.runtime.prefetch import agree_on_ready
from aotcache.types import CacheKey, Digest

BOTH, RECALLED = CacheKey("1" * 64), CacheKey("2" * 64)


def ranks(rank: int) -> dict[str, Any]:
    have = {BOTH: Digest("a" * 64)} | ({RECALLED: Digest("b" * 64)} if rank == 0 else {})
    recalled = {} if rank == 0 else {RECALLED: "bad"}
    agreed, missed, gone = agree_on_ready("world", "request", "store", have, {}, recalled)
    return {"agreed": sorted(agreed), "missed": missed, "gone": gone}
