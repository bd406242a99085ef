"""The builder process, seen from its parent.

All tracing happens in a child, on its main thread, in a scrubbed environment that leads
to no key and no token, under a time and a memory limit. Parent and child talk in JSON lines over a pipe of their
own, so nothing the drafter prints can be taken for an answer. A child that dies,
hangs or grows beyond its limit becomes a BuilderDied that carries the end of its log.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from aotcache.errors import BuilderDied, ConfigError, named

Event = dict[str, Any]

_KEPT = (
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "TERM",
    "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH",
    "CC", "CXX", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "HF_HOME", "XDG_CACHE_HOME",
    "SSL_CERT_FILE", "OMP_NUM_THREADS", "MKL_NUM_THREADS",
    # Of aotcache's own, none that is a secret or leads to one: no token, no address of a store or
    # database, no place of keys.
    "AOTCACHE_HOME", "AOTCACHE_LOCK_SECONDS",
)  # fmt: skip
# Folders, logs and downloads. torch itself puts the cache folders into the environment of any
# process that imports enough of it, a training one too; a builder has folders of its own.
_HARMLESS_TORCH = frozenset(
    {
        "TORCH_HOME", "TORCH_LOGS", "TORCH_SHOW_CPP_STACKTRACES", "TORCH_HUB",
        "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR",
    }
)  # fmt: skip
_REFUSED_PREFIXES = ("TORCH", "TRITON_", "INDUCTOR_", "PYTORCH_", "ATEN_", "AOT_INDUCTOR_")
_USER = "aotcache"
"""Who the builder is to torch, which names a folder of the temporary directory by the user; an
account without a name would stop it."""
_POLL = 0.25
"""Seconds between looks at the child's memory."""
_LOG_TAIL = 4000
"""Characters of the log that an error carries."""


def scrubbed(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a builder: what it needs to find Python and a compiler, no more.

    Raises:
        ConfigError: a variable is set that would change what torch compiles without
            being in any key.
    """
    refused = sorted(
        name for name in environ if name.startswith(_REFUSED_PREFIXES) and name not in _HARMLESS_TORCH
    )
    if refused:
        raise ConfigError(
            f"these environment variables would change what is compiled without being in the key: "
            f"{', '.join(refused)}; unset them for aotcache warm, and set options in the spec's [compile] table",
            variables=refused,
        )
    return {name: environ[name] for name in _KEPT if name in environ}


class Sandbox:
    """One builder process.

    Args:
        job: What the child works on, sent as its first line.
        staging: Folder of its own for temporary files and finished archives.
        seconds: Longest time without an answer to one request.
        headers: Folder for torch's precompiled C++ headers, shared by builders of one host: ten
            seconds saved for each of them. torch keys them by compiler, flags and content.
        memory: Most resident memory in bytes of the child and its compilers, or None.
    """

    def __init__(
        self, job: Mapping[str, Any], staging: Path, *, headers: Path, seconds: float, memory: int | None
    ) -> None:
        self.staging = staging
        self._seconds = seconds
        self._memory = memory
        environment = scrubbed(os.environ)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the sandbox
        to_child, from_child = os.pipe(), os.pipe()
        # Everything temporary goes to the staging folder, which the parent removes. The place of keys
        # and tokens is one where there are none: the drafter's own code runs here, and signs nothing.
        environment |= {
            "AOTCACHE_CONFIG_HOME": str(staging / "no-keys"),
            "TMPDIR": str(staging),
            "TORCHINDUCTOR_CACHE_DIR": str(staging / "inductor"),
            "LOGNAME": _USER,
            # Idle threads of OpenMP sleep, and take no core from builders and training beside this one: two
            # processes of two threads each on two cores were seen to take 17 times as long spinning.
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        (staging / f"torchinductor_{_USER}").symlink_to(headers, target_is_directory=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "aotcache.build.worker", str(to_child[0]), str(from_child[1])],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=(to_child[0], from_child[1]),
            start_new_session=True,
        )
        os.close(to_child[0])
        os.close(from_child[1])
        self._out = os.fdopen(to_child[1], "w", encoding="utf-8")
        self._in = from_child[0]
        self._buffer = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._in, selectors.EVENT_READ)
        self._send(job)

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self._out.write(json.dumps(message) + "\n")
            self._out.flush()
        except (BrokenPipeError, ValueError) as error:
            raise self._died("ended before it took its next request") from error

    def request(
        self, message: Mapping[str, Any], answer: Callable[[Event], Mapping[str, Any] | None]
    ) -> Event:
        """Send a request and follow its events until `{"event": "done"}`, which is returned.

        Args:
            message: The request.
            answer: Called with every event on the way; what it returns is sent back.

        Raises:
            AotcacheError: of the type and with the message that the child reported.
            BuilderDied: crash, time or memory limit.
        """
        self._send(message)
        for event in self._events():
            if event["event"] == "done":
                return event
            if event["event"] == "error":
                raise named(str(event.get("type")), str(event["message"]), **event.get("details", {}))
            reply = answer(event)
            if reply is not None:
                self._send(reply)
        raise self._died("closed its pipe")

    def _events(self) -> Iterator[Event]:
        deadline = time.monotonic() + self._seconds
        while True:
            line, newline, rest = self._buffer.partition(b"\n")
            if newline:
                self._buffer = rest
                deadline = time.monotonic() + self._seconds
                yield json.loads(line)
                continue
            if time.monotonic() > deadline:
                raise self._died(
                    f"gave no sign for {self._seconds:.0f} s, its time limit (AOTCACHE_BUILD_SECONDS)"
                )
            used = _resident(self._process.pid) if self._memory is not None else 0
            if self._memory is not None and used > self._memory:
                raise self._died(
                    f"used {used >> 20} MiB, more than its limit of {self._memory >> 20} MiB "
                    "(AOTCACHE_BUILD_MEMORY_GIB)"
                )
            if self._selector.select(_POLL):
                data = os.read(self._in, 1 << 16)
                if not data:
                    return
                self._buffer += data

    @property
    def dead(self) -> bool:
        """Whether the child has ended."""
        return self._process.poll() is not None

    def log(self) -> str:
        """The end of what the child and its compilers printed."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _LOG_TAIL))
        return self._log.read().decode(errors="replace")

    def _died(self, what: str) -> BuilderDied:
        self.kill()
        code = self._process.wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return BuilderDied(
            f"the builder process {what} ({how}); the end of its log:\n{self.log()}", log=self.log()
        )

    def kill(self) -> None:
        """End the child and everything it started, from any thread."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def close(self) -> None:
        """End the child and everything it started. Safe to call twice."""
        if not self._out.closed:
            try:
                self._out.close()
            except BrokenPipeError:
                pass
            self._selector.close()
            os.close(self._in)
        self.kill()
        self._process.wait()
        self._log.close()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _resident(leader: int) -> int:
    """Resident bytes of all processes of the session that `leader` leads (Linux)."""
    total = 0
    page = os.sysconf("SC_PAGE_SIZE")
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            stat = Path("/proc", entry, "stat").read_text()
        except OSError:
            continue
        fields = stat.rpartition(")")[2].split()
        if int(fields[3]) == leader:
            total += int(fields[21]) * page
    return total
