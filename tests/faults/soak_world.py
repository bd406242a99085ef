"""What a soak stores, and what its processes write down of it: torch-free, and known to everybody beforehand.

An entry is its number and its generation: from these two follow key, archive and manifest. So whoever reads
an archive can tell what it must be without asking the store, and without any digest.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from aotcache.manifest import Manifest
from aotcache.types import CacheKey
from tests.manifests import make_manifest

PINNED = range(8)
"""Numbers that are pinned from the beginning: nothing may ever take these away."""

NUMBERS = range(160)
"""All numbers. A builder makes whichever of them is missing."""

_WANTED = 32
_WANTED_SECONDS = 40.0

LIMIT = 90.0
"""Seconds that one operation of a client or a builder may take, whatever the service does meanwhile."""


@dataclass(frozen=True)
class World:
    """Where a soak takes place.

    Attributes:
        folder: Of all its files.
        url: The service's.
        seed: Of everything that is drawn.
    """

    folder: str
    url: str
    seed: int

    def save(self) -> None:
        """For the processes, who `load` it."""
        (Path(self.folder) / "world.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> World:
        """What `save` wrote."""
        return cls(**json.loads((folder / "world.json").read_text()))

    @property
    def ended(self) -> bool:
        """Whether processes are to stop."""
        return (Path(self.folder) / "end").exists()

    def end(self) -> None:
        """Tell all processes to stop."""
        (Path(self.folder) / "end").touch()


def archive(number: int, generation: int) -> bytes:
    """The bytes of an entry's archive. Of four numbers two share theirs, as keys with one graph do."""
    source = number - 1 if number % 4 == 1 else number
    draw = random.Random(f"archive {source} {generation}")
    return draw.randbytes(draw.choice((3_000, 20_000, 60_000, 300_000)))


def manifest(number: int, generation: int) -> Manifest:
    """An entry's manifest, without signature. Its key is the number's alone."""
    made = make_manifest(archive(number, generation), call=f"number {number}")
    return replace(made, bucket={"number": number, "generation": generation})


def key(number: int) -> CacheKey:
    """A number's key."""
    return _KEYS[number]


_KEYS = [make_manifest(b"", call=f"number {number}").key for number in NUMBERS]


def wanted_now() -> list[int]:
    """The numbers that everybody works with at the moment: what is wanted wanders through all of them, and so
    what was used some time ago is left behind for the collections. The pinned ones are always among them."""
    first = int(time.monotonic() / _WANTED_SECONDS * _WANTED)
    return [*PINNED, *(NUMBERS[(first + n) % len(NUMBERS)] for n in range(_WANTED))]


def wrong(number: int, found: Manifest, data: bytes) -> str | None:
    """Why these bytes are not what the entry must have; None if they are."""
    generation = found.bucket.get("generation", -1)
    if found.key != key(number) or found.bucket.get("number") != number:
        return f"asked for number {number}, got a manifest of {found.bucket} under key {found.key}"
    expected = archive(number, generation)
    if data != expected:
        return f"number {number}, generation {generation}: {len(data)} bytes that are not the archive's"
    return None


class Journal:
    """One process's notes, a line each, whole also if it is killed in between.

    Times are `time.monotonic`, which all processes of a host share.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        (folder / "journal").mkdir(exist_ok=True)
        path = folder / "journal" / f"{name}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, event: str, **what: Any) -> None:
        """Write a line."""
        line = {"event": event, "at": time.monotonic(), "who": self.name, **what}
        os.write(self._file, json.dumps(line).encode() + b"\n")

    def fault(self, kind: str, text: str) -> None:
        """Something that must not happen."""
        self.note("fault", kind=kind, text=text)


def notes(folder: Path) -> Iterator[dict[str, Any]]:
    """Every line of every journal, in order of time."""
    found = [
        json.loads(line)
        for path in sorted((folder / "journal").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    yield from sorted(found, key=lambda line: float(line["at"]))
