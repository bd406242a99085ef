"""Clients and builders of a soak. Each does at random what its kind does in a day, checks what it gets against
what it must be, and notes the rest: what was acknowledged, what was used.
"""

from __future__ import annotations

import time
from pathlib import Path

from aotcache.config import settings
from aotcache.errors import NotStored, ServiceError
from aotcache.manifest import Manifest
from aotcache.store import open_store
from aotcache.store.builds import BuildService
from aotcache.store.session import ServiceSession
from aotcache.store.tiered import TieredStore
from aotcache.trust import SigningKey, sign, signing_key_path
from tests.faults.soak_process import Process
from tests.faults.soak_world import PINNED, World, archive, key, manifest, wanted_now, wrong


class Client(Process):
    """A worker process: it shares its host's home with another, and uses what it finds through the tier."""

    def __init__(self, world: World, name: str, number: int) -> None:
        super().__init__(world, name)
        self.store = self._opened()
        self.scratch = settings().home / f"scratch-{number}"

    def _opened(self) -> TieredStore:
        store = open_store(self.world.url)
        assert isinstance(store, TieredStore)
        return store

    def work(self) -> None:
        """Until the soak ends."""
        self.run(
            {
                self.read_one: 10,
                self.read_directly: 3,
                self.prefetch: 3,
                self.list_all: 1,
                self.begin_anew: 1,
            },
            pause=0.3,
        )

    def read_one(self) -> None:
        """One entry, through this host's copies."""
        self.use([self.draw.choice(wanted_now())], most=1)

    def prefetch(self) -> None:
        """Many keys in one request, and the archives of some of them."""
        self.use(self.draw.sample(wanted_now(), 20), most=4)

    def use(self, numbers: list[int], most: int) -> None:
        """Ask for numbers, and read the archives of some of those that are there."""
        asked = time.monotonic()
        found = self.store.resolve([key(number) for number in numbers])
        # A service that comes back in between has answered the second question alone.
        reached = self.reached()
        if not self.sure(self.store):
            return
        reached = reached and self.reached()
        self.counts["keys asked"] += len(numbers)
        left = most
        for number in numbers:
            manifests = found[key(number)]
            if not manifests and reached and number in PINNED:
                self.journal.fault("lost", f"number {number} is pinned, and is a miss")
            for entry in manifests:
                if left and not self.refused(entry):
                    left -= 1
                    self.read(number, entry, asked, reached)

    def read(self, number: int, entry: Manifest, asked: float, reached: bool) -> None:
        """Use one archive: by its path where there is one, or by a copy of its own."""
        target = self.scratch / "copy.pt2"
        try:
            for again in (True, False):
                path = self.store.blob_path(entry.digest) if self.draw.random() < 0.5 else None
                if path is None:
                    self.store.fetch(entry.digest, target)
                try:
                    data = (path or target).read_bytes()
                    break
                except FileNotFoundError:
                    # The copy was collected after it was checked: a worker that unpacks looks again, once.
                    if not again:
                        raise
        except NotStored:
            self.journal.note("gone", number=number, digest=entry.digest, asked=asked)
            self.counts["gone"] += 1
            return
        self.checked(number, entry, data, asked, reached)

    def checked(self, number: int, entry: Manifest, data: bytes, asked: float, reached: bool) -> None:
        """Compare bytes with what they must be, and note that they were used."""
        problem = wrong(number, entry, data)
        if problem is not None:
            self.journal.fault("wrong", problem)
        self.counts["read"] += 1
        self.counts["bytes"] += len(data)
        self.journal.note("used", number=number, digest=entry.digest, asked=asked, reached=reached)

    def read_directly(self) -> None:
        """One entry from the service, past the copies."""
        number, asked = self.draw.choice(wanted_now()), time.monotonic()
        found = self.remote.resolve([key(number)])[key(number)]
        if not self.sure(self.remote):
            return
        reached = self.reached()
        for entry in found:
            if self.refused(entry):
                continue
            target = self.scratch / "direct.pt2"
            try:
                self.remote.fetch(entry.digest, target)
            except NotStored:
                self.journal.note("gone", number=number, digest=entry.digest, asked=asked)
                self.counts["gone"] += 1
                continue
            self.checked(number, entry, target.read_bytes(), asked, reached)

    def list_all(self) -> None:
        """Every entry, page by page."""
        self.counts["listed"] += sum(1 for _ in self.remote.list())

    def begin_anew(self) -> None:
        """As a process does that starts: it knows nothing of what others read."""
        self.store = self._opened()


class Builder(Process):
    """A builder: it makes whatever number is missing, often under a lease, and publishes it."""

    def __init__(self, world: World, name: str, number: int) -> None:
        super().__init__(world, name)
        self.signing = SigningKey.load(signing_key_path(settings()))
        self.leases = BuildService(ServiceSession(world.url))
        self.drafts = settings().home / f"drafts-{number}"
        self.drafts.mkdir(parents=True, exist_ok=True)

    def work(self) -> None:
        """Until the soak ends."""
        self.run({self.build: 1}, pause=0.15)

    def build(self) -> None:
        """One number: looked for, and made if it is not there."""
        number, asked = self.draw.choice(wanted_now()), time.monotonic()
        found = self.remote.resolve([key(number)])[key(number)]
        if not found:
            self.journal.note("missing", number=number, asked=asked)
        if not self.sure(self.remote):
            return
        there = [entry for entry in found if not self.recalled(entry)]
        if there and self.draw.random() > 0.1:
            return
        wanted = sign(manifest(number, self.generation(number)), self.signing)
        file = self.drafts / f"{number}.pt2"
        file.write_bytes(archive(number, int(wanted.bucket["generation"])))
        leased = self.draw.random() < 0.5
        lease = self.leases.acquire(wanted.key, str(wanted.variant), self.journal.name) if leased else None
        try:
            self.publish(
                number, wanted, file, None if lease is None else lease.claim, bool(found) and not there
            )
        finally:
            if lease is not None:
                self.leases.release(lease)

    def publish(
        self, number: int, wanted: Manifest, file: Path, claim: tuple[str, int] | None, replace: bool
    ) -> None:
        """Publish a build, and see at once that it is there."""
        began = time.monotonic()
        try:
            stored = self.remote.publish(wanted, file, replace=replace, lease=claim)
        except ServiceError as error:
            if error.details.get("type") != "recalled":
                raise
            self.counts["recalled meanwhile"] += 1
            return
        self.journal.note("published", number=number, digest=wanted.digest, began=began, stored=stored)
        self.counts["stored" if stored else "there already"] += 1
        asked = time.monotonic()
        if not self.remote.resolve([wanted.key])[wanted.key]:
            self.journal.note("missing", number=number, asked=asked)
