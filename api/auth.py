"""Who may do what: bearer tokens with scopes, and loopback without any."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Annotated

from fastapi import Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from aotcache.api.errors import Refused
from aotcache.api.state import ServiceOf

SCOPES = ("read", "publish", "build", "admin")

_BEARER = HTTPBearer(
    auto_error=False,
    scheme_name="token",
    description="A token made by `aotcache token create`. Scopes: read, publish, build, admin (all of them).",
)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request.

    Attributes:
        name: The token's name; None without tokens.
        scopes: What it may do.
    """

    name: str | None
    scopes: frozenset[str]

    @property
    def cacheable(self) -> str:
        """Whether caches that several users share may keep the answer; for `Cache-Control`."""
        return "public" if self.name is None else "private"

    def may(self, scope: str) -> bool:
        """Whether the scope is granted, by itself or by `admin`."""
        return scope in self.scopes or "admin" in self.scopes

    def require(self, scope: str) -> None:
        """Raises Refused without the scope."""
        if not self.may(scope):
            raise Refused(
                "forbidden",
                f"this needs the scope {scope!r}, the token {self.name!r} has {', '.join(sorted(self.scopes))}; "
                "make one that has it: aotcache token create",
                scope=scope,
            )


class Requires:
    """A dependency that lets a request pass if its caller has a scope."""

    def __init__(self, scope: str) -> None:
        assert scope in SCOPES
        self.scope = scope

    def __call__(
        self,
        request: Request,
        service: ServiceOf,
        credentials: Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)],
    ) -> Caller:
        """Raises Refused. Runs in a thread: it may ask the database."""
        caller = _caller(request, service, credentials)
        request.state.caller = caller.name
        caller.require(self.scope)
        _require_plain(request)
        return caller


def _caller(request: Request, service: ServiceOf, credentials: HTTPAuthorizationCredentials | None) -> Caller:
    if credentials is not None:
        granted = service.tokens.check(credentials.credentials)
        if granted is None:
            raise Refused(
                "unauthorized", "the token is unknown, revoked or expired; ask the operator for another one"
            )
        return Caller(granted.name, frozenset(granted.scopes))
    if "authorization" in request.headers:
        raise Refused("unauthorized", "the Authorization header is of another kind than Bearer")
    if service.tokens.any_live() or not service.config.loopback:
        raise Refused(
            "unauthorized", "this service asks for a token: set AOTCACHE_TOKEN, or write it to the token file"
        )
    host = request.headers.get("host", "")
    if not is_loopback(_without_port(host)):
        # A page in a browser on this machine can be made to send requests here, but not under this name.
        raise Refused(
            "forbidden",
            f"without tokens only requests to localhost, 127.0.0.1 or [::1] are served, not to {host[:80]!r}; "
            "make a token: aotcache token create",
        )
    return Caller(None, frozenset(SCOPES))


def _require_plain(request: Request) -> None:
    given = [name for name, _ in request.query_params.multi_items()]
    twice = (
        sorted({name[:80] for name in given if given.count(name) > 1})
        if len(given) < 100
        else ["more than 100"]
    )
    if twice:
        raise Refused(
            "bad_request", f"given more than once, so that it is unclear what is meant: {', '.join(twice)}"
        )


def is_loopback(host: str) -> bool:
    """Whether a name or address is this host's own, reachable from nowhere else."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
