"""C4 and B9 on TINY with flex attention: threads that have done nothing, rows that see nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import aotcache
from aotcache.spec import Spec
from tests.cases import tiny
from tests.cases.support import assert_close, assert_gradients_close, make_batch
from tests.cases.test_b9_padding_blocks import padded_batch, removed_reference
from tests.gpu.conftest import DEVICE

BLOCKS = 2


@pytest.fixture(scope="module")
def spec(warm_gpu: Callable[..., Spec]) -> Spec:
    return warm_gpu("tiny", flex=True, blocks=BLOCKS)


def run(model: torch.nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Loss and gradients, on the CPU."""
    model.zero_grad(set_to_none=True)
    loss = model(**{name: value.to(DEVICE) for name, value in batch.items()})
    loss.backward()
    torch.cuda.current_stream().synchronize()
    grads = {n: None if p.grad is None else p.grad.cpu() for n, p in model.named_parameters()}
    return loss.detach().cpu(), grads


def reference(batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor | None]]:
    """REF: dense boolean attention with the same weights, on the CPU."""
    model = tiny.build(flex=False, blocks=BLOCKS)
    loss = model(**batch)
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}


def assert_same(found: Any, want: Any) -> None:
    assert_close(found[0], want[0])
    assert_gradients_close(found[1], want[1])


Prepared = tuple[tiny.Tiny, Tensor, Any, Tensor]


def prepared(batch: dict[str, Tensor]) -> Prepared:
    """A replica, and what its blocks and the loss want, all of it on the device already."""
    on_device = {name: value.to(DEVICE) for name, value in batch.items()}
    model = tiny.build(flex=True, blocks=BLOCKS).to(DEVICE)
    return model, on_device["x"], tiny.block_mask(on_device["documents"]), on_device["target"]


def first_launch(given: Prepared) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Loss and gradients of documents without padding. An artifact is the first that calls the device."""
    model, x, mask, target = given
    for block in model.blocks:
        x = block(x, mask)
    loss = (x - target).pow(2).mean()
    loss.backward()
    grads = {n: None if p.grad is None else p.grad.cpu() for n, p in model.named_parameters()}
    return loss.detach().cpu(), grads


def test_c4_first_launch_in_fresh_threads(spec: Spec) -> None:
    batch = make_batch(seed=4)
    assert (batch["documents"] >= 0).all()
    want = reference(batch)
    alone, *replicas = [prepared(batch) for _ in range(5)]
    handles = [aotcache.attach(model, spec) for model, *_ in (alone, *replicas)]
    # The main thread loads and runs nothing.
    handles[0].prefetch()
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as fresh:
        assert_same(fresh.submit(first_launch, alone).result(120), want)
    streams = [torch.cuda.Stream() for _ in replicas]
    start = threading.Barrier(len(replicas))

    def on_own_stream(given: Prepared, stream: torch.cuda.Stream) -> Any:
        start.wait(60)
        with torch.cuda.stream(stream):
            return first_launch(given)

    with ThreadPoolExecutor(len(replicas)) as pool:
        for each in pool.map(on_own_stream, replicas, streams):
            assert_same(each, want)
    for handle in handles:
        stats = handle.stats()
        assert stats["hits"] == BLOCKS
        assert not stats["misses"] + stats["eager_calls"] + stats["traces"]
        handle.detach()


def test_b9_padding_blocks_leave_no_trace(spec: Spec) -> None:
    model = tiny.build(flex=True, blocks=BLOCKS).to(DEVICE)
    with aotcache.attach(model, spec) as handle:
        found = run(model, padded_batch())
        assert not handle.stats()["misses"]
    loss, gradients = removed_reference(tiny.build(flex=False, blocks=BLOCKS), padded_batch())
    assert torch.isfinite(found[0])
    assert_same(found, (loss, gradients))


@pytest.mark.parametrize("rank", [0, 1])
def test_b3_lengths_that_never_repeat(warm_gpu: Callable[..., Spec], rank: int) -> None:
    spec = warm_gpu(
        "ladder", flex=True, blocks=1, modes=["train"], buckets={"batch": [1], "seq": [512, 1024]}
    )
    buckets = aotcache.Buckets.from_spec(spec)
    model = tiny.build(flex=True, blocks=1).to(DEVICE)
    dense = tiny.build(flex=False, blocks=1)
    with aotcache.attach(model, spec) as handle:
        loaded = handle.prefetch()["loads"]
        generator = torch.Generator().manual_seed(rank)
        for anchors in torch.randperm(64, generator=generator)[:30].tolist():
            batch = make_batch(rows=1, length=16 * (anchors + 1), seed=anchors)
            batch["documents"] = (torch.arange(16 * (anchors + 1)) // 16)[None]
            found = run(model, buckets.pad(batch).batch)
            dense.zero_grad(set_to_none=True)
            loss = dense(**batch)
            loss.backward()
            assert_same(found, (loss.detach(), {n: p.grad for n, p in dense.named_parameters()}))
        stats = handle.stats()
    assert (stats["hits"], stats["misses"], stats["eager_calls"], stats["traces"]) == (30, 0, 0, 0)
    assert stats["loads"] == loaded  # all of them before the first step
