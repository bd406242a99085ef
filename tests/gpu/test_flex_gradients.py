"""B1, B5 and B7 with the device's own kernels of flex attention, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import aotcache
from aotcache.spec import Spec
from tests.cases import eagle_mask, tiny
from tests.gpu import drafters
from tests.gpu.conftest import DEVICE

Warm = Callable[..., Spec]
QKV = ("q", "k", "v")


def assert_close(found: Tensor | None, want: Tensor | None) -> None:
    """CLOSE for a gradient in fp32."""
    assert found is not None
    assert want is not None
    assert torch.isfinite(found).all()
    assert (found - want).abs().max() <= 1e-3 * want.abs().max()


def leaf_copies(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.detach().clone().requires_grad_(t.requires_grad) for n, t in batch.items()}


def test_b1_a_mask_longer_than_the_input(warm_gpu: Warm) -> None:
    spec = warm_gpu(
        "b1",
        factory="tests.cases.eagle_mask:build",
        batch_function="tests.cases.eagle_mask:batch",
        regions=[],
        modes=["train"],
        buckets={},
        axes="",
    )
    _, batch = eagle_mask.batch({}, DEVICE, seed=1)
    model = eagle_mask.build().to(DEVICE)
    with aotcache.attach(model, spec) as handle:
        out, loss = model(**batch)
        loss.backward()
        assert not handle.stats()["misses"]
    at = torch.arange(2 * eagle_mask.REAL, device=DEVICE)
    real = eagle_mask.visible(at, at, at[: eagle_mask.REAL, None], at)
    copies = leaf_copies(batch)
    want = tiny.dense(copies["q"], copies["k"], copies["v"], real)
    (want * batch["target"]).sum().backward()
    assert (out - want).abs().max() <= 1e-4
    for name in QKV:
        assert_close(batch[name].grad, copies[name].grad)


def test_b5_gradients_of_sliced_keys(warm_gpu: Warm) -> None:
    spec = warm_gpu(
        "b5",
        factory="tests.gpu.drafters:build",
        batch_function="tests.gpu.drafters:leaves",
        regions=[],
        modes=["train"],
        buckets={"q": [drafters.LENGTH], "kv": [drafters.LENGTH]},
        axes="",
        kind="both",
    )
    model = drafters.build("both").to(DEVICE)
    _, batch = drafters.leaves({"q": drafters.LENGTH, "kv": drafters.LENGTH}, DEVICE, seed=1)
    found: list[list[Tensor]] = []
    with aotcache.attach(model, spec) as handle:
        for _ in range(10):
            for name in QKV:
                batch[name].grad = None
            model(**batch).backward()
            found.append([batch[name].grad.clone() for name in QKV])
        assert not handle.stats()["misses"]
    copies = leaf_copies(batch)
    kept = {n: copies[n][:, :, : drafters.KEPT].contiguous() for n in ("k", "v")}
    at = torch.arange(drafters.LENGTH, device=DEVICE)
    seen = at[:, None] >= at[: drafters.KEPT]
    scores = (copies["q"] @ kept["k"].mT / drafters.HEAD**0.5).masked_fill(~seen, -torch.inf)
    (scores.softmax(-1) @ kept["v"] * batch["target"]).sum().backward()
    for ours, name in zip(found[0], QKV, strict=True):
        assert_close(ours, copies[name].grad)
    for gradient in found[0][1:]:
        assert not gradient[:, :, drafters.KEPT :].any()
    for again in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(again, found[0], strict=True))


@pytest.mark.parametrize("kind", ["scaled", "biased"])
def test_b7_learned_biases_in_the_score_function(warm_gpu: Warm, kind: str) -> None:
    length = 128
    specs = [
        warm_gpu(
            f"b7_{kind}_{frozen}",
            factory="tests.gpu.drafters:build",
            batch_function="tests.gpu.drafters:leaves",
            regions=[],
            modes=["train"],
            buckets={"q": [length], "kv": [length]},
            axes="",
            kind=kind,
            frozen=frozen,
        )
        for frozen in (False, True)
    ]
    model, reference = (drafters.build(kind).to(DEVICE) for _ in range(2))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, reference)]
    for number in range(3):
        if number == 2:
            for m in (model, reference):
                m.bias.requires_grad_(False)
                m.bias.grad = None
        _, batch = drafters.leaves({"q": length, "kv": length}, DEVICE, seed=number)
        copies = leaf_copies(batch)
        with aotcache.attach(model, specs[number == 2]) as handle:
            model(**batch).backward()
            assert not handle.stats()["misses"]
        reference.by_definition(**copies).backward()
        for name in QKV:
            assert_close(batch[name].grad, copies[name].grad)
        if number == 2:
            assert model.bias.grad is None
            continue
        assert_close(model.bias.grad, reference.bias.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
