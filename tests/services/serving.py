"""A real `aotcache serve` process for tests, with a home, a store and a database of its own."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from aotcache.db.engine import Database
from aotcache.db.migrate import upgrade
from aotcache.service.tokens import Tokens
from aotcache.trust import SigningKey

_SECONDS = 60.0
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Serving:
    """A server that runs.

    Attributes:
        url: Its address on loopback.
        folder: Holds everything of it: `home`, `config` and its log.
        store, database: URLs of these.
        process: The server.
    """

    url: str
    folder: Path
    store: str
    database: str
    process: subprocess.Popen[str]
    environment: dict[str, str] = field(repr=False)

    @property
    def home(self) -> Path:
        """Its AOTCACHE_HOME."""
        return self.folder / "home"

    @property
    def config_home(self) -> Path:
        """Its AOTCACHE_CONFIG_HOME."""
        return self.folder / "config"

    @property
    def signing_key(self) -> SigningKey:
        """The key that it made, and trusts."""
        return SigningKey.load(self.config_home / "signing.pem")

    @property
    def log(self) -> str:
        """Everything that it has written to stderr."""
        return (self.folder / "log").read_text()

    def requests(self) -> list[dict[str, Any]]:
        """The lines of its access log."""
        lines = (json.loads(line) for line in self.log.splitlines() if line.startswith("{"))
        return [line for line in lines if line.get("event") == "request"]

    def token(self, *scopes: str, name: str | None = None, expires: timedelta | None = None) -> str:
        """A new token."""
        return make_token(self.database, *scopes, name=name, expires=expires)

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()
        self.process.wait(_SECONDS)

    def close(self) -> int:
        """End it in good order; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


def make_token(database: str, *scopes: str, name: str | None = None, expires: timedelta | None = None) -> str:
    """A new token in a database that may be in use; tables are made if there are none."""
    opened = Database(database)
    try:
        upgrade(opened)
        text, _ = Tokens(opened).create(name or f"test {time.monotonic_ns()}", scopes, expires)
    finally:
        opened.close()
    return text


@contextmanager
def serving(
    folder: Path,
    *,
    store: str | None = None,
    database: str | None = None,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    port: int = 0,
) -> Iterator[Serving]:
    """Start a server, wait until it is ready, and end it with the block.

    Args:
        folder: For all of it. Another server in the same folder goes on where one has ended.
        store, database: Their URLs; default: below `folder`.
        arguments: Further ones of `aotcache serve`.
        environment: Further variables.
        port: On loopback; 0 for a free one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    store = store or (folder / "store").as_uri()
    database = database or f"sqlite:///{folder / 'aotcache.db'}"
    command = [sys.executable, "-m", "aotcache", "serve", "--json", "--port", str(port)]
    command += ["--store", store, "--database", database, *arguments]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("AOTCACHE_")}
    variables |= {
        "AOTCACHE_HOME": str(folder / "home"),
        "AOTCACHE_CONFIG_HOME": str(folder / "config"),
        **(environment or {}),
    }
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            command,
            env=variables,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert process.stdout is not None
    with process.stdout:
        try:
            line = _first_line(process, folder / "log")
            server = Serving(json.loads(line)["url"], folder, store, database, process, variables)
            with urllib.request.urlopen(f"{server.url}/readyz", timeout=_SECONDS) as answer:
                assert answer.status == 200
            yield server
            server.close()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def _first_line(process: subprocess.Popen[str], log: Path) -> str:
    lines: queue.Queue[str] = queue.Queue()
    out = process.stdout
    assert out is not None
    threading.Thread(target=lambda: lines.put(out.readline()), daemon=True).start()
    try:
        line = lines.get(timeout=_SECONDS)
    except queue.Empty:
        line = ""
    assert line, f"the server did not start:\n{log.read_text()}"
    return line
