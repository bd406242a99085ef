"""Settings: the only reader of `AOTCACHE_*` environment variables.

Every field is a variable: `home` is `AOTCACHE_HOME`, and so on. Each `Settings()`
reads the environment anew, so that nothing is kept for the whole process.
"""

from __future__ import annotations

import os
import pwd
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from aotcache.errors import ConfigError

PREFIX = "AOTCACHE_"


class Settings(BaseSettings):
    """What can be set from outside. Units are in the names.

    Attributes:
        home: Where all state lives. Default: `aotcache` in `XDG_CACHE_HOME`, else in
            `~/.cache`; for a user who has no writable home (a container uid without
            an account), `aotcache-<uid>` in the system's temporary directory.
        config_home: What must outlast the cache: the signing key, trusted keys, tokens. Default:
            `aotcache` in `XDG_CONFIG_HOME`, else in `~/.config`; for a user without a home, `config` in `home`.
        store: URL of the store; default `file://<home>/store`.
        build_seconds: Time limit of one build, in seconds.
        build_memory_gib: Memory limit of one build, in GiB of address space that is
            really used (resident); None sets none.
        lock_seconds: How long to wait for another process that unpacks the same artifact.
        trust_shared_store: Open artifacts from a directory that other users can
            write to. Opening an artifact runs its code, so this trusts them all.
        trust_unsigned: Open artifacts from elsewhere that no trusted key has signed. Opening an
            artifact runs its code, so this trusts everyone who can write to the store, or to the way there.
        recall_hours: How old what this host knows of recalls may be: hours since a store that is not its
            own last showed its recall lists.
        recall_stale: What happens then, or when a list has expired: "warn", or "refuse" to open
            anything from that store.
        database: URL of the database that a service on this host keeps: `sqlite:////absolute/file.db`
            or `postgresql://...`; default `service/aotcache.db` in `home`.
        token: What the service is shown; default: the file `tokens/<host>_<port>` in `config_home`.
        archive_gib: The largest archive that the service takes, in GiB.
        lease_seconds: How long the service leaves an entry to a builder that gives no sign of life.
        signed_url_seconds: How long the addresses in a bucket are good that the service hands out; 0 to
            hand out none, where clients cannot reach the bucket.
        record: Every `attach` records the calls of its drafter, as with `on_miss="record"`:
            the spec to write (`.toml`), or a folder for `<spec>.recorded.toml`.
        record_run: Folder that tells the processes of one recorded run from another run's;
            set by `aotcache record`. Every `attach` records; without `record`, beside its spec.

    Raises:
        ConfigError: naming the variable, what it holds and what was expected.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")

    home: Path = Field(default_factory=lambda: default_home())
    config_home: Path = Field(default_factory=lambda data: default_config_home(data["home"]))
    store: str = Field(default_factory=lambda data: (data["home"] / "store").as_uri())
    database: str = Field(
        default_factory=lambda data: f"sqlite:///{data['home'] / 'service' / 'aotcache.db'}", repr=False
    )
    build_seconds: float = Field(default=900.0, gt=0)
    build_memory_gib: float | None = Field(default=None, gt=0)
    lock_seconds: float = Field(default=300.0, gt=0)
    trust_shared_store: bool = False
    trust_unsigned: bool = False
    recall_hours: float = Field(default=168.0, gt=0)
    recall_stale: Literal["warn", "refuse"] = "warn"
    token: SecretStr | None = None
    archive_gib: float = Field(default=8.0, gt=0)
    signed_url_seconds: float = Field(default=600.0, ge=0, le=7 * 24 * 3600)
    lease_seconds: float = Field(default=60.0, ge=1, le=3600)
    record: Path | None = None
    record_run: Path | None = None

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError("; ".join(_complaints(error))) from error

    @field_validator("home", "config_home", "record", "record_run")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        return None if value is None else value.expanduser().absolute()

    @field_validator("record", "record_run", "token", mode="before")
    @classmethod
    def _empty_is_unset(cls, value: Any) -> Any:
        return None if value == "" else value

    @property
    def recording(self) -> bool:
        """Whether every `attach` records."""
        return self.record is not None or self.record_run is not None

    @property
    def service(self) -> Path:
        """The directory of a service on this host: its store and its database, unless they are elsewhere."""
        return self.home / "service"

    @property
    def locks(self) -> Path:
        """The directory of lock files."""
        return self.home / "locks"


def settings() -> Settings:
    """The settings of this moment. Raises ConfigError."""
    return Settings()


def builder_environment(token: str | None) -> dict[str, str]:
    """This process's environment, for a builder that the service starts.

    Args:
        token: What it is to show; None to show none.
    """
    own = (PREFIX + "TOKEN", PREFIX + "DATABASE")  # a database's address can have a password in it
    kept = {k: v for k, v in os.environ.items() if k not in own}
    return kept if token is None else {**kept, PREFIX + "TOKEN": token}


def recording_environment(output: Path | None, run: Path) -> dict[str, str]:
    """This process's environment, for a command whose calls are to be recorded.

    Args:
        output: What to write, see `Settings.record`; None for a file beside each spec.
        run: The run's folder.
    """
    wanted = {PREFIX + "RECORD_RUN": str(run)}
    if output is not None:
        wanted[PREFIX + "RECORD"] = str(output.expanduser().absolute())
    return {**{k: v for k, v in os.environ.items() if k != PREFIX + "RECORD"}, **wanted}


def _complaints(error: ValidationError) -> Iterator[str]:
    for entry in error.errors():
        name = PREFIX + ".".join(str(part) for part in entry["loc"]).upper()
        yield f"{name}={entry['input']!r}: {entry['msg']}; correct the variable or unset it"


def default_home() -> Path:
    """The home used when `AOTCACHE_HOME` is unset; creates nothing."""
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG rules say that a relative value is to be ignored.
    cache = Path(xdg) if os.path.isabs(xdg) else _user_folder(".cache")
    if cache is not None:
        home = cache / "aotcache"
        # os.path answers False for what may not be looked at; Path would raise.
        if os.path.isdir(home) or _can_create(home):
            return home
    return Path(tempfile.gettempdir()).absolute() / f"aotcache-{os.getuid()}"


def default_config_home(home: Path) -> Path:
    """The config home used when `AOTCACHE_CONFIG_HOME` is unset; creates nothing."""
    xdg = os.environ.get("XDG_CONFIG_HOME", "")
    config = Path(xdg) if os.path.isabs(xdg) else _user_folder(".config")
    if config is not None:
        folder = config / "aotcache"
        if os.path.isdir(folder) or _can_create(folder):
            return folder
    return home / "config"


def _user_folder(name: str) -> Path | None:
    home = os.environ.get("HOME", "")
    if not os.path.isabs(home):
        try:
            home = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:
            return None
    return Path(home) / name


def _can_create(path: Path) -> bool:
    nearest = next((parent for parent in path.parents if os.path.exists(parent)), None)
    return nearest is not None and os.access(nearest, os.W_OK | os.X_OK)
