"""Whose recalls count on this host, and how one of theirs is told."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from aotcache.config import Settings
from aotcache.errors import ConfigError
from aotcache.recall_list import Recalled, signer_of
from aotcache.trust import PublicKey, SigningKey, signing_key_path, trusted_keys


@dataclass(frozen=True, slots=True)
class Signer:
    """Whose recalls count here.

    Attributes:
        name: What the key is called in lists.
        key: The key.
    """

    name: str
    key: PublicKey

    def __str__(self) -> str:
        return f"{self.name} ({self.key.fingerprint})"


@dataclass(frozen=True, slots=True)
class InForce:
    """One thing that is not opened on this host, and who says so."""

    entry: Recalled
    signer: Signer

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.entry.at))
        return f"{self.entry.reason} (recalled by {self.signer} on {when})"


def signers(config: Settings) -> dict[str, Signer]:
    """Whose recalls count: the trusted keys, and this user's own signing key. By hex of the fingerprint.

    Raises:
        ConfigError: a trusted key's file cannot be understood.
    """
    found = {signer_of(key.key): Signer(key.name, key.key) for key in trusted_keys(config).list()}
    path = signing_key_path(config)
    try:
        status = path.stat()
    except OSError:
        return found
    own = _own_key(path, status.st_mtime_ns, status.st_ino, status.st_size)
    if own is not None:
        found.setdefault(signer_of(own), Signer("this user", own))
    return found


@lru_cache(maxsize=4)
def _own_key(path: Path, *_: int) -> PublicKey | None:
    try:
        return SigningKey.load(path).public
    except ConfigError:
        return None  # nothing is signed with it either


__all__ = ["InForce", "Signer", "signers"]
