"""Switches of mode in the middle of training, and steps under the spec's context."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import aotcache
from aotcache.errors import ArtifactMiss
from aotcache.graph import ambient
from tests.cases.support import write_spec
from tests.loops import drafter
from tests.loops.conftest import Twins, Warm, assert_close, assert_same, gradients, make_batch

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evals_between_forward_backward_and_step(
    twins: Twins, mode: Callable[[], AbstractContextManager[Any]]
) -> None:
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in twins]

    def evaluate(seed: int) -> None:
        for length in drafter.BUCKETS:
            found = []
            for model in twins:
                model.eval()
                with mode():
                    found.append(model(**make_batch(length, seed)))
                model.train()
            assert not any(loss.requires_grad for loss in found)
            assert found[0].is_inference() == found[1].is_inference()
            assert_close(*found)

    for step in range(3):
        evaluate(10 + step)
        losses = [model(**make_batch(seed=step)) for model in twins]
        evaluate(20 + step)
        for loss in losses:
            loss.backward()
        twins.agree()
        evaluate(30 + step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    evaluate(40)


def test_a_part_of_a_step_without_gradients(twins: Twins) -> None:
    """A teacher's pass over the same regions, whose result is a target."""
    for model in twins:
        batch = make_batch()
        x, visible = model.embed(batch["x"]), drafter.see(batch["documents"])
        with torch.no_grad():
            wanted, _ = model.layers[1](x, visible)
        hidden, side = model.layers[0](x, visible)
        with torch.no_grad(), torch.enable_grad():
            hidden, _ = model.layers[1](hidden, visible)
        ((hidden - wanted).square().mean() + side.mean()).backward()
    twins.agree()


def test_eval_with_gradients_and_training_without(twins: Twins) -> None:
    """The flag is of no concern to code that does not read it."""
    for model in twins:
        model.eval()
        model(**make_batch()).backward()
        model.train()
        with torch.no_grad():
            model(**make_batch())
    twins.agree()


def test_gradients_of_the_input_alone_and_of_the_weights_alone(twins: Twins) -> None:
    for model in twins:
        batch = make_batch()
        batch["x"].requires_grad_()
        wanted = [batch["x"], model.layers[0].down]
        found = torch.autograd.grad(model(**batch), wanted, retain_graph=False)
        for tensor, gradient in zip((batch["x"], model.layers[0].down), found, strict=True):
            assert gradient.shape == tensor.shape
        model.layers[0].down.grad = found[1]
        model.embed.weight.grad = found[0].sum((0, 1)).expand(drafter.WIDTH, -1).clone()
    twins.agree()


@pytest.fixture(scope="module")
def careful(tmp_path_factory: pytest.TempPathFactory, warmed: Callable[..., str], warm: Warm) -> Warm:
    spec = write_spec(
        Path(warm.spec.path).with_name("careful.toml"),
        factory="tests.loops.drafter:build",
        batch_function="tests.loops.drafter:batch",
        regions=["layers.*"],
        modes=["train"],
        buckets={"seq": [16]},
        context="tests.loops.drafter:careful",
    )
    return Warm(spec, warmed(spec))


@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_deterministic_steps_under_the_specs_context(careful: Warm, checkpointing: bool | None) -> None:
    ours, eager = drafter.build(), drafter.build()
    ours.checkpointing = checkpointing
    seen = []
    with aotcache.attach(ours, careful.spec, store=careful.store) as handle:
        for _ in range(3):
            for model in (ours, eager):
                model.zero_grad()
                with drafter.careful():
                    model(**make_batch()).backward()
            assert_same(gradients(ours), gradients(eager))
            seen.append(gradients(ours))
        stats = handle.stats()
    assert_same(seen[1], seen[0], 0.0)  # to the last bit
    assert_same(seen[2], seen[0], 0.0)
    assert stats["hits"] == (6 if checkpointing is None else 12)
    assert (stats["misses"], stats["eager_calls"], stats["traces"]) == (0, 0, 0)


def test_steps_outside_of_the_specs_context_are_misses_that_name_it(careful: Warm) -> None:
    model = drafter.build()
    with aotcache.attach(model, careful.spec, store=careful.store), drafter.careful():
        torch.use_deterministic_algorithms(True, warn_only=True)
        with pytest.raises(ArtifactMiss, match=r"deterministic differs: True warn_only=True / "):
            model(**make_batch())
        torch.use_deterministic_algorithms(True)
        model(**make_batch()).backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputation_is_under_the_autocast_of_its_forward(reentrant: bool) -> None:
    """So it finds the artifact of its forward, also where the backward is called outside of autocast."""
    read: list[ambient.Ambient] = []

    def region(x: Tensor) -> Tensor:
        read.append(ambient.read("cpu"))
        return (x @ x).float()

    with torch.autocast("cpu", torch.bfloat16), drafter.careful():
        out = checkpoint(region, torch.randn(4, 4, requires_grad=True), use_reentrant=reentrant)
    with drafter.careful():
        out.sum().backward()
    assert len(read) == 2
    assert read[0] == read[1]
    assert read[0].autocast[0]
