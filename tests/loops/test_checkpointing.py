"""Activation checkpointing of both kinds, around regions and around what holds them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import aotcache
from aotcache.errors import CallRefused
from tests.loops import drafter
from tests.loops.conftest import Twins, Warm, assert_same, gradients, make_batch

pytestmark = pytest.mark.slow

BOTH = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])


@BOTH
def test_layers_one_by_one(twins: Twins, reentrant: bool) -> None:
    hits = []
    for seed in range(2):
        for model in twins:
            batch = make_batch(seed=seed)
            x, visible = model.embed(batch["x"]), drafter.see(batch["documents"])
            total = x.new_zeros(())
            for layer in model.layers:
                x, side = checkpoint(layer, x, visible, use_reentrant=reentrant)
                total = total + side.mean()
            (total + x.square().mean()).backward()
        twins.agree()
        hits.append(twins.handle.stats()["hits"])
    assert hits == [4, 8]  # two layers, once more each in the backward


@BOTH
def test_everything_at_once_and_with_accumulation(twins: Twins, reentrant: bool) -> None:
    for seed, length in enumerate((16, 32)):
        for model in twins:
            batch = make_batch(length, seed)
            x = batch.pop("x").requires_grad_()  # the reentrant kind wants an input that needs a gradient
            checkpoint(lambda x, m=model, b=batch: m(x, **b), x, use_reentrant=reentrant).backward()
    twins.agree()


def test_one_checkpoint_inside_another(twins: Twins) -> None:
    for model in twins:
        batch = make_batch()
        visible = drafter.see(batch["documents"])

        def two(x: Tensor, model: Any = model, visible: Tensor = visible) -> Tensor:
            for layer in model.layers:
                x, _ = checkpoint(layer, x, visible, use_reentrant=False)
            return x

        checkpoint(two, model.embed(batch["x"]), use_reentrant=False).square().mean().backward()
    twins.agree()


def test_two_backwards_through_a_checkpoint(twins: Twins) -> None:
    for model in twins:
        batch = make_batch()
        hidden, side = checkpoint(
            model.layers[0], model.embed(batch["x"]), drafter.see(batch["documents"]), use_reentrant=False
        )
        (hidden.mean() + side.mean()).backward(retain_graph=True)
        side.square().mean().backward()
    twins.agree()


def test_selective_checkpointing_is_refused_in_a_region(warm: Warm) -> None:
    """Its policy wants to choose operator by operator, and an artifact has none to show."""
    policy = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    model, batch = drafter.build(), make_batch()
    x, visible = model.embed(batch["x"]), drafter.see(batch["documents"])
    with aotcache.attach(model, warm.spec, store=warm.store):
        with pytest.raises(CallRefused, match="dispatch mode"):
            checkpoint(model.layers[0], x, visible, use_reentrant=False, context_fn=policy)
        model.layers[0](x, visible)


WRAPPERS: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "reentrant": partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT),
    "not reentrant": partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT),
    "offload": offload_wrapper,
}


@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize("first", ["attached", "wrapped"])
def test_a_wrapper_round_each_region(warm: Warm, kind: str, first: str) -> None:
    def wrap(model: torch.nn.Module) -> None:
        apply_activation_checkpointing(
            model, WRAPPERS[kind], check_fn=lambda module: isinstance(module, drafter.Layer)
        )

    ours, eager = drafter.build(), drafter.build()
    wrap(eager)
    if first == "wrapped":
        wrap(ours)
    with aotcache.attach(ours, warm.spec, store=warm.store) as handle:
        if first == "attached":
            wrap(ours)
        for seed in range(2):
            for model in (ours, eager):
                model(**make_batch(seed=seed)).backward()
        stats = handle.stats()
    assert_same(gradients(ours), gradients(eager))
    assert (stats["hits"], stats["misses"], stats["traces"]) == (4 if kind == "offload" else 8, 0, 0)
    assert sorted(stats["regions"]) == ["layers.0", "layers.1"]
