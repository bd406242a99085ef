"""Lengths of time and sizes as people write them."""

from __future__ import annotations

import re
from datetime import timedelta

from aotcache.errors import ConfigError

_TIMES = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}

_SIZES = {
    "": 1,
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate(("k", "M", "G", "T"), 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate(("K", "M", "G", "T"), 1)},
}


def duration(text: str) -> timedelta:
    """`30d` as a timedelta; units s, m, h, d and w. Raises ConfigError."""
    match = re.fullmatch(r"([0-9]{1,6})([smhdw])", text.strip())
    if match is None:
        raise ConfigError(
            f"{text[:80]!r} is no length of time: expected a number and s, m, h, d or w, e.g. 30d"
        )
    return timedelta(**{_TIMES[match[2]]: int(match[1])})


def byte_size(text: str) -> int:
    """`50GiB` or `1.5 TB` in bytes; units B, kB, MB, GB and TB, or KiB, MiB, GiB and TiB. Raises ConfigError."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([A-Za-z]{0,3})", text.strip())
    unit = None if match is None else _SIZES.get(match[2])
    if match is None or unit is None:
        raise ConfigError(f"{text[:80]!r} is no size: expected a number and a unit, e.g. 50GiB or 500MB")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


__all__ = ["byte_size", "duration"]
