"""Conditional and ranged requests (RFC 9110, sections 13 and 14) as far as blobs need them. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

_RANGE = re.compile(r"\s*bytes\s*=\s*(\d{0,19})\s*-\s*(\d{0,19})\s*\Z", re.IGNORECASE)
_QUALITY = re.compile(r";\s*q\s*=\s*0(\.0{0,3})?\s*(;|\Z)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes `start` to `stop` (not included) of a whole of `size` bytes."""

    start: int
    stop: int
    size: int

    @property
    def length(self) -> int:
        """Bytes in it."""
        return self.stop - self.start

    @property
    def content_range(self) -> str:
        """The value of the `Content-Range` header."""
        return f"bytes {self.start}-{self.stop - 1}/{self.size}"


class Unsatisfiable(ValueError):
    """The range begins behind the last byte."""


def parse_range(header: str | None, size: int) -> Range | None:
    """The range that a `Range` header asks for.

    Returns:
        None where the whole is to be sent: no header, another unit, several ranges, or
        something that is not a range (a server may ignore all of these).

    Raises:
        Unsatisfiable: if nothing of it lies within `size` bytes.
    """
    match = None if header is None else _RANGE.match(header)
    if match is None or match[1] == match[2] == "":
        return None
    if match[1] == "":
        start, stop = max(0, size - int(match[2])), size
        if start == stop:
            raise Unsatisfiable
        return Range(start, stop, size)
    start = int(match[1])
    last = int(match[2]) if match[2] else size - 1
    if match[2] and last < start:
        return None
    if start >= size:
        raise Unsatisfiable
    return Range(start, min(last + 1, size), size)


def matches(header: str | None, tags: tuple[str, ...]) -> bool:
    """Whether an `If-None-Match` header names one of `tags` (quoted), or `*`; weakly compared."""
    if header is None:
        return False
    named = [tag.strip().removeprefix("W/") for tag in header.split(",")]
    return "*" in named or any(tag in named for tag in tags)


def range_applies(if_range: str | None, tag: str) -> bool:
    """Whether a `Range` holds under an `If-Range` header: strongly compared, dates never."""
    return if_range is None or if_range.strip() == tag


def accepts(header: str | None, coding: str) -> bool:
    """Whether an `Accept-Encoding` header names a coding, and not with a quality of 0."""
    for item in (header or "").split(","):
        if item.partition(";")[0].strip().lower() == coding:
            return _QUALITY.search(item) is None
    return False
