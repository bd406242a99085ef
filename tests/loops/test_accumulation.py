"""Several forwards and several backwards: what ends up in `.grad` is what eager puts there."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import aotcache
from tests.loops import drafter
from tests.loops.conftest import Twins, assert_close, assert_same, gradients, make_batch

pytestmark = pytest.mark.slow


def test_two_backwards_through_one_forward(twins: Twins) -> None:
    for model in twins:
        loss = model(**make_batch())
        loss.backward(retain_graph=True)
        loss.backward()
    twins.agree()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_two_losses_of_one_forward_one_after_the_other(twins: Twins) -> None:
    for model in twins:
        batch = make_batch()
        hidden, side = model.layers[0](model.embed(batch["x"]), drafter.see(batch["documents"]))
        hidden.square().mean().backward(retain_graph=True)
        (side * hidden.detach()).mean().backward()
    twins.agree()


def test_forwards_of_other_buckets_before_their_backwards(twins: Twins) -> None:
    for model in twins:
        losses = [model(**make_batch(length, seed)) for seed, length in enumerate((16, 32, 16))]
        for i in (1, 2, 0):
            losses[i].backward()
    twins.agree()


def test_one_backward_through_two_forwards(twins: Twins) -> None:
    for model in twins:
        (model(**make_batch(16, 0)) * model(**make_batch(32, 1))).backward()
    twins.agree()


def test_a_region_called_again_on_its_own_output(twins: Twins) -> None:
    for model in twins:
        batch = make_batch()
        x, visible = model.embed(batch["x"]), drafter.see(batch["documents"])
        for _ in range(3):
            x, side = model.layers[0](x, visible)
        (x.square().mean() + side.mean()).backward()
    twins.agree()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_steps_with_accumulation(twins: Twins, set_to_none: bool) -> None:
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in twins]
    for step in range(4):
        for model, optimizer in zip(twins, optimizers, strict=True):
            for micro in range(3):
                (model(**make_batch((16, 32)[micro % 2], 10 * step + micro)) / 3).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        twins.agree()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)
    for one, other in zip(*(m.parameters() for m in twins), strict=True):
        assert_close(one, other, tolerance=1e-4)


def test_gradients_that_somebody_keeps_change_by_accumulation_alone(twins: Twins) -> None:
    for model in twins:
        model(**make_batch(seed=1)).backward()
    kept = {name: p.grad for name, p in twins.ours.named_parameters() if p.grad is not None}
    first = gradients(twins.ours)
    with torch.no_grad():
        twins.ours(**make_batch(seed=5))
    twins.ours(**make_batch(seed=6))
    assert_same(gradients(twins.ours), first, 0.0)
    for model in twins:
        model(**make_batch(seed=2)).backward()
    assert all(twins.ours.get_parameter(name).grad is grad for name, grad in kept.items())
    twins.agree()
    # Gradients of one backward share no memory with each other.
    assert len({grad.data_ptr() for grad in kept.values()}) == len(kept)


def test_a_smaller_last_batch_padded_to_its_bucket(twins: Twins) -> None:
    buckets = aotcache.Buckets.from_spec(aotcache.load_spec(twins.handle.warm_line.split()[2]))
    for length in (32, 16, 9, 3, 17):
        batch = make_batch(length, length)
        padded = buckets.pad(batch)
        assert padded.bucket["seq"] == (16 if length <= 16 else 32)
        losses = [twins.ours(**padded.batch), twins.eager(**batch)]
        assert_close(*losses)
        for loss in losses:
            loss.backward()
        twins.agree()


def test_backwards_in_another_thread_and_in_two_at_once(twins: Twins) -> None:
    errors: list[BaseException] = []

    def backward(loss: torch.Tensor, barrier: threading.Barrier) -> None:
        try:
            barrier.wait(30)
            loss.backward()
        except BaseException as error:
            errors.append(error)

    expected: list[dict[str, Any]] = []
    for model in twins:
        for _ in range(5):
            losses = [model(**make_batch(length, length)) for length in (16, 32)]
            barrier = threading.Barrier(2)
            threads = [threading.Thread(target=backward, args=(loss, barrier)) for loss in losses]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
        expected.append(gradients(model))
    assert errors == []
    assert_same(*expected)
