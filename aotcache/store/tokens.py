"""The token that a service is shown: from the setting, or from a file of the service's own."""

from __future__ import annotations

import stat
from pathlib import Path

from aotcache.config import Settings
from aotcache.errors import ConfigError
from aotcache.store.answers import origin


def token_for(url: str, settings: Settings) -> str | None:
    """The token for a service, or None.

    The setting's, which is for the configured store alone if that is a service; for others, their file's.

    Args:
        url: Of the service.
        settings: Of this moment.

    Raises:
        ConfigError: if others can read the token's file.
    """
    if settings.token is None or _another_service(settings.store, url):
        return _stored(url, settings)
    return settings.token.get_secret_value()


def _another_service(store: str, url: str) -> bool:
    try:
        return origin(store.lower()) != origin(url)
    except ValueError:
        return False  # a directory or a bucket


def token_path(url: str, settings: Settings) -> Path:
    """The file of a service's token: `tokens/<host>_<port>` in `config_home`."""
    _, host, port = origin(url)
    return settings.config_home / "tokens" / f"{host}_{port}"


def _stored(url: str, settings: Settings) -> str | None:
    path = token_path(url, settings)
    try:
        mode = path.stat().st_mode
        text = path.read_text().strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the token in {path}: {error}", path=str(path)) from None
    if mode & 0o077:
        raise ConfigError(
            f"the token in {path} has mode {stat.S_IMODE(mode):04o}, expected 0600; others may have read it: "
            "revoke it and store a new one, or chmod 600 it if you are sure",
            path=str(path),
        )
    return text or None
