"""What addresses and answers of a service may be shown of, and which error an answer is."""

from __future__ import annotations

import json
import re
from email.utils import parsedate_to_datetime
from http.client import responses
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit, urlunsplit

from aotcache.errors import (
    CorruptArtifact,
    LeaseHeld,
    LeaseLost,
    NotStored,
    ServiceError,
    ServiceUnavailable,
    StoreError,
)
from aotcache.types import printable

if TYPE_CHECKING:
    import httpx

_PORTS = {"http": 80, "https": 443}

_TYPED: dict[str, type[StoreError]] = {
    "not_stored": NotStored,
    "corrupt": CorruptArtifact,
    "lease_lost": LeaseLost,
}

_HINTS = {
    401: "set AOTCACHE_TOKEN to a token of this service that is neither expired nor revoked",
    403: "ask for a token with the right to do this",
}

TEMPORARY = (408, 429, 500, 502, 503, 504)
"""Statuses that the same request may not get again."""

_LONGEST_MESSAGE = 2000
_LONGEST_ID = 64


def split(text: str) -> SplitResult:
    """The parts of an address, which may have a port.

    Raises:
        StoreError: if it is none. A password that is not quoted can end the host, or look like
            a port; so of an address with an @ nothing is repeated then.
    """
    unclear = "@" in text
    try:
        parts = urlsplit(text)
        _ = parts.port
        unclear = unclear and "@" not in parts.netloc and ":" in parts.netloc
    except ValueError as error:
        if not unclear:
            raise StoreError(f"store {shown(text)!r} is no address: {error}") from None
    if unclear:
        raise StoreError(
            "the store's address cannot be read, and is not shown, as it may hold a password; expected "
            "scheme://host/..., without credentials"
        )
    return parts


def service_url(text: str) -> str:
    """The address of a service as it is compared and shown: no credentials, query or slash at its end.

    Raises:
        StoreError: if it is no such address; credentials in it are not repeated.
    """
    parts = split(text)
    port = parts.port
    if parts.scheme not in _PORTS or not parts.hostname:
        raise StoreError(f"store {shown(text)!r}: expected http://host:port or https://host")
    if " " in parts.netloc or not text.isprintable():
        raise StoreError(
            f"store {shown(text)!r}: the address holds a character that no address has; copy it again"
        )
    if parts.username is not None or parts.password is not None:
        raise StoreError(
            f"store {shown(text)!r}: the address holds a name or a password, which would end up in logs; "
            "give the token by AOTCACHE_TOKEN or its file instead"
        )
    if parts.query or parts.fragment:
        raise StoreError(f"store {shown(text)!r}: expected an address without ? and #")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    where = host if port in (None, _PORTS[parts.scheme]) else f"{host}:{port}"
    return urlunsplit((parts.scheme, where, parts.path.rstrip("/"), "", ""))


def origin(url: str) -> tuple[str, str, int]:
    """Scheme, host and port. Raises ValueError for what has none."""
    parts = urlsplit(url)
    if parts.scheme not in _PORTS or not parts.hostname:
        raise ValueError("no http or https address")
    return parts.scheme, parts.hostname, parts.port or _PORTS[parts.scheme]


def shown(url: str) -> str:
    """An address without what may be secret in it: user, password, query and fragment."""
    plain = re.split(r"[?#]", url, maxsplit=1)[0]
    return re.sub(r"(?<=//)[^/]*@", "", plain)


def retry_after(response: httpx.Response, now: float) -> float | None:
    """Seconds to wait by the answer's Retry-After, or None.

    Args:
        response: A moment there is compared with its own Date, if it has one: clocks differ.
        now: Seconds since the epoch on this host.
    """
    text = response.headers.get("Retry-After", "").strip()
    if not text:
        return None
    if text.isascii() and text.isdigit():
        return float(text[:9])
    moment = _moment(text)
    sent = _moment(response.headers.get("Date", ""))
    return None if moment is None else max(0.0, moment - (now if sent is None else sent))


def _moment(text: str) -> float | None:
    try:
        return parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None


def error_of(url: str, method: str, response: httpx.Response, body: bytes) -> StoreError:
    """The error that an answer of 400 or more stands for.

    Args:
        url: Where it is from; only `shown` of it gets into the message.
        method: Of the request.
        response: Its status and headers.
        body: The first bytes of its body.
    """
    status = response.status_code
    said = _error(body)
    message, kind = said.get("message"), said.get("type")
    details = said.get("details") if isinstance(said.get("details"), dict) else {}
    request = printable(str(said.get("request_id") or response.headers.get("X-Request-Id")), _LONGEST_ID)
    assert isinstance(details, dict)
    kept: dict[str, Any] = {k: v for k, v in details.items() if isinstance(k, str) and k != "message"}
    kept.update(status=status, type=kind, request_id=request, url=shown(url))
    if isinstance(message, str):
        lines = message[:_LONGEST_MESSAGE].split("\n")
        plain = "\n".join(printable(line, _LONGEST_MESSAGE) for line in lines)
        text = f"{plain} ({method} {shown(url)}: {status}, request {request})"
    else:
        # Not the answer's own phrase: it may repeat the address, signature and all.
        phrase = responses.get(status, "")
        text = (
            f"{method} {shown(url)} answered {f'{status} {phrase}'.rstrip()}, without the error of an aotcache "
            "service: is one at this address?"
        )
    if status in _HINTS and not isinstance(message, str):
        text = f"{text} If so, {_HINTS[status]}"
    elif status == 401:
        text = f"{text}; {_HINTS[401]}"
    if kind == "conflict" and "holder" in kept:
        return LeaseHeld(text, **kept)
    if isinstance(kind, str) and kind in _TYPED:
        return _TYPED[kind](text, **kept)
    if status in TEMPORARY:
        return ServiceUnavailable(text, **kept)
    return ServiceError(text, **kept)


def _error(body: bytes) -> dict[str, Any]:
    try:
        said = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}
