"""Whole drafters of the `speculators` package, switched over, warmed and trained on threads.

The reference is the same drafter on the package's own dense attention, never padded: no flex
attention, no block mask and nothing of aotcache is in it.
"""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from speculators.losses import resolve_loss_config
from torch.nn import functional

import aotcache
from aotcache.errors import ArtifactMiss, CallRefused, ConfigError, UnsupportedGraph
from aotcache.graph.capture import find_regions, recording
from aotcache.integrations.speculators import ATTENTION, switch
from aotcache.runtime.dense import eager_without_tracing

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 20
THREADS = 3
LENGTHS = (50, 64, 101)
"""Of batches, padded to the buckets 64 and 128."""

TOLERANCE = 1e-5
"""Of a step from equal weights, relative: of the loss, and of each gradient's norm."""


def require_equal(got: tuple[float, dict[str, Any]], want: tuple[float, dict[str, Any]]) -> None:
    """Losses and gradients, as `step` returns them."""
    assert got[0] == pytest.approx(want[0], rel=TOLERANCE)
    assert got[1].keys() == want[1].keys()
    errors = {name: float((got[1][name] - g).norm() / g.norm()) for name, g in want[1].items()}
    assert max(errors.values()) < TOLERANCE, errors


def require_clean(stats: dict[str, Any]) -> None:
    assert stats["hits"]
    assert {name: stats[name] for name in ("traces", "eager_calls", "misses") if stats[name]} == {}


def test_threads_train_as_eager_does_on_padded_batches(warmed: Any) -> None:
    """Documents, anchors and lengths are others at every step."""
    assert warmed.report.ok
    buckets = aotcache.Buckets.from_spec(warmed.spec)
    start = Barrier(THREADS)

    def work(thread: int) -> dict[str, Any]:
        torch.get_num_threads()
        model, reference = warmed.build(seed=thread), warmed.build(attention="eager", seed=thread)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
        losses = []
        with warmed.attach(model) as handle:
            opened = handle.prefetch()["loads"]
            start.wait()
            for i in range(STEPS):
                args, kwargs = warmed.batch(seed=1000 * thread + i, seq=LENGTHS[(i + thread) % 3])
                done = warmed.drafters.step(model, (args, buckets.pad(kwargs).batch))
                require_equal(done, warmed.drafters.step(reference, (args, kwargs)))
                optimizer.step()
                reference.load_state_dict(model.state_dict())
                losses.append(done[0])
            stats: dict[str, Any] = handle.stats()
        assert stats["loads"] == opened
        assert len(set(losses)) == STEPS
        return stats

    with ThreadPoolExecutor(THREADS) as pool:
        for stats in pool.map(work, range(THREADS)):
            require_clean(stats)
            assert stats["regions"]["create_block_mask"]["hits"] >= STEPS
            assert {r["runner"] for r in stats["regions"].values()} == {"native"}


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


def test_a_drafter_that_was_not_switched_stays_as_it_was(warmed_named: Callable[[str], Any]) -> None:
    """Two of one configuration in one process; what would be saved does not show the switch."""
    warmed = warmed_named("dflash")
    plain = warmed.build(attention="eager")
    model = type(plain)(plain.config)
    model.load_state_dict(plain.state_dict())
    batch = warmed.batch(seed=3)
    before = plain.config.to_dict()
    want = warmed.drafters.step(plain, batch)
    with warmed.attach(switch(model)) as handle:
        require_equal(warmed.drafters.step(model, batch), want)
        require_equal(warmed.drafters.step(plain, batch), want)
        require_clean(handle.stats())
        made = handle.stats()["regions"]["create_block_mask"]["hits"]
    assert made == 1  # for one of the two
    assert model.config.to_dict() == plain.config.to_dict() == before


