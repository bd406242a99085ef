"""Marks of what a process is opening, and of the processes that ended in the middle of it.

Opening an artifact runs its code, and so do its first forward and its first backward. For as
long as one of these takes, a file lies in `<home>/opening`, locked by the process. The
operating system frees the lock however a process ends, so a mark that lies there unlocked is
a death: the next process that starts says so once and files it under `<home>/deaths/<digest>.json`,
and the service that the artifact came from, if any, is told. Nothing is blocked: what is not to be
opened any more is recalled by a person.

Marks are for people. Where they cannot be written, training goes on without.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from aotcache.errors import AotcacheError, StoreError
from aotcache.store.base import Store
from aotcache.store.deaths import STAGES, Report, Stage, send
from aotcache.store.local import locked, make_dirs
from aotcache.types import CacheKey, Digest, is_digest, printable

logger = logging.getLogger(__name__)

_MARKS, _DEATHS = "opening", "deaths"
"""Folders of the home."""
_MOST_BYTES = 1 << 16
"""Of a file in them."""
_MOST_REPORTS = 100
"""Deaths of one archive that wait to be told to a service; older ones are dropped."""
_LOCK_SECONDS = 10.0
_DRAFT_SECONDS = 3600.0
"""Age from which on a mark that was never finished is cleared away."""
_LONGEST = 300
"""Characters of a text in a mark."""

_SAID = {
    "open": "opened",
    "forward": "first ran the forward of",
    "backward": "first ran the backward of",
}


@dataclass(frozen=True, slots=True)
class Opening:
    """What a mark says is being opened.

    Attributes:
        digest: Of the archive.
        key, region: As its manifest has them.
        store: URL of the store it came from.
    """

    digest: Digest
    key: CacheKey
    region: str
    store: str


@dataclass(frozen=True, slots=True)
class Deaths:
    """What is known on this host of the processes that ended while they opened or first ran one archive.

    Attributes:
        digest, key, region: Of the artifact.
        count: How many there were.
        stage: What the last one was doing: `open`, `forward` or `backward`.
        last: When it began to do that, in seconds since the epoch.
        mark: The mark that was counted last.
        reports: What services are still to be told.
    """

    digest: Digest
    key: CacheKey
    region: str
    count: int
    stage: Stage
    last: float
    mark: str
    reports: tuple[Report, ...] = ()

    @property
    def said(self) -> str:
        """What the last one did with the archive, e.g. `opened`."""
        return _SAID[self.stage]


class _Mark:
    """A file that this process holds locked."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor
        self._pid = os.getpid()
        # A program that ends as it should beside a thread that is opening something is no death.
        atexit.register(self._remove)

    def _remove(self) -> None:
        if os.getpid() == self._pid:  # a fork has this in its exit handlers, too
            with suppress(OSError):
                self._path.unlink()

    def close(self) -> None:
        self._remove()  # before the lock goes: without it, it would be a death
        atexit.unregister(self._remove)
        os.close(self._descriptor)


@contextmanager
def marked(home: Path, what: Opening, stage: Stage) -> Iterator[None]:
    """For as long as the block runs, leave a mark that outlasts the death of this process.

    About 0.1 ms. Raises nothing: without a mark a death goes unseen, and that is all.
    """
    mark = _put(home, what, stage)
    try:
        yield
    finally:
        if mark is not None:
            mark.close()


def _put(home: Path, what: Opening, stage: Stage) -> _Mark | None:
    folder, name = home / _MARKS, uuid.uuid4().hex
    draft, path = folder / f".{name}", folder / f"{name}.json"
    said = asdict(what) | {
        "stage": stage,
        "at": time.time(),
        "pid": os.getpid(),
        "host": socket.gethostname(),
    }
    try:
        make_dirs(folder, 0o700)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Locked and written before it is seen: a mark that is there and free is a death.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(descriptor, json.dumps(said).encode())
            os.rename(draft, path)
            return _Mark(path, descriptor)
        except BaseException:
            os.close(descriptor)
            with suppress(OSError):
                draft.unlink()
            raise
    except (OSError, StoreError) as error:
        logger.info("%s is not marked, a death in it would go unseen: %s", what.digest, error)
        return None


class FirstRun:
    """One graph of an artifact: its first run is marked, later ones go straight to it.

    Thread-safe.

    Args:
        run: Runs the graph.
        home, what, stage: Of the mark.
    """

    __slots__ = ("run",)

    run: Callable[[list[Any]], list[Any]]
    """Runs the graph; after the first time the graph's own function."""

    def __init__(
        self,
        run: Callable[[list[Any]], list[Any]],
        home: Path,
        what: Opening,
        stage: Stage,
    ) -> None:
        def first(tensors: list[Any]) -> list[Any]:
            with marked(home, what, stage):
                found = run(tensors)
            self.run = run
            return found

        self.run = first


