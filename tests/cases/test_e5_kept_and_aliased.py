"""Beside dropout: what a region keeps and changes in place, and results that lie in other tensors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import aotcache
from aotcache.errors import CallRefused
from tests.cases.conftest import Warm
from tests.cases.noisy import HIDDEN, ROWS, Noisy, Statistics, build
from tests.cases.support import assert_close, assert_gradients_close, gradients_of


def _input(seed: int) -> Tensor:
    return torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def _train(model: Noisy, step: int, optimizer: torch.optim.Optimizer) -> Any:
    optimizer.zero_grad(set_to_none=True)
    torch.manual_seed(step)
    x = _input(step)
    loss = model(x)
    loss.backward()
    gradients = gradients_of(model)
    optimizer.step()
    return loss.detach(), x.grad, gradients


def require_same_buffers(one: Statistics, other: Statistics) -> None:
    for (name, ours), (_, want) in zip(one.named_buffers(), other.named_buffers(), strict=True):
        assert_close(ours.float(), want.float())
        assert ours.dtype == want.dtype, name


def test_five_steps_and_evals_in_between_equal_eager_down_to_what_is_kept(noisy: Warm) -> None:
    attached, eager = build(), build()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (attached, eager)]
    with aotcache.attach(attached, noisy.spec, store=noisy.store) as handle:
        for step in range(5):
            ours, want = (_train(m, step, o) for m, o in zip((attached, eager), optimizers, strict=True))
            assert_close(ours[0], want[0])
            assert_close(ours[1], want[1])
            assert_gradients_close(ours[2], want[2])
            require_same_buffers(attached.statistics, eager.statistics)
            with torch.no_grad():
                assert_close(attached.eval()(_input(9)), eager.eval()(_input(9)))
            attached.train()
            eager.train()
        stats = handle.stats()
    assert int(attached.statistics.calls) == 10
    assert int(attached.statistics.norm.num_batches_tracked) == 5
    assert (stats["hits"], stats["misses"], stats["traces"]) == (20, 0, 0)


def test_results_lie_where_eagers_do_and_pass_gradients_on(noisy: Warm) -> None:
    def flow(model: Noisy) -> tuple[Tensor, ...]:
        torch.manual_seed(1)
        x = _input(0)
        middle = x * 1
        y, part, same, rest, detached, calls = model.statistics(middle)
        assert same is middle
        assert calls is model.statistics.calls
        assert not detached.requires_grad
        part.add_(1)
        assert torch.equal(y.view(-1)[HIDDEN:], part)
        assert torch.equal(detached, y)
        (part.sin().sum() + same.cos().sum() + rest.sum()).backward()
        assert x.grad is not None
        return y, x.grad, *(p.grad for p in model.parameters() if p.grad is not None)

    attached, eager = build(), build()
    with aotcache.attach(attached, noisy.spec, store=noisy.store):
        ours = flow(attached)
    want = flow(eager)
    for got, expected in zip(ours, want, strict=True):
        assert_close(got.detach() / expected.detach().abs().max(), expected.detach() / expected.abs().max())


def test_a_write_to_an_alias_of_what_the_backward_needs_is_noticed_as_in_eager(noisy: Warm) -> None:
    attached, eager = build(), build()
    with aotcache.attach(attached, noisy.spec, store=noisy.store):
        for model in (attached, eager):
            middle = _input(0) * 1
            y, _, _, rest, _, _ = model.statistics(middle)
            rest.mul_(2)
            assert torch.equal(middle[1:].t(), rest)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_updates_what_is_kept_as_often_as_in_eager(noisy: Warm, reentrant: bool) -> None:
    attached, eager = build(), build()
    with aotcache.attach(attached, noisy.spec, store=noisy.store):
        for model in (attached, eager):
            torch.manual_seed(3)
            y: Any = checkpoint(lambda x, m=model: m.statistics(x)[0], _input(1), use_reentrant=reentrant)
            y.sin().sum().backward()
    # Without reentrance, recomputation ends with the last tensor that is saved, before the counter.
    assert int(attached.statistics.calls) == int(eager.statistics.calls) == (2 if reentrant else 1)
    assert int(attached.statistics.norm.num_batches_tracked) == 2
    require_same_buffers(attached.statistics, eager.statistics)
    assert_gradients_close(gradients_of(attached), gradients_of(eager))


def test_a_copy_keeps_its_own(noisy: Warm) -> None:
    attached = build()
    with aotcache.attach(attached, noisy.spec, store=noisy.store):
        attached.statistics(_input(0))
        twin = copy.deepcopy(attached)
        twin.statistics(_input(1))
        assert (int(attached.statistics.calls), int(twin.statistics.calls)) == (1, 2)
        twin.statistics.average = torch.full((HIDDEN,), 5.0)
        twin.statistics(_input(1))
        assert float(twin.statistics.average.min()) > 4
        assert float(attached.statistics.average.max()) < 2


def test_a_view_of_an_input_in_another_layout_is_refused_or_runs_eagerly(noisy: Warm) -> None:
    x = _input(0).detach().t().contiguous().t().requires_grad_()

    def call(on_miss: Any) -> Noisy:
        model = build()
        with aotcache.attach(model, noisy.spec, store=noisy.store, on_miss=on_miss) as handle:
            torch.manual_seed(0)
            result = model.statistics(x)
            assert handle.stats()["eager_calls"] == 1
        assert result[3].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        return model

    with pytest.raises(
        CallRefused, match=r"returns a view of x, which the artifact expects with strides \(64, 1\)"
    ):
        call("raise")
    eager = build()
    torch.manual_seed(0)
    eager.statistics(x)
    require_same_buffers(call("eager").statistics, eager.statistics)


def test_a_kept_tensor_in_memory_of_an_argument_is_refused(noisy: Warm) -> None:
    model = build()
    with aotcache.attach(model, noisy.spec, store=noisy.store):
        model.statistics(_input(0))
        memory = torch.zeros(ROWS + 1, HIDDEN)
        model.statistics.average = memory[ROWS]
        with pytest.raises(CallRefused, match="average, which it changes in place, shares its memory with x"):
            model.statistics(memory[:ROWS].requires_grad_())


def test_a_drafter_with_dropout_is_warmed_with_what_it_draws(noisy: Warm) -> None:
    found = {(m.region, m.mode): m for m in noisy.manifests()}
    assert set(found) == {(r, m) for r in ("drop", "statistics") for m in ("train", "infer")}
    drawn = {key: [s.draw.operator for s in m.inputs if s.draw] for key, m in found.items()}
    assert drawn["drop", "train"] == drawn["statistics", "train"] == ["aten.dropout.default"]
    assert drawn["drop", "infer"] == drawn["statistics", "infer"] == []
