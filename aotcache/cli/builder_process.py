"""The builder that a service runs beside itself: started, started again when it dies, ended."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from aotcache.config import builder_environment
from aotcache.errors import AotcacheError

logger = logging.getLogger(__name__)

_FIRST_WAIT = 1.0
_LONGEST_WAIT = 60.0
_STEADY_SECONDS = 60.0
"""A builder that lived this long is started again at once."""

_END_SECONDS = 10.0
"""How long a builder may take to end when it is told to."""


class BuilderProcess:
    """`aotcache builder` as a child process, watched by a thread.

    Args:
        url: Address of the service.
        specs: The specs that it builds.
        token: Makes what the builder shows, anew for each start; None where no token is needed.
    """

    def __init__(self, url: str, specs: Sequence[Path], token: Callable[[], str | None]) -> None:
        self._command = [sys.executable, "-m", "aotcache", "builder", "--as-child", "--service", url]
        for spec in specs:
            self._command += ["--spec", str(spec)]
        self._token = token
        self._ending = threading.Event()
        self._starting = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._watch, name="builder", daemon=True)

    def start(self) -> None:
        """Start it, and keep it alive from now on."""
        self._thread.start()

    def close(self) -> None:
        """End it: what it builds is taken over by whoever claims it next. Waits some seconds at most."""
        with self._starting:
            self._ending.set()
            child = self._child
        if child is not None and child.poll() is None:
            child.terminate()
            try:
                child.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                logger.warning("the builder did not end within %g s and is killed", _END_SECONDS)
                child.kill()
        self._thread.join(_END_SECONDS)

    def _watch(self) -> None:
        wait = _FIRST_WAIT
        while not self._ending.is_set():
            started = time.monotonic()
            code = self._run()
            if self._ending.is_set():
                return
            lived = time.monotonic() - started
            wait = _FIRST_WAIT if lived > _STEADY_SECONDS else wait
            logger.error(
                "the builder ended with status %s after %.0f s; it is started again in %g s",
                code,
                lived,
                wait,
            )
            self._ending.wait(wait)
            wait = min(2 * wait, _LONGEST_WAIT)

    def _run(self) -> int | None:
        """One life of the builder; its exit status, or None if it could not be started."""
        try:
            environment = builder_environment(self._token())
            with self._starting:
                if self._ending.is_set():
                    return None
                # Its own output is the log's; stdout is this program's. It ends when stdin does, however this ends.
                self._child = subprocess.Popen(
                    self._command, env=environment, stdin=subprocess.PIPE, stdout=sys.stderr.fileno()
                )
        except (OSError, AotcacheError) as error:
            logger.error("the builder cannot be started: %s", error)
            return None
        try:
            return self._child.wait()
        finally:
            assert self._child.stdin is not None
            self._child.stdin.close()
