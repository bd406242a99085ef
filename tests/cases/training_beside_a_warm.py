"""Process P of A1: four threads that train from artifacts, while P has a second model warmed."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence

import torch

import aotcache
from aotcache.build import Cell, Plan
from aotcache.errors import AotcacheError
from tests.cases import tiny
from tests.cases.support import make_batch

THREADS, STEPS = 4, 200


class Started:
    """Tells when the builder begins to trace."""

    def __init__(self) -> None:
        self.tracing = threading.Event()
        self.stages: list[str] = []

    def planned(self, plan: Plan, builds: Sequence[Cell]) -> None:
        pass

    def stage(self, cell: Cell | None, stage: str) -> None:
        self.stages.append(stage)
        if stage == "export":
            self.tracing.set()

    def finished(self, cell: Cell, seconds: float, error: AotcacheError | None) -> None:
        pass


def train(spec: str, store: str, start: threading.Event) -> tuple[list[list[float]], int, int]:
    """Losses of every step of every thread, and the traces and misses of all of them."""
    replicas = [tiny.build() for _ in range(THREADS)]
    handles = [aotcache.attach(model, spec, store=store) for model in replicas]
    for handle in handles:
        handle.prefetch()
    losses: list[list[float]] = [[] for _ in range(THREADS)]
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            torch.get_num_threads()
            model = replicas[index]
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            batches = [make_batch(seed=10 * index + i) for i in range(5)]
            assert start.wait(200)
            for i in range(STEPS):
                optimizer.zero_grad()
                loss = model(**batches[i % len(batches)])
                loss.backward()
                optimizer.step()
                losses[index].append(float(loss))
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    stats = [handle.stats() for handle in handles]
    for handle in handles:
        handle.detach()
    return losses, sum(s["traces"] for s in stats), sum(s["misses"] for s in stats)


def main(spec: str, store: str, second: str, second_store: str) -> None:
    torch.set_num_threads(1)
    call = torch.nn.Module.__call__
    now = threading.Event()
    now.set()
    with aotcache.forbid_tracing("process") as receipt:
        quiet, *quiet_counts = train(spec, store, now)
        started = Started()
        reports = []

        def request() -> None:
            try:
                reports.append(aotcache.warm(second, store=second_store, progress=started))
            finally:
                started.tracing.set()

        builder = threading.Thread(target=request)
        builder.start()
        beside, *counts = train(spec, store, started.tracing)
        builder.join()
    print(
        json.dumps(
            {
                "quiet": quiet,
                "beside": beside,
                "counts": [*quiet_counts, *counts, receipt.total],
                "same call": torch.nn.Module.__call__ is call,
                "stages": started.stages,
                "errors": [str(b.error) for report in reports for b in report.failed],
                "built": [
                    {"key": b.cell.key, "content": b.manifest and b.manifest.content, "reused": b.reused}
                    for report in reports
                    for b in report.built
                ],
            }
        )
    )
