"""Guards and dispatch: what a call costs around a graph that computes next to nothing.

Sixteen tensors of eight numbers go in: twelve parameters and four arguments. The kernel's
own time, below two microseconds, is in every figure of both sides.
"""

from __future__ import annotations

import copy
from typing import Any

from bench import subjects
from bench.common import Bar, Report, fresh, in_turn, main, text_of_seconds

MODULE = "bench.dispatch"
_BARRED = "training forward"


def run(quick: bool) -> Report:
    """Three kinds of call on each side, in turn in one process."""
    place = subjects.warmed("sixteen")
    env = {"AOTCACHE_HOME": str(place.home), "TORCHINDUCTOR_CACHE_DIR": str(place.root / "inductor")}
    seconds = fresh(
        MODULE,
        "calls",
        env=env,
        spec=str(place.spec),
        store=place.store.as_uri(),
        rounds=60 if quick else 300,
    )
    return Report(
        name="dispatch",
        title="One call with 16 inputs around an empty graph",
        columns=("call", "torch.compile", "aotcache", "ratio"),
        rows=[
            (
                call,
                text_of_seconds(took["torch.compile"]),
                text_of_seconds(took["aotcache"]),
                f"{took['aotcache'] / took['torch.compile']:.2f}",
            )
            for call, took in seconds.items()
        ],
        bars=[
            Bar(call, took["aotcache"] / took["torch.compile"], 0.5)
            for call, took in seconds.items()
            if call == _BARRED
        ],
        data={"seconds": seconds},
    )


def side_calls(spec: str, store: str, rounds: int) -> dict[str, Any]:
    """Seconds per call, by kind of call and side."""
    import torch

    from aotcache import attach

    torch.set_num_threads(1)
    subject = subjects.load(spec)
    attached, batch = subject.build(), subject.batch()
    arguments = tuple(batch.values())
    compiled = copy.deepcopy(attached)
    compiled.region.compile()
    handle = attach(attached, subject.spec, store=store, forbid_tracing=None)
    sides = {"torch.compile": compiled.region, "aotcache": attached.region}

    def both(call: Any) -> dict[str, float]:
        return in_turn(
            {name: lambda r=region: call(r) for name, region in sides.items()}, rounds=rounds, least=0.02
        )

    def forward_and_backward(region: Any) -> None:
        region(*arguments).backward(ones)

    ones = torch.ones_like(arguments[0])
    seconds = {
        "training forward": both(lambda region: region(*arguments)),
        "training forward and backward": both(forward_and_backward),
    }
    for region in sides.values():
        region.eval()
    with torch.no_grad():
        seconds["forward under no_grad"] = both(lambda region: region(*arguments))
    subjects.check(handle)
    return seconds


if __name__ == "__main__":
    main("dispatch", run, {"calls": side_calls})
