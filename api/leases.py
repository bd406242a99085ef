"""Leases over HTTP: the right to build and publish one entry. See `aotcache.service.leases`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response

from aotcache.api.auth import Requires
from aotcache.api.errors import Refused
from aotcache.api.schemas import ERRORS, IdPath, LeaseAnswer, LeaseRequest, LeaseToken, Renewed
from aotcache.api.state import ServiceOf
from aotcache.service.leases import Held
from aotcache.types import CacheKey

router = APIRouter(tags=["leases"], dependencies=[Depends(Requires("publish"))])


@router.post("/v1/leases", summary="Take the lease of an entry", status_code=201, responses=ERRORS)
def acquire(body: LeaseRequest, service: ServiceOf) -> LeaseAnswer:
    """Renew it before `seconds` are over. While somebody else holds it: `conflict`, with who and how long."""
    lease = service.leases.acquire(CacheKey(body.key), body.variant, body.holder)
    if isinstance(lease, Held):
        raise Refused(
            "conflict",
            f"{lease.holder} holds the lease of {body.key} for {body.variant} for another {lease.expires_in:.0f} s; "
            "wait for it, or try again then",
            holder=lease.holder,
            expires_in=lease.expires_in,
        )
    return LeaseAnswer(lease=lease.id, token=lease.token, seconds=lease.seconds)


@router.put("/v1/leases/{id}", summary="Renew a lease", responses=ERRORS)
def renew(id: IdPath, body: LeaseToken, service: ServiceOf) -> Renewed:  # noqa: A002 - the interface's word
    """A heartbeat. `lease_lost` if it ran out or was taken over: stop, and publish nothing."""
    return Renewed(seconds=service.leases.renew(id, body.token))


@router.delete("/v1/leases/{id}", summary="Give a lease back", status_code=204, responses=ERRORS)
def release(
    id: IdPath,  # noqa: A002
    token: Annotated[int, Query(ge=0, le=(1 << 63) - 1)],
    service: ServiceOf,
) -> Response:
    """Also where it is lost already."""
    service.leases.release(id, token)
    return Response(status_code=204)
