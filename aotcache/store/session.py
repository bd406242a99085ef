"""Requests to a service: connections, the token, limits of time, tries and their errors.

The token is shown to the origin of the service's address alone, and is in no log line, `repr` or
error. Neither is the query of any address: a redirect to a bucket carries a signature there.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import httpx
import tenacity
from pydantic import SecretStr

from aotcache.config import Settings
from aotcache.errors import ConfigError, ServiceError, ServiceUnavailable, StoreError
from aotcache.store.answers import TEMPORARY, error_of, origin, retry_after, service_url, shown
from aotcache.store.circuit import Circuit, circuit_for
from aotcache.store.patience import LATE, answered_within, make_patient
from aotcache.store.quiet import unlogged
from aotcache.store.sse import parse_events
from aotcache.store.tokens import token_for
from aotcache.types import Digest

logger = logging.getLogger(__name__)

T = TypeVar("T")

_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_REDIRECTS = 5
_LARGEST_ANSWER = 64 << 20
_LARGEST_ERROR = 64 << 10

_BACKOFF = tenacity.wait_random_exponential(multiplier=0.2, max=5.0)


@dataclass(frozen=True, slots=True)
class Limits:
    """How long and how often. Seconds, where nothing else is said.

    Attributes:
        connect: Until a connection stands.
        read: Without a byte, in either direction.
        call: One call with all its tries; a transfer of an archive has a speed instead.
        slowest: Bytes a second that such a transfer must keep up, after `call` seconds for free.
        attempts: Tries of one call.
        retry_after: Longest wait that a service may ask for.
    """

    connect: float = 5.0
    read: float = 30.0
    call: float = 60.0
    slowest: int = 16 << 10
    attempts: int = 4
    retry_after: float = 10.0


class Failed(Exception):
    """One try failed in a way that another may not.

    Attributes:
        error: What to raise when there is no further try.
        sent: Whether the service may have acted on it.
        down: Whether it says that the service is out of reach or order, not this request alone.
        wait: Seconds to wait by the service's word, or None.
    """

    def __init__(
        self, error: StoreError, *, sent: bool = True, down: bool = True, wait: float | None = None
    ) -> None:
        super().__init__(str(error))
        self.error, self.sent, self.down, self.wait = error, sent, down, wait


class ServiceSession:
    """The way to one service with one token. Threads may share it; a forked process gets its own connections.

    Args:
        url: Address of the service.
        token: Shown as `Authorization: Bearer` to the origin of `url`.
        limits: Of time and tries.
    """

    def __init__(self, url: str, token: str | None = None, *, limits: Limits | None = None) -> None:
        self.url = service_url(url)
        self.limits = limits or Limits()
        if token is not None and re.fullmatch(r"[\x21-\x7e]+", token) is None:
            raise ConfigError(
                f"the token for {self.url} holds a space, a line end or another character that no token has; "
                "copy it again"
            )
        self._token = None if token is None else SecretStr(token)
        self._origin = origin(self.url)
        self._clients: dict[int, httpx.Client] = {}

    def __repr__(self) -> str:
        return f"ServiceSession({self.url!r})"

    @property
    def circuit(self) -> Circuit:
        """What this process knows of the service's being reachable."""
        return circuit_for(self.url)

    def close(self) -> None:
        """Close this process's connections; the next request opens new ones."""
        client = self._clients.pop(os.getpid(), None)
        if client is not None:
            client.close()

    def json(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        params: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        retry: bool = True,
    ) -> Any:
        """Make a request and read the JSON of its answer; None if it has no body.

        Args:
            method: Of HTTP.
            path: Below the service's address, quoted.
            body: Bytes to send as they are, or what to send as JSON; None for nothing.
            params: The query; those that are None are left out.
            headers: More of them.
            retry: Try again although an earlier try may have reached the service. A request
                that was never sent is tried again in any case.

        Raises:
            ServiceUnavailable: not reached, not answered in time, or out of order.
            ServiceError: any other error that the service answers; or one of the more special
                errors of aotcache/errors.py by its type: NotStored, LeaseLost, LeaseHeld, CorruptArtifact.
        """
        sent = {"Accept": "application/json", **(headers or {})}
        if body is not None:
            sent.setdefault("Content-Type", "application/json")
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        query = {k: v for k, v in (params or {}).items() if v is not None}

        def once() -> Any:
            with self.stream(method, path, params=query, headers=sent, content=content) as response:
                data = self._read(response, _LARGEST_ANSWER)
            if not data:
                return None
            try:
                return json.loads(data)
            except (ValueError, RecursionError):
                raise ServiceError(
                    f"{method} {self.url}{path} answered {response.status_code} with something that is not JSON: "
                    "is an aotcache service at this address?",
                    status=response.status_code,
                    url=self.url,
                ) from None

        return self.reliably(once, retry=retry)

    def upload(self, path: str, file: Path, digest: Digest) -> bool:
        """PUT a file's bytes, read piece by piece; whether the service stored them (it may have had them).

        Raises:
            StoreError: as `json`, and if the file cannot be read.
        """

        def once() -> bool:
            try:
                source = file.open("rb")
            except OSError as error:
                raise StoreError(f"cannot read archive {file}: {error.strerror}", path=str(file)) from error
            with source:
                size = os.fstat(source.fileno()).st_size
                sent = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
                with self.stream("PUT", path, headers=sent, content=source) as response:
                    self._read(response, _LARGEST_ANSWER)
                    return response.status_code == 201

        logger.debug("uploading %s to %s", digest, self.url)
        return self.reliably(once)

    def events(self, path: str, *, after: str | None = None) -> Iterator[dict[str, Any]]:
        """Server-sent events as they come: `id`, `event` and the JSON of `data`.

        Ends when the service ends the stream. A connection that breaks is taken up again
        after the last event; so is one without a sign for `Limits.read` seconds.

        Raises:
            StoreError: as `json`.
        """
        failures = 0
        while True:
            self.circuit.enter(self.limits.read)
            sent = {"Accept": "text/event-stream"} | ({} if after is None else {"Last-Event-ID": after})
            try:
                with self.stream("GET", path, headers=sent) as response:
                    _require_plain(response)
                    for event in parse_events(response.iter_lines()):
                        failures, after = 0, event["id"] or after
                        yield event
                return
            except Failed as failed:
                failures += 1
                if failures >= self.limits.attempts:
                    raise failed.error from None
            time.sleep(pause(failures))

    def reliably(self, once: Callable[[], T], *, retry: bool = True) -> T:
        """Call `once` until it does not raise Failed, as often and as long as the limits allow."""
        circuit, probe = self.circuit, False

        def attempt() -> T:
            nonlocal probe
            probe = circuit.enter(self.limits.connect + self.limits.read) or probe
            return once()

        def again(error: BaseException) -> bool:
            if not isinstance(error, Failed) or probe:
                return False
            return (retry or not error.sent) and (error.wait or 0.0) <= self.limits.retry_after

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(again),
            stop=tenacity.stop_after_attempt(self.limits.attempts)
            | tenacity.stop_before_delay(self.limits.call),
            wait=_wait,
            reraise=True,
        )
        try:
            found = retrying(attempt)
        except Failed as failed:
            if failed.down:
                circuit.failed(str(failed), probe=probe)
            else:
                circuit.reached()
            raise failed.error from None
        except ServiceUnavailable:
            raise
        except StoreError:
            circuit.reached()
            raise
        circuit.reached()
        return found

    @contextmanager
    def stream(
        self,
        method: str,
        path: str,
        *,
        params: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        content: bytes | IO[bytes] | None = None,
    ) -> Iterator[httpx.Response]:
        """One try of one request; the answer's body is the caller's to read.

        Redirects of a GET or HEAD are followed, without the token once they lead elsewhere, and
        without If-Range: what is there has another ETag.

        Raises:
            Failed: not reached, broken off (also while the body is read), or a temporary error.
            StoreError: any other status of 400 or more, but for 416.
        """
        url = str(httpx.URL(self.url + path, params=params) if params else self.url + path)
        own = True
        request_id = uuid.uuid4().hex
        for _ in range(_MOST_REDIRECTS + 1):
            own = own and origin(url) == self._origin
            # httpx.Headers hides the token in its repr, also where a traceback shows local variables.
            sent = httpx.Headers({k: v for k, v in (headers or {}).items() if own or k != "If-Range"})
            if own:
                sent["X-Request-Id"] = request_id
                if self._token is not None:
                    sent["Authorization"] = f"Bearer {self._token.get_secret_value()}"
            with self._answer(method, url, sent, content) as response:
                target = response.headers.get("Location")
                if response.status_code not in _REDIRECTS or target is None:
                    self._raise_for_status(method, url, response, own)
                    yield response
                    return
            url = self._redirected(method, url, target)
        raise ServiceError(f"{method} {self.url}{path}: more than {_MOST_REDIRECTS} redirects", url=self.url)

    @contextmanager
    def _answer(
        self, method: str, url: str, headers: httpx.Headers, content: bytes | IO[bytes] | None
    ) -> Iterator[httpx.Response]:
        began = time.monotonic()
        try:
            client = self._client()
            request = client.build_request(method, url, headers=headers, content=content)
            with unlogged(), answered_within(self.limits.call):
                response = client.send(request, stream=True)
            logger.debug(
                "%s %s: %d in %.3f s", method, shown(url), response.status_code, time.monotonic() - began
            )
            try:
                yield response
            finally:
                response.close()
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            reason = _reason(error, self.limits)
            logger.debug("%s %s: %s", method, shown(url), reason)
            raise Failed(
                ServiceUnavailable(
                    f"{shown(url)} was not reached: {reason}; check the address, and that the service runs",
                    url=self.url,
                ),
                sent=not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout),
                down=origin(url) == self._origin and not isinstance(error, httpx.PoolTimeout),
            ) from None

    def _raise_for_status(self, method: str, url: str, response: httpx.Response, own: bool) -> None:
        status = response.status_code
        if status < 400 or status == 416:
            return
        # What a bucket says may repeat the address, signature and all.
        body = self._read(response, _LARGEST_ERROR) if own and method != "HEAD" else b""
        error = error_of(url, method, response, body)
        if status not in TEMPORARY:
            raise error
        raise Failed(error, down=own and status in (502, 503, 504), wait=retry_after(response, time.time()))

    def _redirected(self, method: str, url: str, target: str) -> str:
        if method not in ("GET", "HEAD"):
            raise ServiceError(
                f"{method} {shown(url)} is redirected to {shown(target)}, where it is not repeated; use the address "
                "that the service itself has",
                url=self.url,
            )
        try:
            new = str(httpx.URL(url).join(target))
            origin(new)
        except (httpx.InvalidURL, ValueError):
            raise ServiceError(f"{shown(url)} is redirected to no http or https address") from None
        return new

    def _read(self, response: httpx.Response, most: int) -> bytes:
        """The body of an answer that is no archive."""
        if response.status_code >= 400 and not _is_plain(response):
            return b""
        _require_plain(response)
        until, data = time.monotonic() + self.limits.call, bytearray()
        for chunk in response.iter_bytes():
            data += chunk
            if len(data) > most:
                if response.status_code >= 400:
                    break
                raise ServiceError(f"{self.url} answered more than {most} bytes", url=self.url)
            if time.monotonic() > until:
                error = ServiceUnavailable(
                    f"{self.url} had not ended its answer after {self.limits.call:g} s", url=self.url
                )
                raise Failed(error)
        return bytes(data)

    def _client(self) -> httpx.Client:
        process = os.getpid()
        client = self._clients.get(process)
        if client is None:
            limits = self.limits
            try:
                made = httpx.Client(
                    timeout=httpx.Timeout(limits.read, connect=limits.connect, pool=limits.call),
                    limits=httpx.Limits(max_connections=64, max_keepalive_connections=16),
                    follow_redirects=False,
                    # Not coded: a few bytes of a coded answer can stand for more than the memory holds.
                    headers={"User-Agent": "aotcache", "Accept-Encoding": "identity"},
                )
            except (ImportError, ValueError, httpx.InvalidURL) as error:
                why = (
                    "it is a SOCKS proxy, which needs httpx[socks]"
                    if isinstance(error, ImportError)
                    else "no such kind"
                )
                # Not with the error's text: the address of a proxy can hold a password.
                raise ConfigError(
                    f"{self.url} cannot be asked through the proxy that HTTP_PROXY, HTTPS_PROXY or ALL_PROXY names: "
                    f"{why}; correct the variable, or set NO_PROXY for this host"
                ) from None
            make_patient(made)
            client = self._clients.setdefault(process, made)
            if client is not made:
                made.close()
        return client


