"""Deaths of workers, as a service is told of them and tells of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from aotcache.store.base import Store
from aotcache.types import Digest

Stage = Literal["open", "forward", "backward"]
STAGES: tuple[Stage, ...] = get_args(Stage)
"""What a worker may die in: the opening of an artifact's library, or the first run of one of its graphs."""

_MOST = 100
"""Of one request."""


@dataclass(frozen=True, slots=True)
class Report:
    """One death that a service is to be told of.

    Attributes:
        id: Its name, 32 hex characters; told twice, it counts once.
        digest: The archive.
        stage: What the worker was doing.
        at: When it began to, in seconds since the epoch by that host's clock.
        store: URL of the service.
    """

    id: str
    digest: Digest
    stage: Stage
    at: float
    store: str


def send(store: Store, reports: Sequence[Report]) -> bool:
    """Tell the service behind a store; False if there is none.

    Raises:
        ServiceError: it was not reached or refuses.
    """
    if store.own:
        return False
    from aotcache.store.builds import shared  # which loads what most programs need not
    from aotcache.store.http import HttpStore

    remote = shared(store)
    if not isinstance(remote, HttpStore):
        return False
    for first in range(0, len(reports), _MOST):
        body = {
            "deaths": [
                {"id": r.id, "digest": r.digest, "stage": r.stage, "at": r.at}
                for r in reports[first : first + _MOST]
            ]
        }
        remote.session.json("POST", "/v1/deaths", body=body)
    return True


def counted(store: Store) -> dict[Digest, int]:
    """How many deaths the service behind a store was told of, by archive; nothing where there is no service.

    Raises:
        ServiceError: it was not reached.
    """
    if store.own:
        return {}
    from aotcache.store.builds import shared
    from aotcache.store.http import HttpStore

    remote = shared(store)
    return remote.deaths() if isinstance(remote, HttpStore) else {}


__all__ = ["STAGES", "Report", "Stage", "counted", "send"]
