"""Calls per second with two threads over one, `torch.set_num_threads(1)`.

The same archive runs through aotcache's runner and through torch's own loader. torch's
loader gives outputs without autograd history, so the comparison is of forward calls;
training steps are measured for aotcache alone.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from bench import subjects
from bench.common import Bar, Report, fresh, main

MODULE = "bench.threads"
COUNTS = (1, 2)


def run(quick: bool) -> Report:
    """One process; the sides and thread counts take turns."""
    place = subjects.warmed("layer")
    env = {"AOTCACHE_HOME": str(place.home)}
    rates = fresh(
        MODULE,
        "rates",
        env=env,
        spec=str(place.spec),
        store=str(place.store),
        seconds=1.0 if quick else 2.0,
        rounds=3 if quick else 7,
    )
    scaling = {side: rate["2"] / rate["1"] for side, rate in rates.items()}
    return Report(
        name="threads",
        title="Calls per second of one decoder layer, one OpenMP thread in each",
        columns=("side", "1 thread", "2 threads", "2 over 1"),
        rows=[
            (side, f"{rate['1']:.0f}", f"{rate['2']:.0f}", f"{scaling[side]:.2f}")
            for side, rate in rates.items()
        ],
        bars=[Bar("aotcache, forward calls", scaling["aotcache, forward"], 1.8, at_least=True)],
        data={"calls_per_second": rates},
    )


def side_rates(spec: str, store: str, seconds: float, rounds: int) -> dict[str, Any]:
    """Calls per second by side and number of threads: the median of `rounds`."""
    import torch
    from torch._inductor.package import load_package

    from aotcache import attach

    torch.set_num_threads(1)
    subject = subjects.load(spec)
    found: dict[str, dict[int, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="aotcache-bench-") as folder:
        (manifest,) = subjects.manifests(Path(store), "infer")
        archive = subjects.archive(Path(store), manifest, Path(folder) / "infer.pt2")
        stock = load_package(str(archive), "forward")
        replicas = [subject.build() for _ in range(max(COUNTS))]
        batches = [subject.batch() for _ in replicas]
        flat = [subjects.inputs(manifest, m, b) for m, b in zip(replicas, batches, strict=True)]
        handles = [
            attach(model, subject.spec, store=Path(store).as_uri(), forbid_tracing=None) for model in replicas
        ]

        def stock_call(i: int) -> None:
            stock(*flat[i])

        def forward(i: int) -> None:
            with torch.no_grad():
                replicas[i].region(**batches[i])

        def train(i: int) -> None:
            replicas[i](**batches[i]).backward()

        sides = {
            "torch's loader, forward": (stock_call, False),
            "aotcache, forward": (forward, False),
            "aotcache, training step": (train, True),
        }
        for _ in range(rounds):
            for side, (call, training) in sides.items():
                for replica in replicas:
                    replica.train(training)
                for count in COUNTS:
                    rate = _rate(call, count, seconds)
                    found.setdefault(side, {}).setdefault(count, []).append(rate)
    for handle in handles:
        subjects.check(handle)
    return {
        side: {str(n): median(rates) for n, rates in by_count.items()} for side, by_count in found.items()
    }


def _rate(call: Callable[[int], None], count: int, seconds: float) -> float:
    """Calls per second of `count` threads together."""
    import torch

    barrier = threading.Barrier(count)
    calls = [0] * count
    spans = [(0.0, 0.0)] * count

    def work(i: int) -> None:
        torch.get_num_threads()  # what set_num_threads said reaches a thread with its first use of it
        call(i)
        barrier.wait()
        done, start = 0, perf_counter()
        while (now := perf_counter()) - start < seconds:
            call(i)
            done += 1
        calls[i], spans[i] = done, (start, now)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(calls) / (max(end for _, end in spans) - min(start for start, _ in spans))


if __name__ == "__main__":
    main("threads", run, {"rates": side_rates})
