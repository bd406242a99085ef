"""What workers died with: told at the start of the next one on their host."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends

from aotcache.api.auth import Caller, Requires
from aotcache.api.schemas import ERRORS, DeathsAnswer, DeathsRequest
from aotcache.api.state import ServiceOf
from aotcache.service.deaths import Told

router = APIRouter(tags=["artifacts"])


@router.post("/v1/deaths", summary="Tell of workers that died with an archive", responses=ERRORS)
def deaths(
    body: DeathsRequest, service: ServiceOf, _: Annotated[Caller, Depends(Requires("read"))]
) -> DeathsAnswer:
    """A worker ended while it opened the archive, or in its first forward or backward.

    Each has an id of its own, so that one that is told twice counts once. Archives that no entry names are
    passed over. Nothing follows from it but a number in the listing and in the metrics.
    """
    told = [Told(death.id, death.digest, death.stage, death.at) for death in body.deaths]
    return DeathsAnswer(recorded=service.deaths.record(told))
