"""Who signs here, and whose signatures count: `keygen` and `trust`."""

from __future__ import annotations

import getpass
import os
import platform
import shlex
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from aotcache import rotation
from aotcache.cli.contact import Offered, introduce, is_service, offered
from aotcache.cli.output import JsonFlag, count, emit_json, human_time, print_lines, print_table
from aotcache.config import Settings, settings
from aotcache.errors import ConfigError
from aotcache.recall import Recalls
from aotcache.trust import PublicKey, TrustedKey, make_signing_key, signing_key_path, trusted_keys

_LARGEST = 4096
"""Bytes of a file that may hold a public key."""

NameOption = Annotated[str | None, typer.Option("--name", help="What to call the key in lists.")]

trust = typer.Typer(
    name="trust",
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Whose artifacts are opened here: add, list and remove keys.",
)


def keygen(
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Where to put it.  [default: signing.pem in AOTCACHE_CONFIG_HOME]"),
    ] = None,
    name: NameOption = None,
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Make another one; what is published is signed by both.")
    ] = False,
    retire: Annotated[
        bool, typer.Option("--retire", help="End that: the key before the one in use signs no more.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Make the key that signs what this host publishes, and trust it here.

    Never writes over a key that is there. To replace one: --rotate, then have every host trust the new
    key, sign what lies in stores with it (aotcache sign), and --retire the old one.
    """
    config = settings()
    if rotate or retire:
        if rotate == retire or out is not None:
            raise ConfigError("--rotate and --retire are two steps, each without --out")
        _rotate(config, name, as_json) if rotate else _retire(config, as_json)
        return
    path = signing_key_path(config) if out is None else out.expanduser().absolute()
    name = name or f"{_user()}@{platform.node() or 'this-host'}"
    key = make_signing_key(path, trusted_keys(config), name)
    if as_json:
        emit_json({"path": str(path), "name": name, **_public(key.public)})
        return
    print_lines(
        [
            f"signing key  {path}  (for this user alone; whoever has it can sign in its name)",
            f"fingerprint  {key.public.fingerprint}",
            f"public key   {key.public.to_text()}",
            f"trusted here as {name!r}; on other hosts: "
            + shlex.join(["aotcache", "trust", "add", key.public.to_text(), "--name", name]),
        ]
    )


def _rotate(config: Settings, name: str | None, as_json: bool) -> None:
    name = name or f"{_user()}@{platform.node() or 'this-host'}, {time.strftime('%Y-%m-%d')}"
    key = rotation.rotate(config, name)
    if as_json:
        path, kept = signing_key_path(config), rotation.previous_key_path(config)
        emit_json({"path": str(path), "previous": str(kept), "name": name, **_public(key.public)})
        return
    print_lines(
        [
            f"new key      {key.public.fingerprint}",
            f"public key   {key.public.to_text()}",
            "what is published from now on is signed by the new key and by the one before it",
            "1. every host, and every service: "
            + shlex.join(["aotcache", "trust", "add", key.public.to_text(), "--name", name]),
            "2. each store: aotcache sign --store URL",
            "3. aotcache keygen --retire; then every host: aotcache trust remove of the old key",
        ]
    )


def _retire(config: Settings, as_json: bool) -> None:
    gone = rotation.retire(config)
    if as_json:
        emit_json({"retired": _public(gone.public)})
        return
    print_lines(
        [
            f"retired: {gone.public.fingerprint}; it is deleted here, and signs no more",
            "what it alone has signed is opened, and what it alone has recalled is blocked, while it is trusted; "
            "every host, and every service: "
            + shlex.join(["aotcache", "trust", "remove", gone.public.fingerprint]),
        ]
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid-{os.getuid()}"  # a container's, without an account


def _public(key: PublicKey) -> dict[str, Any]:
    return {"fingerprint": key.fingerprint, "public": key.to_text()}


@trust.command("add")
def add(
    source: Annotated[
        str,
        typer.Argument(
            metavar="KEY",
            help="A public key's text, a file with it, or the address of a service that shows it.",
        ),
    ],
    fingerprint: Annotated[
        list[str] | None,
        typer.Option(
            "--fingerprint", metavar="ed25519:...", help="Which key it has to be; then nothing is asked."
        ),
    ] = None,
    name: NameOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Trust a key: open what its owner signed.

    A service's keys are shown one by one, and asked about on a terminal; elsewhere
    --fingerprint must name what is to be trusted.
    """
    config = settings()
    trusted = trusted_keys(config)
    known = {key.key.fingerprint for key in trusted.list()}
    origin = source if is_service(source) else None
    keys = offered(source) if origin else [_given(source, name)]
    if origin and not keys:
        raise ConfigError(f"{source} shows no key: it has none, and nothing that is signed, yet")
    if fingerprint:
        _require(source, keys, fingerprint)
        keys = [key for key in keys if key.public.fingerprint in fingerprint]
    fresh = [key for key in keys if key.public.fingerprint not in known]
    if origin and fresh and not fingerprint:
        added = introduce(source, fresh, trusted, name)
    else:
        for key in keys:  # the known ones too: what a killed one left of them goes
            trusted.add(key.public, name or key.name, origin)
        added = [key.public for key in fresh]
    if as_json:
        emit_json(
            {"added": [_public(key) for key in added], "trusted": [_row(key) for key in trusted.list()]}
        )
    else:
        print_lines(f"trusted from now on: {key.fingerprint}" for key in added)
        if not fresh:
            print_lines(f"trusted already: {key.public.fingerprint}" for key in keys)
        elif not added:
            print_lines(["nothing was added"])
    if fresh and not added:
        raise typer.Exit(1)


def _given(source: str, name: str | None) -> Offered:
    path = Path(source).expanduser()
    try:
        is_file = path.is_file()
        text = path.read_bytes()[:_LARGEST].decode("ascii", "replace") if is_file else source
    except OSError as error:
        if len(source) < _LARGEST and Path(source).exists():
            raise ConfigError(f"cannot read {source}: {error.strerror}") from error
        text, is_file = source, False  # too long for a file's name: a text
    try:
        public = PublicKey.from_text(text)
    except ConfigError as error:
        where = f"{path}:" if is_file else "KEY is no file, and"
        raise ConfigError(f"{where} {error}") from error
    return Offered(name or (path.stem if is_file else public.fingerprint[:20]), public)


def _require(source: str, keys: list[Offered], wanted: list[str]) -> None:
    found = [key.public.fingerprint for key in keys]
    missing = [fingerprint for fingerprint in wanted if fingerprint not in found]
    if missing:
        raise ConfigError(
            f"{source[:_LARGEST]}: expected a key with fingerprint {missing[0]}, found {', '.join(found)}; nothing "
            "was added",
            expected=missing,
            found=found,
        )


@trust.command("list")
def show(as_json: JsonFlag = False) -> None:
    """List the keys whose artifacts are opened here."""
    config = settings()
    keys = trusted_keys(config).list()
    if as_json:
        emit_json({"folder": str(config.config_home / "trusted"), "trusted": [_row(key) for key in keys]})
    elif keys:
        rows = (
            (key.name, key.key.fingerprint, human_time(key.added), key.origin or "-", key.public)
            for key in keys
        )
        print_table(("name", "fingerprint", "added", "shown by", "public key"), rows)
    else:
        print_lines(
            [
                (
                    "no key is trusted: what this user built on this host is opened, and nothing else; "
                    "aotcache trust add, or aotcache keygen for a key of your own"
                )
            ]
        )


def _row(key: TrustedKey) -> dict[str, Any]:
    return {"name": key.name, "added": key.added, "origin": key.origin, **_public(key.key)}


@trust.command("remove", short_help="Stop trusting a key.")
def remove(
    which: Annotated[str, typer.Argument(metavar="KEY", help="Its fingerprint, or its name.")],
    as_json: JsonFlag = False,
) -> None:
    """Stop trusting a key: nothing that it signed is opened from now on, wherever it lies."""
    config = settings()
    before = len(Recalls(config.home).in_force())
    gone = trusted_keys(config).remove(which)
    lost = before - len(Recalls(config.home).in_force())
    if as_json:
        emit_json({"removed": _row(gone), "recalls": lost})
    else:
        print_lines(
            [
                (
                    f"no longer trusted: {gone.key.fingerprint} ({gone.name}); processes that opened its "
                    "artifacts keep them until they end"
                )
            ]
        )
        if lost:
            print_lines(
                [
                    f"no longer blocked here: {count(lost, 'recall')} of its own; aotcache recall lists the rest"
                ]
            )
