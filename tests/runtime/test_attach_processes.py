"""Whole processes: cold rounds on many threads, and a host with no compiler on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.conftest import Probe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_HEAD = """
import json, sys, threading
from pathlib import Path
spec, store = sys.argv[1:3]
sys.path.insert(0, str(Path(spec).parent))
import torch, aotcache, probe
torch.set_num_threads(1)

torch.manual_seed(3)
given = probe.batch({"batch": 4}, "cpu")[1]

def step(model):
    loss = model(**given)
    wanted = [*model.parameters(), given["x"], given["states"]]
    return loss.detach(), torch.autograd.grad(loss, wanted)
"""

_COLD = (
    _HEAD
    + """
from concurrent.futures import ThreadPoolExecutor
from aotcache.runtime import registry

models = [probe.build() for _ in range(8)]
barrier = threading.Barrier(8)
home = Path(sys.argv[3])

def work(model):
    barrier.wait()
    with aotcache.attach(model, spec, store=store) as handle:
        loss, gradients = step(model)
    return loss, gradients, handle.stats()

first, unpacked, loads = None, set(), []
for _ in range(int(sys.argv[4])):
    registry._opened.clear()
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, models))
    loads.append(sum(stats["loads"] for *_, stats in results))
    first = first or results[0]
    for loss, gradients, stats in results:
        assert torch.equal(loss, first[0])
        assert all(map(torch.equal, gradients, first[1]))
        assert stats["misses"] == stats["traces"] == 0
    unpacked.add(tuple(sorted((p.name, p.stat().st_ino) for p in (home / "unpacked").iterdir())))
print(json.dumps({"unpackings": len(unpacked), "folders": len(next(iter(unpacked))), "loads": loads}))
"""
)

_BARE = (
    """
import sys
sys.modules["triton"] = None  # importing it fails, as where it is not installed
"""
    + _HEAD
    + """
import shutil
model = probe.build()
with aotcache.attach(model, spec, store=store) as handle:
    loss, gradients = step(model)
    stats = handle.stats()
print(json.dumps({
    "compiler": shutil.which("g++") or shutil.which("gcc") or shutil.which("cc") or shutil.which("clang"),
    "half": sorted(m for m in sys.modules if m.startswith(("aotcache.compile", "aotcache.build"))),
    "loss": float(loss), "hits": stats["hits"], "traces": stats["traces"],
    "runners": sorted({r["runner"] for r in stats["regions"].values()}),
}))
"""
)


def _run(program: str, *arguments: Any, **environment: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environment},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_eight_threads_in_fifty_cold_rounds_agree_and_unpack_once(probe: Probe, tmp_path: Path) -> None:
    home = tmp_path / "home"
    found = _run(_COLD, probe.spec, probe.store, home, 50, AOTCACHE_HOME=str(home))
    assert found["unpackings"] == 1
    assert found["folders"] == 2  # two probes share one archive, and the scored region has its own
    assert found["loads"] == [3] * 50  # one open for each of three keys, whoever of the threads came first


def test_processes_that_start_at_once_unpack_once(probe: Probe, tmp_path: Path) -> None:
    home = tmp_path / "home"
    command = [sys.executable, "-W", "ignore", "-c", _COLD, str(probe.spec), probe.store, str(home), "1"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "AOTCACHE_HOME": str(home)}
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    answers = [(p.communicate()[0], p.returncode) for p in running]
    assert [code for _, code in answers] == [0, 0, 0]
    assert [json.loads(out)["folders"] for out, _ in answers] == [2, 2, 2]
    assert not [p for p in (home / "unpacked").iterdir() if p.name.startswith(".")]


def test_a_worker_needs_no_compiler(probe: Probe, tmp_path: Path) -> None:
    empty = tmp_path / "bin"
    empty.mkdir()
    found = _run(
        _BARE, probe.spec, probe.store, AOTCACHE_HOME=str(tmp_path / "home"), PATH=str(empty), CC="", CXX=""
    )
    assert found["compiler"] is None
    assert found["half"] == []
    assert (found["hits"], found["traces"], found["runners"]) == (3, 0, ["native"])
    torch.manual_seed(3)
    with torch.no_grad():
        batch = probe.module.batch({"batch": 4}, "cpu")[1]
        from aotcache.runtime.dense import eager_without_tracing

        with eager_without_tracing():
            expected = float(probe.module.build()(**batch))
    assert found["loss"] == pytest.approx(expected, rel=1e-5)
