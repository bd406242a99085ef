"""One call of `flex_attention`: q, k, v and a BlockMask whose closure is a new one each step.

On CPU torch compiles the forward alone, so the forward is compared. The work of a step is
sixteen positions: what is measured is guards and dispatch.
"""

from __future__ import annotations

from itertools import cycle
from typing import Any

from bench import subjects
from bench.common import Bar, Report, fresh, in_turn, main, text_of_seconds

MODULE = "bench.flex"
_MASKS = 64
"""Masks made beforehand: each call takes the next, so that no call meets the closure of the last."""


def run(quick: bool) -> Report:
    """Both sides in turn in one process."""
    place = subjects.warmed("flex")
    env = {"AOTCACHE_HOME": str(place.home), "TORCHINDUCTOR_CACHE_DIR": str(place.root / "inductor")}
    seconds = fresh(
        MODULE,
        "calls",
        env=env,
        spec=str(place.spec),
        store=place.store.as_uri(),
        rounds=60 if quick else 300,
    )
    ours, theirs = seconds["aotcache"], seconds["torch.compile"]
    return Report(
        name="flex",
        title="One call of flex_attention under a new mask",
        columns=("call", "torch.compile", "aotcache", "ratio"),
        rows=[("forward", text_of_seconds(theirs), text_of_seconds(ours), f"{ours / theirs:.2f}")],
        bars=[Bar("one call of flex_attention", ours / theirs, 1.0)],
        data={"seconds": seconds},
    )


def side_calls(spec: str, store: str, rounds: int) -> dict[str, Any]:
    """Seconds per call, by side."""
    import torch
    from torch.nn.attention import flex_attention as torch_flex

    from aotcache import attach
    from aotcache.flex import flex_attention

    torch.set_num_threads(1)
    subject = subjects.load(spec)
    bucket = subject.spec.cells()[0]
    batches = [subject.make_batch(bucket, "cpu")[1] for _ in range(_MASKS)]
    masked = __import__(type(subject.build()).__module__).masked
    masks = cycle([masked(batch["documents"]) for batch in batches])
    q, k, v = (batches[0][name] for name in "qkv")
    compiled = torch.compile(torch_flex.flex_attention)
    with attach(subject.build(), subject.spec, store=store, forbid_tracing=None) as handle, torch.no_grad():
        seconds = in_turn(
            {
                "torch.compile": lambda: compiled(q, k, v, block_mask=next(masks)),
                "aotcache": lambda: flex_attention(q, k, v, block_mask=next(masks)),
            },
            rounds=rounds,
            least=0.02,
        )
        subjects.check(handle)
    return seconds


if __name__ == "__main__":
    main("flex", run, {"calls": side_calls})
