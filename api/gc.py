"""Making room, and what stays whatever the limits say: `POST /v1/gc` and `/v1/pins`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Depends, Path

from aotcache.api.auth import Caller, Requires
from aotcache.api.schemas import (
    ERRORS,
    Deleted,
    GcAnswer,
    GcRequest,
    PinRequest,
    PinRow,
    PinsAnswer,
)
from aotcache.api.state import ServiceOf
from aotcache.errors import DatabaseError
from aotcache.store.evict import Decision, Limits

router = APIRouter(tags=["gc"])

Admin = Annotated[Caller, Depends(Requires("admin"))]
What = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="A key or digest", examples=["3f" * 32])]


@router.post("/v1/gc", summary="Remove what the limits do not allow", responses=ERRORS)
def collect(body: GcRequest, service: ServiceOf, _: Admin) -> GcAnswer:
    """What was used longest ago first; then refs and archives that nothing names.

    One request does what it can in some seconds. While `next` is not null there is more to do: send it as
    `cursor`, with the same limits.
    """
    notes = []
    try:
        service.usage.flush()
    except DatabaseError as error:
        # On a full disk nothing can be noted, but room can be made. Said once for all rounds.
        if body.cursor is None:
            notes.append(f"what was used in the last moments is not taken into account: {error}")
    done = service.collector.round(
        Limits(body.max_bytes, body.max_age), locked=body.locked, dry_run=body.dry_run, cursor=body.cursor
    )
    return GcAnswer.model_validate(
        {
            "decisions": [_row(decision) for decision in done.decisions],
            "before": done.before,
            "after": done.after,
            "over": done.over,
            "next": done.next,
            "notes": notes + done.notes,
        }
    )


def _row(decision: Decision) -> dict[str, object]:
    return {**decision.to_json(), "remove": decision.remove}


@router.get("/v1/pins", summary="What no collection removes", responses=ERRORS)
def pins(service: ServiceOf, _: Annotated[Caller, Depends(Requires("read"))]) -> PinsAnswer:
    """In the order of what is pinned."""
    return PinsAnswer.model_validate({"pins": [asdict(pin) for pin in service.store.pins()]})


@router.put("/v1/pins/{what}", summary="Pin a key or digest", responses=ERRORS)
def pin(what: What, body: PinRequest, service: ServiceOf, _: Admin) -> PinRow:
    """A pinned key keeps its variants, a pinned digest all entries with that archive. It need not be stored yet."""
    return PinRow.model_validate(asdict(service.store.pin(what, body.reason)))


@router.delete("/v1/pins/{what}", summary="Remove a pin", responses=ERRORS)
def unpin(what: What, service: ServiceOf, _: Admin) -> Deleted:
    """Whether there was one is in `deleted`."""
    return Deleted(deleted=int(service.store.unpin(what)))
