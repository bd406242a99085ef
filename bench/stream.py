"""Training steps of a whole drafter over a stream of batches, each of another length.

A step is forward, backward and AdamW. The peers run the batches at their own lengths, with the
package's dense attention (torch has no backward of flex attention on CPU); aotcache's are padded
to their buckets, which counts. torch.compile is that of the layers, with its defaults. All sides
take each batch in turn, in one process with one thread inside, and must come to the same losses.
The second process finds torch.compile's local caches warm.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any

from bench import subjects
from bench.common import ROOT, Bar, Report, fresh, main, text_of_seconds

MODULE = "bench.stream"
PLOT = ROOT / "docs" / "stream.svg"

EAGER, COMPILED, OURS = "eager", "torch.compile", "aotcache"
SHORTEST, LONGEST = 100, 1024
STALL = 1.0
"""Seconds from which on a step counts as a stall."""

SAME = 1e-2
"""How far apart, relatively, AdamW may take losses that begin equal."""


def run(quick: bool) -> Report:
    """Warm the drafter, then train all sides twice: with caches of torch.compile cold, then warm."""
    if importlib.util.find_spec("speculators") is None:
        raise RuntimeError(
            "speculators is not installed: pip install -r tests/integration/requirements.txt && "
            "pip install --no-deps -r tests/integration/requirements-no-deps.txt"
        )
    place = subjects.warmed("stream")
    env = {"AOTCACHE_HOME": str(place.home), "TORCHINDUCTOR_CACHE_DIR": str(place.root / "inductor")}
    asked = {"spec": str(place.spec), "store": place.store.as_uri(), "steps": 12 if quick else 80}
    cold, warm = (fresh(MODULE, "stream", env=env, **asked) for _ in range(2))
    series = {
        EAGER: cold["seconds"][EAGER],
        f"{COMPILED}, cold": cold["seconds"][COMPILED],
        f"{COMPILED}, caches warm": warm["seconds"][COMPILED],
        OURS: cold["seconds"][OURS],
    }
    _plot(series, cold["lengths"])
    return Report(
        name="stream",
        title=f"Training steps of a whole DFlash drafter, {len(cold['lengths'])} batches of "
        f"{SHORTEST} to {LONGEST} tokens",
        columns=("side", "mean step", "median step", "slowest step", f"stalls over {STALL:g} s"),
        rows=[(side, *_row(times)) for side, times in series.items()],
        bars=[
            Bar("mean step against eager", _ratio(cold, EAGER, mean), 1.0),
            Bar(f"mean step against {COMPILED}, cold", _ratio(cold, COMPILED, mean), 1.0),
            Bar(f"mean step against {COMPILED}, caches warm", _ratio(warm, COMPILED, mean), 1.0),
            Bar(f"median step against {COMPILED}", _ratio(cold, COMPILED, median), 1.0),
            Bar("stalls of aotcache", float(_stalls(cold["seconds"][OURS])), 0.0),
            Bar("slowest step of aotcache against its median", _slowest(cold["seconds"][OURS]), 3.0),
        ],
        data={"cold": cold, "warm": warm},
    )


def _row(times: Sequence[float]) -> tuple[str, ...]:
    return (*(text_of_seconds(of(times)) for of in (mean, median, max)), str(_stalls(times)))


def _stalls(times: Sequence[float]) -> int:
    return sum(took > STALL for took in times)


def _slowest(times: Sequence[float]) -> float:
    """Case B3: how much longer than the median the slowest step takes."""
    return max(times) / median(times)


def _ratio(measured: Mapping[str, Any], peer: str, of: Callable[[Sequence[float]], float]) -> float:
    """Of two sides of one process."""
    return of(measured["seconds"][OURS]) / of(measured["seconds"][peer])


def side_stream(spec: str, store: str, steps: int) -> dict[str, Any]:
    """Seconds of every step by side, the lengths, and the seconds before the first step of aotcache."""
    import torch

    from aotcache import Buckets, attach

    torch.set_num_threads(1)
    subject = subjects.load(spec)
    buckets = Buckets.from_spec(subject.spec)
    draw = random.Random(0)
    lengths = [draw.randint(SHORTEST, LONGEST) for _ in range(steps)]
    (anchors,) = subject.spec.buckets["anchors"]
    models = {
        EAGER: subject.factory(attention="sdpa"),
        COMPILED: subject.factory(attention="sdpa"),
        OURS: subject.build(),
    }
    for layer in models[COMPILED].layers:
        layer.compile()
    started = perf_counter()
    # The tripwire is off: the peer traces in this process, which is what is measured.
    handle = attach(models[OURS], subject.spec, store=store, forbid_tracing=None)
    handle.prefetch()
    opened = perf_counter() - started
    optimizers = {side: torch.optim.AdamW(model.parameters(), lr=1e-4) for side, model in models.items()}
    seconds: dict[str, list[float]] = {side: [] for side in models}
    for step, length in enumerate(lengths):
        _, batch = subject.make_batch({"seq": length, "anchors": anchors}, "cpu", seed=step)
        losses = {}
        for side, model in models.items():
            torch.manual_seed(step)  # the package draws its anchors from here
            began = perf_counter()
            _, loss, _ = model(**(buckets.pad(batch).batch if side == OURS else batch))
            loss.backward()
            optimizers[side].step()
            optimizers[side].zero_grad()
            seconds[side].append(perf_counter() - began)
            losses[side] = float(loss.detach())
        _require_same(step, losses)
    subjects.check(handle)
    return {"seconds": seconds, "lengths": lengths, "opened_in": opened}


def _require_same(step: int, losses: Mapping[str, float]) -> None:
    """Refuse figures of sides that do not train the same drafter."""
    for side, loss in losses.items():
        if not abs(loss - losses[EAGER]) <= SAME * abs(losses[EAGER]):
            raise RuntimeError(f"step {step}: the loss of {side} is {loss}, of eager {losses[EAGER]}")


def _plot(series: Mapping[str, Sequence[float]], lengths: Sequence[int]) -> None:
    """Every step of every side, on a logarithmic scale, into `docs/stream.svg`."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is missing, pip install -e '.[bench]'", file=sys.stderr)
        return
    matplotlib.use("svg")
    from matplotlib import pyplot

    with pyplot.rc_context({"svg.hashsalt": "aotcache", "svg.fonttype": "none"}):
        figure, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
        for side, times in series.items():
            axes.plot(range(1, len(times) + 1), times, label=side, linewidth=1)
        axes.axhline(STALL, color="grey", linestyle=":", linewidth=1)
        axes.set(
            yscale="log",
            xlabel=f"step, each of another length ({min(lengths)} to {max(lengths)} tokens)",
            ylabel="seconds",
        )
        axes.legend(loc="upper right")
        figure.savefig(Path(PLOT), metadata={"Date": None})
        pyplot.close(figure)


if __name__ == "__main__":
    main("stream", run, {"stream": side_stream})
