"""The stages that processes are killed in: what is done there, and what must hold afterwards."""

from __future__ import annotations

import shutil
import socket
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from aotcache.trust import SigningKey, TrustedKeys
from tests.faults import entries
from tests.faults.hatchery import Child, Ended, Hatchery
from tests.services.postgres import Postgres
from tests.services.s3 import S3, s3_server

LIMIT = 30.0
"""Seconds that an act may take."""

_BOOT = 30.0
_WINDOW = 10
"""After so many rounds a stage goes on in an empty store: what is examined after each grows otherwise."""


@dataclass
class Surroundings:
    """What stages share.

    Attributes:
        folder: For everything.
        hatched: Where processes come from.
    """

    folder: Path
    hatched: Hatchery
    stack: ExitStack

    @cached_property
    def s3(self) -> S3:
        """A server of buckets."""
        return self.stack.enter_context(s3_server(self.folder / "s3"))

    @cached_property
    def postgres(self) -> Postgres:
        """A database server."""
        made = Postgres()
        self.stack.callback(made.close)
        return made

    @cached_property
    def key(self) -> SigningKey:
        """The key of every process here, which all of them trust."""
        made = SigningKey.generate()
        made.save(self.folder / "config" / "signing.pem")
        TrustedKeys(self.folder / "config" / "trusted").add(made.public, "faults")
        return made

    def place(self) -> Path:
        """A new folder."""
        made = self.folder / uuid.uuid4().hex[:12]
        made.mkdir()
        return made


