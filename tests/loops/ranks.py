"""Processes of a process group, each of which runs one function of this package and prints what it found."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.cases.support import ROOT

SIZE = 2
SECONDS = 120
"""For everything that two ranks do; whoever waits longer for the other hangs."""


def run(target: str, *arguments: Any, seconds: float = SECONDS) -> list[Any]:
    """What `module:function` returns on every rank, called as `function(rank, *arguments)`.

    Raises:
        AssertionError: a rank failed; with the ends of their output.
        subprocess.TimeoutExpired: they hang.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", "-m", "tests.loops.ranks", folder, target]
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        started = [
            subprocess.Popen(
                [*command, str(rank), json.dumps(arguments)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=ROOT,
                env=environment,
            )
            for rank in range(SIZE)
        ]
        try:
            ends = [process.communicate(timeout=seconds)[0] for process in started]
        finally:
            for process in started:
                process.kill()
        failed = [end[-4000:] for process, end in zip(started, ends, strict=True) if process.returncode]
        assert not failed, "\n".join(failed)
        return [json.loads((Path(folder) / f"found.{rank}").read_text()) for rank in range(SIZE)]


def main(folder: str, target: str, rank: str, arguments: str) -> None:
    torch.set_num_threads(1)
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=int(rank),
        world_size=SIZE,
        timeout=timedelta(seconds=30),
    )
    try:
        found = function(int(rank), *json.loads(arguments))
        (Path(folder) / f"found.{rank}").write_text(json.dumps(found))
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
