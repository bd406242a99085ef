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
from tests.cases.second import LAYERS
from tests.cases.support import make_batch

THREADS, STEPS = 4, 200


class Started:
    """Tells how many traces the builder has begun."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self._over = False
        self._changed = threading.Condition()

    def wait(self, traces: int) -> None:
        """Until so many have begun, or none will any more."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._over or self.stages.count("export") >= traces, 600)

    def end(self) -> None:
        """No further trace will begin."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def planned(self, plan: Plan, builds: Sequence[Cell]) -> None:
        pass

    def stage(self, cell: Cell | None, stage: str) -> None:
        with self._changed:
            self.stages.append(stage)
            self._changed.notify_all()

    def finished(self, cell: Cell, seconds: float, error: AotcacheError | None) -> None:
        pass


def train(spec: str, store: str, builder: Started | None) -> tuple[list[list[float]], int, int]:
    """Losses of every step of every thread, and the traces and misses of all of them.

    Beside a builder the steps are spread over all of its traces: an equal share begins with each.
    """
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
            for i in range(STEPS):
                if builder is not None:
                    builder.wait(1 + i * LAYERS // STEPS)
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
    with aotcache.forbid_tracing("process") as receipt:
        quiet, *quiet_counts = train(spec, store, None)
        started = Started()
        reports = []

        def request() -> None:
            try:
                reports.append(aotcache.warm(second, store=second_store, progress=started))
            finally:
                started.end()

        builder = threading.Thread(target=request)
        builder.start()
        beside, *counts = train(spec, store, started)
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
