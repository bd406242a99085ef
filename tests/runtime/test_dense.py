"""Dense flex attention against torch's own operator and a hand-written float64 reference."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import convert_frame
from torch.fx import _symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import (
    BlockMask,
    and_masks,
    create_block_mask,
    flex_attention,
    or_masks,
)

from aotcache.errors import CallRefused
from aotcache.runtime.dense import dense_attention, eager_without_tracing

B, HQ, HKV, Q, E = 2, 4, 2, 40, 8


def document_mask(documents: Tensor, anchors: Tensor) -> Callable[..., Any]:
    """Nested closures over two tensors, as DFlash masks are."""

    def same_document(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return documents[b, q] == documents[b, kv]

    def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q >= kv

    def to_anchor(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (kv == anchors[b, q // 8]) & (documents[b, q] >= 0)

    return or_masks(and_masks(same_document, causal), to_anchor)


def document_mask_by_loops(documents: Tensor, anchors: Tensor) -> Tensor:
    keep = torch.zeros(B, HQ, Q, Q, dtype=torch.bool)
    for b in range(B):
        for q in range(Q):
            for kv in range(Q):
                same = documents[b, q].item() == documents[b, kv].item()
                anchor = kv == anchors[b, q // 8].item() and documents[b, q].item() >= 0
                keep[b, :, q, kv] = (same and q >= kv) or anchor
    return keep


def reference(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, keep: Tensor) -> Tensor:
    """Float64, one head at a time, rows that see nothing skipped."""
    rows = []
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            kh, vh = k[b, h * k.shape[1] // q.shape[1]].double(), v[b, h * v.shape[1] // q.shape[1]].double()
            scores = q[b, h].double() @ kh.T / math.sqrt(q.shape[-1])
            if bias is not None:
                scores = scores + bias[h].double()
            for i in range(q.shape[2]):
                seen = keep[b, h, i].nonzero().squeeze(-1)
                row = torch.softmax(scores[i, seen], dim=0) @ vh[seen]
                rows.append(row if len(seen) else torch.zeros_like(vh[0]))
    return torch.stack(rows).reshape(*q.shape[:3], -1)


@pytest.fixture
def inputs() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "q": torch.randn(B, HQ, Q, E, requires_grad=True),
        "k": torch.randn(B, HKV, Q, E, requires_grad=True),
        "v": torch.randn(B, HKV, Q, E, requires_grad=True),
        "bias": torch.randn(HQ, 2 * Q, requires_grad=True),
        "documents": torch.randint(0, 3, (B, Q)).sort(dim=-1).values,
        "anchors": torch.randint(0, Q, (B, Q // 8)),
    }


def relative(bias: Tensor) -> Callable[..., Tensor]:
    return lambda score, b, h, q, kv: score + bias[h, q - kv + Q]


def run(inputs: dict[str, Tensor], mask: Any, score_mod: Any = None) -> Tensor:
    with eager_without_tracing():
        return flex_attention(
            inputs["q"], inputs["k"], inputs["v"], score_mod=score_mod, block_mask=mask, enable_gqa=True
        )


def close(ours: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    scale = expected.abs().max().item()
    error = (ours.double() - expected.double()).abs().max().item()
    assert error <= tolerance * scale, f"error {error} at scale {scale}"


def test_output_and_every_gradient_equal_the_float64_reference(inputs: dict[str, Tensor]) -> None:
    documents, anchors = inputs["documents"], inputs["anchors"]
    mask = create_block_mask(document_mask(documents, anchors), B, None, Q, Q, device="cpu", BLOCK_SIZE=16)
    out = run(inputs, mask, relative(inputs["bias"]))
    weight = torch.randn(out.shape)
    leaves = [inputs[name] for name in ("q", "k", "v", "bias")]
    ours = torch.autograd.grad((out * weight).sum(), leaves)

    positions = torch.arange(Q)
    bias = inputs["bias"][:, positions[:, None] - positions + Q]
    expected = reference(
        inputs["q"], inputs["k"], inputs["v"], bias, document_mask_by_loops(documents, anchors)
    )
    gradients = torch.autograd.grad((expected * weight).sum(), leaves)
    close(out, expected)
    for got, want in zip(ours, gradients, strict=True):
        close(got, want)


def test_forward_and_statistics_equal_torchs_own_operator(inputs: dict[str, Tensor]) -> None:
    mask = create_block_mask(
        document_mask(inputs["documents"], inputs["anchors"]), B, None, Q, Q, device="cpu", BLOCK_SIZE=16
    )
    q, k, v = (inputs[name].detach() for name in "qkv")
    args = (q, k, v, relative(inputs["bias"].detach()), mask.as_tuple(), 0.3)
    options = {"OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": True}
    ours = dense_attention(*args, options)
    theirs = torch.ops.higher_order.flex_attention(*args, options)
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_equal_torchs_own_operator(inputs: dict[str, Tensor], dtype: torch.dtype) -> None:
    mask = create_block_mask(
        document_mask(inputs["documents"], inputs["anchors"]), B, None, Q, Q, device="cpu", BLOCK_SIZE=16
    )
    q, k, v = (inputs[name].detach().to(dtype) for name in "qkv")
    args = (q, k, v, relative(inputs["bias"].detach()), mask.as_tuple(), 0.3, {"OUTPUT_LOGSUMEXP": True})
    out, lse, _ = dense_attention(*args)
    expected, expected_lse, _ = torch.ops.higher_order.flex_attention(*args)
    assert out.dtype == dtype
    assert lse.dtype == expected_lse.dtype
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_autocast_casts_as_torchs_operator_does(inputs: dict[str, Tensor]) -> None:
    q, k, v = (inputs[name].detach() for name in "qkv")
    args = (q, k, v, flex._identity, flex._create_empty_block_mask(q, k).as_tuple(), 0.3, {})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, expected = dense_attention(*args)[0], torch.ops.higher_order.flex_attention(*args)[0]
        assert torch.is_autocast_enabled("cpu")
    assert out.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected)


def test_rows_that_see_nothing_give_zero_output_and_zero_gradients(inputs: dict[str, Tensor]) -> None:
    """A DFlash batch with padding blocks, through two layers, and through the score function."""

    def padded(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & ((b == 0) | (q < 24)) & (q != 3)

    mask = create_block_mask(padded, B, None, Q, Q, device="cpu", BLOCK_SIZE=8)
    first = run(inputs, mask, relative(inputs["bias"]))
    second = run({**inputs, "q": first}, mask, relative(inputs["bias"]))
    assert torch.equal(first[1, :, 24:], torch.zeros_like(first[1, :, 24:]))
    assert torch.equal(first[:, :, 3], torch.zeros_like(first[:, :, 3]))
    leaves = [inputs[name] for name in ("q", "k", "v", "bias")]
    gradients = torch.autograd.grad((first.sin() + second.cos()).sum(), leaves)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert torch.equal(gradients[0][1, :, 24:], torch.zeros(HQ, Q - 24, E))
    assert torch.equal(gradients[1][1, :, 24:], torch.zeros(HKV, Q - 24, E))
    assert gradients[0][1, :, :24].abs().sum() > 0


def test_a_score_function_may_mask_whole_rows_too(inputs: dict[str, Tensor]) -> None:
    def score_mod(score: Tensor, b: Any, h: Any, q: Any, kv: Any) -> Tensor:
        return torch.where(q < 8, -math.inf, score)

    out = run(inputs, None, score_mod)
    gradient = torch.autograd.grad(out.sum() + out.square().sum(), inputs["q"])[0]
    assert torch.equal(out[:, :, :8], torch.zeros(B, HQ, 8, E))
    assert torch.equal(gradient[:, :, :8], torch.zeros(B, HQ, 8, E))
    assert gradient.isfinite().all()


def test_log_sum_exp_of_dead_rows_is_minus_infinity_and_differentiable(inputs: dict[str, Tensor]) -> None:
    mask = create_block_mask(lambda b, h, q, kv: q > kv, 1, 1, Q, Q, device="cpu", BLOCK_SIZE=8)
    with eager_without_tracing():
        _, aux = flex_attention(
            inputs["q"],
            inputs["k"],
            inputs["v"],
            block_mask=mask,
            enable_gqa=True,
            return_aux=flex.AuxRequest(lse=True),
        )
    assert torch.equal(aux.lse[:, :, 0], torch.full((B, HQ), -math.inf))
    keys = inputs["k"].repeat_interleave(2, dim=1).double()
    scores = (inputs["q"].double() @ keys.mT) / math.sqrt(E)
    close(aux.lse[:, :, 9], scores[:, :, 9, :9].exp().sum(-1).log())
    gradient = torch.autograd.grad(aux.lse[:, :, 1:].sum(), inputs["q"])[0]
    assert gradient.isfinite().all()
    assert torch.equal(gradient[:, :, 0], torch.zeros(B, HQ, E))


def test_the_block_map_decides_like_in_the_kernels(inputs: dict[str, Tensor]) -> None:
    """Blocks that the map leaves out are not looked at, and full blocks do not ask the mask."""
    rows = Q // 8
    one = torch.ones(1, 1, rows, dtype=torch.int32)
    diagonal = (
        torch.arange(rows, dtype=torch.int32).reshape(1, 1, rows, 1).expand(1, 1, rows, rows).contiguous()
    )
    first = torch.zeros(1, 1, rows, rows, dtype=torch.int32)
    positions = torch.arange(Q)
    in_diagonal = positions[:, None] // 8 == positions // 8
    every = torch.ones(B, HQ, 1, 1, dtype=torch.bool)

    blocks_alone = BlockMask.from_kv_blocks(one, diagonal, BLOCK_SIZE=8)
    close(
        run(inputs, blocks_alone),
        reference(inputs["q"], inputs["k"], inputs["v"], None, in_diagonal & every),
    )
    with_full = BlockMask.from_kv_blocks(
        one, diagonal, one, first, BLOCK_SIZE=8, mask_mod=lambda b, h, q, kv: q == kv
    )
    keep = (positions[:, None] == positions) | (positions // 8 == 0)
    close(run(inputs, with_full), reference(inputs["q"], inputs["k"], inputs["v"], None, keep & every))


def test_functions_may_reduce_over_what_they_read(inputs: dict[str, Tensor]) -> None:
    table = torch.randn(Q, 5)
    mask = create_block_mask(
        lambda b, h, q, kv: (table[q].sum() > 0) | (q == kv), 1, 1, Q, Q, device="cpu", BLOCK_SIZE=8
    )
    keep = ((table.sum(-1) > 0)[:, None] | torch.eye(Q, dtype=torch.bool)).expand(B, HQ, Q, Q)
    close(run(inputs, mask), reference(inputs["q"], inputs["k"], inputs["v"], None, keep))


@pytest.mark.parametrize(
    "read",
    [
        lambda t, h, q: t[h, 1, q],
        lambda t, h, q: t[h][1][q],
        lambda t, h, q: t[h, :, q][1],
        lambda t, h, q: t[..., q][h, -2],
        lambda t, h, q: t[None, h, 1, q].sum(),
        lambda t, h, q: t[:, 1][h, q.int()],
        lambda t, h, q: t[h, 1:2, q][0],
    ],
)
def test_every_form_of_index_reads_and_differentiates(inputs: dict[str, Tensor], read: Any) -> None:
    table = torch.randn(HQ, 3, Q, requires_grad=True)
    keep = torch.ones(B, HQ, Q, Q, dtype=torch.bool)
    out = run(inputs, None, lambda score, b, h, q, kv: score + read(table, h, kv))
    expected = reference(
        inputs["q"], inputs["k"], inputs["v"], table[:, 1].unsqueeze(1).expand(HQ, Q, Q), keep
    )
    close(out, expected)
    weight = torch.randn(out.shape)
    got = torch.autograd.grad((out * weight).sum(), table)[0]
    close(got, torch.autograd.grad((expected * weight).sum(), table)[0])


def test_a_learnable_scale_gets_its_gradient(inputs: dict[str, Tensor]) -> None:
    factor = torch.tensor(1.5, requires_grad=True)
    weight = torch.randn(B, HQ, Q, E)
    out = run(inputs, None, lambda score, b, h, q, kv: score * factor)
    keep = torch.ones(B, HQ, Q, Q, dtype=torch.bool)
    expected = reference(inputs["q"] * factor, inputs["k"], inputs["v"], None, keep)
    close(
        torch.autograd.grad((out * weight).sum(), factor)[0],
        torch.autograd.grad((expected * weight).sum(), factor)[0],
    )


def test_keys_of_one_batch_serve_all(inputs: dict[str, Tensor]) -> None:
    mask = create_block_mask(lambda b, h, q, kv: q >= kv + b, B, None, Q, Q, device="cpu", BLOCK_SIZE=8)
    shared = {**inputs, "k": inputs["k"][:1], "v": inputs["v"][:1]}
    repeated = {**inputs, "k": inputs["k"][:1].repeat(2, 1, 1, 1), "v": inputs["v"][:1].repeat(2, 1, 1, 1)}
    close(run(shared, mask), run(repeated, mask))


def test_batches_that_do_not_broadcast_are_refused(inputs: dict[str, Tensor]) -> None:
    q, k = inputs["q"][:1], inputs["k"]
    with pytest.raises(CallRefused, match="query has batch 1 and key has batch 2"):
        dense_attention(q, k, k, flex._identity, flex._create_empty_block_mask(q, k).as_tuple(), 1.0, {})


def test_the_output_can_be_viewed_as_torchs_can() -> None:
    q, k, v = (torch.randn(2, Q, HQ, E).transpose(1, 2) for _ in range(3))
    with eager_without_tracing():
        out = flex_attention(q, k, v)
    assert out.stride() == q.stride()
    assert out.transpose(1, 2).view(2, Q, HQ * E).shape == (2, Q, HQ * E)


class Region(torch.nn.Module):
    """The block mask is put together inside, from tensors that come in."""

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self.block_size = block_size

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, documents: Tensor, anchors: Tensor
    ) -> Tensor:
        mask = create_block_mask(
            document_mask(documents, anchors), B, None, Q, Q, device="cpu", BLOCK_SIZE=self.block_size
        )
        return flex_attention(q, k, v, score_mod=relative(bias), block_mask=mask, enable_gqa=True)


@pytest.mark.parametrize("how", ["make_fx", "make_fx_fake", "export"])
def test_a_trace_of_it_follows_tensors_read_by_closures(inputs: dict[str, Tensor], how: str) -> None:
    names = ("q", "k", "v", "bias", "documents", "anchors")
    args = tuple(inputs[name].detach() for name in names)
    region = Region(16)
    with eager_without_tracing():
        if how == "export":
            graph: Any = torch.export.export(region, args, strict=False).module()
        else:
            graph = make_fx(region, tracing_mode="fake" if how.endswith("fake") else "real")(*args)
    assert not any("flex" in str(node.target) for node in graph.graph.nodes)
    others = (
        *(torch.randn_like(arg) for arg in args[:4]),
        torch.randint(0, 3, (B, Q)).sort(dim=-1).values,
        torch.randint(0, Q, (B, Q // 8)),
    )
    with eager_without_tracing():
        close(graph(*others), region(*others))
        assert not torch.allclose(region(*others), region(*others[:4], *args[4:]))


def test_the_traced_gradients_need_no_operator_of_flex(inputs: dict[str, Tensor]) -> None:
    """`flex_lib::zeros_and_scatter` in a backward graph would force torch's own loader."""
    names = ("q", "k", "v", "bias")
    leaves = tuple(inputs[name].detach() for name in names)

    def step(*leaves: Tensor) -> Any:
        fresh = tuple(leaf.detach().requires_grad_() for leaf in leaves)
        out = Region(16)(*fresh, inputs["documents"], inputs["anchors"])
        return torch.autograd.grad(out.square().sum(), fresh)

    with eager_without_tracing():
        expected = step(*leaves)
        graph = make_fx(step)(*leaves)
    assert not any("flex" in str(node.target) for node in graph.graph.nodes)
    for got, want in zip(graph(*leaves), expected, strict=True):
        close(got, want)


def test_nothing_traces_in_four_training_threads(
    inputs: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something traced")

    mask_mod = document_mask(inputs["documents"], inputs["anchors"])
    mask = create_block_mask(mask_mod, B, None, Q, Q, device="cpu", BLOCK_SIZE=16)
    names = ("q", "k", "v", "bias")
    expected = torch.autograd.grad(
        run(inputs, mask, relative(inputs["bias"])).square().sum(), [inputs[name] for name in names]
    )
    monkeypatch.setattr(convert_frame, "compile_frame", forbidden)
    monkeypatch.setattr(_symbolic_trace.Tracer, "trace", forbidden)
    results: list[Any] = []
    start = threading.Barrier(4)

    def train() -> None:
        mine = {name: tensor.detach().clone() for name, tensor in inputs.items()}
        leaves = [mine[name].requires_grad_() for name in names]
        try:
            start.wait(60)
            for _ in range(5):
                out = run(mine, mask, relative(mine["bias"]))
                results.append(torch.autograd.grad(out.square().sum(), leaves))
        except BaseException as error:
            results.append(error)

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 20
    for result in results:
        assert not isinstance(result, BaseException), result
        for got, want in zip(result, expected, strict=True):
            close(got, want)
