"""`aotcache serve`: the service on this machine, in one process, with a builder beside it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import platform
import signal
import socket
import sys
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aotcache.config import Settings, settings
from aotcache.errors import ConfigError
from aotcache.spec import load_spec
from aotcache.trust import TrustedKeys, make_signing_key, signing_key_path, trusted_keys, unfinished_key

if TYPE_CHECKING:
    from aotcache.service.tokens import Tokens

logger = logging.getLogger(__name__)

GRACE_SECONDS = 20
"""How long requests may go on after the server was told to end."""

_BUILDER_SCOPES = ("read", "publish", "build")
_BUILDER_DAYS = 30


def serve(
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")] = 8400,
    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            metavar="URL",
            help="A directory or bucket.  [default: AOTCACHE_STORE, else <home>/service/store]",
        ),
    ] = None,
    database: Annotated[
        str | None, typer.Option("--database", metavar="URL", help="[default: AOTCACHE_DATABASE]")
    ] = None,
    spec: Annotated[
        list[Path] | None,
        typer.Option(
            "--spec", metavar="PATH", help="A spec that clients may ask builds of, or a folder; repeat."
        ),
    ] = None,
    builder: Annotated[
        bool | None,
        typer.Option("--builder/--no-builder", help="Build here.  [default: with --spec]"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON when it listens.")] = False,
) -> None:
    """Serve a store over HTTP: signed artifacts to fetch and share, and builds on request.

    Needs no configuration. Logs go to stderr, one JSON object per line. Ends at SIGTERM or
    SIGINT, when requests that run are answered.
    """
    try:
        import uvicorn

        from aotcache.api import logs
        from aotcache.api.app import create_app
        from aotcache.api.auth import is_loopback
        from aotcache.api.protocol import LimitedHeads
        from aotcache.api.state import GIB, ServiceConfig
        from aotcache.db.engine import Database
        from aotcache.db.migrate import upgrade
        from aotcache.service.tokens import Tokens
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the service needs {error.name}, which is not installed: pip install 'aotcache[server]'"
        ) from error

    current = settings()
    specs = named_specs(spec or [])
    building = bool(specs) if builder is None else builder
    if building and not specs:
        raise ConfigError("--builder without --spec has nothing to build; name a spec, or leave it out")
    trusted = trusted_keys(current)
    if builder is not False:
        _ensure_key(current, trusted, building)
    logs.configure()
    config = ServiceConfig(
        store=store or served_store(current),
        database=database or current.database,
        trusted=trusted,
        uploads=current.service / "uploads",
        specs=tuple(specs),
        loopback=is_loopback(host),
        blob_bytes=int(current.archive_gib * GIB),
        signed_url_seconds=current.signed_url_seconds,
        lease_seconds=current.lease_seconds,
    )
    with ExitStack() as stack:
        base = Database(config.database)
        stack.callback(base.close)
        upgrade(base)
        tokens = Tokens(base)
        if not config.loopback and not tokens.any_live():
            raise ConfigError(
                f"{host} can be reached from other machines, and there is no token: everybody could publish; make "
                "one with aotcache token create, or listen on 127.0.0.1"
            )
        listener = _listen(host, port)
        stack.callback(listener.close)
        url = _url(host, listener)
        # uvicorn raises the signal again when it has ended; what comes after it is to run still.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)

        ends: list[Callable[[], None]] = []

        class Server(uvicorn.Server):
            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                if self.started:
                    _announce(url, as_json)
                    if building:
                        ends.append(_start_builder(url, list(specs.values()), tokens))

            async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
                # The builder gives back what it has while it can still be heard.
                for end in ends:
                    await asyncio.to_thread(end)
                await super().shutdown(sockets)

        server = Server(
            uvicorn.Config(
                create_app(config),
                loop="uvloop",
                http=LimitedHeads,
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=GRACE_SECONDS,
            )
        )
        server.run(sockets=[listener])
        if not server.started:
            raise typer.Exit(1)


def named_specs(paths: list[Path]) -> dict[str, Path]:
    """Specs by the name in their `[drafter]` table; of a folder, all that lie in it. Raises ConfigError."""
    found: dict[str, Path] = {}
    for path in paths:
        files = sorted(path.glob("*.toml")) if path.is_dir() else [path]
        if not files:
            raise ConfigError(f"--spec {path}: the folder has no .toml file", path=str(path))
        for file in files:
            spec = load_spec(file)
            name = spec.drafter.name
            if found.setdefault(name, spec.path) != spec.path:
                raise ConfigError(
                    f"--spec: {found[name]} and {spec.path} are both called {name!r} in [drafter], and builds name "
                    "specs by that; rename one"
                )
    return found


def served_store(current: Settings) -> str:
    """What a service on this host keeps its entries in, where no store is named. Raises ConfigError."""
    if "store" not in current.model_fields_set:
        return str((current.service / "store").as_uri())
    if current.store.startswith(("http://", "https://")):
        raise ConfigError(
            f"AOTCACHE_STORE is {current.store}, a service, not what a service keeps its entries in; "
            "say with --store which directory or bucket that is"
        )
    return current.store


def _ensure_key(current: Settings, trusted: TrustedKeys, building: bool) -> None:
    """A key to sign with, unless there is one, or builders elsewhere have theirs."""
    path = signing_key_path(current)
    if os.path.exists(path) or (trusted.list() and not building and not os.path.exists(unfinished_key(path))):
        return
    make_signing_key(path, trusted, f"service@{platform.node() or 'this-host'}")


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; choose another --port (0 takes a "
            "free one) or --host"
        ) from error
    listener.set_inheritable(False)
    return listener


def _url(host: str, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _announce(url: str, as_json: bool) -> None:
    text = json.dumps({"url": url}) if as_json else f"aotcache serves {url}   (routes: {url}/docs)"
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _start_builder(url: str, specs: list[Path], tokens: Tokens) -> Callable[[], None]:
    """Start the builder; answers what ends it."""
    from aotcache.cli.builder_process import BuilderProcess

    made: list[str] = []

    def revoke() -> None:
        while made:
            tokens.revoke(made.pop())

    def token() -> str | None:
        revoke()
        if not tokens.any_live():
            return None
        text, row = tokens.create(
            f"builder of {platform.node()} {uuid.uuid4().hex[:8]}",
            _BUILDER_SCOPES,
            timedelta(days=_BUILDER_DAYS),
        )
        made.append(row.id)
        return text

    child = BuilderProcess(url, specs, token)
    child.start()

    def end() -> None:
        child.close()
        revoke()

    return end