def look_back(home: Path, store: Store) -> None:
    """Find the deaths since somebody looked last, say each once, and tell the service that `store` is, if any.

    For the start of a process. The service is told in a thread that nobody waits for; what it could not be
    told is told at a later start. Raises nothing.
    """
    try:
        for death, pid in _settle(home):
            logger.warning(
                "a process of this host (pid %s) ended while it %s archive %s of region %r, %s so far: it crashed or "
                "was killed. The archive is used as before; `aotcache show %s` and `aotcache verify --run` tell more "
                "of it, `aotcache recall %s --reason ...` keeps it from being opened",
                pid,
                death.said,
                death.digest,
                death.region,
                f"{death.count} death{'' if death.count == 1 else 's'}",
                death.digest[:12],
                death.digest[:12],
            )
        untold = (
            [] if store.own else [r for d in known_deaths(home) for r in d.reports if r.store == store.url]
        )
    except (OSError, StoreError) as error:
        logger.info("deaths could not be looked at: %s", error)
        return
    if untold:
        threading.Thread(
            target=_tell, args=(home, store, untold), name="aotcache-deaths", daemon=True
        ).start()


def known_deaths(home: Path) -> list[Deaths]:
    """Every archive that a process of this host died with. Files that cannot be read are passed over."""
    try:
        names = sorted(os.listdir(home / _DEATHS))
    except OSError:
        return []
    found = (deaths_of(home, Digest(name.removesuffix(".json"))) for name in names if name.endswith(".json"))
    return [deaths for deaths in found if deaths is not None]


def deaths_of(home: Path, digest: Digest) -> Deaths | None:
    """What is known on this host of one archive's deaths."""
    if not is_digest(digest):
        return None
    try:
        with (home / _DEATHS / f"{digest}.json").open("rb") as file:
            found = json.loads(file.read(_MOST_BYTES))
        return Deaths(
            digest,
            CacheKey(_text(found["key"])),
            _text(found["region"]),
            int(found["count"]),
            _stage(found["stage"]),
            float(found["last"]),
            _text(found["mark"]),
            tuple(
                Report(_text(r["id"]), digest, _stage(r["stage"]), float(r["at"]), _text(r["store"]))
                for r in found["reports"]
            ),
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None


def _settle(home: Path) -> list[tuple[Deaths, Any]]:
    """File every mark that nobody holds; what is known of each archive then, with the dead process's id."""
    folder = home / _MARKS
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    if not names:
        return []
    found = []
    with locked(home / "locks", "deaths", _LOCK_SECONDS):
        for name in names:
            if name.startswith("."):
                _clear_draft(folder / name)
                continue
            with suppress(OSError):
                death = _settled(home, folder / name)
                found += [] if death is None else [death]
    return found


def _clear_draft(path: Path) -> None:
    with suppress(OSError):
        if time.time() - path.stat().st_mtime > _DRAFT_SECONDS:
            path.unlink()


def _settled(home: Path, path: Path) -> tuple[Deaths, Any] | None:
    """File one mark, if its process is gone. Needs the lock of the deaths."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        # Its process id says nothing: by now it may be another process's.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.exists(path):
            return None  # it was taken away while this one was opening it
        death = _filed(home, path.stem, os.read(descriptor, _MOST_BYTES))
        path.unlink()
        return death
    finally:
        os.close(descriptor)


def _filed(home: Path, mark: str, data: bytes) -> tuple[Deaths, Any] | None:
    try:
        said = json.loads(data)
        digest, stage, at = said["digest"], _stage(said["stage"]), float(said["at"])
        key, region, store = _text(said["key"]), _text(said["region"]), _text(said["store"])
        pid = int(said["pid"])
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None
    if not is_digest(digest):
        return None
    before = deaths_of(home, digest)
    if before is not None and before.mark == mark:
        return None  # counted by one who ended before it could take the mark away
    reports = () if before is None else before.reports
    if store.startswith(("http://", "https://")):
        reports = (*reports, Report(mark, digest, stage, at, store))[-_MOST_REPORTS:]
    count = 1 if before is None else before.count + 1
    deaths = Deaths(digest, CacheKey(key), region, count, stage, at, mark, reports)
    _write(home, deaths)
    return deaths, pid


def _write(home: Path, deaths: Deaths) -> None:
    folder = home / _DEATHS
    make_dirs(folder, 0o700)
    draft = folder / f".{deaths.digest}"
    draft.write_text(json.dumps(asdict(deaths), sort_keys=True))
    os.replace(draft, folder / f"{deaths.digest}.json")


def _tell(home: Path, store: Store, reports: Sequence[Report]) -> None:
    try:
        if not send(store, reports):
            return
        told = {report.id for report in reports}
        with locked(home / "locks", "deaths", _LOCK_SECONDS):
            for digest in {report.digest for report in reports}:
                deaths = deaths_of(home, digest)
                if deaths is not None:
                    left = tuple(report for report in deaths.reports if report.id not in told)
                    _write(home, replace(deaths, reports=left))
    except (AotcacheError, OSError) as error:
        logger.info("%s was not told of deaths, and will be at a later start: %s", store.url, error)


def _stage(found: object) -> Stage:
    for stage in STAGES:
        if found == stage:
            return stage
    raise ValueError(found)


def _text(found: object) -> str:
    return printable(str(found), _LONGEST)


__all__ = ["Deaths", "FirstRun", "Opening", "deaths_of", "known_deaths", "look_back", "marked"]
