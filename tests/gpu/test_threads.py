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


def test_c4_first_launch_in_fresh_threads(spec: Spec) -> None:
    batch = make_batch(seed=4)
    want = reference(batch)
    model = tiny.build(flex=True, blocks=BLOCKS).to(DEVICE)
    with aotcache.attach(model, spec) as handle:
        # The main thread loads and runs nothing.
        handle.prefetch()
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(run(model, batch)))
        thread.start()
        thread.join(120)
        assert_same(found[0], want)
        replicas = [tiny.build(flex=True, blocks=BLOCKS).to(DEVICE) for _ in range(4)]
        handles = [aotcache.attach(replica, spec) for replica in replicas]
        start = threading.Barrier(4)

        def on_own_stream(replica: torch.nn.Module) -> Any:
            start.wait(60)
            with torch.cuda.stream(torch.cuda.Stream()):
                return run(replica, batch)

        with ThreadPoolExecutor(4) as pool:
            for each in pool.map(on_own_stream, replicas):
                assert_same(each, want)
        for each in (handle, *handles):
            stats = each.stats()
            assert not stats["misses"] + stats["eager_calls"] + stats["traces"]
        for each in handles:
            each.detach()


def test_b9_padding_blocks_leave_no_trace(spec: Spec) -> None:
    model = tiny.build(flex=True, blocks=BLOCKS).to(DEVICE)
    with aotcache.attach(model, spec) as handle:
        found = run(model, padded_batch())
        assert not handle.stats()["misses"]
    loss, gradients = removed_reference(tiny.build(flex=False, blocks=BLOCKS), padded_batch())
    assert torch.isfinite(found[0])
    assert_same(found, (loss, gradients))


def test_b3_lengths_that_never_repeat(warm_gpu: Callable[..., Spec]) -> None:
    spec = warm_gpu(
        "ladder", flex=True, blocks=1, modes=["train"], buckets={"batch": [1], "seq": [512, 1024]}
    )
    buckets = aotcache.Buckets.from_spec(spec)
    model = tiny.build(flex=True, blocks=1).to(DEVICE)
    dense = tiny.build(flex=False, blocks=1)
    with aotcache.attach(model, spec) as handle:
        handle.prefetch()
        generator = torch.Generator().manual_seed(0)
        for anchors in torch.randperm(64, generator=generator)[:30].tolist():
            batch = make_batch(rows=1, length=16 * (anchors + 1), seed=anchors)
            found = run(model, buckets.pad(batch).batch)
            dense.zero_grad(set_to_none=True)
            loss = dense(**batch)
            loss.backward()
            assert_same(found, (loss.detach(), {n: p.grad for n, p in dense.named_parameters()}))
        stats = handle.stats()
    assert (stats["hits"], stats["misses"], stats["traces"]) == (30, 0, 0)
