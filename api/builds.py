"""Builds over HTTP: asked for by clients, taken by builders, watched by anybody who may build."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Annotated

import anyio
from fastapi import APIRouter, Depends, Header, Response
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool

from aotcache.api.auth import Caller, Requires
from aotcache.api.errors import Refused
from aotcache.api.schemas import (
    ERRORS,
    BuildAnswer,
    BuildPage,
    BuildRequest,
    BuildState,
    ClaimAnswer,
    ClaimRequest,
    Cursor,
    FinishRequest,
    IdPath,
    Limit,
    ProgressAnswer,
    ProgressRequest,
    SpecRow,
    SpecsAnswer,
)
from aotcache.api.state import Service, ServiceOf
from aotcache.service.builds import Build
from aotcache.service.queue import Failure
from aotcache.types import CacheKey, Target, Toolchain, Variant

router = APIRouter(tags=["builds"])

Builds = Annotated[Caller, Depends(Requires("build"))]
Publishes = Annotated[Caller, Depends(Requires("publish"))]

FINAL = ("done", "failed", "cancelled")

LOOK_SECONDS = 0.3
"""How often the events of a watched build are looked for."""

PING_SECONDS = 15
"""How often a stream without news says that it is alive."""

END_SECONDS = 5.0
"""How long streams may take to end when the server does."""

SEND_SECONDS = 30.0
"""How long a watcher may take nothing."""


def _answer(build: Build) -> BuildAnswer:
    return BuildAnswer.model_validate(asdict(build))


def _no_build(build: str) -> Refused:
    return Refused(
        "not_found", f"there is no build {build}; builds that ended are kept for some time only", id=build
    )


@router.get("/v1/specs", summary="The specs that builds may name", responses=ERRORS)
def specs(service: ServiceOf, _: Annotated[Caller, Depends(Requires("read"))]) -> SpecsAnswer:
    """Registered by the operator: aotcache serve --spec, or a builder that has them."""
    return SpecsAnswer(
        specs=[SpecRow(name=name, registered=at) for name, at in service.specs.known().items()]
    )


@router.post(
    "/v1/builds",
    summary="Ask for an artifact",
    status_code=202,
    responses={**ERRORS, 200: {"model": BuildAnswer, "description": "It is there already."}},
)
async def request(body: BuildRequest, response: Response, service: ServiceOf, _: Builds) -> BuildAnswer:
    """Everybody who asks for one key and variant gets the same build; a recent failure is an answer too."""
    # All trainers of a run ask at the same moment: the threads that look-ups need are not for them.
    build = await anyio.to_thread.run_sync(lambda: _request(service, body), limiter=service.asking)
    if build.state == "done":
        response.status_code = 200
    return _answer(build)


def _request(service: Service, body: BuildRequest) -> Build:
    known = service.specs.known()
    if body.spec not in known:
        raise Refused(
            "not_found",
            f"no spec {body.spec!r} is registered here, only {', '.join(sorted(known)[:20]) or 'none'}; "
            "the operator adds one with aotcache serve --spec, or runs a builder that has it",
            spec=body.spec,
        )
    toolchain = Toolchain(body.toolchain.torch, body.toolchain.git, body.toolchain.cuda)
    variant = Variant(Target.parse(body.target), toolchain)
    return service.builds.request(body.spec, CacheKey(body.key), str(variant))


@router.get("/v1/builds", summary="List builds", responses=ERRORS)
def listing(
    service: ServiceOf, _: Builds, state: BuildState | None = None, limit: Limit = 100, cursor: Cursor = None
) -> BuildPage:
    """The newest first, without logs."""
    page = service.builds.page(state=state, limit=limit, cursor=cursor)
    return BuildPage(builds=[_answer(build) for build in page.builds], next=page.next)


@router.post(
    "/v1/builds/claim",
    summary="Take a build, as a builder",
    responses={**ERRORS, 200: {"model": ClaimAnswer}, 204: {"description": "There is nothing to build."}},
    response_model=None,
)
def claim(body: ClaimRequest, service: ServiceOf, _: Publishes) -> ClaimAnswer | Response:
    """The oldest of these specs and variants. Registers the specs. Heartbeats keep the lease that comes with it."""
    service.specs.register(body.specs)
    claimed = service.builds.claim(body.specs, body.variants, body.holder)
    if claimed is None:
        return Response(status_code=204)
    lease = claimed.lease
    return ClaimAnswer(build=_answer(claimed.build), lease=lease.id, token=lease.token, seconds=lease.seconds)


@router.get("/v1/builds/{id}", summary="One build", responses=ERRORS)
def detail(id: IdPath, service: ServiceOf, _: Builds) -> BuildAnswer:  # noqa: A002 - the interface's word
    """With the end of its log."""
    build = service.builds.get(id)
    if build is None:
        raise _no_build(id)
    return _answer(build)


@router.delete("/v1/builds/{id}", summary="Cancel a build", responses=ERRORS)
def cancel(id: IdPath, service: ServiceOf, _: Builds) -> BuildAnswer:  # noqa: A002
    """For everybody who waits for it. One that has ended stays as it is."""
    build = service.builds.cancel(id)
    if build is None:
        raise _no_build(id)
    return _answer(build)


@router.post("/v1/builds/{id}/events", summary="A builder's heartbeat and stage", responses=ERRORS)
def progress(id: IdPath, body: ProgressRequest, service: ServiceOf, _: Publishes) -> ProgressAnswer:  # noqa: A002
    """Says whether the build was cancelled meanwhile."""
    told = service.builds.progress(
        id, body.lease, body.token, stage=body.stage, expected_seconds=body.expected_seconds
    )
    return ProgressAnswer(cancelled=told.cancelled, seconds=told.seconds)


@router.post("/v1/builds/{id}/finish", summary="A builder is through", responses=ERRORS)
def finish(id: IdPath, body: FinishRequest, service: ServiceOf, _: Publishes) -> BuildAnswer:  # noqa: A002
    """Done if the entry was published; failed, or queued once more, if not."""
    error = None if body.error is None else Failure(body.error.type, body.error.message)
    return _answer(
        service.builds.finish(id, body.lease, body.token, error=error, log=body.log, retry=body.retry)
    )


@router.get(
    "/v1/builds/{id}/events",
    summary="Watch a build",
    response_class=EventSourceResponse,
    responses={
        **ERRORS,
        200: {
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
            "description": "Until it has ended.",
        },
    },
)
async def events(
    id: IdPath,  # noqa: A002
    service: ServiceOf,
    _: Builds,
    last_event_id: Annotated[str | None, Header(max_length=20, description="Go on after this event")] = None,
) -> Response:
    """Server-sent events: `state` and `stage`, numbered; the last one is the final state."""
    build = await run_in_threadpool(service.builds.get, id)
    if build is None:
        raise _no_build(id)
    after = int(last_event_id) if last_event_id is not None and last_event_id.isdecimal() else 0
    ending = anyio.Event()
    return EventSourceResponse(
        _stream(service, build, after, ending),
        ping=PING_SECONDS,
        send_timeout=SEND_SECONDS,
        sep="\n",
        shutdown_event=ending,
        shutdown_grace_period=END_SECONDS,
    )


async def _stream(
    service: Service, build: Build, after: int, ending: anyio.Event
) -> AsyncIterator[ServerSentEvent]:
    """Until the build or the server ends; a watcher of the latter comes back with the number of its last event."""
    with service.watching.of(build.id) as watched:
        while not ending.is_set():
            ended = build.ended or watched.ended
            found = await run_in_threadpool(service.builds.events, build.id, after)
            for event in found:
                after = event.sequence
                yield ServerSentEvent(
                    json.dumps({**event.data, "at": event.at}), id=str(after), event=event.kind
                )
            if found:
                if found[-1].data.get("state") in FINAL:
                    return
                continue
            if ended:
                return
            while watched.sequence <= after and not watched.ended and not ending.is_set():
                with anyio.move_on_after(LOOK_SECONDS):
                    await ending.wait()
