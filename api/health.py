"""Whether the service is alive and ready, its numbers, and the keys it trusts. All open to everybody."""

from __future__ import annotations

from functools import cache

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from aotcache.api.errors import Refused
from aotcache.api.schemas import ERRORS, Health, TrustAnswer, TrustedKeyRow
from aotcache.api.state import ServiceOf
from aotcache.db.migrate import current, head
from aotcache.types import Digest

router = APIRouter(tags=["operation"])

_NOWHERE = Digest("0" * 64)

_head = cache(head)


@router.get("/healthz", summary="Whether the process answers", responses=ERRORS)
async def healthz() -> Health:
    """Looks at nothing else."""
    return Health()


@router.get("/readyz", summary="Whether requests can be served", responses=ERRORS)
def readyz(service: ServiceOf) -> Health:
    """The database has this program's tables, and the store can be reached."""
    found, expected = current(service.database), _head()
    if found != expected:
        raise Refused(
            "unavailable",
            f"the database has version {found}, expected {expected}: run aotcache db upgrade",
            expected=expected,
            found=found,
        )
    service.store.blob_size(_NOWHERE)
    return Health()


@router.get(
    "/metrics",
    summary="Numbers for Prometheus",
    response_class=Response,
    responses={**ERRORS, 200: {"content": {"text/plain": {}}}},
)
def metrics(service: ServiceOf) -> Response:
    """What is counted in the database is some seconds old."""
    return Response(service.metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})


@router.get("/v1/trust", summary="The keys that signed what is stored here", responses=ERRORS)
def trust(service: ServiceOf) -> TrustAnswer:
    """Compare their fingerprints with what the operator says before trusting them: aotcache trust add."""
    return TrustAnswer(
        keys=[
            TrustedKeyRow(fingerprint=key.key.fingerprint, public=key.public, name=key.name)
            for key in service.config.trusted.list()
        ]
    )
