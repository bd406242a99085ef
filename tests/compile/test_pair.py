"""Pairs, run as their contract says, against eager autograd in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

from aotcache.compile.export import export_flat
from aotcache.compile.graphs import memory_use
from aotcache.compile.pair import Pair, infer_graph, make_pair
from aotcache.errors import UnsupportedGraph
from aotcache.graph.redirect import redirect_flex
from aotcache.runtime.dense import dense_attention
from tests.compile.flat import (
    assert_close,
    block,
    block_examples,
    reference,
    run_contract,
    tangents_for,
)
from tests.compile.uncompiled import prepare, runner


def _pair(fn: Callable[..., Any], examples: Sequence[torch.Tensor], **options: Any) -> Pair:
    program = export_flat(fn, examples, region="r", train=True)
    return make_pair(program, examples, region="r", **options)


def _check(fn: Callable[..., Any], examples: Sequence[torch.Tensor], **options: Any) -> Pair:
    pair = _pair(fn, examples, **options)
    assert pair.contract is not None
    assert pair.backward is not None
    tangents = tangents_for(pair.contract, pair.outputs)
    outputs, grads = run_contract(
        pair.contract,
        len(pair.outputs),
        lambda ts: pair.forward(*ts),
        lambda ts: pair.backward(*ts),  # type: ignore[misc]
        examples,
        tangents,
    )
    want_outputs, want_grads = reference(fn, examples, tangents)
    for i, (got, want, slot) in enumerate(zip(outputs, want_outputs, pair.outputs, strict=True)):
        assert_close(got, want, f"output {i}")
        assert (tuple(got.shape), got.stride()) == (slot.shape, slot.stride)
        assert str(got.dtype) == f"torch.{slot.dtype}"
        assert want.requires_grad == slot.differentiable
    for i, (got_grad, want_grad) in enumerate(zip(grads, want_grads, strict=True)):
        assert_close(got_grad, want_grad, f"gradient {i}")
    for module in (pair.forward, pair.backward):
        use = memory_use(module)
        assert (use.written, use.output_of_input, use.output_of_output) == ([], {}, {})
    return pair


def _leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@pytest.mark.parametrize("budget", [1.0, 0.0])
def test_a_block_equals_eager_at_any_memory_budget(budget: float) -> None:
    _check(block, block_examples(train=True), memory_budget=budget)


def test_a_smaller_memory_budget_saves_less() -> None:
    def deep(x, w):
        for _ in range(4):
            x = torch.tanh(x @ w).sin()
        return (x,)

    examples = [_leaf(16, 16), _leaf(16, 16, seed=1)]
    contracts = [_check(deep, examples, memory_budget=b).contract for b in (1.0, 0.0)]
    assert contracts[0] is not None
    assert contracts[1] is not None
    assert contracts[1].intermediates < contracts[0].intermediates


def test_a_saved_view_of_an_input_is_taken_from_the_input() -> None:
    def views(x, w):
        return (x.transpose(0, 1).reshape(6, 4) @ w,)

    pair = _check(views, [_leaf(3, 2, 4).detach().transpose(0, 1).requires_grad_(), _leaf(4, 5)])
    assert pair.contract is not None
    assert pair.contract.saved_inputs == (0, 1)
    assert pair.contract.intermediates == 0


def test_a_saved_output_is_the_output_itself() -> None:
    pair = _check(lambda x: (x.exp(),), [_leaf(3, 4)])
    assert pair.contract is not None
    assert pair.contract.saved_outputs == (0,)
    assert pair.contract.intermediates == 0


def test_an_output_that_is_a_view_of_a_saved_tensor_shares_nothing_with_it() -> None:
    pair = _check(lambda x: (x.exp()[1:].t(),), [_leaf(3, 4)])
    assert pair.contract is not None
    assert (pair.contract.saved_outputs, pair.contract.intermediates) == ((), 1)


def test_two_saved_views_of_one_tensor_are_saved_once() -> None:
    def fused(x, w):
        q, k = (x @ w).chunk(2, -1)
        return ((q * k).sum(-1),)

    pair = _check(fused, [_leaf(3, 4), _leaf(4, 8)])
    assert pair.contract is not None
    assert pair.contract.intermediates == 1


def test_equal_gradients_of_two_inputs_lie_in_memory_of_their_own() -> None:
    _check(lambda x, y: (x + y,), [_leaf(3, 2), _leaf(3, 2)])
    _check(lambda x, y: (torch.cat([x, y]),), [_leaf(3, 2), _leaf(3, 2)])


def test_inputs_without_an_effect_or_without_a_gradient_have_none() -> None:
    def partly(x, unused, ids, frozen):
        return F.embedding(ids, x) * frozen, (x * 2).argmax(-1)

    examples = [_leaf(5, 4), _leaf(3), torch.tensor([1, 1, 4]), torch.randn(4)]
    pair = _check(partly, examples)
    assert pair.contract is not None
    assert pair.contract.gradients == (0,)
    assert pair.contract.tangents == (0,)


def test_no_gradient_flows_through_what_the_model_runs_without() -> None:
    def stopped(x, w):
        with torch.no_grad():
            gate = (x @ w).sigmoid()
        return (x * gate,)

    pair = _check(stopped, [_leaf(3, 4), _leaf(4, 4)])
    assert pair.contract is not None
    assert pair.contract.gradients == (0,)


def test_an_output_of_other_strides_takes_its_gradient_in_them() -> None:
    pair = _check(lambda x, w: ((x @ w).transpose(0, 1),), [_leaf(2, 3, 4), _leaf(4, 4)])
    assert pair.outputs[0].stride == (4, 12, 1)


def test_an_expanded_input_works() -> None:
    wide = torch.randn(3, 1).expand(3, 4).detach().requires_grad_()
    _check(lambda x, w: (x.sin() * w,), [wide, _leaf(3, 4)])


def test_a_learnable_bias_in_a_score_function_gets_its_gradient_by_plain_operators() -> None:
    def attention(q, k, v, bias):
        with redirect_flex(dense_attention):
            return (flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[h, i - j + 16]),)

    def dense(q, k, v, bias):
        i = torch.arange(16)
        scores = q @ k.transpose(-1, -2) / 8**0.5 + bias[:, i[:, None] - i[None] + 16]
        return (scores.softmax(-1) @ v,)

    examples = [*(_leaf(1, 2, 16, 8, seed=s) for s in range(3)), _leaf(2, 32, seed=3)]
    pair = _pair(attention, examples)
    assert pair.contract is not None
    assert pair.backward is not None
    tangents = [torch.randn(1, 2, 16, 8, generator=torch.Generator().manual_seed(9))]
    _, grads = run_contract(
        pair.contract, 1, lambda ts: pair.forward(*ts), lambda ts: pair.backward(*ts),  # type: ignore[misc]
        examples, tangents,
    )  # fmt: skip
    _, want = reference(dense, examples, tangents)
    for i, (got, ref) in enumerate(zip(grads, want, strict=True)):
        assert_close(got, ref, f"gradient {i}")
    assert not [n for n in pair.backward.graph.nodes if "zeros_and_scatter" in str(n.target)]


def test_autocast_is_in_the_program_and_not_around_the_backward() -> None:
    def mixed(x, w):
        with torch.autocast("cpu", enabled=False):
            full = F.linear(x, w)
        return F.linear(x, w).softmax(-1), full

    examples = [_leaf(4, 8), _leaf(8, 8, seed=1)]
    with torch.autocast("cpu", torch.bfloat16):
        program = export_flat(mixed, examples, region="r", train=True)
        eager = mixed(*examples)
    pair = make_pair(program, examples, region="r")
    assert [s.dtype for s in pair.outputs] == ["bfloat16", "float32"]
    assert pair.contract is not None
    assert pair.backward is not None
    some = torch.randn(4, 8)
    # Where only the full-precision path counts, a cast in the backward would show at once.
    for tangents, bound in (([some.bfloat16(), some], 1e-2), ([some.bfloat16() * 0, some], 1e-6)):
        outputs, grads = run_contract(
            pair.contract, 2, lambda ts: pair.forward(*ts), lambda ts: pair.backward(*ts),  # type: ignore[misc]
            examples, tangents,
        )  # fmt: skip
        assert [t.dtype for t in outputs] == [t.dtype for t in eager]
        want = torch.autograd.grad(eager, examples, tangents, retain_graph=True)
        for i, (got, ref) in enumerate(zip(grads, want, strict=True)):
            assert got is not None
            assert got.dtype == ref.dtype
            assert_close(got, ref.double(), f"gradient {i}", bound=bound)


def test_nothing_to_differentiate_is_refused() -> None:
    x = torch.randn(3)
    program = export_flat(lambda x: (x * 2,), [x], region="layers.1", train=True)
    with pytest.raises(UnsupportedGraph, match=r"layers\.1.*no backward"):
        make_pair(program, [x], region="layers.1")


def test_an_output_that_no_gradient_reaches_is_refused() -> None:
    examples = [_leaf(3)]
    program = export_flat(lambda x: (x.detach() * 2,), examples, region="layers.1", train=True)
    with pytest.raises(UnsupportedGraph, match=r"layers\.1.*no output"):
        make_pair(program, examples, region="layers.1")


def test_inference_returns_the_outputs_alone() -> None:
    examples = block_examples(train=False)
    made = infer_graph(export_flat(block, examples, region="r", train=False))
    assert made.contract is None
    outputs = made.forward(*examples)
    want, _ = reference(block, examples, [])
    for i, (got, ref, slot) in enumerate(zip(outputs, want, made.outputs, strict=True)):
        assert_close(got, ref, f"output {i}")
        assert got.stride() == slot.stride
        assert not slot.differentiable


def test_inference_under_autocast_casts_as_eager_does() -> None:
    def half(x, w):
        return (F.linear(x, w),)

    examples = [torch.randn(4, 8), torch.randn(8, 8)]
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        program = export_flat(half, examples, region="r", train=False)
        eager = half(*examples)[0]
    made = infer_graph(program)
    (got,) = made.forward(*examples)
    assert made.outputs[0].dtype == "bfloat16"
    assert torch.equal(got, eager)


def test_a_weight_that_a_call_does_not_use_is_no_part_of_its_graph() -> None:
    def uses_one(x: Any, used: Any, unused: Any, cut: Any) -> Any:
        return (x * used + cut.detach(),)

    leaves = [torch.randn(3, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(4)]
    executable = runner(prepare(uses_one, [t.detach().requires_grad_() for t in leaves], train=True))
    told: dict[str, list[int]] = {}
    for name, run in (("eager", uses_one), ("ours", lambda *tensors: executable.train(list(tensors)))):
        own = [t.detach().requires_grad_() for t in leaves]
        fired = told[name] = [0] * len(own)
        for i, leaf in enumerate(own):

            def count(_: Any, i: int = i, fired: list[int] = fired) -> None:
                fired[i] += 1

            leaf.register_hook(count)
            leaf.register_post_accumulate_grad_hook(count)
        (out,) = run(*own)
        out.sin().sum().backward()
        assert [t.grad is None for t in own] == [False, False, True, True]
    assert told["ours"] == told["eager"] == [2, 2, 0, 0]
