"""Stages of publishing: into a directory, a bucket and a service."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from tests.faults import entries
from tests.faults.hatchery import Child, Ended
from tests.faults.stages import LIMIT, Stage
from tests.faults.surroundings import Server, Surroundings

_WINDOW = 10
"""After so many rounds a stage goes on in an empty store: what is examined after each grows otherwise."""


class Publishing(Stage):
    """A publish; the store is new every `window` rounds."""

    window: ClassVar[int] = _WINDOW
    size: ClassVar[int] = 60_000
    sign: ClassVar[bool] = False
    replaces: ClassVar[bool] = False

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around)
        self.seed = 0
        self.since = 0
        self.acknowledged: dict[str, str] = {}
        self.tried: dict[str, list[str]] = {}
        self.url = ""
        self._watcher: tuple[Child, Path] | None = None
        self._seen: list[str] = []

    def new_store(self) -> str:
        """The address of an empty store."""
        raise NotImplementedError

    def act(self) -> tuple[str, dict[str, Any]]:
        """See `Stage`."""
        if not self.url or self.since >= self.window:
            self.url, self.since, self.acknowledged, self.tried = self.new_store(), 0, {}, {}
        self.seed, self.since = self.seed + 1, self.since + 1
        archive = entries.written(self.around.folder / "archives", self.seed, self.size)
        if self.seed > 1:
            (self.around.folder / "archives" / f"{self.seed - 1}-{self.size}.pt2").unlink(missing_ok=True)
        # Entries that replace each other have one name, and so one key.
        name = f"replaced {self.since % 3}" if self.replaces else None
        arguments = {
            "url": self.url,
            "archive": str(archive),
            "seed": self.seed,
            "size": self.size,
            "sign": self.sign,
            "replace": self.replaces,
            "name": name,
        }
        wanted = entries.manifest_of(self.seed, self.size, name)
        self.tried.setdefault(wanted.key, []).append(wanted.digest)
        return "tests.faults.acts:publish", arguments

    def done(self, acknowledged: list[dict[str, Any]]) -> None:
        """See `Stage`."""
        self.acknowledged |= {entry["key"]: entry["digest"] for entry in acknowledged}
        for entry in acknowledged:
            self.tried.pop(entry["key"], None)

    def check(self) -> list[str]:
        """See `Stage`."""
        # A publish that was killed since may have replaced what was acknowledged; an earlier one may not.
        return [
            *self.ask("examine", url=self.url, acknowledged=self.acknowledged, replaced=self.tried),
            *self.ask("examine_home"),
        ]


class Directory(Publishing):
    """A publish into a directory, readers in another process all the while."""

    name = "publish into a directory"
    weight = 24

    def new_store(self) -> str:
        """See `Publishing`."""
        return (self.around.place() / "store").as_uri()

    @contextmanager
    def ready(self) -> Iterator[None]:
        """See `Stage`."""
        yield
        self._stop()

    def act(self) -> tuple[str, dict[str, Any]]:
        """See `Stage`."""
        before = self.url
        made = super().act()
        if self.url != before:
            self._stop()
            stop = self.around.place() / "stop"
            watcher = self.around.hatched.begin(
                "tests.faults.acts:watch", {"url": self.url, "stop": str(stop)}, limit=600, counted=False
            )
            self._watcher = (watcher, stop)
        return made

    def _stop(self) -> None:
        if self._watcher is None:
            return
        watcher, stop = self._watcher
        stop.touch()
        found = watcher.wait().answer
        self._watcher = None
        self.notes["reads beside it"] = self.notes.get("reads beside it", 0) + found["reads"]
        self._seen += found["problems"]

    def watched(self) -> list[str]:
        """See `Stage`."""
        self._stop()
        return self._seen


class Replacing(Directory):
    """A publish in the place of an entry that is there."""

    name = "replace an entry of a directory"
    replaces = True


class Bucket(Publishing):
    """A publish into a bucket."""

    name = "publish into a bucket (S3)"
    weight = 10
    sign = True
    window = 6

    def new_store(self) -> str:
        """See `Publishing`."""
        assert self.around.key is not None
        self.environment |= self.around.s3.environment
        return self.around.s3.bucket()


class Service(Publishing):
    """A publish to a service: the client is killed."""

    name = "publish to a service, the client killed"
    weight = 10
    sign = True
    window = 1 << 30
    size = 120_000
    counts_server: ClassVar[bool] = False

    @contextmanager
    def ready(self) -> Iterator[None]:
        """See `Stage`."""
        assert self.around.key is not None
        self.server = Server(self.around, self.around.place(), counted=self.counts_server)
        self.server.start()
        self.stores = 0
        yield
        self.server.stop()

    def new_store(self) -> str:
        """See `Publishing`."""
        return self.server.url

    def check(self) -> list[str]:
        """See `Stage`."""
        # Looking at all entries takes longer the more there are: the latest ones will do until the end, in the
        # service's directory and, for the last, as a client sees it.
        latest = dict(list(self.acknowledged.items())[-4:])
        behind = (self.server.folder / "store").as_uri()
        problems = self.ask("examine_index", url=behind, acknowledged=latest)
        for key, digest in list(latest.items())[-1:]:
            problems += self.ask("examine_entry", url=self.url, key=key, digest=digest)
        if self.since % 40 == 0:
            shutil.rmtree(self.around.folder / "home" / "tiers", ignore_errors=True)
        return problems + self.ask("examine_home")

    def watched(self) -> list[str]:
        """See `Stage`."""
        behind = (self.server.folder / "store").as_uri()
        problems = self.ask("examine", url=behind, acknowledged=self.acknowledged)
        return problems + self.ask("examine_index", url=self.url, acknowledged=self.acknowledged)


class ServerKilled(Service):
    """A publish to a service: the server is killed, and started again."""

    name = "publish to a service, the server killed"
    weight = 8
    counts_server = True

    def operations(self, whole: Ended) -> int:
        """See `Stage`."""
        # Of one publish that was not disturbed.
        assert self.server.child is not None
        self.server.child.arm(1 << 60)
        call, arguments = self.act()
        ended = self.around.hatched.run(call, arguments, limit=LIMIT, environment=self.environment)
        self.done(ended.acknowledged)
        return self.server.child.operations

    def disturbed(self, call: str, arguments: dict[str, Any], how: Mapping[str, Any]) -> Ended:
        """See `Stage`."""
        server = self.server
        assert server.child is not None
        kill_after = how.get("kill_after")
        server.child.arm(how.get("kill_at") or 1 << 60)
        client = self.around.hatched.begin(call, arguments, limit=2 * LIMIT, environment=self.environment)
        began = time.monotonic()
        self._died = False
        while True:
            if server.child.poll(0.005) is not None:
                self._died = True
                server.start()
            if kill_after is not None and time.monotonic() - began > kill_after:
                server.child.kill()
                kill_after = None
            ended = client.poll(0.005)
            if ended is not None:
                break
        if not self._died:
            server.stop()
            server.start()
        return ended

    def was_hit(self, ended: Ended) -> bool:
        """See `Stage`."""
        return self._died

    def may_end_so(self, ended: Ended) -> bool:
        """See `Stage`."""
        # It was told that the service is away, which it was; it must not have been told anything else.
        return ended.status == 0 or (ended.error or "").startswith("ServiceUnavailable")
