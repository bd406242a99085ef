"""Hooks on tensors, parameters and modules: as often, in the order and with the values of eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.loops import drafter
from tests.loops.conftest import Twins, assert_close, make_batch

pytestmark = pytest.mark.slow

Log = list[tuple[str, Tensor]]


def compare(twins: Twins, run: Callable[[drafter.Drafter, Log], Any]) -> Log:
    """What hooks saw in `run` on both, equal in order and values; all gradients are equal, too."""
    logs: list[Log] = [[], []]
    for model, log in zip(twins, logs, strict=True):
        run(model, log)
    assert [name for name, _ in logs[0]] == [name for name, _ in logs[1]]
    for (name, found), (_, wanted) in zip(*logs, strict=True):
        assert_close(found, wanted, name)
    twins.agree()
    return logs[0]


def saw(log: Log, name: str, result: Callable[[Tensor], Any] = lambda gradient: None) -> Callable[..., Any]:
    def hook(gradient: Tensor) -> Any:
        log.append((name, gradient.detach().clone()))
        return result(gradient)

    return hook


@pytest.mark.parametrize("scale", [None, 3.0])
def test_hooks_on_inputs_and_outputs_of_a_region(twins: Twins, scale: float | None) -> None:
    def run(model: drafter.Drafter, log: Log) -> None:
        def result(gradient: Tensor) -> Tensor | None:
            return None if scale is None else gradient * scale

        batch = make_batch()
        x = model.embed(batch["x"])
        x.register_hook(saw(log, "input", result))
        x.retain_grad()
        hidden, side = model.layers[0](x, drafter.see(batch["documents"]))
        hidden.register_hook(saw(log, "hidden", result))
        side.register_hook(saw(log, "side", result))
        hidden.retain_grad()
        (hidden.square().mean() + side.mean()).backward()
        log += [("x.grad", x.grad), ("hidden.grad", hidden.grad)]  # type: ignore[list-item]
        log.sort(key=lambda entry: entry[0])  # eager's outputs are two nodes, an artifact's are one

    log = compare(twins, run)
    assert [name for name, _ in log] == ["hidden", "hidden.grad", "input", "side", "x.grad"]


def test_tensor_hooks_on_parameters_fire_once_per_backward_and_may_change_the_gradient(twins: Twins) -> None:
    def run(model: drafter.Drafter, log: Log) -> None:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(saw(log, name, lambda gradient: gradient * 0.5))
        for seed in range(2):
            model(**make_batch(seed=seed)).backward()
        log.sort(key=lambda entry: entry[0])

    log = compare(twins, run)
    trained = [name for name, p in twins.ours.named_parameters() if p.requires_grad]
    assert [name for name, _ in log] == sorted([*trained, *trained])


def test_post_accumulate_hooks_fire_once_per_backward(twins: Twins) -> None:
    def run(model: drafter.Drafter, log: Log) -> None:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    lambda p, name=name: log.append((name, p.grad.clone()))  # type: ignore[misc]
                )
        for seed in range(2):
            model(**make_batch(seed=seed)).backward()
        log.sort(key=lambda entry: entry[0])

    log = compare(twins, run)
    trained = [name for name, p in twins.ours.named_parameters() if p.requires_grad]
    assert [name for name, _ in log] == sorted([*trained, *trained])


def test_an_optimizer_that_steps_in_the_backward(twins: Twins) -> None:
    """Weights change while the backward of other regions is still to come."""
    for model in twins:
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters() if p.requires_grad}

        def step(parameter: Tensor, optimizers: dict[Any, torch.optim.SGD] = optimizers) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in optimizers:
            parameter.register_post_accumulate_grad_hook(step)
    # In eager a weight that is used twice in one graph may not change before its last use.
    for model in twins:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    for seed in range(3):
        for model in twins:
            model(**make_batch(seed=seed)).backward()
    for one, other in zip(*(m.parameters() for m in twins), strict=True):
        assert_close(one, other)


def test_forward_and_backward_hooks_of_a_regions_module(twins: Twins) -> None:
    def run(model: drafter.Drafter, log: Log) -> None:
        layer = model.layers[1]
        layer.register_forward_pre_hook(lambda m, args: (args[0] * 2, *args[1:]))
        layer.register_forward_hook(lambda m, args, out: (out[0] + 1, out[1]))
        layer.register_full_backward_pre_hook(lambda m, out: log.append(("pre", out[0])))
        layer.register_full_backward_hook(lambda m, into, out: log.extend([("in", into[0]), ("out", out[1])]))
        model(**make_batch()).backward()

    assert [name for name, _ in compare(twins, run)] == ["pre", "in", "out"]


def test_hooks_on_the_node_of_an_output(twins: Twins) -> None:
    def run(model: drafter.Drafter, log: Log) -> None:
        batch = make_batch()
        x = model.embed(batch["x"])
        hidden, side = model.layers[0](x, drafter.see(batch["documents"]))
        assert hidden.grad_fn is not None
        handle = torch.autograd.graph.register_multi_grad_hook(
            [hidden, side], lambda grads: log.extend(("multi", g) for g in grads if g is not None)
        )
        (hidden.square().mean() + side.mean()).backward()
        handle.remove()

    assert len(compare(twins, run)) == 2


def test_a_hook_that_raises_leaves_the_next_step_right(twins: Twins) -> None:
    def fail(gradient: Tensor) -> None:
        raise ValueError("no further")

    for model in twins:
        hook = model.layers[0].gain.register_hook(fail)
        with pytest.raises(ValueError, match="no further"):
            model(**make_batch()).backward()
        hook.remove()
        model.zero_grad()
        model(**make_batch(seed=1)).backward()
    twins.agree()


def test_hooks_of_weights_that_have_no_part_are_told_of_none(twins: Twins) -> None:
    """Eager does not call them; autograd has no way to leave one edge of a node out."""
    seen: list[Any] = []
    for model in twins:
        model.with_sides = False
        model.layers[0].gain.register_hook(seen.append)
        model.layers[0].gain.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
        model(**make_batch()).backward()
    assert seen == [None, None]
    twins.agree()
    assert twins.ours.layers[0].gain.grad is None
