"""Trains a drafter on several threads from artifacts, while another thread keeps tracing.

Each thread has a replica, an optimizer and a data order of its own. Now and then it keeps its
weights, its batch and its gradients, and at the end, when nothing else runs, the same step is
done eagerly and compared.

    aotcache warm examples/dflash/dflash.toml
    python examples/threads/train.py --spec examples/dflash/dflash.toml
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tracer import Tracer

import aotcache
from aotcache.runtime.dense import eager_without_tracing
from aotcache.spec import Spec

POOL = 8
"""Batches of each bucket that the threads draw from, each in its own order."""

CHECKS = 5
"""Steps of each thread that are compared with eager."""

Batch = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Kept:
    """One training step, kept for the comparison."""

    weights: dict[str, torch.Tensor]
    batch: Batch
    gradients: dict[str, torch.Tensor]


@dataclass
class Trainer:
    """What one thread does, and what came of it."""

    model: torch.nn.Module
    spec: Spec
    store: str | None
    batches: list[Batch]
    steps: int
    order: random.Random
    losses: list[float] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    first_step_seconds: float = 0.0
    seconds: float = 0.0
    stats: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    def run(self) -> None:
        """The thread's body."""
        torch.get_num_threads()  # a new thread takes over the process's setting only when asked for it
        try:
            self._train()
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"

    def _train(self) -> None:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        check_every = max(1, self.steps // CHECKS)
        started = time.perf_counter()
        # The tracer thread is part of the demonstration, so only this thread is forbidden to trace.
        # In a real trainer leave the default, which forbids it in the whole process.
        with aotcache.attach(self.model, self.spec, store=self.store, forbid_tracing="thread") as handle:
            for step in range(self.steps):
                batch = self.order.choice(self.batches)
                loss = self.model(*batch[0], **batch[1])
                loss.backward()
                if step == 0:
                    self.first_step_seconds = time.perf_counter() - started
                if step % check_every == 0:
                    self._keep(batch)
                optimizer.step()
                optimizer.zero_grad()
                self.losses.append(float(loss.detach()))
            self.seconds = time.perf_counter() - started - self.first_step_seconds
            self.stats = handle.stats()

    def _keep(self, batch: Batch) -> None:
        named = dict(self.model.named_parameters())
        self.kept.append(
            Kept(
                {name: p.detach().clone() for name, p in named.items()},
                batch,
                {name: p.grad.clone() for name, p in named.items() if p.grad is not None},
            )
        )


def build(spec: Spec) -> torch.nn.Module:
    """A replica of the spec's drafter."""
    model: torch.nn.Module = spec.resolve_factory()(**spec.drafter.kwargs)
    return model


def largest_error(spec: Spec, trainers: list[Trainer]) -> float | None:
    """The largest difference of any kept gradient from eager's, over eager's largest entry.

    A gradient that only one side has counts as 1; None if no step was kept.
    """
    if not any(trainer.kept for trainer in trainers):
        return None
    worst = 0.0
    model = build(spec)
    for kept in (kept for trainer in trainers for kept in trainer.kept):
        model.load_state_dict(kept.weights, strict=False)
        model.zero_grad()
        with eager_without_tracing():
            model(*kept.batch[0], **kept.batch[1]).backward()
        for name, parameter in model.named_parameters():
            found = kept.gradients.get(name)
            if found is None or parameter.grad is None:
                worst = max(worst, float((found is None) != (parameter.grad is None)))
                continue
            difference = (found - parameter.grad).abs().max() / parameter.grad.abs().max().clamp(min=1e-12)
            worst = max(worst, float(difference.nan_to_num(nan=1e30)))
    return worst


def main() -> None:
    """Train, compare, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--spec", required=True)
    parser.add_argument("--store")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--result", type=Path, help="write the result here as JSON instead of printing it")
    wanted = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    spec = aotcache.load_spec(wanted.spec)
    make_batch = spec.resolve_batch()
    batches = [make_batch(bucket, torch.device("cpu")) for bucket in spec.cells() for _ in range(POOL)]
    trainers = [
        Trainer(build(spec), spec, wanted.store, batches, wanted.steps, random.Random(i))
        for i in range(wanted.threads)
    ]
    with Tracer() as tracer:
        threads = [threading.Thread(target=t.run, name=f"train-{i}") for i, t in enumerate(trainers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    done = [t for t in trainers if t.error is None]
    errors = [t.error for t in trainers if t.error is not None]
    errors += [f"the tracing thread: {error}" for error in tracer.errors[:1]]
    result = {
        "steps": min(len(t.losses) for t in trainers),
        "errors": errors,
        "traces_in_workers": sum(t.stats["traces"] for t in done),
        "traces_beside": tracer.traces,
        "max_grad_rel_error": largest_error(spec, trainers),
        "load_seconds": sum(t.stats["load_seconds"] for t in done),
        "first_step_seconds": max((t.first_step_seconds for t in done), default=None),
        "runners": {region: s["runner"] for t in done for region, s in t.stats["regions"].items()},
        "steps_per_second": [(t.steps - 1) / t.seconds if t.seconds else 0.0 for t in trainers],
        "losses": [[t.losses[0], t.losses[-1]] if t.losses else None for t in trainers],
    }
    text = json.dumps(result, indent=2)
    if wanted.result is None:
        print(text)
    else:
        wanted.result.write_text(text)


if __name__ == "__main__":
    main()