@pytest.mark.parametrize("kind", ["DFlashDraftModel", "CompiledDFlash"])
def test_copies_and_pickles_stay_switched(warmed_named: Callable[[str], Any], kind: str) -> None:
    """Also of a class whose forward is compiled, as the package's are on hosts with CUDA."""
    from speculators.models.attention import ALL_ATTENTION_FUNCTIONS

    warmed = warmed_named("dflash")
    model = warmed.build(kind=getattr(warmed.drafters, kind))
    packed = pickle.dumps(model)
    batch = warmed.batch(seed=4)
    want = warmed.drafters.step(warmed.build(attention="eager"), batch)
    del ALL_ATTENTION_FUNCTIONS._global_mapping[ATTENTION]  # as in a process that never switched a drafter
    for other in (pickle.loads(packed), copy.deepcopy(model), copy.deepcopy(switch(model))):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()  # none of its weights are the copies'
        with warmed.attach(other) as handle:
            require_equal(warmed.drafters.step(other, batch), want)
            require_clean(handle.stats())


@pytest.mark.parametrize("kind", ["dspark:DSpark", "xpress:XPress", "dflash2:DFlash2"])
def test_drafters_derived_from_these_are_switched_as_well(
    warmed_named: Callable[[str], Any], kind: str
) -> None:
    warmed = warmed_named("dflash")
    module, name = kind.split(":")
    derived = getattr(importlib.import_module(f"speculators.models.{module}"), f"{name}DraftModel")
    model, reference = warmed.build(kind=derived), warmed.build(kind=derived, attention="eager")
    args, kwargs = warmed.batch(seed=6)
    if name != "XPress":  # which has one loss only
        kwargs["tv_loss_fn"] = resolve_loss_config("tv", "eager")["tv"][0]
    with eager_without_tracing():
        got = warmed.drafters.step(model, (args, kwargs))
    require_equal(got, warmed.drafters.step(reference, (args, kwargs)))


def test_another_attention_function_is_a_miss(warmed_named: Callable[[str], Any]) -> None:
    """The layers look theirs up in a registry by name, so a new entry is other code."""
    from speculators.models.attention import ALL_ATTENTION_FUNCTIONS

    def doubled(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **_: Any
    ) -> tuple[torch.Tensor, None]:
        return functional.scaled_dot_product_attention(query, key, value, enable_gqa=True).transpose(
            1, 2
        ), None

    warmed = warmed_named("dflash")
    model = warmed.build()
    batch = warmed.batch(seed=1)
    original = ALL_ATTENTION_FUNCTIONS[ATTENTION]
    with warmed.attach(model):
        warmed.drafters.step(model, batch)
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, doubled)
        try:
            with pytest.raises(ArtifactMiss):
                warmed.drafters.step(model, batch)
        finally:
            ALL_ATTENTION_FUNCTIONS.register(ATTENTION, original)
        warmed.drafters.step(model, batch)


def test_a_layer_that_writes_to_its_callers_cache_is_refused(warmed_named: Callable[[str], Any]) -> None:
    """As a region, an EAGLE-3 layer appends to a DynamicCache, which no artifact could do."""
    warmed = warmed_named("eagle3")
    model = warmed.build()
    regions = find_regions(model, ["layers.*"], {})
    with eager_without_tracing(), recording(regions, lambda call: None):
        with pytest.raises(UnsupportedGraph, match=r"'layers\.0'.*past_key_values"):
            warmed.drafters.step(model, warmed.batch(seed=1))


def test_lengths_at_which_eagle3_would_lose_keys_are_refused(warmed_named: Callable[[str], Any]) -> None:
    """It grows its masks by whole blocks; torch's own flex attention refuses such a mask as well."""
    warmed = warmed_named("eagle3")
    with pytest.raises(CallRefused, match=r"with 192 tokens later steps would miss some.*multiple of 128"):
        warmed.drafters.step(warmed.build(), warmed.batch(seed=1, seq=192))


def test_what_cannot_be_switched_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"cannot switch a torch\S+Linear; expected.*DFlashDraftModel"):
        switch(torch.nn.Linear(2, 2))
    monkeypatch.setitem(sys.modules, "speculators.models.peagle", None)
    with pytest.raises(ConfigError, match="pip install speculators"):
        switch(torch.nn.Linear(2, 2))
