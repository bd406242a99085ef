"""E3: what needs a gradient, and which modules there are, decides which artifact runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import aotcache
from aotcache.errors import ArtifactMiss
from tests.cases import lora, tiny
from tests.cases.conftest import Warm
from tests.cases.support import (
    assert_close,
    assert_gradients_close,
    make_batch,
    step,
    write_spec,
)


@pytest.fixture(scope="module")
def adapted(specs: Path, tiny_d: Warm, warmed: Callable[..., str]) -> Warm:
    """Two frozen layers with adapters: the first one's input needs no gradient, the second's does.
    TINY-D's own artifacts are in the same store."""
    spec = write_spec(specs / "lora.toml", factory="tests.cases.lora:build", modes=["train"])
    store = warmed(spec)
    assert store == tiny_d.store
    return Warm(spec, store)


def check(make: Callable[[], tiny.Tiny], warm: Warm, on_miss: Any = "raise", seed: int = 2) -> dict[str, Any]:
    """A training step CLOSE to that of an equal model which is not attached; returns the stats."""
    model, batch = make(), make_batch(seed=seed)
    want, want_gradients = step(make(), batch)
    with aotcache.attach(model, warm.spec, store=warm.store, on_miss=on_miss) as handle:
        loss, gradients = step(model, batch)
        stats: dict[str, Any] = handle.stats()
    assert_close(loss, want)
    assert_gradients_close(gradients, want_gradients)
    for name, parameter in model.named_parameters():
        assert (gradients[name] is None) or parameter.requires_grad, name
    assert stats["traces"] == 0
    return stats


def only_second() -> tiny.Tiny:
    return lora.wrap(tiny.build(blocks=2), (1,))


def unfrozen_output() -> tiny.Tiny:
    model = lora.build()
    for block in model.blocks:
        block.out.requires_grad_(True)
    return model


def disabled() -> tiny.Tiny:
    model = unfrozen_output()
    for block in model.blocks:
        block.qkv.enabled = False
    return model


def test_frozen_base_with_adapters_runs_from_two_artifacts(adapted: Warm) -> None:
    keys = [manifest.key for manifest in adapted.manifests()]
    assert len(keys) == len(set(keys)) == 2
    stats = check(lora.build, adapted)
    assert (stats["hits"], stats["misses"]) == (2, 0)


def test_adapters_taken_out_run_from_the_base_models_artifacts(adapted: Warm) -> None:
    def trainable() -> tiny.Tiny:
        return lora.unwrap(lora.build()).requires_grad_(True)

    stats = check(trainable, adapted)
    assert (stats["hits"], stats["misses"]) == (2, 0)


def test_one_adapted_layer_behind_a_frozen_one(adapted: Warm) -> None:
    # Nothing in the first layer wants a gradient: it is inference, and the second one's input is as
    # the first one's was when both had adapters.
    stats = check(only_second, adapted)
    assert (stats["hits"], stats["misses"]) == (2, 0)


@pytest.mark.parametrize(
    ("make", "named"),
    [(unfrozen_output, r"out\.weight"), (disabled, "enabled")],
    ids=["output linear unfrozen", "adapter disabled"],
)
def test_a_state_that_was_not_warmed_is_a_miss_that_says_why(
    adapted: Warm, make: Callable[[], tiny.Tiny], named: str
) -> None:
    model = make()
    with aotcache.attach(model, adapted.spec, store=adapted.store) as handle:
        with pytest.raises(ArtifactMiss, match=named):
            model(**make_batch())
        assert handle.stats()["hits"] == 0
    stats = check(make, adapted, on_miss="eager")
    assert (stats["hits"], stats["eager_calls"]) == (0, 2)


def test_one_attached_model_through_all_states(adapted: Warm) -> None:
    model, batch = lora.build(), make_batch(seed=7)
    base = lora.unwrap(lora.build())
    with aotcache.attach(model, adapted.spec, store=adapted.store, on_miss="eager") as handle:

        def compare(plain: tiny.Tiny) -> None:
            loss, gradients = step(model, batch)
            want, want_gradients = step(plain, batch)
            assert_close(loss, want)
            assert_gradients_close(gradients, want_gradients)

        compare(lora.build())
        assert handle.stats()["hits"] == 2
        for block in model.blocks:
            block.out.requires_grad_(True)
        compare(unfrozen_output())
        assert handle.stats()["hits"] == 2
        for block in model.blocks:
            block.qkv.enabled = False
        compare(disabled())
        with torch.no_grad():
            assert_close(model(**batch), base(**batch))
        for block in model.blocks:
            block.qkv.enabled = True
            block.out.requires_grad_(False)
        compare(lora.build())
        assert handle.stats()["hits"] == 4
        lora.unwrap(model).requires_grad_(True)
        compare(base.requires_grad_(True))
        assert handle.stats()["hits"] == 6
        assert handle.stats()["traces"] == 0