def _is_plain(response: httpx.Response) -> bool:
    coding: str = response.headers.get("Content-Encoding", "identity")
    return coding.strip().lower() == "identity"


def _require_plain(response: httpx.Response) -> None:
    """Refuse an answer that is coded although no coding was accepted."""
    if not _is_plain(response):
        coding = response.headers["Content-Encoding"]
        raise ServiceError(
            f"{shown(str(response.url))} answered {response.status_code} coded as {coding[:40]!r}, which was not "
            "asked for: does something between here and the service compress it?",
            status=response.status_code,
        )


def _reason(error: Exception, limits: Limits) -> str:
    """What happened, in words that hold nothing of the request or of the answer."""
    if isinstance(error, httpx.ConnectTimeout):
        return f"no connection within {limits.connect:g} s"
    if isinstance(error, httpx.ReadTimeout | httpx.WriteTimeout):
        return str(error) if str(error).startswith(LATE) else f"not a byte for {limits.read:g} s"
    if isinstance(error, httpx.ConnectError):
        return str(error) or "no connection"
    if isinstance(error, httpx.PoolTimeout):
        return "all connections were in use"
    if isinstance(error, httpx.RemoteProtocolError):
        return "the connection was closed early, or what came was not HTTP"
    return f"the connection failed ({type(error).__name__})"


def pause(failures: int) -> float:
    """Seconds to wait after so many failures in a row, with jitter."""
    state = tenacity.RetryCallState(tenacity.Retrying(), None, (), {})
    state.attempt_number = failures
    return _BACKOFF(state)


def _wait(state: tenacity.RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome is not None else None
    asked = error.wait if isinstance(error, Failed) else None
    return (asked or 0.0) + _BACKOFF(state)


_sessions: dict[tuple[str, str | None], ServiceSession] = {}


def session_for(url: str) -> ServiceSession:
    """This process's session with a service, with its token, see `token_for`.

    Raises:
        StoreError: for an address that is none.
        ConfigError: if others can read the token's file.
    """
    place = service_url(url)
    token = token_for(place, Settings())
    found = _sessions.get((place, token))
    if found is None:
        if token is not None and not _private(place):
            logger.warning(
                "the token for %s crosses the network unencrypted, where anybody on the way can read it; put TLS in "
                "front of the service and use https://",
                place,
            )
        found = _sessions.setdefault((place, token), ServiceSession(place, token))
    return found


def _private(place: str) -> bool:
    """Whether what is sent there is encrypted, or does not leave this host."""
    scheme, host, _ = origin(place)
    try:
        return scheme == "https" or host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
