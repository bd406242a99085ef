"""Processes that begin in milliseconds, and can be killed between any two operations.

One process imports everything once and forks a child for each request, so that a round of a kill test
costs no imports. Children run real product code; what they acknowledge goes through a pipe at once, so
that it is known whatever becomes of them.

    with hatchery(folder) as hatched:
        ended = hatched.run("tests.faults.acts:publish", {"url": url, "seed": 1}, kill_at=17)

Run as a program it is the process that forks: requests are lines of JSON on stdin, answers on stdout.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import random
import select
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults import dying

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 60.0
"""Seconds that a child may take before it is a fault by itself."""

_PDEATHSIG = 1


@dataclass(frozen=True)
class Ended:
    """How a child ended.

    Attributes:
        status: Its exit status; negative for a signal.
        said: What it acknowledged and answered, in order.
        seconds: How long it took.
        late: Whether it was still at work after its limit, and was killed for that.
        operations: How many operations it made.
        log: What it wrote to stdout and stderr.
    """

    status: int
    said: list[dict[str, Any]]
    seconds: float
    late: bool
    operations: int
    log: str = field(repr=False)

    @property
    def killed(self) -> bool:
        """Whether SIGKILL ended it before its work did."""
        return self.status == -signal.SIGKILL and not self.late

    @property
    def acknowledged(self) -> list[dict[str, Any]]:
        """What it said was done before it ended."""
        return [line["done"] for line in self.said if "done" in line]

    @property
    def error(self) -> str | None:
        """The name and text of what it raised; None if it raised nothing."""
        return next((line["error"] for line in self.said if "error" in line), None)

    @property
    def answer(self) -> Any:
        """What the function returned. Fails if it raised or was killed."""
        assert self.status == 0, f"status {self.status}: {self.error}\n{self.log}"
        return next(line["answer"] for line in self.said if "answer" in line)


class Child:
    """A process that runs."""

    def __init__(self, hatched: Hatchery, number: int, pid: int, slots: dying.Slots, log: Path) -> None:
        self._hatched, self._number, self._slots, self._log = hatched, number, slots, log
        self.pid = pid

    def wait(self) -> Ended:
        """How it ended, which is within its limit."""
        ended = self.poll(None)
        assert ended is not None
        return ended

    def poll(self, seconds: float | None = 0.0) -> Ended | None:
        """How it ended; None if it runs on after so many seconds. To be asked once it has ended no more."""
        answer = self._hatched._answer(self._number, "ended", seconds)
        if answer is None:
            return None
        # One that was killed at once has none.
        log = self._log.read_text(errors="replace") if self._log.exists() else ""
        self._log.unlink(missing_ok=True)
        ended = Ended(
            answer["ended"], answer["said"], answer["seconds"], answer["late"], self._slots.count, log
        )
        self._slots.close()
        return ended

    def arm(self, at: int) -> None:
        """Have it killed before its `at`-th operation from now."""
        self._slots.arm(at)

    @property
    def operations(self) -> int:
        """How many operations it has made since it was armed, or since its beginning."""
        return self._slots.count

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal; nothing if it has ended."""
        self._hatched._ask({"signal": self._number, "which": int(number)})


