"""Decoder layers of the `speculators` package, warmed and trained on threads.

The reference is the same drafter on the package's own dense attention: no flex attention, no
mask closure and nothing of aotcache is in it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.nn import functional

import aotcache
from aotcache.errors import ArtifactMiss, UnsupportedGraph
from aotcache.graph.capture import find_regions, recording
from aotcache.runtime.dense import eager_without_tracing

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 20
THREADS = 3
LOSS_TOLERANCE = 1e-4
"""Relative, and gathered over `STEPS` updates in float32."""
GRAD_TOLERANCE = 1e-5
"""Of one step from equal weights, relative to the gradient's norm."""


def relative_errors(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> dict[str, float]:
    assert got.keys() == want.keys()
    return {name: float((got[name] - want[name]).norm() / want[name].norm()) for name in want}


def clean(stats: dict[str, Any]) -> bool:
    return not (stats["traces"] or stats["eager_calls"] or stats["misses"])


def train(
    warmed: Any, model: Any, thread: int, *, check: Callable[[Any, Any, Any], None] | None = None
) -> list[float]:
    """`STEPS` steps on the thread's own data; `check` sees each batch with its loss and gradients."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    losses = []
    for i in range(STEPS):
        batch = warmed.batch(seed=1000 * thread + i)
        loss, grads = warmed.drafters.step(model, batch)
        if check is not None:
            check(i, batch, (loss, grads))
        optimizer.step()
        losses.append(loss)
    return losses


def test_every_layer_is_built(warmed: Any) -> None:
    assert warmed.report.ok, [str(b.error) for b in warmed.report.failed]
    layers = warmed.spec.drafter.kwargs["layers"]
    assert {row.cell.region.split(".")[1] for row in warmed.report.plan} == {str(i) for i in range(layers)}


def test_a_step_equals_the_packages_own_dense_attention(warmed: Any) -> None:
    model, reference = warmed.build(), warmed.build(attention="eager")
    warmed.drafters.copy_weights(model, reference)
    with warmed.attach(model) as handle:
        for seed in (1, 2):
            batch = warmed.batch(seed)
            loss, grads = warmed.drafters.step(model, batch)
            want_loss, want_grads = warmed.drafters.step(reference, batch)
            assert loss == pytest.approx(want_loss, rel=GRAD_TOLERANCE)
            assert max(relative_errors(grads, want_grads).values()) < GRAD_TOLERANCE
        stats = handle.stats()
    assert stats["hits"] > 0
    assert clean(stats), stats


def test_threads_train_as_one_would_and_never_trace(warmed: Any) -> None:
    start = threading.Barrier(THREADS)
    models = [warmed.build(seed=thread) for thread in range(THREADS)]
    handles = [warmed.attach(model) for model in models]
    last: dict[int, dict[str, torch.Tensor]] = {}

    def work(thread: int) -> list[float]:
        def keep(step: int, batch: Any, result: Any) -> None:
            if step == STEPS - 1:
                last[thread] = result[1]

        start.wait()
        return train(warmed, models[thread], thread, check=keep)

    with ThreadPoolExecutor(THREADS) as pool:
        losses = list(pool.map(work, range(THREADS)))
    stats = [handle.stats() for handle in handles]
    for handle in handles:
        handle.detach()
    assert all(clean(s) for s in stats), stats

    for thread in range(THREADS):
        reference = warmed.build(attention="eager", seed=thread)
        want: dict[str, torch.Tensor] = {}

        def keep_last(step: int, batch: Any, result: Any, want: dict[str, torch.Tensor] = want) -> None:
            if step == STEPS - 1:
                want.update(result[1])

        assert losses[thread] == pytest.approx(
            train(warmed, reference, thread, check=keep_last), rel=LOSS_TOLERANCE
        )
        assert max(relative_errors(last[thread], want).values()) < 100 * LOSS_TOLERANCE
        assert losses[thread][-1] < losses[thread][0]


@pytest.mark.parametrize("name", ["dflash", "peagle"])
def test_a_shorter_batch_padded_into_the_bucket_trains_as_unpadded(
    name: str, warmed_named: Callable[[str], Any]
) -> None:
    warmed = warmed_named(name)
    model, reference = warmed.build(), warmed.build(attention="eager")
    warmed.drafters.copy_weights(model, reference)
    args, kwargs = warmed.batch(seed=5, seq=101)
    padded = aotcache.Buckets.from_spec(warmed.spec).pad(kwargs, sizes={**warmed.spec.cells()[0], "seq": 101})
    with warmed.attach(model) as handle:
        loss, grads = warmed.drafters.step(model, (args, padded.batch))
        assert clean(handle.stats())
    want_loss, want_grads = warmed.drafters.step(reference, (args, kwargs))
    assert loss == pytest.approx(want_loss, rel=GRAD_TOLERANCE)
    assert max(relative_errors(grads, want_grads).values()) < GRAD_TOLERANCE


def test_each_batch_gets_its_own_mask(warmed: Any) -> None:
    """Equal in every tensor but the documents: the captured tensors are read anew."""
    model = warmed.build()
    args, kwargs = warmed.batch(seed=1)
    other = {**kwargs, "document_ids": torch.zeros_like(kwargs["document_ids"])}
    with warmed.attach(model):
        first, _ = warmed.drafters.step(model, (args, kwargs))
        second, _ = warmed.drafters.step(model, (args, other))
        again, _ = warmed.drafters.step(model, (args, kwargs))
    assert first == again
    assert first != second


def test_another_attention_function_is_a_miss(warmed: Any) -> None:
    """The layers look theirs up in a registry by name, so a new entry is other code."""
    from speculators.models.attention import ALL_ATTENTION_FUNCTIONS

    def doubled(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **_: Any
    ) -> tuple[torch.Tensor, None]:
        return functional.scaled_dot_product_attention(query, key, value, enable_gqa=True).transpose(
            1, 2
        ), None

    model = warmed.build()
    batch = warmed.batch(seed=1)
    original = ALL_ATTENTION_FUNCTIONS["simple_flex_attention"]
    with warmed.attach(model):
        warmed.drafters.step(model, batch)
        ALL_ATTENTION_FUNCTIONS.register("simple_flex_attention", doubled)
        try:
            with pytest.raises(ArtifactMiss):
                warmed.drafters.step(model, batch)
        finally:
            ALL_ATTENTION_FUNCTIONS.register("simple_flex_attention", original)
        warmed.drafters.step(model, batch)


def test_a_layer_that_writes_to_its_callers_cache_is_refused(warmed_named: Callable[[str], Any]) -> None:
    """EAGLE-3 as it comes: its layers append to a DynamicCache, which no artifact could do."""
    warmed = warmed_named("eagle3")
    model = warmed.build()
    model.layers[0] = model.layers[0].body.layer
    regions = find_regions(model, ["layers.*"], {})
    with eager_without_tracing(), recording(regions, lambda call: None):
        with pytest.raises(UnsupportedGraph, match=r"'layers\.0'.*past_key_values"):
            warmed.drafters.step(model, warmed.batch(seed=1))