class Stage:
    """One stage; see `kills.py` for when each method is called."""

    name: ClassVar[str]
    weight: ClassVar[int] = 10

    def __init__(self, around: Surroundings) -> None:
        self.around = around
        self.environment: dict[str, str | None] = {}
        self.notes: dict[str, int] = {}

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Servers and the like, for all rounds."""
        yield

    def act(self) -> tuple[str, dict[str, Any]]:
        """Prepare a round: the function that will be killed, and its arguments."""
        raise NotImplementedError

    def disturbed(self, call: str, arguments: dict[str, Any], how: Mapping[str, Any]) -> Ended:
        """Do the act and kill it."""
        return self.around.hatched.run(call, arguments, limit=LIMIT, environment=self.environment, **how)

    def was_hit(self, ended: Ended) -> bool:
        """Whether the kill came before the act was done."""
        return ended.killed

    def may_end_so(self, ended: Ended) -> bool:
        """Whether the act may end so when something is killed."""
        return ended.killed or ended.status == 0

    def operations(self, whole: Ended) -> int:
        """Among how many operations to choose, by an act that was not disturbed."""
        return whole.operations

    def done(self, acknowledged: list[dict[str, Any]]) -> None:
        """Take note of what was acknowledged."""

    def check(self) -> list[str]:
        """What fresh processes find wrong."""
        raise NotImplementedError

    def finished(self) -> list[str]:
        """What is wrong once the round is over."""
        return []

    def watched(self) -> list[str]:
        """What readers beside the rounds found wrong."""
        return []

    def ask(self, call: str, **arguments: Any) -> list[str]:
        """The problems that a function of `acts` finds in a process of its own."""
        ended = self.around.hatched.run(
            f"tests.faults.acts:{call}", arguments, limit=LIMIT, environment=self.environment
        )
        if ended.status == 0:
            return list(ended.answer)
        kind = "late" if ended.late else "unusable"
        return [f"{kind}: {call} ended with {ended.status}: {ended.error} {ended.log[-2000:]}"]


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


@dataclass
class Server:
    """`aotcache serve` from the hatchery, which can be started again where it was killed."""

    around: Surroundings
    folder: Path
    environment: Mapping[str, str | None] = field(default_factory=dict)
    store: str | None = None
    database: str | None = None
    before: Mapping[str, Any] = field(default_factory=dict)
    counted: bool = False
    port: int = 0
    child: Child | None = None

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Child:
        """Start it, on the port that it had, and wait until it is ready."""
        if not self.port:
            with socket.socket() as held:
                held.bind(("127.0.0.1", 0))
                self.port = held.getsockname()[1]
        home = {"AOTCACHE_HOME": str(self.folder / "home"), **self.environment}
        arguments = {"folder": str(self.folder), "port": self.port}
        arguments |= {"store": self.store, "database": self.database}
        self.child = self.around.hatched.begin(
            "tests.faults.acts:serve",
            arguments,
            environment=home,
            armed=False,
            counted=self.counted,
            limit=3600,
            before=self.before,
        )
        until = time.monotonic() + _BOOT
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/readyz", timeout=_BOOT):
                    return self.child
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                ended = self.child.poll()
                assert ended is None, f"the server ended with {ended.status}: {ended.log}"
                assert time.monotonic() < until, "the server did not start"
                time.sleep(0.02)

    def stop(self) -> Ended | None:
        """Kill it if it runs."""
        if self.child is None:
            return None
        self.child.kill()
        ended, self.child = self.child.wait(), None
        return ended


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


class Unpacking(Stage):
    """Unpacking an archive, as a worker does before it opens it."""

    name = "unpack an archive"
    weight = 14

    @contextmanager
    def ready(self) -> Iterator[None]:
        """See `Stage`."""
        place = self.around.place()
        self.url, self.count = (place / "store").as_uri(), 0
        archive = entries.written(place, 1, 500_000)
        ended = self.around.hatched.run(
            "tests.faults.acts:publish",
            {"url": self.url, "archive": str(archive), "seed": 1, "size": 500_000},
        )
        (entry,) = ended.acknowledged
        self.key = entry["key"]
        self.home = place / "home"
        self.environment = {"AOTCACHE_HOME": str(self.home)}
        yield

    def act(self) -> tuple[str, dict[str, Any]]:
        """See `Stage`."""
        shutil.rmtree(self.home, ignore_errors=True)
        return "tests.faults.acts:unpack", {"url": self.url, "key": self.key}

    def check(self) -> list[str]:
        """See `Stage`."""
        return [*self.ask("examine_unpacked", url=self.url, key=self.key), *self.ask("examine_home")]

    def finished(self) -> list[str]:
        """See `Stage`."""
        left = [p.name for p in (self.home / "unpacked").iterdir() if p.name.startswith(".")]
        return [f"unusable: {name} is left in unpacked/" for name in left]


class Taking(Stage):
    """A download into this host's tier, from a service."""

    name = "download into the tier"
    weight = 10
    size: ClassVar[int] = 600_000

    @contextmanager
    def ready(self) -> Iterator[None]:
        """See `Stage`."""
        assert self.around.key is not None
        self.server = Server(self.around, self.around.place())
        self.server.start()
        self.home = self.around.place()
        self.environment = {"AOTCACHE_HOME": str(self.home)}
        archive = entries.written(self.around.place(), 5, self.size)
        arguments = {"url": self.server.url, "archive": str(archive), "seed": 5, "size": self.size}
        ended = self.around.hatched.run("tests.faults.acts:publish", {**arguments, "sign": True})
        assert ended.status == 0, ended.error
        (entry,) = ended.acknowledged
        self.key = entry["key"]
        yield
        ended = self.server.stop()
        assert ended is not None
        self.notes["answers to ranges"] = ended.log.count('"status": 206')

    def act(self) -> tuple[str, dict[str, Any]]:
        """See `Stage`."""
        shutil.rmtree(self.home, ignore_errors=True)
        return "tests.faults.acts:take", {"url": self.server.url, "key": self.key}

    def check(self) -> list[str]:
        """See `Stage`."""
        return self.ask("examine_home")

    def finished(self) -> list[str]:
        """See `Stage`."""
        left = [path.name for path in (self.home / "tiers").glob("*/tmp/*")]
        # Those with a name of their own are swept once they are a day old.
        swept = [name for name in left if len(name) == 32]
        self.notes["drafts to be swept"] = self.notes.get("drafts to be swept", 0) + len(swept)
        return [f"unusable: {name} is left in the tier" for name in left if name not in swept]


class Resuming(Taking):
    """A download that was killed goes on where it broke off, and is killed again."""

    name = "go on with a download that was killed"
    weight = 10
    size = 5_000_000

    def act(self) -> tuple[str, dict[str, Any]]:
        """See `Stage`."""
        call, arguments = super().act()
        if self.total:
            first = self.around.hatched.run(
                call,
                arguments,
                environment=self.environment,
                kill_at=self.total * 2 // 5,  # some way into the bytes
                limit=LIMIT,
            )
            assert first.killed, first
        return call, arguments

    total = 0

    def operations(self, whole: Ended) -> int:
        """See `Stage`."""
        self.total = whole.operations
        return whole.operations


class Migrating(Stage):
    """`aotcache db upgrade` of a database without tables."""

    name = "migrate a database (SQLite)"
    weight = 8

    def act(self) -> tuple[str, dict[str, Any]]:
        """See `Stage`."""
        self.url, self.acknowledged = self.new_database(), False
        argv = ["db", "upgrade", "--json", "--database", self.url]
        return "tests.faults.acts:command", {"argv": argv}

    def new_database(self) -> str:
        """The address of one without tables."""
        return f"sqlite:///{self.around.place() / 'aotcache.db'}"

    def done(self, acknowledged: list[dict[str, Any]]) -> None:
        """See `Stage`."""
        self.acknowledged = self.acknowledged or bool(acknowledged)

    def check(self) -> list[str]:
        """See `Stage`."""
        return self.ask("examine_database", url=self.url, acknowledged=self.acknowledged)


