"""The cache key: sha256 over named components that can be compared one by one.

A component is an ordered list of named items, so that two keys can be told
apart by name ("call.mask_mod.total_seq_len differs: 256 / 300") instead of by
two hashes. Every frame is length-prefixed, so no two lists of items share bytes.
`docs/cache-key.md` lists what goes in, what stays out and why.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from aotcache.types import CacheKey, Digest

FORMAT = 2
"""Version of the key itself: the first component of every key."""

COMPONENTS = ("format", "code", "structure", "call", "ambient", "compile")
"""Names of the components, in the order in which they are hashed."""


def _frame(*parts: str) -> bytes:
    out = bytearray()
    for part in parts:
        data = part.encode()
        out += len(data).to_bytes(8, "big") + data
    return bytes(out)


@dataclass(frozen=True, slots=True)
class Component:
    """One named part of a key: ordered `(item name, item value)` texts."""

    name: str
    items: tuple[tuple[str, str], ...]
    digest: Digest = field(init=False, compare=False)

    def __post_init__(self) -> None:
        framed = hashlib.sha256(_frame(self.name))
        for name, value in self.items:
            framed.update(_frame(name, value))
        object.__setattr__(self, "digest", Digest(framed.hexdigest()))


@dataclass(frozen=True, slots=True)
class Difference:
    """One item in which two keys differ; None where one of them lacks it."""

    component: str
    item: str
    ours: str | None
    theirs: str | None

    def __str__(self) -> str:
        return (
            f"{self.component}.{self.item} differs: {self.ours or '(absent)'} / {self.theirs or '(absent)'}"
        )


@dataclass(frozen=True, slots=True)
class KeyParts:
    """All components of one key."""

    components: tuple[Component, ...]

    @property
    def key(self) -> CacheKey:
        """The key itself."""
        framed = hashlib.sha256()
        for part in self.components:
            framed.update(_frame(part.name, part.digest))
        return CacheKey(framed.hexdigest())

    def diff(self, other: KeyParts) -> list[Difference]:
        """What differs between two keys, in the order of the components."""
        return list(_differences(self.components, other.components))

    def to_json(self) -> list[dict[str, Any]]:
        """As stored in a manifest."""
        return [{"name": c.name, "items": [list(i) for i in c.items]} for c in self.components]

    @classmethod
    def from_json(cls, data: Iterable[dict[str, Any]]) -> KeyParts:
        """The inverse of `to_json`. Raises ValueError for anything else."""
        try:
            return cls(
                tuple(Component(str(c["name"]), tuple((str(n), str(v)) for n, v in c["items"])) for c in data)
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not the components of a key: {error}") from error


def _differences(ours: tuple[Component, ...], theirs: tuple[Component, ...]) -> Iterator[Difference]:
    their_parts = {part.name: part for part in theirs}
    our_names = [part.name for part in ours]
    for part in ours:
        other = their_parts.get(part.name, Component(part.name, ()))
        if part.digest != other.digest:
            yield from _item_differences(part, other)
    for part in theirs:
        if part.name not in our_names:
            yield from _item_differences(Component(part.name, ()), part)


def _item_differences(ours: Component, theirs: Component) -> Iterator[Difference]:
    a, b = dict(ours.items), dict(theirs.items)
    for name in dict.fromkeys([*a, *b]):
        if a.get(name) != b.get(name):
            yield Difference(ours.name, name, a.get(name), b.get(name))
