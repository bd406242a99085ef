"""Entries by key: resolve, list, read, publish, delete, and why a key is not there."""

from __future__ import annotations

import json
from dataclasses import asdict
from hashlib import sha256
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse

from aotcache.api.auth import Caller, Requires
from aotcache.api.errors import Refused
from aotcache.api.ranges import matches
from aotcache.api.schemas import (
    ERRORS,
    ArtifactDetail,
    ArtifactPage,
    Cursor,
    Deleted,
    KeyPath,
    Limit,
    ResolveAnswer,
    ResolveRequest,
    Stored,
    WhyRequest,
)
from aotcache.api.state import Service, ServiceOf
from aotcache.errors import ManifestError, NotStored
from aotcache.manifest import Manifest
from aotcache.types import CacheKey

router = APIRouter(tags=["artifacts"])

Reads = Annotated[Caller, Depends(Requires("read"))]
Text = Annotated[str | None, Query(max_length=512)]


@router.post("/v1/resolve", summary="Look up many keys", responses={**ERRORS, 200: {"model": ResolveAnswer}})
def resolve(body: ResolveRequest, service: ServiceOf, _: Reads) -> Response:
    """Compact references per key and variant, or why a key is missing. One statement for all keys."""
    found = service.index.resolve([CacheKey(key) for key in body.keys])
    hits = {key: references for key, references in found.items() if references}
    for key, references in found.items():
        for reference in references:
            service.usage.hit(key, reference.variant)
        if not references:
            service.usage.miss(key)
    service.metrics.resolved(len(hits), len(found) - len(hits))
    return JSONResponse(
        {
            "found": {
                key: [
                    {"variant": r.variant, "digest": r.digest, "size": r.size, "document": r.document}
                    for r in references
                ]
                for key, references in hits.items()
            },
            "missing": {key: "nothing is stored for this key" for key in found if key not in hits},
            "recalls": service.recalls.tag(),
        }
    )


@router.get("/v1/artifacts", summary="List what is stored", responses=ERRORS)
def listing(
    service: ServiceOf,
    _: Reads,
    cursor: Cursor = None,
    limit: Limit = 100,
    region: Text = None,
    mode: Text = None,
    target: Text = None,
    torch: Text = None,
    key: Text = None,
    code: Text = None,
) -> ArtifactPage:
    """Page by page in the order of key and variant, each page at the same cost. Filters are exact.

    `code` is the digest of a key's component of that name: what a worker can run of its drafter's code.
    """
    page = service.index.page(
        cursor=cursor, limit=limit, region=region, mode=mode, target=target, torch=torch, key=key, code=code
    )
    return ArtifactPage.model_validate(
        {"artifacts": [asdict(artifact) for artifact in page.artifacts], "next": page.next}
    )


@router.get(
    "/v1/artifacts/{key}",
    summary="The manifests of one key",
    responses={**ERRORS, 200: {"model": ArtifactDetail}, 304: {"description": "The client has them."}},
)
def detail(key: KeyPath, request: Request, service: ServiceOf, _: Reads) -> Response:
    """Whole ref documents, as the builder signed them."""
    variants = []
    for entry in service.store.variants(CacheKey(key)):
        if entry.usable is not None:
            document = entry.usable.document()
            variants.append(
                {
                    "variant": entry.variant,
                    "document": sha256(document).hexdigest(),
                    "modified": entry.modified,
                    "envelope": json.loads(document),
                }
            )
    if not variants:
        raise NotStored(f"nothing is stored for key {key}; aotcache why explains a miss", key=key)
    tag = sha256("".join(str(variant["document"]) for variant in variants).encode()).hexdigest()
    headers = {"ETag": f'"{tag}"', "Cache-Control": "no-cache"}
    if matches(request.headers.get("if-none-match"), (headers["ETag"],)):
        return Response(status_code=304, headers=headers)
    return JSONResponse({"key": key, "variants": variants}, headers=headers)


