"""`aotcache.flex` in the place of torch's functions. The reference is attention by its definition."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

import aotcache
from aotcache.errors import ArtifactMiss, CallRefused
from aotcache.flex import create_block_mask, flex_attention
from aotcache.lockfile import lock_path, read_lock
from aotcache.spec import Spec
from tests.cases.support import assert_gradients_close, gradients_of
from tests.flex import dropin
from tests.flex.conftest import SEQ


def step(model: Any, run: Any, seed: int, padding: int = 0) -> tuple[Tensor, Any]:
    """Loss and gradients of one batch, by `run(model, **batch)`."""
    model.zero_grad(set_to_none=True)
    loss = run(model, **dropin.batch({"seq": SEQ}, seed=seed, padding=padding)[1])
    loss.backward()
    return loss.detach(), gradients_of(model)


def cells(spec: Spec) -> set[tuple[str, str]]:
    return {(cell.region, cell.mode) for cell in read_lock(lock_path(spec.path)).cells}


def qkv(seed: int = 0, *, grad: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (2, dropin.HEADS, SEQ, dropin.HEAD),
        *[(2, dropin.KV_HEADS, SEQ, dropin.HEAD)] * 2,
    ]
    return [torch.randn(shape, generator=generator).requires_grad_(grad) for shape in shapes]


def test_warming_finds_the_functions_by_itself(functions: Spec) -> None:
    assert cells(functions) == {
        ("flex_attention", "train"),
        ("flex_attention", "infer"),
        ("create_block_mask", "infer"),
    }


def test_training_on_threads_equals_the_definition(functions: Spec) -> None:
    start = threading.Barrier(3)

    def train(thread: int) -> dict[str, Any]:
        model = dropin.build()
        with aotcache.attach(model, functions, lock=lock_path(functions.path)) as handle:
            handle.prefetch()
            start.wait(timeout=60)
            for i in range(4):
                # New documents at every step, in a closure made anew.
                loss, gradients = step(model, dropin.Drafter.__call__, 10 * thread + i)
                want, expected = step(model, dropin.reference, 10 * thread + i)
                torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-4)
                assert_gradients_close(gradients, expected)
            return handle.stats()

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(train, range(3)))
    for stats in found:
        # Two layers and one mask in each step.
        assert stats["hits"] == 4 * 3
        assert not stats["misses"] + stats["eager_calls"] + stats["traces"]


def test_padding_that_sees_no_key_leaves_no_trace(functions: Spec) -> None:
    model = dropin.build()
    with aotcache.attach(model, functions) as handle:
        loss, gradients = step(model, dropin.Drafter.__call__, 8, padding=SEQ // 3)
        with torch.no_grad():
            without_gradients = model(**dropin.batch({"seq": SEQ}, seed=8, padding=SEQ // 3)[1])
        stats = handle.stats()
    assert (stats["hits"], stats["misses"], stats["traces"]) == (6, 0, 0)
    # The same rows with nothing behind them: the padded one on its own, without its padding.
    _, batch = dropin.batch({"seq": SEQ}, seed=8)
    counts = (SEQ, SEQ - SEQ // 3)
    model.zero_grad(set_to_none=True)
    rows = [{name: t[i : i + 1, :n] for name, t in batch.items()} for i, n in enumerate(counts)]
    want = sum(n * dropin.reference(model, **row) for n, row in zip(counts, rows, strict=True)) / sum(counts)
    want.backward()
    for found in (loss, without_gradients):
        torch.testing.assert_close(found, want.detach(), rtol=1e-5, atol=1e-4)
    assert_gradients_close(gradients, gradients_of(model))


def test_without_gradients_the_inference_artifact_runs(functions: Spec) -> None:
    model = dropin.build()
    _, batch = dropin.batch({"seq": SEQ}, seed=5)
    with aotcache.attach(model, functions) as handle, torch.no_grad():
        torch.testing.assert_close(model(**batch), dropin.reference(model, **batch), rtol=1e-5, atol=1e-4)
        assert handle.stats()["hits"] == 3


def test_masks_equal_torchs_own(functions: Spec) -> None:
    documents = dropin.batch({"seq": SEQ}, seed=3)[1]["documents"]
    with aotcache.attach(dropin.build(), functions):
        ours = dropin.make_mask(documents)
    want = torch_flex.create_block_mask(ours.mask_mod, 2, None, SEQ, SEQ, device="cpu")
    assert ours.seq_lengths == want.seq_lengths
    assert ours.BLOCK_SIZE == want.BLOCK_SIZE
    names = [name for name, value in vars(want).items() if isinstance(value, Tensor)]
    assert len(names) == 8
    for name in names:
        found, expected = getattr(ours, name), getattr(want, name)
        assert torch.equal(found, expected), name
        assert (found.dtype, found.stride()) == (expected.dtype, expected.stride()), name


def test_masks_of_torchs_own_function_are_taken(functions: Spec) -> None:
    model = dropin.build()
    _, batch = dropin.batch({"seq": SEQ}, seed=4)
    with aotcache.attach(model, functions) as handle:
        mask = torch_flex.create_block_mask(
            dropin.make_mask(batch["documents"]).mask_mod, 2, None, SEQ, SEQ, device="cpu"
        )
        x = batch["x"]
        for layer in model.layers:
            x = layer(x, mask)
        real = (batch["documents"] >= 0).unsqueeze(-1)
        loss = ((x - batch["target"]).pow(2) * real).sum() / real.sum()
        torch.testing.assert_close(loss, dropin.reference(model, **batch), rtol=1e-5, atol=1e-4)
        assert not handle.stats()["misses"]


def test_inside_a_region_they_are_part_of_it(layers: Spec) -> None:
    assert cells(layers) == {("layers.0", "train"), ("layers.1", "train"), ("create_block_mask", "infer")}
    model = dropin.build()
    with aotcache.attach(model, layers) as handle:
        loss, gradients = step(model, dropin.Drafter.__call__, 7)
        assert set(handle.stats()["regions"]) == {"layers.0", "layers.1", "create_block_mask"}
    want, expected = step(model, dropin.reference, 7)
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-4)
    assert_gradients_close(gradients, expected)


def test_a_mask_that_is_too_short_is_refused_with_both_shapes(functions: Spec) -> None:
    model = dropin.build()
    _, batch = dropin.batch({"seq": SEQ}, seed=6)
    short = torch_flex.create_block_mask(lambda b, h, q, kv: q >= kv, 2, None, 48, SEQ, device="cpu")
    with aotcache.attach(model, functions) as handle:
        with pytest.raises(CallRefused, match=r"48 queries and 64 keys, the input has 64 and 64"):
            flex_attention(*qkv(), block_mask=short, enable_gqa=True)
        torch.testing.assert_close(model(**batch), dropin.reference(model, **batch), rtol=1e-5, atol=1e-4)
        assert not handle.stats()["misses"]


def test_another_constant_in_the_closure_is_a_miss_that_names_it(functions: Spec) -> None:
    window = 8
    documents = torch.zeros(2, SEQ, dtype=torch.long)

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q - kv < window) & (documents[b, q] == documents[b, kv])

    with aotcache.attach(dropin.build(), functions), pytest.raises(ArtifactMiss, match=r"window") as missed:
        create_block_mask(visible, 2, None, SEQ, SEQ, device="cpu")
    assert "aotcache warm" in str(missed.value)


def test_a_miss_may_run_eagerly_and_does_not_trace(functions: Spec) -> None:
    q, k, v = qkv(1)
    with aotcache.attach(dropin.build(), functions, on_miss="eager") as handle:
        mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, SEQ, SEQ, device="cpu")
        out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        out.sum().backward()
        stats = handle.stats()
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True)
    want.sum().backward()
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    for ours, expected in zip((q, k, v), wide, strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad.double(), expected.grad, rtol=1e-4, atol=1e-5)
    assert (stats["eager_calls"], stats["traces"]) == (2, 0)


def test_a_program_that_attaches_nothing_uses_the_configured_store(functions: Spec) -> None:
    model = dropin.build()
    with aotcache.forbid_tracing() as receipt:
        loss, gradients = step(model, dropin.Drafter.__call__, 8)
    want, expected = step(model, dropin.reference, 8)
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-4)
    assert_gradients_close(gradients, expected)
    assert receipt.total == 0


def test_calls_belong_to_the_handle_of_their_thread(functions: Spec) -> None:
    _, batch = dropin.batch({"seq": SEQ}, seed=9)
    attached, done = threading.Event(), threading.Event()
    hits: dict[str, int] = {}

    def other() -> None:
        model = dropin.build()
        with aotcache.attach(model, functions) as handle:
            attached.set()
            assert done.wait(60)
            model(**batch)
            hits["other"] = handle.stats()["hits"]

    model = dropin.build()
    with aotcache.attach(model, functions) as handle:
        thread = threading.Thread(target=other)
        thread.start()
        assert attached.wait(60)
        model(**batch)
        hits["own"] = handle.stats()["hits"]
        done.set()
        thread.join(60)
        assert handle.stats()["hits"] == hits["own"]
    assert hits == {"own": 3, "other": 3}
