"""A6: gradient mode and autocast are each thread's own, and so is the artifact that it gets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import aotcache
from tests.cases import tiny
from tests.cases.conftest import Warm
from tests.cases.support import copy_store, make_batch, write_spec

STEPS = 100


@pytest.fixture(scope="module")
def mixed(
    specs: Path, tiny_d: Warm, warmed: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> Warm:
    """A store that holds TINY-D's bf16 autocast training artifact, its fp32 inference one, and no more."""
    spec = write_spec(specs / "bf16.toml", modes=["train"], context="tests.cases.tiny:bf16")
    made = Warm(spec, warmed(spec))
    both = [*made.manifests(), *tiny_d.manifests("infer")]
    return Warm(spec, copy_store(made.store, tmp_path_factory.mktemp("mixed"), both))


def in_bf16(block: tiny.DenseBlock, call: dict[str, torch.Tensor], out: list[Any]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        y = block(**call)
    gradients = torch.autograd.grad(y.float().pow(2).mean(), list(block.parameters()))
    out.append((y.dtype, y.requires_grad, y.detach(), [(g.dtype, g) for g in gradients]))


def in_fp32(block: tiny.DenseBlock, call: dict[str, torch.Tensor], out: list[Any]) -> None:
    with torch.no_grad():
        y = block(**call)
    out.append((y.dtype, y.requires_grad, y.detach(), []))


def same(one: Any, other: Any) -> bool:
    return (
        one[:2] == other[:2]
        and torch.equal(one[2], other[2])
        and len(one[3]) == len(other[3])
        and all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in zip(one[3], other[3], strict=True))
    )


def test_two_modes_in_lockstep_on_one_module(mixed: Warm) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # equal to the last bit asks for one order of additions
    try:
        lockstep(mixed)
    finally:
        torch.set_num_threads(threads)


def lockstep(mixed: Warm) -> None:
    model = tiny.build()
    block = model.blocks[0]
    calls = [{k: b[k] for k in ("x", "documents")} for b in (make_batch(seed=s) for s in range(4))]
    kinds = (in_bf16, in_fp32)
    with aotcache.attach(model, mixed.spec, store=mixed.store) as handle:
        alone: dict[Any, list[Any]] = {kind: [] for kind in kinds}
        together: dict[Any, list[Any]] = {kind: [] for kind in kinds}
        for kind in kinds:
            for call in calls:
                kind(block, call, alone[kind])
        barrier = threading.Barrier(2, timeout=60)
        errors: list[BaseException] = []

        def work(kind: Any) -> None:
            torch.get_num_threads()
            try:
                for i in range(STEPS):
                    barrier.wait()
                    kind(block, calls[i % 4], together[kind])
            except BaseException as error:
                errors.append(error)
                barrier.abort()

        workers = [threading.Thread(target=work, args=(kind,)) for kind in kinds]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert errors == []
        stats = handle.stats()
    for kind in kinds:
        assert len(together[kind]) == STEPS
        assert all(same(alone[kind][i % 4], found) for i, found in enumerate(together[kind]))
    assert all(found[1] for found in together[in_bf16])
    assert not any(found[1] for found in together[in_fp32])
    assert (stats["hits"], stats["misses"], stats["traces"]) == (2 * (STEPS + 4), 0, 0)


def test_each_is_right_and_not_the_other(mixed: Warm) -> None:
    model = tiny.build()
    call = {k: v for k, v in make_batch(seed=1).items() if k != "target"}
    eager = tiny.build().blocks[0]
    exact = tiny.build().double().blocks[0]
    wide = exact(call["x"].double(), call["documents"])
    wide.pow(2).mean().backward()
    with aotcache.attach(model, mixed.spec, store=mixed.store):
        for context in (torch.autocast("cpu", torch.bfloat16), nullcontext()):
            grad = not isinstance(context, nullcontext)
            with context, torch.set_grad_enabled(grad):
                ours, plain = model.blocks[0](**call), eager(**call)
            assert ours.dtype == plain.dtype
            error, eager_error = ((t.double() - wide).abs().max() for t in (ours, plain))
            assert error <= max(2 * eager_error, 1e-6)
            # bf16 products are no fp32 products: three decimal digits, not seven.
            assert bool(error > 1e-4) is grad
            if grad:
                ours.float().pow(2).mean().backward()
                plain.float().pow(2).mean().backward()
    for name, parameter in exact.named_parameters():
        found, rounded = (m.get_parameter(name).grad for m in (model.blocks[0], eager))
        assert found.dtype == rounded.dtype
        error, eager_error = ((t.double() - parameter.grad).abs().max() for t in (found, rounded))
        assert error <= 2 * eager_error, name


def test_the_store_has_two_keys(mixed: Warm) -> None:
    manifests = list(aotcache.open_store(mixed.store).list())
    assert sorted(m.mode for m in manifests) == ["infer", "train"]
    assert len({m.key for m in manifests}) == 2
