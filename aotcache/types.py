"""The small values that every part of aotcache passes around. No torch here."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Literal, NewType

from aotcache.errors import ConfigError

Digest = NewType("Digest", str)
"""Lower-case hex sha256 of some bytes (64 characters)."""

CacheKey = NewType("CacheKey", str)
"""Lower-case hex sha256 over the named key components (64 characters)."""

Mode = Literal["train", "infer"]

_HEX64 = re.compile(r"[0-9a-f]{64}\Z")
_TARGET = re.compile(r"(cpu|cuda):([A-Za-z0-9_.-]{1,40})\Z")


def sha256(data: bytes) -> Digest:
    """The digest of `data`."""
    return Digest(hashlib.sha256(data).hexdigest())


def printable(text: str, most: int) -> str:
    """The first `most` characters of another's text for a message or a log: none moves a terminal's cursor."""
    return "".join(c if c.isprintable() else "?" for c in text[:most])


def is_digest(text: object) -> bool:
    """Whether `text` has the form of a digest or a key."""
    return isinstance(text, str) and _HEX64.match(text) is not None


@dataclass(frozen=True, slots=True, order=True)
class Target:
    """Where machine code runs, e.g. `cpu:x86_64-avx512` or `cuda:sm_90`."""

    device: str
    arch: str

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read `device:arch`. Raises ConfigError for anything else."""
        match = _TARGET.match(text)
        if match is None:
            raise ConfigError(
                f"target {text!r} is not of the form cpu:<arch> or cuda:sm_<n>; "
                "for example cpu:x86_64-avx2 or cuda:sm_90"
            )
        return cls(match[1], match[2])

    def __str__(self) -> str:
        return f"{self.device}:{self.arch}"


@dataclass(frozen=True, slots=True, order=True)
class Toolchain:
    """What must match for a library to load.

    Attributes:
        torch: torch's version without the local part, e.g. `2.13.0`.
        git: torch's git hash, 40 hex characters.
        cuda: the CUDA version torch was built with, or None.
    """

    torch: str
    git: str
    cuda: str | None

    def __str__(self) -> str:
        return f"torch{self.torch}-{self.git[:8]}-{'cu' + self.cuda if self.cuda else 'cpu'}"


@dataclass(frozen=True, slots=True, order=True)
class Variant:
    """Target and toolchain of one artifact for a key. Its text names the ref file."""

    target: Target
    toolchain: Toolchain

    def __str__(self) -> str:
        return f"{self.target.device}-{self.target.arch}+{self.toolchain}"


@dataclass(frozen=True, slots=True)
class Miss:
    """A lookup that found none, and why, in one sentence."""

    reason: str