class Hatchery:
    """The process that forks. Not thread-safe."""

    def __init__(self, process: subprocess.Popen[str], folder: Path, environment: Mapping[str, str]) -> None:
        self._process, self._folder = process, folder
        self._environment = dict(environment)
        self._numbers = 0
        self._answers: dict[tuple[int, str], dict[str, Any]] = {}
        self._rest = b""

    def begin(
        self,
        call: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        kill_at: int | None = None,
        kill_after: float | None = None,
        limit: float = LIMIT,
        environment: Mapping[str, str | None] | None = None,
        uid: int | None = None,
        umask: int | None = None,
        before: Mapping[str, Any] | None = None,
        armed: bool = True,
        counted: bool = True,
    ) -> Child:
        """Start a child.

        Args:
            call: `module:function`; what it returns must fit into JSON.
            arguments: Its keyword arguments.
            kill_at: Kill it before its n-th operation.
            kill_after: Kill it after so many seconds.
            limit: After so many seconds it is killed, and late.
            environment: Further variables; None removes one.
            uid, umask: Who it is.
            before: Further calls, `module:function` to arguments, made first and not counted: shims.
            armed: Whether operations are counted from the beginning, or only from `Child.arm` on.
            counted: Whether they are counted at all, which costs time.
        """
        self._numbers += 1
        number = self._numbers
        log = self._folder / f"{number}.log"
        slots = dying.Slots.create(self._folder / f"{number}.slots")
        if armed:
            slots.arm(kill_at or dying.NEVER)
        self._ask(
            {
                "number": number,
                "call": call,
                "arguments": dict(arguments or {}),
                "slots": str(slots.path),
                "log": str(log),
                "kill_after": kill_after,
                "limit": limit,
                "environment": {**self._environment, **(environment or {})},
                "uid": uid,
                "umask": umask,
                "before": dict(before or {}),
                "counted": counted,
            }
        )
        started = self._answer(number, "pid", None)
        assert started is not None
        return Child(self, number, started["pid"], slots, log)

    def run(self, call: str, arguments: Mapping[str, Any] | None = None, **how: Any) -> Ended:
        """`begin`, and wait for its end."""
        return self.begin(call, arguments, **how).wait()

    def _ask(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def _answer(self, number: int, kind: str, seconds: float | None) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        out = self._process.stdout.fileno()
        until = None if seconds is None else time.monotonic() + seconds
        while (number, kind) not in self._answers:
            left = None if until is None else max(0.0, until - time.monotonic())
            if not select.select([out], [], [], left)[0]:
                return None
            data = os.read(out, 1 << 16)
            assert data, "the process that forks has ended"
            *lines, self._rest = (self._rest + data).split(b"\n")
            for answer in map(json.loads, lines):
                self._answers[answer["number"], "pid" if "pid" in answer else "ended"] = answer
        return self._answers.pop((number, kind))


@contextmanager
def hatchery(folder: Path, *, environment: Mapping[str, str] | None = None) -> Iterator[Hatchery]:
    """Start the process that forks, and end it and all its children with the block.

    Args:
        folder: For logs.
        environment: Variables of every child.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o777)  # children of another uid write there too
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.hatchery"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        try:
            yield Hatchery(process, folder, environment or {})
        finally:
            process.stdin.close()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def acknowledge(**what: Any) -> None:
    """Say, in a child, that something is done: from here on it must not be lost."""
    _say(done=what)


_said: list[int] = []


def _say(**line: Any) -> None:
    data = json.dumps(line).encode() + b"\n"
    while data:  # a long answer takes several
        data = data[os.write(_said[0], data) :]


@dataclass
class _Running:
    number: int
    pid: int
    handle: int
    said: int
    began: float
    ends: float
    kill_at: float | None
    text: bytes = b""
    late: bool = False


class _Forking:
    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ, None)
        self._running: dict[int, _Running] = {}
        self._buffer = b""

    def serve(self) -> None:
        while True:
            for key, _ in self._selector.select(self._patience()):
                if key.data is None:
                    data = os.read(0, 1 << 16)
                    if not data:
                        self._end()
                        return
                    self._buffer += data
                    while b"\n" in self._buffer:
                        line, _, self._buffer = self._buffer.partition(b"\n")
                        self._request(json.loads(line))
                elif key.fd == key.data.said:
                    self._drain(key.data)
                elif key.data.number in self._running:
                    self._ended(key.data)
            self._kill_the_late()

    def _patience(self) -> float | None:
        moments = [m for r in self._running.values() for m in (r.ends, r.kill_at) if m is not None]
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _kill_the_late(self) -> None:
        now = time.monotonic()
        for running in self._running.values():
            if now >= running.ends:
                running.late, running.ends = True, now + 60
                os.kill(running.pid, signal.SIGKILL)
            if running.kill_at is not None and now >= running.kill_at:
                running.kill_at = None
                os.kill(running.pid, signal.SIGKILL)

    def _request(self, request: dict[str, Any]) -> None:
        if "signal" in request:
            running = self._running.get(request["signal"])
            if running is not None:
                os.kill(running.pid, request["which"])
            return
        out, into = os.pipe()
        sys.stdout.flush()
        now = time.monotonic()
        pid = os.fork()
        if pid == 0:
            os.close(out)
            _child(request, into)
        os.close(into)
        after = request["kill_after"]
        running = _Running(
            request["number"],
            pid,
            os.pidfd_open(pid),
            out,
            now,
            now + request["limit"],
            None if after is None else now + after,
        )
        self._running[running.number] = running
        self._selector.register(running.handle, selectors.EVENT_READ, running)
        self._selector.register(out, selectors.EVENT_READ, running)
        print(json.dumps({"number": running.number, "pid": pid}), flush=True)

    def _drain(self, running: _Running) -> bool:
        data = os.read(running.said, 1 << 16)
        if not data:
            self._selector.unregister(running.said)
            os.close(running.said)
            running.said = -1
            return False
        running.text += data
        return True

    def _ended(self, running: _Running) -> None:
        seconds = time.monotonic() - running.began
        _, status = os.waitpid(running.pid, 0)
        # What it forked itself may hold the pipe for longer: only what is there already is waited for.
        if running.said >= 0:
            os.set_blocking(running.said, False)
            try:
                while self._drain(running):
                    pass
            except BlockingIOError:
                self._selector.unregister(running.said)
                os.close(running.said)
        self._selector.unregister(running.handle)
        os.close(running.handle)
        del self._running[running.number]
        whole, _, _ = running.text.rpartition(b"\n")
        answer = {
            "number": running.number,
            "ended": os.waitstatus_to_exitcode(status),
            "said": [json.loads(line) for line in whole.splitlines()],
            "seconds": seconds,
            "late": running.late,
        }
        print(json.dumps(answer), flush=True)

    def _end(self) -> None:
        for running in self._running.values():
            os.kill(running.pid, signal.SIGKILL)
            os.waitpid(running.pid, 0)


def _child(request: dict[str, Any], said: int) -> None:
    """Does not return."""
    try:
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
        _said[:] = [said]
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, nothing), (1, log), (2, log)):
            os.dup2(source, target)
        os.close(log)
        slots = dying.Slots.open(Path(request["slots"]))
        if request["umask"] is not None:
            os.umask(request["umask"])
        if request["uid"] is not None:
            os.setgroups([])
            os.setgid(request["uid"])
            os.setuid(request["uid"])
        for name, value in request["environment"].items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        random.seed()
        tempfile.tempdir = None  # found anew, for this child's environment
        for before, arguments in request["before"].items():
            _named(before)(**arguments)
        function = _named(request["call"])
        with dying.watched(slots) if request["counted"] else nullcontext():
            answer = function(**request["arguments"])
        _say(answer=answer)
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 1)
    except BaseException as error:
        traceback.print_exc()
        _say(error=f"{type(error).__name__}: {error}")
        _flushed_exit(1)
    _flushed_exit(0)


def _flushed_exit(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _named(call: str) -> Any:
    module, _, name = call.partition(":")
    return getattr(importlib.import_module(module), name)


def main() -> None:
    # What children need, imported once. Nothing here makes a thread or uses a bucket.
    from tests.faults import acts

    acts.warm_up()
    _Forking().serve()


if __name__ == "__main__":
    # Children import this module by its name: both must be one.
    from tests.faults import hatchery as _same

    _same.main()
