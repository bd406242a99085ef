"""Recall lists over HTTP: what somebody with a trusted key has taken back."""

from __future__ import annotations

import json
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse

from aotcache.api.auth import Caller, Requires
from aotcache.api.errors import Refused
from aotcache.api.ranges import matches
from aotcache.api.schemas import ERRORS, RecallsAnswer, RecallStored
from aotcache.api.state import Service, ServiceOf
from aotcache.recall_list import SignedList

router = APIRouter(tags=["recalls"])


@router.get(
    "/v1/recalls",
    summary="What was taken back",
    responses={**ERRORS, 200: {"model": RecallsAnswer}, 304: {"description": "The client has them."}},
)
def listing(
    request: Request, service: ServiceOf, _: Annotated[Caller, Depends(Requires("read"))]
) -> Response:
    """The signed lists. Check the signatures: the service only passes them on."""
    shown = service.recalls.shown()
    headers = {"ETag": f'"{shown.tag}"', "Cache-Control": "no-cache"}
    if matches(request.headers.get("if-none-match"), (headers["ETag"],)):
        return Response(status_code=304, headers=headers)
    rows = [
        {"signer": one.signer, "number": one.listed.number, "document": json.loads(one.document)}
        for one in shown.lists
    ]
    return JSONResponse({"tag": shown.tag, "recalls": rows}, headers=headers)


@router.put(
    "/v1/recalls",
    summary="Take artifacts back",
    response_model=RecallStored,
    status_code=201,
    responses={**ERRORS, 200: {"model": RecallStored, "description": "This very list was there."}},
    openapi_extra={
        "requestBody": {
            "required": True,
            "description": "A recall list in its DSSE envelope, in canonical form, by a key that is trusted here.",
            "content": {"application/json": {"schema": {"type": "object"}}},
        }
    },
)
async def put(
    request: Request,
    response: Response,
    service: ServiceOf,
    _: Annotated[Caller, Depends(Requires("admin"))],
) -> RecallStored:
    """It has to have all that the list before it has, and a larger number; `409` tells otherwise."""
    data = await request.body()
    number, stored = await run_in_threadpool(_put, service, data)
    if not stored:
        response.status_code = 200
    return RecallStored(stored=stored, number=number)


def _put(service: Service, data: bytes) -> tuple[int, bool]:
    made = SignedList.from_document(data, where="the body")
    trusted = service.config.trusted
    if not any(made.by(key.key) for key in trusted.list()):
        raise Refused(
            "untrusted",
            f"recall list {made.listed.number} is not taken: no key that this service trusts has signed it; it "
            f"says that ed25519:{made.signer} did. On the service's host, under its AOTCACHE_CONFIG_HOME: "
            "aotcache trust add <public key>",
        )
    return made.listed.number, service.recalls.put(made, service.store, trusted)
