"""Damage to bytes and to JSON documents, by a generator of random numbers: what disks, networks and people do."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

Damage = Callable[[random.Random, bytes], bytes]

_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 1 << 63, -(1 << 64), 1e308, 0.5, float("nan"), float("inf"), "", "x", "../x",
    "\0", "\ud800", "é" * 300, [], {}, [[]], {"": None}, "0" * 64, "f" * 64,
)  # fmt: skip
"""What a field of a document may be replaced by."""


def flip_bits(chance: random.Random, data: bytes) -> bytes:
    """One to four bits are wrong."""
    made = bytearray(data)
    for _ in range(chance.randint(1, 4) if made else 0):
        made[chance.randrange(len(made))] ^= 1 << chance.randrange(8)
    return bytes(made)


def truncate(chance: random.Random, data: bytes) -> bytes:
    """The end is missing."""
    return data[: chance.randrange(len(data))] if data else data


def extend(chance: random.Random, data: bytes) -> bytes:
    """Something follows the end, or comes before the beginning."""
    more = chance.choice([b"\0", b"\n", b" ", b"}", chance.randbytes(chance.randint(1, 64)), data])
    return data + more if chance.random() < 0.8 else more + data


def zero_block(chance: random.Random, data: bytes) -> bytes:
    """A block was never written."""
    size = min(len(data), chance.choice([16, 512, 4096]))
    start = chance.randrange(len(data) - size + 1)
    return data[:start] + bytes(size) + data[start + size :]


def swap_blocks(chance: random.Random, data: bytes) -> bytes:
    """Two blocks are in each other's place."""
    size = min(len(data) // 2, chance.choice([16, 512, 4096]))
    if not size:
        return data
    one = chance.randrange(len(data) - 2 * size + 1)
    two = chance.randrange(one + size, len(data) - size + 1)
    return (
        data[:one]
        + data[two : two + size]
        + data[one + size : two]
        + data[one : one + size]
        + data[two + size :]
    )


def drop_block(chance: random.Random, data: bytes) -> bytes:
    """A block in the middle is missing."""
    size = min(len(data), chance.randint(1, 64))
    start = chance.randrange(len(data) - size + 1)
    return data[:start] + data[start + size :]


BYTES: tuple[Damage, ...] = (flip_bits, truncate, extend, zero_block, swap_blocks, drop_block)


def delete_field(chance: random.Random, data: bytes) -> bytes:
    """A field, or an item of a list, is missing."""
    return _changed(chance, data, lambda owner, name: owner.__delitem__(name))


def change_field(chance: random.Random, data: bytes) -> bytes:
    """A field has another value, perhaps of another kind."""

    def change(owner: Any, name: Any) -> None:
        old = owner[name]
        if isinstance(old, bool):
            owner[name] = not old
        elif isinstance(old, int) and chance.random() < 0.7:
            owner[name] = old + chance.choice([-1, 1, 1000])
        elif isinstance(old, str) and old and chance.random() < 0.5:
            at = chance.randrange(len(old))
            owner[name] = old[:at] + chance.choice("0aZ/.\n") + old[at + 1 :]
        else:
            owner[name] = chance.choice(_VALUES)

    return _changed(chance, data, change)


def swap_fields(chance: random.Random, data: bytes) -> bytes:
    """Two values are in each other's place."""
    document = json.loads(data)
    places = list(_places(document))
    if len(places) < 2:
        return data
    (one, a), (two, b) = chance.sample(places, 2)
    one[a], two[b] = copy.deepcopy(two[b]), copy.deepcopy(one[a])
    return _dumped(chance, document)


def double_field(chance: random.Random, data: bytes) -> bytes:
    """A name stands twice in one object, with two values."""
    document = json.loads(data)
    owners = [owner for owner, name in _places(document) if isinstance(owner, dict)]
    if not owners:
        return data
    owner = chance.choice(owners)
    name = chance.choice(list(owner))
    mark = "\x01doubled\x01"
    other = chance.choice([owner[name], *_VALUES])
    owner[mark] = other
    text = _dumped(chance, document).decode()
    return text.replace(json.dumps(mark), json.dumps(name)).encode()


def rewrite(chance: random.Random, data: bytes) -> bytes:
    """The same values in another form: spaces, other order."""
    document = json.loads(data)
    if isinstance(document, dict):
        names = list(document)
        chance.shuffle(names)
        document = {name: document[name] for name in names}
    return json.dumps(document, indent=chance.choice([None, 1])).encode()


FIELDS: tuple[Damage, ...] = (delete_field, change_field, swap_fields, double_field, rewrite)


def _changed(chance: random.Random, data: bytes, change: Callable[[Any, Any], None]) -> bytes:
    document = json.loads(data)
    places = list(_places(document))
    if not places:
        return data
    owner, name = chance.choice(places)
    change(owner, name)
    return _dumped(chance, document)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every object or list with every name or index in it."""
    names = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for name in names:
        yield value, name
        yield from _places(value[name])


def _dumped(chance: random.Random, document: Any) -> bytes:
    """As our documents are written, or as others write JSON."""
    compact = chance.random() < 0.7
    text = json.dumps(document, separators=(",", ":") if compact else None, sort_keys=compact)
    return text.encode()
