"""Builds and leases of a service, as its clients see them: askers, builders, and `aotcache warm`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast
from urllib.parse import quote

from aotcache.errors import AotcacheError, BuildError, StoreError, named
from aotcache.types import CacheKey, Target, Toolchain

if TYPE_CHECKING:
    from aotcache.manifest import Manifest
    from aotcache.store.base import Store
    from aotcache.store.session import ServiceSession

_MOST_TEXT = 100_000
_MOST_STAGE = 120
"""Characters."""

State = Literal["queued", "running", "done", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class Build:
    """One build as the service tells it.

    Attributes:
        id: Its name; None where the artifact was there before any build.
        spec: Name of the registered spec.
        key: What is built.
        variant: For which target and toolchain, as text.
        state: Where it is; the last three are final.
        stage: What its builder does now.
        expected_seconds: How long the builder expects the whole build to take.
        attempts: How often it was begun.
        error: Type and message of the recorded error.
        log: The end of the builder's log.
        expires: Until when, by the service's clock, a failure is the answer to whoever asks.
    """

    id: str | None
    spec: str
    key: CacheKey
    variant: str
    state: State
    stage: str | None
    expected_seconds: float | None
    attempts: int
    error: tuple[str, str] | None
    log: str
    expires: float | None = None

    @property
    def ended(self) -> bool:
        """Whether the state is final."""
        return self.state in ("done", "failed", "cancelled")

    def failure(self) -> AotcacheError:
        """The recorded error of a build that did not make it, as an exception of its own type."""
        if self.state == "cancelled":
            return BuildError(f"build {self.id} of key {self.key} was cancelled", build=self.id, key=self.key)
        kind, message = self.error or ("BuildError", "the service recorded no reason")
        if self.expires is not None:
            until = time.strftime("%H:%M:%S", time.localtime(self.expires))
            message += f" (build {self.id}; the service builds this key again for whoever asks after {until})"
        return named(kind, message, build=self.id, key=self.key, attempts=self.attempts, log=self.log)


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to build and publish one entry.

    Attributes:
        id: Its name.
        token: The fencing token.
        seconds: How long it holds after it was taken or renewed.
    """

    id: str
    token: int
    seconds: float

    @property
    def claim(self) -> tuple[str, int]:
        """What a publish under it shows."""
        return self.id, self.token


