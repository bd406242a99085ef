"""Archives by digest: `GET`, `HEAD` and `PUT /v1/blobs/{digest}`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from aotcache.api.auth import Caller, Requires
from aotcache.api.blob_files import no_blob
from aotcache.api.errors import Refused
from aotcache.api.ranges import Range, Unsatisfiable, accepts, matches, parse_range, range_applies
from aotcache.api.schemas import ERRORS, DigestPath, Stored
from aotcache.api.state import Service, ServiceOf
from aotcache.api.transfer import Compressed, Draft, FilePieces, Pieces, receive_into
from aotcache.errors import CorruptArtifact
from aotcache.store.files import sweep
from aotcache.store.objects import ObjectStore
from aotcache.types import Digest

router = APIRouter(tags=["blobs"])


@router.head(
    "/v1/blobs/{digest}",
    summary="Whether there is such an archive, and its size",
    responses=ERRORS,
    response_class=Response,
)
@router.get(
    "/v1/blobs/{digest}",
    summary="The bytes of an archive",
    response_class=Response,
    responses={
        **ERRORS,
        200: {"content": {"application/octet-stream": {}}, "description": "All bytes."},
        206: {"content": {"application/octet-stream": {}}, "description": "One range."},
        304: {"description": "The client has them."},
        307: {"description": "They are in a bucket: an address to GET them at, good for some minutes."},
    },
)
async def download(
    digest: DigestPath,
    request: Request,
    service: ServiceOf,
    caller: Annotated[Caller, Depends(Requires("read"))],
) -> Response:
    """Immutable: a digest names the same bytes for ever."""
    name = Digest(digest)
    headers = {
        "ETag": f'"{digest}"',
        "Cache-Control": f"{caller.cacheable}, max-age=31536000, immutable",
        "Accept-Ranges": "bytes",
        "Vary": "Accept-Encoding",
    }
    found = await service.workers.run(lambda: service.checked.find(name))
    if found is None:
        size = await service.workers.run(lambda: service.store.blob_size(name))
        if size is None:
            raise no_blob(name)
    else:
        size = found[1]
    asked = request.headers
    if matches(asked.get("if-none-match"), (f'"{digest}"', f'"{digest}-zstd"')):
        return Response(status_code=304, headers=headers)
    if request.method == "GET" and found is None and service.config.signed_url_seconds:
        url = await service.workers.run(
            lambda: service.store.blob_url(name, service.config.signed_url_seconds)
        )
        if url is not None:
            return Response(status_code=307, headers={"Location": url, "Cache-Control": "no-store"})
    return await _whole_or_part(name, request, service, headers, size, found[0] if found else None)


async def _whole_or_part(
    digest: Digest, request: Request, service: Service, headers: dict[str, str], size: int, path: Path | None
) -> Response:
    asked = request.headers
    part: Range | None = None
    if range_applies(asked.get("if-range"), headers["ETag"]):
        try:
            part = parse_range(asked.get("range"), size)
        except Unsatisfiable:
            raise Refused(
                "range",
                f"archive {digest} has {size} bytes; {asked['range'][:80]!r} lies behind its end",
                size=size,
            ) from None
    headers = {**headers, "Content-Type": "application/octet-stream"}
    zstd = part is None and "range" not in asked and accepts(asked.get("accept-encoding"), "zstd")
    # Where others are at it already, whoever asks for compression gets it as it is.
    zstd = zstd and (request.method == "HEAD" or service.workers.compressing.acquire(blocking=False))
    start, stop, status = (part.start, part.stop, 206) if part is not None else (0, size, 200)
    if part is not None:
        headers["Content-Range"] = part.content_range
    if zstd:
        headers |= {"Content-Encoding": "zstd", "ETag": f'"{digest}-zstd"'}
    else:
        headers["Content-Length"] = str(stop - start)
    if request.method == "HEAD":
        return Response(status_code=status, headers=headers)
    try:
        pieces = await service.workers.run(_opener(service, digest, path, start, stop))
    except BaseException:
        if zstd:
            service.workers.compressing.release()
        raise
    if zstd:
        pieces = Compressed(pieces, service.workers.compressing.release)
    return Pieces(pieces, service.workers, status, headers)


def _opener(
    service: Service, digest: Digest, path: Path | None, start: int, stop: int
) -> Callable[[], Iterator[bytes]]:
    def opened() -> Iterator[bytes]:
        if path is not None:
            return FilePieces(path, start, stop, service.workers)
        pieces = service.store.blob_chunks(digest, start, stop) if stop > start else iter(())
        if pieces is None:
            raise no_blob(digest)
        return pieces

    return opened


@router.put(
    "/v1/blobs/{digest}",
    summary="Store an archive",
    response_model=Stored,
    status_code=201,
    responses={**ERRORS, 200: {"model": Stored, "description": "It was stored already."}},
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
async def upload(
    digest: DigestPath,
    request: Request,
    response: Response,
    service: ServiceOf,
    _: Annotated[Caller, Depends(Requires("publish"))],
) -> Stored:
    """The body is the archive. What does not match the digest, or is cut off, leaves nothing behind."""
    draft = await service.workers.run(lambda: _begun(service.uploads))
    with draft:
        await receive_into(draft, request, service.workers, service.config.blob_bytes)
        if draft.digest != digest:
            raise CorruptArtifact(
                f"the body does not match its name: expected {digest}, found {draft.digest} "
                f"({draft.size} bytes); nothing was stored: send it again",
                expected=digest,
                found=draft.digest,
            )
        there = await service.workers.run(lambda: _store(service.store, draft))
    if there:
        response.status_code = 200
    return Stored(stored=not there)


def _begun(uploads: Path) -> Draft:
    """A new draft. What a server that was killed has left there a day ago goes: nobody else would remove it."""
    sweep(uploads)
    return Draft(uploads)


def _store(store: ObjectStore, draft: Draft) -> bool:
    """Whether the archive was there. A file takes its place in any case: that heals one gone bad."""
    there = store.blob_size(draft.digest) == draft.size
    if not there or store.drafts is not None:
        store.put_blob(draft.digest, draft.path)
    return there
