"""How other keys are served while many clients wait for the build of one that all of them lack.

The clients are plain connections in a process of their own, and the builder says its stages as
one that compiles would; nothing is compiled. All of it shares one machine.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from typing import Any

from aotcache.db.engine import Database
from bench import serve_rows, serve_traffic
from bench.common import ROOT, Bar, Report, fresh, main, text_of_seconds

MODULE = "bench.misses"
CLIENTS = 64
ROWS = 10_000
ASKED = 40
"""Keys of one look-up: those of one drafter."""
IDLE = 5.0
BUILD = 10.0
"""Seconds."""
PAUSE = 0.02

_SPEC = "bench"
_TARGET = "cpu:x86_64-avx2"
_TOOLCHAIN = {"torch": "2.13.0", "git": "c" * 40}
_VARIANT = "cpu-x86_64-avx2+torch2.13.0-cccccccc-cpu"
_MISSING = "f" * 64


def run(quick: bool) -> Report:
    """Look-ups with an idle service, and from the first of the clients to the last, over both databases."""
    rounds = 1 if quick else 3
    found = {
        dialect: [fresh(MODULE, "waiting", dialect=dialect) for _ in range(rounds)]
        for dialect in ("sqlite", "postgresql")
    }
    table, bars = [], []
    for dialect, sides in found.items():
        for when in ("idle", "waiting"):
            p50, p99 = (median(side[when][name] for side in sides) for name in ("p50", "p99"))
            what = "idle" if when == "idle" else f"while {CLIENTS} clients wait for a build"
            table.append((f"look-up of {ASKED} keys, {what}, {dialect}: p50, p99", _both(p50, p99)))
        bars.append(
            Bar(
                f"p99 in ms of look-ups of other keys while {CLIENTS} clients wait, {dialect}",
                median(side["waiting"]["p99"] for side in sides) * 1000,
                200,
            )
        )
    return Report(
        name="misses",
        title=f"{CLIENTS} clients miss one key together",
        columns=("what", "measured"),
        rows=table,
        bars=bars,
        data=found,
    )


def _both(p50: float, p99: float) -> str:
    return f"{text_of_seconds(p50)}, {text_of_seconds(p99)}"


def side_waiting(dialect: str) -> dict[str, Any]:
    """Seconds of look-ups: idle, and while the clients wait."""
    made: AbstractContextManager[str] = getattr(serve_rows, dialect)()
    with made as address, tempfile.TemporaryDirectory(prefix="aotcache-bench-") as name:
        database = Database(address)
        try:
            serve_rows.fill(database, ROWS)
        finally:
            database.close()
        (Path(name) / "store").mkdir()
        with serve_traffic.serving(Path(name), store=Path(name) / "store", database=address) as (port, _):
            _claim(port)  # tells the service of the spec
            warm: list[float] = []
            _look_ups(port, lambda: len(warm) > 20, warm)
            idle: list[float] = []
            until = time.monotonic() + IDLE
            _look_ups(port, lambda: time.monotonic() > until, idle)
            clients = subprocess.Popen(
                [sys.executable, "-m", MODULE, "--side", "clients", "--args", json.dumps({"port": port})],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
            )
            builder = threading.Thread(target=_build, args=(port,))
            builder.start()
            waiting: list[float] = []
            try:
                _look_ups(port, lambda: clients.poll() is not None, waiting)
            finally:
                clients.kill()
                out, _ = clients.communicate()
                builder.join()
    ends = json.loads(out.splitlines()[-1])["ends"]
    if ends != [f"failed: {_SPEC}"] * CLIENTS:
        raise RuntimeError(f"the clients were told {ends}")
    return {"idle": serve_rows.spread(idle), "waiting": serve_rows.spread(waiting), "count": len(waiting)}


def side_clients(port: int) -> dict[str, Any]:
    """What each client is told at the end, who all begin at one moment."""
    ends: list[str] = []

    def client() -> None:
        body = {"spec": _SPEC, "key": _MISSING, "target": _TARGET, "toolchain": _TOOLCHAIN}
        build = _ask(port, "POST", "/v1/builds", body)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", f"/v1/builds/{build['id']}/events")
        connection.getresponse().read()
        connection.close()
        build = _ask(port, "GET", f"/v1/builds/{build['id']}")
        ends.append(f"{build['state']}: {build['error']['message']}")

    serve_traffic.together(CLIENTS, client)
    return {"ends": ends}


def _look_ups(port: int, over: Any, times: list[float]) -> None:
    """One after another until it is over, with a short pause between them."""
    body = {"keys": [serve_rows.key_of(number) for number in range(ASKED)]}
    while not over():
        began = time.perf_counter()
        found = _ask(port, "POST", "/v1/resolve", body)["found"]
        times.append(time.perf_counter() - began)
        if len(found) != ASKED:
            raise RuntimeError(f"{len(found)} of {ASKED} keys were found")
        time.sleep(PAUSE)


def _build(port: int) -> None:
    while (claimed := _claim(port)) is None:
        time.sleep(0.2)
    path = f"/v1/builds/{claimed['build']['id']}"
    held = {"lease": claimed["lease"], "token": claimed["token"]}
    until = time.monotonic() + BUILD
    for stage in ("capture", "export", "compile", "certify"):
        _ask(port, "POST", f"{path}/events", {**held, "stage": stage})
        time.sleep(max(0.0, until - time.monotonic()) / 4)
    error = {"type": "BuildFailed", "message": _SPEC}
    _ask(port, "POST", f"{path}/finish", {**held, "error": error, "log": "", "retry": False})


def _claim(port: int) -> Any:
    return _ask(port, "POST", "/v1/builds/claim", {"specs": [_SPEC], "variants": [_VARIANT], "holder": _SPEC})


def _ask(port: int, method: str, path: str, body: Any = None) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        sent = None if body is None else json.dumps(body)
        connection.request(method, path, sent, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        data = answer.read()
        if answer.status >= 400:
            raise RuntimeError(f"{method} {path} answered {answer.status}: {data[:500]!r}")
        return json.loads(data) if data else None
    finally:
        connection.close()


if __name__ == "__main__":
    main("misses", run, {"waiting": side_waiting, "clients": side_clients})