class MigratingPostgres(Migrating):
    """The same on PostgreSQL."""

    name = "migrate a database (PostgreSQL)"
    weight = 8

    def new_database(self) -> str:
        """See `Migrating`."""
        return self.around.postgres.url(self.around.postgres.create())

    def finished(self) -> list[str]:
        """See `Stage`."""
        self.around.postgres.drop(self.url.partition("@/")[2].partition("?")[0])
        return []


class Keys(Stage):
    """`aotcache keygen` in a config home without keys."""

    name = "make a signing key"
    weight = 6

    def act(self) -> tuple[str, dict[str, Any]]:
        """See `Stage`."""
        self.config = self.around.place() / "config"
        self.environment = {"AOTCACHE_CONFIG_HOME": str(self.config)}
        self.acknowledged = False
        return "tests.faults.acts:make_key", {}

    def done(self, acknowledged: list[dict[str, Any]]) -> None:
        """See `Stage`."""
        self.acknowledged = self.acknowledged or bool(acknowledged)

    def check(self) -> list[str]:
        """See `Stage`."""
        return self.ask("examine_keys", acknowledged=self.acknowledged)

    def finished(self) -> list[str]:
        """See `Stage`."""
        left = [path for path in self.config.rglob("*") if path.is_file()]
        wrong = [path for path in left if path.name != "signing.pem" and path.parent.name != "trusted"]
        wrong += [path for path in left if path.name.startswith(".")]
        return [f"unusable: {path} is left" for path in wrong]


class Trusting(Keys):
    """`aotcache trust add`."""

    name = "trust a key"
    weight = 5

    def act(self) -> tuple[str, dict[str, Any]]:
        """See `Stage`."""
        super().act()
        argv = ["trust", "add", SigningKey.generate().public.to_text(), "--name", "friend", "--json"]
        return "tests.faults.acts:command", {"argv": argv}

    def check(self) -> list[str]:
        """See `Stage`."""
        return self.ask("examine_trusted", acknowledged=self.acknowledged)


class LockFile(Stage):
    """Writing a lock file over an older one."""

    name = "write a lock file"
    weight = 5

    def act(self) -> tuple[str, dict[str, Any]]:
        """See `Stage`."""
        self.folder = self.around.place()
        self.path = self.folder / "drafter.toml.lock"
        self.may_be = [["old", 40]]
        ended = self.around.hatched.run(
            "tests.faults.acts:write_lock", {"path": str(self.path), "cells": 40, "mark": "old"}
        )
        assert ended.status == 0, ended.error
        self.new = False
        return "tests.faults.acts:write_lock", {"path": str(self.path), "cells": 60, "mark": "new"}

    def done(self, acknowledged: list[dict[str, Any]]) -> None:
        """See `Stage`."""
        self.new = self.new or bool(acknowledged)

    def check(self) -> list[str]:
        """See `Stage`."""
        ended = self.around.hatched.run("tests.faults.acts:read_lock", {"path": str(self.path)})
        if ended.status != 0:
            return [f"partial: the lock file cannot be read: {ended.error}"]
        expected = [["new", 60]] if self.new else [["old", 40], ["new", 60]]
        if ended.answer not in expected:
            return [f"lost: the lock file has {ended.answer}, expected {expected}"]
        return []

    def finished(self) -> list[str]:
        """See `Stage`."""
        left = sorted(path.name for path in self.folder.iterdir() if path != self.path)
        return [f"unusable: {name} is left beside the lock file" for name in left]


class Holding(Stage):
    """A process that holds a lock of this host."""

    name = "hold a lock"
    weight = 3

    def act(self) -> tuple[str, dict[str, Any]]:
        """See `Stage`."""
        return "tests.faults.acts:hold", {"name": "held by a process that dies", "seconds": 0.3}

    def check(self) -> list[str]:
        """See `Stage`."""
        return self.ask("examine_home")


STAGES: dict[str, type[Stage]] = {
    stage.name: stage
    for stage in (
        Directory, Replacing, Bucket, Service, ServerKilled, Unpacking, Taking, Resuming, Migrating,
        MigratingPostgres, Keys, Trusting, LockFile, Holding,
    )
}  # fmt: skip
