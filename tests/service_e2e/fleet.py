"""Worker processes of one host that start together: `python fleet.py SPEC PROCESSES THREADS`.

Each attaches, prefetches and trains in its threads, and tells what it saw. They are forked from a process
that has imported torch and nothing of theirs, so that 32 of them start in the time of one. The last line
on stdout is a list with one answer for each process, as JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import aotcache

STEPS = 2


def worker(spec: Path, threads: int) -> dict[str, Any]:
    """Train, one replica for each thread, and compare with eager autograd."""
    import fleet_drafter  # lies beside the spec

    torch.set_num_threads(1)
    layers = aotcache.load_spec(spec).drafter.kwargs["layers"]
    torch.manual_seed(7)
    batches = [torch.randn(8, fleet_drafter.WIDTH) for _ in range(threads)]
    expected = [gradients(fleet_drafter.build(layers), x) for x in batches]
    # Not in the threads: they would draw each other's weights.
    replicas = [fleet_drafter.build(layers) for _ in batches]
    barrier = threading.Barrier(threads)

    def train(model: torch.nn.Module, x: torch.Tensor) -> tuple[list[torch.Tensor], dict[str, Any]]:
        barrier.wait()
        with aotcache.attach(model, spec, lock=spec.with_name(spec.name + ".lock")) as handle:
            handle.prefetch()
            for _ in range(STEPS):
                found = gradients(model, x)
            return found, handle.stats()

    with aotcache.forbid_tracing() as receipt:
        with ThreadPoolExecutor(threads) as pool:
            results = list(pool.map(train, replicas, batches))
    worst = max(
        float((a - b).abs().max() / b.abs().max())
        for (found, _), wanted in zip(results, expected, strict=True)
        for a, b in zip(found, wanted, strict=True)
    )
    return {
        "worst": worst,
        "compilers": [name for name in ("g++", "gcc", "c++", "cc", "clang") if shutil.which(name)],
        "builder_half": sorted(
            m for m in sys.modules if m.startswith(("aotcache.compile", "aotcache.build"))
        ),
        "traces": receipt.total,
        "threads": [
            {name: stats[name] for name in ("hits", "misses", "eager_calls", "traces")}
            for _, stats in results
        ],
    }


def gradients(model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Of every parameter."""
    model.zero_grad(set_to_none=True)
    model(x).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _child(write: int, go: int, spec: Path, threads: int) -> None:
    """Never returns."""
    code = 1
    try:
        os.read(go, 1)  # ends when the parent has forked them all
        answer: dict[str, Any] = worker(spec, threads)
        code = 0
    except BaseException:
        answer = {"error": traceback.format_exc()}
    with os.fdopen(write, "w") as pipe:
        json.dump(answer, pipe)
    os._exit(code)


def main() -> None:
    spec, processes, threads = Path(sys.argv[1]).absolute(), int(sys.argv[2]), int(sys.argv[3])
    sys.path.insert(0, str(spec.parent))
    go, gate = os.pipe()
    running = []
    for _ in range(processes):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(gate)
            os.close(read)
            _child(write, go, spec, threads)
        os.close(write)
        running.append((pid, read))
    os.close(gate)
    answers = []
    for pid, read in running:
        with os.fdopen(read) as pipe:
            text = pipe.read()
        os.waitpid(pid, 0)
        answers.append(json.loads(text or '{"error": "the process ended without a word"}'))
    print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
