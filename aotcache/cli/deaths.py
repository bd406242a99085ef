"""What is known of processes that died with an artifact: on this host, and at the service."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from aotcache.cli.output import human_time
from aotcache.config import settings
from aotcache.errors import StoreError
from aotcache.runtime.openings import Deaths, known_deaths
from aotcache.store import Entry, Store
from aotcache.store.deaths import counted
from aotcache.types import Digest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KnownDeaths:
    """Deaths by archive.

    Attributes:
        here: What processes of this host found.
        told: How many the service that is the store was told of, by all hosts.
    """

    here: dict[Digest, Deaths]
    told: dict[Digest, int]

    @classmethod
    def of(cls, store: Store) -> KnownDeaths:
        """What is known; a service that is away tells nothing."""
        here = {deaths.digest: deaths for deaths in known_deaths(settings().home)}
        try:
            return cls(here, counted(store))
        except StoreError as error:
            logger.info("what the service knows of deaths cannot be had: %s", error)
            return cls(here, {})

    def number(self, entry: Entry) -> int:
        """How many there were: this host's are among those that its service was told of, but for the last ones."""
        if entry.manifest is None:
            return 0
        here = self.here.get(entry.manifest.digest)
        return max(0 if here is None else here.count, self.told.get(entry.manifest.digest, 0))

    def lines(self, entry: Entry) -> Iterator[str]:
        """What `show` says."""
        if entry.manifest is None or not self.number(entry):
            return
        here = self.here.get(entry.manifest.digest)
        told = self.told.get(entry.manifest.digest, 0)
        if here is not None:
            processes = "1 process" if here.count == 1 else f"{here.count} processes"
            last = human_time(here.last)
            yield f"deaths       {processes} of this host died with it, the last one {last}: it {here.said} it"
        if told:
            yield f"deaths       {told} told to the service, by all hosts"

    def to_json(self, entry: Entry) -> dict[str, Any]:
        """For `--json` of `show`."""
        if entry.manifest is None:
            return {}
        here = self.here.get(entry.manifest.digest)
        return {
            "deaths": {
                "number": self.number(entry),
                "stage": None if here is None else here.stage,
                "last": None if here is None else here.last,
            }
        }


__all__ = ["KnownDeaths"]
