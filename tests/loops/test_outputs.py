"""Outputs that nobody uses, or that are detached: who gets a gradient, and who gets none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.loops import drafter
from tests.loops.conftest import Twins, assert_close, make_batch

pytestmark = pytest.mark.slow

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "both": lambda hidden, side: hidden.square().mean() + side.mean(),
    "the first": lambda hidden, side: hidden.square().mean(),
    "the second": lambda hidden, side: side.square().mean(),
    "the second detached": lambda hidden, side: (hidden * side.detach()).mean(),
    "the first detached": lambda hidden, side: (hidden.detach() * side).mean(),
    "the second times zero": lambda hidden, side: hidden.square().mean() + (side * 0).sum(),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_and_their_absence(twins: Twins, loss: str) -> None:
    for model in twins:
        batch = make_batch()
        hidden, side = model.layers[0](model.embed(batch["x"]), drafter.see(batch["documents"]))
        LOSSES[loss](hidden, side).backward()
    twins.agree()


@pytest.mark.parametrize("loss", ["the first", "the second detached"])
def test_an_optimizer_leaves_weights_alone_that_had_no_part(twins: Twins, loss: str) -> None:
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1) for model in twins
    ]
    for step in range(3):
        for model, optimizer in zip(twins, optimizers, strict=True):
            batch = make_batch(seed=step)
            hidden, side = model.layers[0](model.embed(batch["x"]), drafter.see(batch["documents"]))
            LOSSES["both" if step == 1 else loss](hidden, side).backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, one), other in zip(twins.ours.named_parameters(), twins.eager.parameters(), strict=True):
        assert_close(one, other, name)


def test_an_input_that_no_used_output_depends_on(twins: Twins) -> None:
    for model in twins:
        batch = make_batch()
        x = model.embed(batch["x"]).detach().requires_grad_()
        _, side = model.layers[0](x, drafter.see(batch["documents"]))
        found = torch.autograd.grad(
            side.sum(), [x, model.layers[0].gain, model.layers[1].gain], allow_unused=True
        )
        assert [g is None for g in found] == [False, False, True]


def test_outputs_that_are_thrown_away(twins: Twins) -> None:
    for model in twins:
        batch = make_batch()
        x, visible = model.embed(batch["x"]), drafter.see(batch["documents"])
        model.layers[1](x, visible)
        hidden, _ = model.layers[0](x, visible)
        del _
        hidden.mean().backward()
    twins.agree()


def test_a_loss_behind_a_detached_region(twins: Twins) -> None:
    for model in twins:
        batch = make_batch()
        visible = drafter.see(batch["documents"])
        hidden, side = model.layers[0](model.embed(batch["x"]), visible)
        hidden, side = model.layers[1](hidden.detach().requires_grad_(), visible)
        (hidden.mean() + side.mean()).backward()
    twins.agree()
    assert twins.ours.embed.weight.grad is None
