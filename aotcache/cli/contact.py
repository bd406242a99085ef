"""First contact with a service: its keys are shown, and a person says whether they are trusted."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import typer

from aotcache.config import Settings
from aotcache.errors import ConfigError, RejectedArtifact, ServiceError, ServiceUnavailable
from aotcache.trust import PublicKey, TrustedKeys, trust_command, trusted_keys

_LONGEST_NAME = 60


@dataclass(frozen=True, slots=True)
class Offered:
    """A key that a service shows.

    Attributes:
        name: What the service calls it; printable.
        public: The key.
    """

    name: str
    public: PublicKey


def is_service(url: str) -> bool:
    """Whether a store's address is that of a service."""
    return url.startswith(("http://", "https://"))


def offered(url: str) -> list[Offered]:
    """The keys that a service says its artifacts are signed with.

    Raises:
        ServiceError: it cannot be asked, or its answer makes no sense.
    """
    from aotcache.store.session import ServiceSession

    # Without the token: whoever answers there is not known yet.
    session = ServiceSession(url)
    try:
        return _read(session.json("GET", "/v1/trust"), url)
    finally:
        session.close()


def _read(answer: Any, url: str) -> list[Offered]:
    found = []
    try:
        for entry in answer["keys"]:
            public = PublicKey.from_text(entry["public"])
            if public.fingerprint != entry["fingerprint"]:
                raise ValueError(f"the key {entry['public']!r} is not the one of {entry['fingerprint']!r}")
            name = "".join(c for c in str(entry.get("name") or "") if c.isprintable())
            found.append(Offered(name[:_LONGEST_NAME] or url, public))
    except (KeyError, TypeError, AttributeError, ValueError, ConfigError) as error:
        raise ServiceError(f"{url}/v1/trust: not a list of keys: {error}", url=url) from error
    return found


def meet(store: str | None) -> None:
    """Before a command reads from a service: see that one of its keys is trusted, or ask.

    A service that cannot be reached is left to the command, and so is one without keys.

    Args:
        store: Address of the store; None is the configured one.

    Raises:
        ConfigError: none of its keys is trusted, and there is nobody to ask.
        RejectedArtifact: they are not to be trusted.
    """
    config = Settings()
    url = config.store if store is None else store
    if not is_service(url) or config.trust_unsigned:
        return
    try:
        keys = offered(url)
    except ServiceUnavailable:
        return
    trusted = trusted_keys(config)
    known = {key.key.fingerprint for key in trusted.list()}
    if not keys or any(key.public.fingerprint in known for key in keys):
        return
    if not introduce(url, keys, trusted):
        raise RejectedArtifact(
            f"no key of {url} is trusted, so nothing that it holds would be opened here; nothing was read from it"
        )


def introduce(
    url: str, keys: Sequence[Offered], trusted: TrustedKeys, name: str | None = None
) -> list[PublicKey]:
    """Show each key of a service and ask whether it is trusted; those that are from now on.

    Raises:
        ConfigError: there is no terminal to ask on.
    """
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        lines = [f"  {key.public.fingerprint}  {key.name}" for key in keys]
        raise ConfigError(
            "\n".join(
                [
                    (
                        f"{url} is a service whose keys are not trusted yet, and there is no terminal to ask on; "
                        "it says that its artifacts are signed with"
                    ),
                    *lines,
                    "compare with what its operator tells you, then: "
                    + trust_command(keys[0].public.fingerprint, url),
                ]
            ),
            url=url,
            fingerprints=[key.public.fingerprint for key in keys],
        )
    added = []
    for key in keys:
        sys.stderr.write(
            f"{url} says that its artifacts are signed with\n"
            f"  {key.public.fingerprint}  {key.name}\n"
            "Whoever holds that key can run code on this machine, as this user. Compare it with what the "
            "service's operator tells you.\n"
        )
        if typer.confirm("Trust it?", default=False, err=True):
            trusted.add(key.public, name or key.name, url)
            added.append(key.public)
    return added
