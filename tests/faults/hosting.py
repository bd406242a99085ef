"""Stages of what else a host does: unpacking, downloads, migrations, keys, lock files and locks."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from aotcache.trust import SigningKey
from tests.faults import entries
from tests.faults.hatchery import Ended
from tests.faults.stages import LIMIT, Stage
from tests.faults.surroundings import Server


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
