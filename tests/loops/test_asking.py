"""The ways of asking for gradients, and what people put around a step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.loops import drafter
from tests.loops.conftest import Twins, assert_close, make_batch

pytestmark = pytest.mark.slow

Ask = Callable[[drafter.Drafter], list[Tensor | None]]


def _trained(model: drafter.Drafter) -> list[Tensor | None]:
    return [p.grad for p in model.parameters() if p.requires_grad]


def _of_some_inputs(model: drafter.Drafter) -> list[Tensor | None]:
    model(**make_batch()).backward(inputs=[model.layers[0].up])
    return _trained(model)


def _of_several_losses(model: drafter.Drafter) -> list[Tensor | None]:
    losses = [model(**make_batch(16, seed)) for seed in range(3)]
    torch.autograd.backward(losses, [torch.tensor(s) for s in (1.0, -2.0, 0.5)])
    return _trained(model)


def _jacobian(model: drafter.Drafter) -> list[Tensor | None]:
    batch = make_batch()
    found: Tensor = torch.autograd.functional.jacobian(
        lambda x: model(x, batch["documents"], batch["target"]), batch["x"]
    )
    return [found, *_trained(model)]


def _other_weights(model: drafter.Drafter) -> list[Tensor | None]:
    """A call with weights that are no parameters of the module."""
    own = {n: (p.detach() * 1.1).requires_grad_(p.requires_grad) for n, p in model.named_parameters()}
    loss = torch.func.functional_call(model, own, (), make_batch())
    wanted = [p for p in own.values() if p.requires_grad]
    return [*torch.autograd.grad(loss, wanted), *_trained(model)]


def _anomaly_detection(model: drafter.Drafter) -> list[Tensor | None]:
    with torch.autograd.detect_anomaly(check_nan=True):
        model(**make_batch()).backward()
    return _trained(model)


def _loss_scaling(model: drafter.Drafter) -> list[Tensor | None]:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    scaler.scale(model(**make_batch())).backward()
    scaler.unscale_(optimizer)
    return _trained(model)


def _offloading(model: drafter.Drafter) -> list[Tensor | None]:
    with torch.autograd.graph.save_on_cpu():
        loss = model(**make_batch())
    with torch.autograd.set_multithreading_enabled(False):
        loss.backward()
    return _trained(model)


def _not_a_number(model: drafter.Drafter) -> list[Tensor | None]:
    batch = make_batch()
    batch["x"][0, 0, 0] = torch.nan
    model(**batch).backward()
    return [None if g is None else g.isnan().float() for g in _trained(model)]


ASKS: tuple[Ask, ...] = (
    _of_some_inputs,
    _of_several_losses,
    _jacobian,
    _other_weights,
    _anomaly_detection,
    _loss_scaling,
    _offloading,
    _not_a_number,
)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("ask", ASKS)
def test_the_answer_is_eagers(twins: Twins, ask: Ask) -> None:
    found, wanted = (ask(model) for model in twins)
    assert [g is None for g in found] == [g is None for g in wanted]
    for ours, eager in zip(found, wanted, strict=True):
        if ours is not None and eager is not None:
            assert_close(ours, eager)


def test_a_closure_that_an_optimizer_calls(twins: Twins) -> None:
    for model in twins:
        optimizer = torch.optim.LBFGS([p for p in model.parameters() if p.requires_grad], max_iter=3)

        def closure(model: drafter.Drafter = model, optimizer: torch.optim.LBFGS = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(**make_batch())
            loss.backward()
            return loss

        optimizer.step(closure)
    for one, other in zip(*(m.parameters() for m in twins), strict=True):
        assert_close(one, other, tolerance=1e-4)


def test_an_average_of_weights_runs_on_its_own(twins: Twins) -> None:
    found = []
    for model in twins:
        average = torch.optim.swa_utils.AveragedModel(model)
        for factor in (1.5, 0.5):
            with torch.no_grad():
                model.layers[0].out.weight.mul_(factor)
            average.update_parameters(model)
        with torch.no_grad():
            found.append(average(**make_batch()))
        assert not torch.equal(average.module.layers[0].out.weight, model.layers[0].out.weight)
    assert_close(*found)
