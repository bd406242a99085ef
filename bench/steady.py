"""A training step once everything is loaded: aotcache, torch.compile and eager, the same layer."""

from __future__ import annotations

import copy
from typing import Any

from bench import subjects
from bench.common import Bar, Report, fresh, in_turn, main, text_of_seconds

MODULE = "bench.steady"


def run(quick: bool) -> Report:
    """All sides in turn in one process: forward and backward, without an optimizer."""
    place = subjects.warmed("layer")
    env = {"AOTCACHE_HOME": str(place.home), "TORCHINDUCTOR_CACHE_DIR": str(place.root / "inductor")}
    # Two threads inside wait for each other, on a busy machine for long.
    rounds = {1: 60, 2: 20} if quick else {1: 300, 2: 100}
    seconds = {
        threads: fresh(
            MODULE,
            "steps",
            env=env,
            spec=str(place.spec),
            store=place.store.as_uri(),
            threads=threads,
            rounds=rounds[threads],
        )
        for threads in (1, 2)
    }
    return Report(
        name="steady",
        title="Training step of one decoder layer, forward and backward",
        columns=("side", "1 thread inside", "2 threads inside"),
        rows=[(side, *(text_of_seconds(seconds[t][side]) for t in (1, 2))) for side in seconds[1]],
        bars=[
            Bar(f"aotcache against torch.compile, {t} inside", took["aotcache"] / took["torch.compile"], 1.0)
            for t, took in seconds.items()
        ],
        data={"seconds": seconds},
    )


def side_steps(spec: str, store: str, threads: int, rounds: int) -> dict[str, Any]:
    """Seconds per step of each side, with `threads` OpenMP threads inside of it."""
    import torch

    from aotcache import attach

    torch.set_num_threads(threads)
    subject = subjects.load(spec)
    eager, batch = subject.build(), subject.batch()
    compiled, attached = copy.deepcopy(eager), copy.deepcopy(eager)
    compiled.region.compile()
    compiled(**batch).backward()
    # The tripwire is off: the peer's guards live in the process that it would watch.
    handle = attach(attached, subject.spec, store=store, forbid_tracing=None)

    def step_of(model: Any) -> Any:
        def step() -> None:
            model.zero_grad(set_to_none=True)
            batch["x"].grad = batch["target"].grad = None
            model(**batch).backward()

        return step

    sides = {"eager": eager, "torch.compile": compiled, "aotcache": attached}
    seconds = in_turn({name: step_of(model) for name, model in sides.items()}, rounds=rounds, least=0.02)
    subjects.check(handle)
    return seconds


if __name__ == "__main__":
    main("steady", run, {"steps": side_steps})
