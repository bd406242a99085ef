"""The last look at a soak: is everything that was acknowledged there and right, or gone by a rule?

Each function says what is not as it must be, a text for each, with its kind first as in `tally.KINDS`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from aotcache.errors import AotcacheError, NotStored
from aotcache.manifest import Manifest
from aotcache.store import ObjectStore, open_store
from aotcache.store.http import HttpStore
from aotcache.store.session import ServiceSession
from tests.faults.soak_world import NUMBERS, PINNED, key, notes, wrong
from tests.services.serving import Serving

Note = Mapping[str, Any]
There = Mapping[int, Sequence[Manifest]]


def look(server: Serving, bucket: Mapping[str, str], folder: Path) -> list[str]:
    """Compare what is there with what processes and operator have noted.

    Args:
        server: The service, started once more.
        bucket: Variables that lead to its store.
        folder: Of the soak.
    """
    lines = list(notes(folder))
    own = {"AOTCACHE_HOME": str(folder / "last"), "AOTCACHE_CONFIG_HOME": str(server.config_home)}
    with mock.patch.dict(os.environ, {**bucket, **own}):
        store = HttpStore(server.url, ServiceSession(server.url))
        answer = store.resolve([key(number) for number in NUMBERS])
        there = {number: answer[key(number)] for number in NUMBERS}
        found = [
            *_wrong_bytes(store, there, folder / "last.pt2"),
            *_lost(lines, there),
            *_missing(lines),
            *_vanished(lines),
            *_used_although_recalled(lines),
            *_halves(server, store, there),
            *_unexpected_by_the_service(server),
        ]
        store.session.close()
    return found


def _wrong_bytes(store: HttpStore, there: There, target: Path) -> Iterator[str]:
    for number, entries in there.items():
        for entry in entries:
            try:
                store.fetch(entry.digest, target)
            except NotStored as error:
                yield f"partial: number {number} is there without its archive: {error}"
            except AotcacheError as error:
                yield f"wrong: number {number}: {error}"
            else:
                problem = wrong(number, entry, target.read_bytes())
                if problem is not None:
                    yield f"wrong: {problem}"


def _lost(lines: Sequence[Note], there: There) -> Iterator[str]:
    """An entry whose last publish was acknowledged is there, unless a collection could take it after that."""
    last = {line["number"]: line for line in lines if line["event"] == "published" and line["stored"]}
    for number, publish in last.items():
        if not there[number] and not any(_could_take(line, publish) for line in _collections(lines)):
            yield f"lost: number {number} was acknowledged at {publish['at']:.1f}, and is gone by no rule"


def _missing(lines: Sequence[Note]) -> Iterator[str]:
    """What a builder did not find, a collection had taken since it was last acknowledged.

    What is missed is built anew, so that at the end it is there again, however it was lost.
    """
    collections = list(_collections(lines))
    last: dict[int, Note] = {}
    for line in lines:
        if line["event"] == "published" and line["stored"]:
            last[line["number"]] = line
        elif line["event"] == "missing" and line["number"] in last:
            publish = last[line["number"]]
            if publish["at"] <= line["asked"] and not any(
                collection["began"] <= line["at"] and _could_take(collection, publish)
                for collection in collections
            ):
                since = line["asked"] - publish["at"]
                yield (
                    f"lost: number {line['number']} was acknowledged {since:.1f} s before {line['who']} missed it, "
                    "and had gone by no rule"
                )


def _collections(lines: Sequence[Note]) -> Iterator[Note]:
    """All of them; of one whose process was killed, only its beginning.

    Of one during which the service ended, what it removed until then may never have been told.
    """
    pending: dict[str, Note] = {}
    ends = [line["at"] for line in lines if line["event"] == "service ended"]
    for line in lines:
        if line["event"] == "collecting":
            if line["who"] in pending:
                yield _unheard(pending[line["who"]])
            pending[line["who"]] = line
        elif line["event"] == "collected":
            pending.pop(line["who"], None)
            unsure = any(line["began"] <= end <= line["at"] for end in ends)
            yield {**line, "removed": None} if unsure else line
    yield from (_unheard(line) for line in pending.values())


def _unheard(line: Note) -> Note:
    return {**line, "began": line["at"], "removed": None}


def _could_take(collection: Note, publish: Note) -> bool:
    """Whether a collection has taken what was published, or may have, where nobody heard its answer."""
    age = collection["until"] - publish["began"]
    if age < 0 or publish["number"] in PINNED or (collection["age"] is not None and age < collection["age"]):
        return False
    removed = collection["removed"]
    return removed is None or key(publish["number"]) in removed


def _vanished(lines: Sequence[Note]) -> Iterator[str]:
    """What a reader was told of and could not get was taken away while it read."""
    for line in lines:
        if line["event"] == "gone" and not any(
            collection["began"] <= line["at"] and collection["until"] >= line["asked"]
            for collection in _collections(lines)
        ):
            yield f"lost: {line['who']}: archive {line['digest']} of number {line['number']} vanished"


def _used_although_recalled(lines: Sequence[Note]) -> Iterator[str]:
    """Nobody whom the service answered used what had been recalled before they asked."""
    recalled = {line["digest"]: line["at"] for line in lines if line["event"] == "recalled"}
    for line in lines:
        if line["event"] == "used" and line["reached"] and line["digest"] in recalled:
            late = line["asked"] - recalled[line["digest"]]
            if late > 0:
                yield f"wrong: {line['who']} used {line['digest']}, {late:.1f} s after it was recalled"


def _halves(server: Serving, store: HttpStore, there: There) -> Iterator[str]:
    """The bucket itself, and the listing: both have what `resolve` says, and no halves."""
    behind = open_store(server.store, tier=False)
    assert isinstance(behind, ObjectStore)
    for entry in behind.entries():
        if entry.problem is not None:
            yield f"partial: {entry.key}/{entry.variant}: {entry.problem}"
    told = {(m.key, str(m.variant)) for entries in there.values() for m in entries}
    listed = {(m.key, str(m.variant)) for m in store.list()}
    if listed != told:
        yield f"partial: the listing has {len(listed)} entries, resolve {len(told)}"


def _unexpected_by_the_service(server: Serving) -> Iterator[str]:
    """Errors that it did not answer by a typed one."""
    for text in server.log.splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            line = {"exception": "no JSON"}
        if line.get("exception") or line.get("level") in ("error", "critical") or line.get("status") == 500:
            yield f"unusable: the service wrote {text[:3000]}"
