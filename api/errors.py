"""What an error becomes: one JSON body with a type, a message, details and the request's id.

A response that is an error has this body whatever raised it: a handler, the router (404,
405), the check of a request (422) or a defect (500). Types are for programs and never
change their meaning; messages are for people.
"""

from __future__ import annotations

import json
import logging
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from aotcache.errors import (
    AotcacheError,
    BadCursor,
    ConfigError,
    CorruptArtifact,
    DatabaseError,
    LeaseHeld,
    LeaseLost,
    ManifestError,
    NotStored,
    RecallConflict,
    RejectedArtifact,
    SpecError,
    StoreError,
)

logger = logging.getLogger(__name__)

ErrorType = Literal[
    "bad_request",
    "unauthorized",
    "forbidden",
    "not_found",
    "not_stored",
    "method_not_allowed",
    "timeout",
    "conflict",
    "lease_lost",
    "corrupt",
    "invalid",
    "untrusted",
    "recalled",
    "too_large",
    "range",
    "unavailable",
    "internal",
]

_STATUS: dict[ErrorType, int] = {
    "bad_request": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "untrusted": 403,
    "recalled": 403,
    "not_found": 404,
    "not_stored": 404,
    "method_not_allowed": 405,
    "timeout": 408,
    "conflict": 409,
    "lease_lost": 409,
    "too_large": 413,
    "range": 416,
    "corrupt": 422,
    "invalid": 422,
    "unavailable": 503,
    "internal": 500,
}

_TYPES: tuple[tuple[type[AotcacheError], ErrorType], ...] = (
    (NotStored, "not_stored"),
    (LeaseLost, "lease_lost"),
    (LeaseHeld, "conflict"),
    (RecallConflict, "conflict"),
    (CorruptArtifact, "corrupt"),
    (ManifestError, "invalid"),
    (RejectedArtifact, "untrusted"),
    (BadCursor, "bad_request"),
    (StoreError, "unavailable"),
    (DatabaseError, "unavailable"),
    (ConfigError, "bad_request"),
    (SpecError, "bad_request"),
)
"""From an exception to its type; the first that fits."""

_OF_STATUS: dict[int, ErrorType] = {
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    409: "conflict",
    413: "too_large",
    416: "range",
    422: "invalid",
    503: "unavailable",
}

RETRY_SECONDS = 2
"""What `Retry-After` says with a 503."""


class Refused(AotcacheError):
    """A request that is answered with an error of the given type.

    Args:
        kind: The error's type; it decides the status.
        message: One sentence for people.
        details: Plain values for programs.
    """

    def __init__(self, kind: ErrorType, message: str, **details: Any) -> None:
        super().__init__(message, **details)
        self.kind: ErrorType = kind


def kind_of(error: AotcacheError) -> ErrorType:
    """The type that an exception is reported as."""
    if isinstance(error, Refused):
        return error.kind
    return next((kind for family, kind in _TYPES if isinstance(error, family)), "internal")


def error_response(
    kind: ErrorType,
    message: str,
    details: dict[str, Any],
    request_id: str,
    *,
    headers: dict[str, str] | None = None,
) -> Response:
    """The one error body. Details that JSON cannot hold are written as text."""
    body = {"error": {"type": kind, "message": message, "details": details, "request_id": request_id}}
    extra = dict(headers or {})
    if kind == "unauthorized":
        extra["WWW-Authenticate"] = "Bearer"
    if kind == "unavailable":
        extra["Retry-After"] = str(RETRY_SECONDS)
    return Response(
        json.dumps(body, default=str, separators=(",", ":")),
        status_code=_STATUS[kind],
        media_type="application/json",
        headers=extra,
    )


def _request_id(request: Request) -> str:
    return str(request.scope.get("state", {}).get("request_id", ""))


async def _own(request: Request, error: Exception) -> Response:
    assert isinstance(error, AotcacheError)
    kind = kind_of(error)
    if kind in ("internal", "unavailable"):
        logger.error("request %s: %s", _request_id(request), error, exc_info=error)
    headers = None
    if kind == "range":
        headers = {"Content-Range": f"bytes */{error.details['size']}", "Accept-Ranges": "bytes"}
    return error_response(kind, str(error), error.details, _request_id(request), headers=headers)


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = _OF_STATUS.get(error.status_code, "bad_request" if error.status_code < 500 else "internal")
    path, method = request.url.path, request.method
    if kind == "not_found":
        message = f"there is no {path} here; the routes are listed at /docs"
    elif kind == "method_not_allowed":
        message = f"{path} does not take {method}; the routes are listed at /docs"
    else:
        message = str(error.detail)
    headers = {name: value for name, value in (error.headers or {}).items() if name.lower() == "allow"}
    return error_response(kind, message, {}, _request_id(request), headers=headers)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    # What was sent is left out: it may be large, and it may be a secret in the wrong place.
    complaints = [{"where": [str(step) for step in e["loc"]], "problem": e["msg"]} for e in error.errors()]
    text = "; ".join(f"{'.'.join(c['where'])}: {c['problem']}" for c in complaints[:5])
    return error_response(
        "invalid", f"the request is not valid: {text}", {"problems": complaints[:50]}, _request_id(request)
    )


def add_error_handlers(app: FastAPI) -> None:
    """Every error of the application gets the one body."""
    app.add_exception_handler(AotcacheError, _own)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _invalid)