class BuildService:
    """Calls of a service about builds and leases. Thread-safe.

    All raise ServiceUnavailable where the service is not reached, ServiceError for its other answers.

    Args:
        session: The way to the service.
    """

    def __init__(self, session: ServiceSession) -> None:
        self.session = session
        self.url = session.url

    def specs(self) -> list[str]:
        """Names of the registered specs."""
        answer = self.session.json("GET", "/v1/specs")
        return [str(row["name"]) for row in answer["specs"]]

    def trusts(self, fingerprint: str) -> bool | None:
        """Whether the service takes what that key signs; None where it does not say, as when it is away."""
        try:
            answer = self.session.json("GET", "/v1/trust")
            return fingerprint in {row["fingerprint"] for row in answer["keys"]}
        except (StoreError, KeyError, TypeError):
            return None

    def request(self, spec: str, key: CacheKey, target: Target, toolchain: Toolchain) -> Build:
        """Ask for an artifact; the same build for everyone who asks for the same."""
        body = {"spec": spec, "key": key, "target": str(target), "toolchain": asdict(toolchain)}
        return _build(self.session.json("POST", "/v1/builds", body=body))

    def get(self, id: str) -> Build:  # noqa: A002 - the interface's word
        """One build."""
        return _build(self.session.json("GET", f"/v1/builds/{quote(id)}"))

    def events(self, id: str) -> Iterator[dict[str, Any]]:  # noqa: A002
        """Stages and states of a build from its beginning to its final state."""
        return self.session.events(f"/v1/builds/{quote(id)}/events")

    def claim(self, specs: Sequence[str], variants: Sequence[str], holder: str) -> tuple[Build, Lease] | None:
        """Take the next build that waits, with its lease; None if there is none.

        Registers the specs. Not repeated when it is unclear whether it was heard: what it took then
        is free again when its lease ends.
        """
        body = {"specs": list(specs), "variants": list(variants), "holder": holder}
        answer = self.session.json("POST", "/v1/builds/claim", body=body, retry=False)
        return None if answer is None else (_build(answer["build"]), _lease(answer))

    def progress(
        self,
        id: str,  # noqa: A002
        lease: Lease,
        stage: str,
        expected_seconds: float | None,
    ) -> bool:
        """Heartbeat and stage of a claimed build; whether it was cancelled.

        Raises:
            LeaseLost: the build is somebody else's by now.
        """
        body = {
            "lease": lease.id,
            "token": lease.token,
            "stage": stage[:_MOST_STAGE],
            "expected_seconds": expected_seconds,
        }
        return bool(self.session.json("POST", f"/v1/builds/{quote(id)}/events", body=body)["cancelled"])

    def finish(
        self,
        id: str,  # noqa: A002
        lease: Lease,
        *,
        error: tuple[str, str] | None = None,
        log: str = "",
        retry: bool = False,
    ) -> None:
        """Say how a claimed build ended.

        Args:
            id: The build.
            lease: What it was claimed with.
            error: Type and message; None where the artifact is published, or given back.
            log: The end of the builder's log.
            retry: Whether another attempt could go better; without an error, the build is given back
                as if it had not been begun.

        Raises:
            LeaseLost: the build is somebody else's by now.
        """
        body = {
            "lease": lease.id,
            "token": lease.token,
            "error": None if error is None else {"type": error[0], "message": _plain(error[1])},
            "log": _plain(log),
            "retry": retry,
        }
        self.session.json("POST", f"/v1/builds/{quote(id)}/finish", body=body)

    def acquire(self, key: CacheKey, variant: str, holder: str) -> Lease:
        """Take the lease of an entry.

        Raises:
            LeaseHeld: somebody else has it.
        """
        body = {"key": key, "variant": variant, "holder": holder}
        return _lease(self.session.json("POST", "/v1/leases", body=body, retry=False))

    def renew(self, lease: Lease) -> None:
        """Heartbeat.

        Raises:
            LeaseLost: it is gone.
        """
        self.session.json("PUT", f"/v1/leases/{quote(lease.id)}", body={"token": lease.token})

    def release(self, lease: Lease) -> None:
        """Give a lease back; nothing happens to one that is lost."""
        self.session.json("DELETE", f"/v1/leases/{quote(lease.id)}", params={"token": lease.token})


class LeasingStore(Protocol):
    """A store that publishes under leases."""

    def publish(
        self,
        manifest: Manifest,
        archive: Path,
        *,
        replace: bool = False,
        lease: tuple[str, int] | None = None,
    ) -> bool:
        """As `Store.publish`. With a lease that is lost: LeaseLost, and nothing is written."""


def service_of(store: Store) -> BuildService | None:
    """The service behind a store, or None where there is none."""
    if store.own:
        return None
    from aotcache.store.http import HttpStore  # which most programs need not load

    remote = shared(store)
    return BuildService(remote.session) if isinstance(remote, HttpStore) else None


def shared(store: Store) -> Store:
    """What others see of a store: the remote one behind this host's copies."""
    if store.own:
        return store
    from aotcache.store.tiered import TieredStore

    return store.remote if isinstance(store, TieredStore) else store


def leasing(store: Store) -> LeasingStore:
    """The same store, for one that `service_of` finds a service behind."""
    return cast("LeasingStore", store)


def _plain(text: str) -> str:
    """The end of a text, as JSON and databases can hold it."""
    return text[-_MOST_TEXT:].encode(errors="replace").decode().replace("\0", "\ufffd")


def _build(value: dict[str, Any]) -> Build:
    error = value.get("error")
    return Build(
        value["id"],
        value["spec"],
        CacheKey(value["key"]),
        value["variant"],
        cast("State", value["state"]),
        value.get("stage"),
        value.get("expected_seconds"),
        value["attempts"],
        None if error is None else (str(error["type"]), str(error["message"])),
        value.get("log") or "",
        value.get("expires"),
    )


def _lease(value: dict[str, Any]) -> Lease:
    return Lease(str(value["lease"]), int(value["token"]), float(value["seconds"]))