@router.put(
    "/v1/artifacts/{key}",
    summary="Publish an entry whose archive is stored",
    response_model=Stored,
    status_code=201,
    responses={**ERRORS, 200: {"model": Stored, "description": "An entry was there, and is left alone."}},
    openapi_extra={
        "requestBody": {
            "required": True,
            "description": "The ref document: a DSSE envelope around the manifest.",
            "content": {"application/json": {"schema": {"type": "object"}}},
        }
    },
)
async def publish(
    key: KeyPath,
    request: Request,
    response: Response,
    service: ServiceOf,
    caller: Annotated[Caller, Depends(Requires("publish"))],
    replace: Annotated[
        bool, Query(description="Overwrite an entry that is there; needs the scope admin")
    ] = False,
    lease: Annotated[
        str | None,
        Header(
            alias="Aotcache-Lease",
            description="`<lease>:<fencing token>`: publish only while this lease is held",
            pattern=r"^[A-Za-z0-9_-]{1,64}:[0-9]{1,18}$",
        ),
    ] = None,
) -> Stored:
    """Checks the document, its key, its signature and its archive; then the entry is visible at once."""
    if replace:
        caller.require("admin")
    data = await request.body()
    claim: tuple[str, int] | None = None
    if lease is not None:
        name, _, token = lease.partition(":")
        claim = (name, int(token))
    stored = await run_in_threadpool(_publish, service, CacheKey(key), data, replace, claim)
    if not stored:
        response.status_code = 200
    return Stored(stored=stored)


def _publish(
    service: Service, key: CacheKey, data: bytes, replace: bool, claim: tuple[str, int] | None
) -> bool:
    manifest = Manifest.from_json(data, where="the body")
    if manifest.key != key:
        raise ManifestError(
            f"the manifest is of key {manifest.key}, the address says {key}", expected=key, found=manifest.key
        )
    problem = service.config.trusted.problem(manifest)
    if problem is not None:
        raise Refused(
            "untrusted",
            f"key {key} is not published: {problem}; if that key is to be trusted, run on the service's host, under "
            "its AOTCACHE_CONFIG_HOME: aotcache trust add <public key>",
            key=key,
        )
    taken_back = service.recalls.problem(manifest.digest, manifest.key)
    if taken_back is not None:
        raise Refused(
            "recalled",
            f"archive {manifest.digest} of key {key} is not published: it is recalled: {taken_back}; aotcache recall "
            "tells by whom",
            key=key,
            digest=manifest.digest,
        )
    variant = str(manifest.variant)
    with (
        service.publishes.begun(manifest) as publish,
        service.leases.publishing(key, variant, claim) as session,
        # A delete of another entry with this archive waits, or has taken the archive along before it is looked for.
        service.database.exclusive("archive", manifest.digest),
    ):
        # What is recalled is nobody's loss: whoever may publish puts another in its place.
        before = None if replace else service.store.entry(key, variant)
        if before is not None and before.manifest is not None:
            replace = service.recalls.problem(before.manifest.digest, key) is not None
        publish.write(session)
        try:
            stored = service.store.put_ref(manifest, replace=replace)
        except NotStored as error:
            # It may also have gone after the ref was written.
            publish.writing = service.store.entry(key, variant) is not None
            raise Refused(
                "conflict",
                f"archive {manifest.digest} of key {key} is not here yet: PUT /v1/blobs/{manifest.digest} first",
                digest=manifest.digest,
            ) from error
        # What lies there now is what is indexed. If this fails, the ref stays, the answer is an error,
        # and the same request once more enters it.
        entry = service.store.entry(key, variant)
        if entry is not None and entry.usable is not None:
            service.index.add(entry.usable, entry.usable.document(), modified=entry.modified)
            publish.entered(session)
    return stored


@router.delete("/v1/artifacts/{key}", summary="Remove entries", responses=ERRORS)
def remove(
    key: KeyPath,
    service: ServiceOf,
    _: Annotated[Caller, Depends(Requires("admin"))],
    variant: Annotated[str | None, Query(max_length=250, description="Only this one")] = None,
) -> Deleted:
    """All variants of a key, or one. Archives that no other entry of the index names go with them."""
    name = CacheKey(key)
    stored = {entry.variant for entry in service.store.variants(name)}
    # Rows without a ref go as well, under the same locks: one may be published meanwhile.
    indexed = {reference.variant for reference in service.index.resolve([name])[name]}
    which = sorted(v for v in stored | indexed if variant in (None, v))
    return Deleted(deleted=sum(service.collector.remove(name, v)[0] for v in which))


@router.get("/v1/keys/{key}/why", summary="What is nearest to a key", responses=ERRORS)
def why(key: KeyPath, service: ServiceOf, _: Reads) -> dict[str, Any]:
    """For a key whose components the service knows; for others, POST them."""
    return asdict(service.index.why(CacheKey(key)))


@router.post("/v1/keys/{key}/why", summary="What is nearest to a key with these components", responses=ERRORS)
def why_components(key: KeyPath, body: WhyRequest, service: ServiceOf, _: Reads) -> dict[str, Any]:
    """Compares the components with those of what is stored, and names the items that differ."""
    try:
        found = service.index.why(CacheKey(key), mode=body.mode, components=body.components)
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(
            "invalid",
            f"components: expected a list of {{name, items: [[name, value], ...]}} as in a manifest ({error!r})",
        ) from error
    return asdict(found)
