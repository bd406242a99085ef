"""This user's signing keys: the one in use and, while it is being replaced, the one before it.

Between `rotate` and `retire` all that is published is signed by both, so that hosts may learn to trust the
new key one after the other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from aotcache.config import Settings
from aotcache.drafts import clear
from aotcache.errors import ConfigError
from aotcache.manifest import Manifest
from aotcache.trust import SigningKey, sign, signing_key_path, trusted_keys, unfinished_key


def previous_key_path(config: Settings) -> Path:
    """Where the key before this user's signing key is, while both sign."""
    return config.config_home / "signing.previous.pem"


def signing_keys(config: Settings) -> list[SigningKey]:
    """The keys that this user signs with, the one in use first.

    Raises:
        ConfigError: there is none, or one cannot be read.
    """
    keys = [SigningKey.load(signing_key_path(config))]
    path = previous_key_path(config)
    if path.exists():
        keys.append(SigningKey.load(path))
    return keys if len({key.public for key in keys}) == len(keys) else keys[:1]


def sign_with(manifest: Manifest, keys: list[SigningKey]) -> Manifest:
    """The manifest with the signatures of all these keys."""
    for key in keys:
        manifest = sign(manifest, key)
    return manifest


def rotate(config: Settings, name: str) -> SigningKey:
    """Make a new signing key, trust it here, and keep the one in use beside it.

    Killed at any moment, there is one key in use, which is trusted here; until that is the new one, `rotate`
    goes on where it was when it is run again.

    Args:
        config: Where keys are.
        name: What to call the new one in lists.

    Raises:
        ConfigError: there is no key yet, it is not trusted here, the one before it is still kept, or another
            process is at it.
    """
    with _alone(config) as current:
        return _rotate(config, name, current)


def _rotate(config: Settings, name: str, current: SigningKey) -> SigningKey:
    path, kept = signing_key_path(config), previous_key_path(config)
    if kept.exists() and SigningKey.load(kept).public != current.public:
        raise ConfigError(
            f"{kept} is there already: the last rotation is not over. When your stores are signed by "
            f"{current.public.fingerprint} too (aotcache sign), and every host trusts it: aotcache keygen --retire",
            path=str(kept),
        )
    if all(key.key != current.public for key in trusted_keys(config).list()):
        raise ConfigError(
            f"{current.public.fingerprint}, the key in use, is not trusted here, and would go on signing beside the "
            f"new one: if it has leaked, delete {path} and run aotcache keygen; else aotcache trust add "
            f"{current.public.to_text()}",
            path=str(path),
        )
    pending = unfinished_key(path)
    if pending.exists():
        clear(pending)
        made = SigningKey.load(pending)  # that of a rotation which was killed
    else:
        made = SigningKey.generate()
        made.save(pending)
    trusted_keys(config).add(made.public, name)
    if not kept.exists():
        current.save(kept)
    try:
        os.replace(pending, path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", path=str(path)) from error
    return made


def retire(config: Settings) -> SigningKey:
    """Drop the key before the one in use; it, once more.

    Raises:
        ConfigError: there is none, the one in use was not replaced yet, or another process is at it.
    """
    with _alone(config) as current:
        return _retire(config, current)


def _retire(config: Settings, current: SigningKey) -> SigningKey:
    kept = previous_key_path(config)
    if not kept.exists():
        raise ConfigError(f"no key is being replaced: there is no {kept}; aotcache keygen --rotate begins it")
    gone = SigningKey.load(kept)
    if gone.public == current.public:
        raise ConfigError(
            f"{gone.public.fingerprint} is still the key in use: the rotation was broken off before it was replaced; "
            "aotcache keygen --rotate goes on with it",
            path=str(kept),
        )
    try:
        kept.unlink()
    except OSError as error:
        raise ConfigError(f"cannot remove {kept}: {error.strerror}", path=str(kept)) from error
    return gone


@contextmanager
def _alone(config: Settings) -> Iterator[SigningKey]:
    """The key in use, while no other step of a rotation of these keys is taken."""
    SigningKey.load(signing_key_path(config))  # where there is none, nothing is made for the lock
    path = config.config_home / ".rotation.lock"
    lock = FileLock(path, timeout=config.lock_seconds, mode=0o600)
    try:
        lock.acquire()
    except Timeout:
        raise ConfigError(
            f"{path} was not free within {config.lock_seconds:g} s: another keygen --rotate or --retire is at it",
            path=str(path),
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", path=str(path)) from error
    try:
        yield SigningKey.load(signing_key_path(config))
    finally:
        lock.release()


__all__ = ["previous_key_path", "retire", "rotate", "sign_with", "signing_keys"]
