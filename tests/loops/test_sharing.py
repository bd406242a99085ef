"""Weights in several places, frozen ones, and tensors that change while a backward still needs them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.loops import drafter
from tests.loops.conftest import Twins, assert_close, make_batch

pytestmark = pytest.mark.slow


def test_a_weight_tied_inside_and_outside_gets_the_sum(twins: Twins) -> None:
    tied = [m.layers[1].out.weight for m in twins]
    for model, weight in zip(twins, tied, strict=True):
        assert weight is model.head.weight
        assert weight is model.layers[1].again.weight
        model(**make_batch()).backward()
    twins.agree()
    # The parts, each by eager autograd on an untied copy in float64, add up to it.
    apart = drafter.build().double()
    apart.head.weight = nn.Parameter(apart.head.weight.detach().clone())
    apart.layers[1].again.weight = nn.Parameter(apart.layers[1].again.weight.detach().clone())
    batch = make_batch()
    apart(batch["x"].double(), batch["documents"], batch["target"].double()).backward()
    parts = [m.weight.grad for m in (apart.head, apart.layers[1].again, apart.layers[1].out)]
    assert all(part.abs().max() > 1e-4 for part in parts)
    assert_close(tied[0].grad, sum(parts).float())


def test_steps_keep_what_is_tied_tied(twins: Twins) -> None:
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in twins]
    for step in range(3):
        for model, optimizer in zip(twins, optimizers, strict=True):
            model(**make_batch(seed=step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert twins.ours.head.weight is twins.ours.layers[1].again.weight
    assert_close(twins.ours(**make_batch(seed=9)), twins.eager(**make_batch(seed=9)))


def test_a_weight_tied_outside_may_be_untied_and_tied_again(twins: Twins) -> None:
    for model in twins:
        model(**make_batch()).backward()
        model.head.weight = nn.Parameter(model.head.weight.detach() * 2)
        model(**make_batch(seed=1)).backward()
        model.head.weight = model.layers[0].out.weight
        model(**make_batch(seed=2)).backward()
    twins.agree()


def test_frozen_weights_get_no_gradient_and_adapters_do(twins: Twins) -> None:
    for step in range(2):
        for model in twins:
            if step:
                with torch.no_grad():
                    model.layers[0].base.weight.mul_(0.5)  # a base that is merged or loaded anew
            model(**make_batch(seed=step)).backward()
        twins.agree()
    for layer in twins.ours.layers:
        assert layer.base.weight.grad is None
        assert layer.up.grad is not None
        assert layer.down.grad is not None


def test_replicas_in_one_graph_each_get_their_own(twins: Twins) -> None:
    """One loss over two passes of the same layers with the weights exchanged in between."""
    for model in twins:
        batch = make_batch()
        x, visible = model.embed(batch["x"]), drafter.see(batch["documents"])
        first, _ = model.layers[0](x, visible)
        old = model.layers[0].gain
        model.layers[0].gain = nn.Parameter(old.detach() * 3)
        second, side = model.layers[0](x, visible)
        (first.square().mean() + second.mean() + side.mean()).backward()
        assert old.grad is None
    twins.agree()


CHANGES: dict[str, Callable[[drafter.Drafter, Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "input": lambda model, x, visible, hidden, side: x,
    "mask": lambda model, x, visible, hidden, side: visible,
    "first output": lambda model, x, visible, hidden, side: hidden,
    "second output": lambda model, x, visible, hidden, side: side,
    "frozen weight": lambda model, x, visible, hidden, side: model.layers[0].base.weight,
    "weight": lambda model, x, visible, hidden, side: model.layers[0].out.weight,
    "adapter": lambda model, x, visible, hidden, side: model.layers[0].up,
    "gain": lambda model, x, visible, hidden, side: model.layers[0].gain,
    "bias": lambda model, x, visible, hidden, side: model.layers[0].out.bias,
    "other layer": lambda model, x, visible, hidden, side: model.layers[1].out.weight,
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_changes_before_the_backward_is_noticed_as_in_eager(twins: Twins, what: str) -> None:
    """Never another gradient than eager's. Of a mask eager keeps the negation, an artifact the mask itself."""
    errors = []
    for model in twins:
        batch = make_batch()
        x, visible = model.embed(batch["x"]), drafter.see(batch["documents"])
        hidden, side = model.layers[0](x, visible)
        loss = hidden.sum() + side.mean()
        with torch.no_grad():
            changed = CHANGES[what](model, x, visible, hidden, side)
            changed.logical_not_() if changed.dtype == torch.bool else changed.add_(1)
        try:
            loss.backward()
            errors.append("")
        except RuntimeError as error:
            errors.append(str(error))
            model.zero_grad()
    ours, eager = errors
    assert ("modified by an inplace operation" in ours) == bool(ours)
    if what == "mask":
        assert (bool(ours), bool(eager)) == (True, False)
        return
    assert bool(ours) == bool(eager)
    twins.agree()
