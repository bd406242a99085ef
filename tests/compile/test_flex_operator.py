"""Graphs that keep torch's flex operator, as CUDA's compiler takes them, run without a compiler.

No device here has a kernel for the operator's backward, but torch can run both directions
densely. That proves the graphs and their slots, not the kernels; tests/gpu has those.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention, or_masks

from aotcache.compile import pair as pairing
from aotcache.compile import rewrite
from aotcache.compile.export import export_flat
from aotcache.compile.flex_operator import lift_closure, operator_attention
from aotcache.compile.rewrite import is_flex
from aotcache.graph.redirect import redirect_flex

HEADS, LENGTH, HEAD = 2, 32, 8


def attention(q: Tensor, k: Tensor, v: Tensor, slope: Tensor, documents: Tensor) -> tuple[Tensor]:
    """Same document or the first position, with a learned penalty of distance."""

    def same(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return documents[b, i] == documents[b, j]

    def penalise(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, *, by: Tensor) -> Tensor:
        return score - by[h] * (i - j).abs()

    mask = create_block_mask(
        or_masks(same, lambda b, h, i, j: j == 0), 2, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16
    )
    return (flex_attention(q, k, v, functools.partial(penalise, by=slope), mask),)


def examples(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 2, HEADS, LENGTH, HEAD, generator=generator)
    slope = torch.rand(HEADS, generator=generator)
    cut = torch.randint(1, LENGTH, (2, 1), generator=generator)
    floating = [t.clone().requires_grad_() for t in (q, k, v, slope)]
    return [*floating, (torch.arange(LENGTH) >= cut).long()]


def by_definition(q: Tensor, k: Tensor, v: Tensor, slope: Tensor, documents: Tensor) -> Tensor:
    at = torch.arange(LENGTH)
    seen = (documents[:, :, None] == documents[:, None]) | (at == 0)
    scores = q @ k.mT / HEAD**0.5 - slope[:, None, None] * (at[:, None] - at).abs()
    return scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ v


@pytest.fixture(scope="module")
def graphs() -> pairing.Pair:
    tensors = examples(0)
    with pytest.MonkeyPatch.context() as patch:
        # No compiler takes flex attention on CPU tensors both ways, and none is asked to here.
        patch.setattr(rewrite, "_require_backward", lambda node: None)

        def flat(*inputs: Tensor) -> Any:
            with redirect_flex(operator_attention):
                return attention(*inputs)

        program = export_flat(flat, tensors, region="operator", train=True)
        return pairing.make_pair(program, tensors, region="operator")


def test_both_directions_keep_the_operator(graphs: pairing.Pair) -> None:
    assert graphs.backward is not None
    for graph in (graphs.forward, graphs.backward):
        (node,) = [n for n in graph.graph.nodes if n.op == "call_function" and is_flex(n)]
        # What the score and the mask functions close over goes in as an argument.
        assert [len(captured) for captured in node.args[-2:]] == [1, 1]


@pytest.mark.parametrize("seed", [1, 2])
def test_outputs_and_gradients_follow_the_captured_tensors(graphs: pairing.Pair, seed: int) -> None:
    tensors = examples(seed)
    contract = graphs.contract
    assert contract is not None
    assert graphs.backward is not None
    plain = [t.detach() for t in tensors]
    found = graphs.forward(*plain)
    wide = [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in tensors]
    want = by_definition(*wide)
    torch.testing.assert_close(found[0].double(), want, rtol=1e-4, atol=1e-5)
    tangent = torch.randn(want.shape, generator=torch.Generator().manual_seed(seed))
    want.backward(tangent.double())
    saved = [
        *(plain[i] for i in contract.saved_inputs),
        *(found[i] for i in contract.saved_outputs),
        *found[len(graphs.outputs) :],
    ]
    gradients = graphs.backward(*saved, tangent)
    assert contract.gradients == (0, 1, 2, 3)
    # The operator's dense form, which runs here, leaves the gradient of what score_mod captures out.
    for slot, gradient in zip(contract.gradients[:3], gradients[:3], strict=True):
        assert wide[slot].grad is not None
        torch.testing.assert_close(gradient.double(), wide[slot].grad, rtol=1e-3, atol=1e-4)


def test_each_captured_tensor_is_one_argument() -> None:
    table = torch.arange(4.0)

    class Windowed:
        def __init__(self) -> None:
            self.table = table

        def __call__(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return self.table[q] > kv

        def method(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return self.table[kv] > q

    made = Windowed()
    lifted, tensors = lift_closure(or_masks(made, made.method, lambda b, h, q, kv, t=table: t[q] == kv))
    assert len(tensors) == 1
    assert tensors[0] is table
    zero, two = torch.tensor(0), torch.tensor(2)
    other = torch.tensor([0.0, 0.0, 0.0, 0.0])
    assert lifted(zero, zero, two, zero, table)
    assert not lifted(zero, zero, two, two, other)
    assert lift_closure(made.method)[1] == (table,)


def test_a_function_that_captures_nothing_is_left_alone() -> None:
    def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q >= kv

    assert lift_closure(causal) == (causal, ())
