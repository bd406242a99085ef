"""One pair as one differentiable call: every gradient, and what autograd itself promises."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from aotcache.errors import CallRefused
from aotcache.manifest import OutputSlot
from aotcache.runtime import registry
from aotcache.runtime.function import Executable, conform
from tests.runtime import artifacts
from tests.runtime.artifacts import Artifact, close, inputs, loss, reference

WEIGHTS = [(1.0, 0.5), (0.0, 1.0), (1.0, 0.0)]


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return artifacts.pair(tmp_path_factory)


@pytest.fixture(scope="module")
def executable(pair: Artifact, tmp_path_factory: pytest.TempPathFactory) -> Executable:
    return registry.open_unshared(pair.manifest, pair.archive, tmp_path_factory.mktemp("home"))


def _step(executable: Executable, seed: int, weights: tuple[float, float] = (1.0, 0.5)) -> bool:
    tensors = inputs(seed)
    outputs = executable.train(tensors)
    loss(outputs, weights).backward()
    return _as_reference(tensors, outputs, weights)


def _as_reference(
    tensors: list[torch.Tensor], outputs: list[torch.Tensor], weights: tuple[float, float]
) -> bool:
    values, grads = reference(tensors, weights)
    found = [t.grad for t in tensors if t.requires_grad]
    return all(close(t, w) for t, w in zip([*outputs, *found], [*values, *grads], strict=True))


@pytest.mark.parametrize("weights", WEIGHTS)
def test_outputs_and_every_gradient_equal_eager(executable: Executable, weights: tuple[float, float]) -> None:
    # With a weight of zero an output takes no part in the loss: its gradient is missing.
    assert _step(executable, 1, weights)


def test_four_threads_train_at_once(executable: Executable) -> None:
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda seed: _step(executable, seed), range(400)))


def test_a_backward_may_run_in_another_thread_than_its_forward(executable: Executable) -> None:
    tensors = inputs(2)
    outputs = executable.train(tensors)
    thread = threading.Thread(target=loss(outputs).backward)
    thread.start()
    thread.join()
    assert _as_reference(tensors, outputs, (1.0, 0.5))


def test_gradients_nobody_asked_for_are_not_there(executable: Executable) -> None:
    tensors = inputs(3)
    (weight,) = torch.autograd.grad(loss(executable.train(tensors)), [tensors[1]])
    assert close(weight, reference(tensors, (1.0, 0.5))[1][1])
    assert all(t.grad is None for t in tensors)


def test_integer_outputs_are_not_differentiable(executable: Executable) -> None:
    outputs = executable.train(inputs(4))
    assert [t.requires_grad for t in outputs] == [True, True, False]
    assert outputs[2].dtype == torch.int64


def test_without_gradients_nothing_is_kept(executable: Executable) -> None:
    tensors = inputs(5, grad=False)
    outputs = executable.infer(tensors)
    assert len(outputs) == 3
    assert not any(t.requires_grad for t in outputs)
    assert all(
        close(t, w) for t, w in zip(outputs, artifacts.region(*(t.double() for t in tensors)), strict=True)
    )


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_saved_input_changed_in_place_is_noticed(executable: Executable, position: int) -> None:
    tensors = inputs(6)
    outputs = executable.train(tensors)
    with torch.no_grad():
        tensors[position].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss(outputs).backward()


def test_the_base_of_a_saved_view_changed_in_place_is_noticed(executable: Executable) -> None:
    base = torch.randn(3, artifacts.ROWS, artifacts.WIDTH)
    _, *others = inputs(7)
    outputs = executable.train([base[1].requires_grad_(), *others])
    base.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss(outputs).backward()


def test_an_output_changed_in_place_is_right_or_noticed(executable: Executable) -> None:
    tensors = inputs(8)
    outputs = executable.train(tensors)
    total = loss(outputs)
    with torch.no_grad():
        outputs[0].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_a_double_backward_raises(executable: Executable) -> None:
    """When its graph is asked for: later, a tensor that no path leads to would count as zero."""
    tensors = inputs(9)
    with pytest.raises(CallRefused, match="no second derivative"):
        torch.autograd.grad(loss(executable.train(tensors)), [tensors[0]], create_graph=True)

    def total(shift: torch.Tensor) -> torch.Tensor:
        return loss(executable.train([tensors[0] * shift, *tensors[1:]]))

    with pytest.raises(CallRefused, match="no second derivative"):
        torch.autograd.functional.hessian(total, torch.ones(artifacts.WIDTH))


def test_many_gradients_at_once_are_refused(executable: Executable) -> None:
    tensors = inputs(9)
    out = executable.train(tensors)[0]
    with pytest.raises(CallRefused, match="one by one"):
        torch.autograd.grad(out, tensors[:3], torch.ones(2, *out.shape), is_grads_batched=True)


def test_a_second_backward_raises_unless_the_graph_is_retained(executable: Executable) -> None:
    tensors = inputs(10)
    total = loss(executable.train(tensors))
    total.backward(retain_graph=True)
    first = [t.grad.clone() for t in tensors[:3] if t.grad is not None]
    total.backward()
    assert all(torch.equal(t.grad, 2 * f) for t, f in zip(tensors, first, strict=False) if t.grad is not None)
    with pytest.raises(RuntimeError, match="second time"):
        total.backward()


def test_saved_tensor_hooks_see_every_saved_tensor(executable: Executable) -> None:
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> int:
        packed.append(tensor.detach().clone())
        return len(packed) - 1

    tensors = inputs(11)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda i: packed[i]):
        outputs = executable.train(tensors)
    contract = executable.manifest.pair
    assert contract is not None
    assert len(packed) == len(contract.saved_inputs) + len(contract.saved_outputs) + contract.intermediates
    loss(outputs).backward()
    assert _as_reference(tensors, outputs, (1.0, 0.5))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_recomputes_with_the_same_artifact(executable: Executable, reentrant: bool) -> None:
    tensors = inputs(12)
    outputs = checkpoint(
        lambda *given: tuple(executable.train(list(given))), *tensors, use_reentrant=reentrant
    )
    assert isinstance(outputs, tuple)
    loss(outputs).backward()
    assert _as_reference(tensors, list(outputs), (1.0, 0.5))


def test_a_call_that_nobody_holds_frees_what_it_saved_at_once(executable: Executable) -> None:
    tensors = inputs(13)
    outputs = executable.train(tensors)
    node = outputs[0].grad_fn
    held = [weakref.ref(thing) for thing in (*tensors[:3], outputs[0], node)]
    gc.disable()
    try:
        del tensors, outputs, node
        assert [ref() for ref in held] == [None] * 5
    finally:
        gc.enable()


SLOT = OutputSlot("float32", (4, 6), (6, 1), True)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda g: g.t().contiguous().t(), id="transposed"),
        pytest.param(lambda g: torch.cat([g, g], 1)[:, :6], id="sliced"),
        pytest.param(lambda g: torch.cat([torch.zeros(1), g.flatten()])[1:].view(4, 6), id="unaligned"),
        pytest.param(torch.nn.Parameter, id="parameter"),
        pytest.param(lambda g: torch._neg_view(-g), id="negative view"),
        pytest.param(lambda g: torch._efficientzerotensor(g.zero_().shape), id="zeros without memory"),
    ],
)
def test_incoming_gradients_are_brought_into_the_compiled_layout(make: Any) -> None:
    values = torch.randn(4, 6)
    with torch.no_grad():
        found = conform(make(values), SLOT, 0)
    assert found.stride() == (6, 1)
    assert not found.is_neg()
    assert torch.equal(found, values)


@pytest.mark.parametrize("layout", ["transposed", "expanded", "sliced"])
def test_gradients_of_any_layout_give_what_contiguous_ones_give(executable: Executable, layout: str) -> None:
    grad = {
        "transposed": torch.randn(artifacts.WIDTH, artifacts.ROWS).t(),
        "expanded": torch.randn(1, 1).expand(artifacts.ROWS, artifacts.WIDTH),
        "sliced": torch.randn(artifacts.ROWS, 2 * artifacts.WIDTH)[:, ::2],
    }[layout]
    tensors = inputs(14)
    found = torch.autograd.grad(executable.train(tensors)[0], tensors[:3], grad)
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
    wanted = torch.autograd.grad(artifacts.region(*wide)[0], wide[:3], grad.double())
    assert all(close(f, w) for f, w in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    ("gradient", "message"),
    [
        (torch.zeros(4, 7), r"output 2 is float32 \(4, 7\), expected float32 \(4, 6\)"),
        (torch.zeros(4, 6, dtype=torch.float64), r"output 2 is float64 \(4, 6\), expected float32"),
        (
            torch.zeros(4, 6).to_sparse(),
            r"output 2 is a Tensor of layout torch\.sparse_coo, expected a plain",
        ),
    ],
)
def test_other_incoming_gradients_are_refused_by_name(gradient: torch.Tensor, message: str) -> None:
    with pytest.raises(CallRefused, match=message) as refused:
        conform(gradient, SLOT, 2)
    assert refused.value.details["output"] == 2
