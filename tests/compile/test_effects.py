"""What a call does besides computing, done around its graphs by the worker's own code, against eager."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from aotcache.compile.effects import export_call
from aotcache.errors import CallRefused, ManifestError, UnsupportedGraph
from aotcache.graph import draws
from aotcache.manifest import Draw, Manifest, View
from aotcache.runtime.effects import Around
from tests.compile.flat import assert_close, line_of
from tests.compile.uncompiled import prepare, runner


def _fresh(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]


def _leaf(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def _loss(outputs: Sequence[Tensor]) -> Tensor:
    return torch.stack([o.double().sin().sum() for o in outputs if o.requires_grad]).sum()


def check(
    fn: Callable[..., Any],
    examples: Sequence[Tensor],
    *,
    train: bool = True,
    kinds: Sequence[str] | None = None,
    steps: int = 2,
) -> Any:
    """Runs `fn` eagerly and as its graphs, from one seed on: results, gradients, kept tensors and the
    generator are alike after every step."""
    with torch.set_grad_enabled(train):
        prepared = prepare(fn, _fresh(examples), train=train, kinds=kinds)
        executable = runner(prepared)
        eager, ours = _fresh(examples), _fresh(examples)
        for step in range(steps):
            torch.manual_seed(step)
            want = fn(*eager)
            state = torch.get_rng_state()
            torch.manual_seed(step)
            got = (executable.train if train else executable.infer)(ours)
            assert torch.equal(torch.get_rng_state(), state)
            for i, (a, b) in enumerate(zip(got, want, strict=True)):
                assert_close(a, b.double() if b.is_floating_point() else b, f"output {i}")
                assert (a.dtype, a.requires_grad, a.stride()) == (b.dtype, b.requires_grad, b.stride()), i
            if train:
                leaves = [[t for t in side if t.requires_grad] for side in (ours, eager)]
                grads = [
                    torch.autograd.grad(_loss(o), ts, allow_unused=True)
                    for o, ts in zip((got, want), leaves, strict=True)
                ]
                for i, (mine, theirs) in enumerate(zip(*grads, strict=True)):
                    assert_close(mine, None if theirs is None else theirs.double(), f"gradient {i}")
            for i, (a, b) in enumerate(zip(ours, eager, strict=True)):
                assert_close(a.detach(), b.detach().double() if b.is_floating_point() else b, f"input {i}")
    return prepared


def dropouts(x):
    y = F.dropout(x * 2, 0.5)
    y = F.dropout(F.dropout(y, 0.25, inplace=True), 1.0) + F.dropout(y, 0.3)
    z, mask = torch.native_dropout(x.t(), 0.4, True)
    return F.dropout1d(y, 0.5), z, mask, F.dropout(x, 0.5, training=False) + F.dropout(x, 0.0)


def factories(x):
    y = torch.rand(4, 5) + torch.randn(4, 5) + torch.randint(7, (4, 5)) + torch.randint(-2, 3, (4, 5))
    with torch.no_grad():
        y = y + torch.rand_like(x.t()).t() * torch.randn_like(x) + torch.normal(1.0, 2.0, (4, 5))
    y = y + torch.randint_like(x, 9) + torch.randint_like(x, 2, 9) + torch.bernoulli(x.detach(), 0.3)
    return x * y, torch.rand(3, dtype=torch.float64), torch.randperm(6), torch.rand(2).mul_(3)


def fills(x):
    e = torch.empty_like
    y = x.mul(e(x).uniform_(-1, 2)) + e(x).normal_(1, 2) + e(x).bernoulli_(0.3) + e(x).exponential_(2)
    y = y + e(x).geometric_(0.5) + e(x).log_normal_() + e(x).cauchy_().clamp(-5, 5)
    y = y + e(x).random_() % 3 + e(x).random_(5)
    y[:, ::2].uniform_()
    return y, F.gumbel_softmax(x, hard=True)


def attentions(x):
    q, k, v = x.view(3, 1, 4, 6, 5).unbind()
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    one = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True)
    other = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=0.5, scale=0.7)
    bias = F.scaled_dot_product_attention(q, k, v, x.new_ones(1, 1, 6, 6).cumsum(-1), dropout_p=0.5)
    grouped = F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], dropout_p=0.25, enable_gqa=True)
    return one, other.transpose(1, 2), grouped + bias, F.scaled_dot_product_attention(q, k, v, dropout_p=0.0)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("fn", [dropouts, attentions, factories, fills])
def test_random_operators_draw_what_eager_draws(fn: Callable[..., Any], train: bool) -> None:
    examples = [_leaf(360) if fn is attentions else _leaf(4, 5)]
    prepared = check(fn, examples, train=train)
    assert len([s for s in prepared.inputs if s.kind == "random"]) > 3


def test_every_operator_of_the_table_is_there_in_this_torch() -> None:
    assert set(draws.table()) == {name for form in draws._OPERATORS.values() for name in form}


def test_the_mask_of_dropout_is_saved_once_and_not_drawn_again() -> None:
    prepared = check(lambda x, w: (F.dropout(x @ w, 0.5),), [_leaf(4, 5), _leaf(5, 5, seed=1)])
    assert prepared.pair is not None
    assert 2 in prepared.pair.saved_inputs
    assert prepared.pair.intermediates == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_random_numbers_under_autocast_are_those_of_its_dtype(dtype: torch.dtype) -> None:
    def mixed(x, w):
        return (F.dropout(x @ w, 0.5) + torch.rand_like(x @ w),)

    with torch.autocast("cpu", dtype):
        prepared = prepare(mixed, [_leaf(4, 5), _leaf(5, 5)], train=False)
    assert {s.dtype for s in prepared.inputs[2:]} == {str(dtype).removeprefix("torch.")}
    x, w = _leaf(4, 5, seed=2), _leaf(5, 5, seed=3)
    with torch.no_grad():
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype):
            want = mixed(x, w)[0]
        torch.manual_seed(0)
        assert torch.equal(runner(prepared).infer([x, w])[0], want)


def keeps(x, mean, variance, average, count, weight):
    y = F.batch_norm(x @ weight, mean, variance, training=True, momentum=0.3) * (average + 1)
    with torch.no_grad():
        average.mul_(0.5).add_(y.mean(0))
        count += 1
    return y, count, average[1:], y.detach()


def _kept() -> tuple[list[Tensor], list[str]]:
    tensors = [
        _leaf(6, 5),
        torch.zeros(5),
        torch.ones(5),
        torch.ones(5),
        torch.tensor(0),
        _leaf(5, 5, seed=1),
    ]
    return tensors, ["input", "buffer", "buffer", "lifted", "buffer", "parameter"]


@pytest.mark.parametrize("train", [True, False])
def test_what_a_region_keeps_has_eagers_values_after_five_steps(train: bool) -> None:
    tensors, kinds = _kept()
    prepared = check(keeps, tensors, kinds=kinds, train=train, steps=5)
    assert {m.input for m in prepared.mutations} == {1, 2, 3, 4}


@pytest.mark.parametrize("train", [True, False])
def test_what_operators_on_lists_write_is_seen(train: bool) -> None:
    def listed(x, last, mean):
        torch._foreach_mul_([last, mean], 0.5)
        torch._foreach_add_([mean], [x.detach().mean(0)])
        return (x * mean.clone(),)

    tensors = [_leaf(3, 4), torch.ones(4), torch.zeros(4)]
    prepared = check(listed, tensors, kinds=["input", "buffer", "buffer"], train=train, steps=3)
    assert {m.input for m in prepared.mutations} == {1, 2}
    with pytest.raises(UnsupportedGraph, match=r"t1 is changed in place by aten\._foreach_mul_"):
        prepare(listed, tensors, kinds=["input", "input", "buffer"], train=train)


def test_what_a_mapped_function_writes_is_its_own() -> None:
    def one_hot(index):
        return index.new_zeros(4).index_put_((index,), index.new_ones(()))

    prepared = check(lambda x, i: (x * torch.vmap(one_hot)(i),), [_leaf(3, 4), torch.tensor([1, 0, 3])])
    assert not prepared.mutations


def test_the_old_value_that_a_backward_needs_is_a_copy() -> None:
    def gated(x, average):
        y = x * average.sigmoid()
        with torch.no_grad():
            average.copy_(y.mean(0))
        return (y,)

    prepared = check(gated, [_leaf(3, 4), torch.randn(4)], kinds=["input", "buffer"], steps=3)
    assert prepared.pair is not None
    assert 1 not in prepared.pair.saved_inputs


def test_a_result_that_is_also_a_new_value_has_memory_of_its_own() -> None:
    def stored(x, last):
        y = (x * 2).detach()
        last.copy_(y)
        return y, x * 3

    tensors = [_leaf(3, 4), torch.zeros(3, 4)]
    executable = runner(prepare(stored, tensors, train=True, kinds=["input", "buffer"]))
    x, last = _fresh(tensors)
    y, _ = executable.train([x, last])
    assert torch.equal(y, last)
    y.zero_()
    assert torch.equal(last, (x * 2).detach())


def _counting() -> Any:
    return prepare(
        lambda x, n: (x + n.add_(1),), [torch.ones(3), torch.zeros(3)], train=False, kinds=["input", "buffer"]
    )


def test_the_tensor_of_the_call_is_written_where_a_copy_was_fed() -> None:
    executable = runner(
        prepare(
            lambda x, n: (x + n.add_(1),),
            [torch.ones(3), torch.zeros(3)],
            train=False,
            kinds=["input", "buffer"],
        )
    )
    x, own = torch.ones(3), torch.zeros(3, 2).t()[0]
    (got,) = executable.infer([x, own.clone()], [x, own])
    assert torch.equal(got, torch.full((3,), 2.0))
    assert torch.equal(own, torch.ones(3))


def aliases(x, w):
    y = x @ w
    with torch.no_grad():
        apart = y[2:], x[1:]
    return x, x.view(-1)[2:], y.t(), y, y[1:].detach(), x.detach(), y.view(-1), x.reshape(4, 5), *apart


@pytest.mark.parametrize("train", [True, False])
def test_results_that_lie_in_other_tensors_are_there_and_differentiate_as_in_eager(train: bool) -> None:
    prepared = check(aliases, [_leaf(4, 5), _leaf(5, 5, seed=1)], train=train)
    assert len(prepared.outputs) == 1
    ours, w = _leaf(4, 5), _leaf(5, 5)
    with torch.set_grad_enabled(train):
        executable = runner(prepared)
        got = (executable.train if train else executable.infer)([ours, w])
    assert got[0] is ours
    for i in (1, 5, 7, 9):
        assert got[i].untyped_storage().data_ptr() == ours.untyped_storage().data_ptr()
    for i in (2, 4, 6, 8):
        assert got[i].untyped_storage().data_ptr() == got[3].untyped_storage().data_ptr()


def test_writing_to_an_alias_shows_in_what_it_lies_in_and_counts_in_the_gradient() -> None:
    def flow(run: Callable[[list[Tensor]], Sequence[Tensor]]) -> tuple[Tensor, ...]:
        x, w = _leaf(4, 5), _leaf(5, 5, seed=1)
        middle = x * 1
        rest, y, part = run([middle, w])
        rest.mul_(3)
        part.add_(1)
        assert torch.equal(middle[1:], rest)
        assert torch.equal(y[2:], part)
        (y.sin().sum() + middle.cos().sum() + rest.sum()).backward()
        assert x.grad is not None
        assert w.grad is not None
        return y, middle, x.grad, w.grad

    def fn(x, w):
        y = torch.tanh(x).detach() @ w + (x * 0)
        return x[1:], y, y[2:]

    ours = flow(runner(prepare(fn, [_leaf(4, 5), _leaf(5, 5)], train=True)).train)
    for i, (got, want) in enumerate(zip(ours, flow(lambda ts: fn(*ts)), strict=True)):
        assert_close(got.detach(), want.detach().double(), str(i))


def test_an_alias_of_a_tensor_that_starts_inside_of_its_memory_lies_in_its_place() -> None:
    executable = runner(prepare(lambda x: (x * 2, x[1:]), [torch.randn(3, 4)], train=False))
    x = torch.arange(24.0).view(6, 4)[2:5]
    assert torch.equal(executable.infer([x])[1], x[1:])


def changes_an_argument(x, b):
    x.mul_(2)  # here
    return (x * b,)


def changes_what_gets_a_gradient(x, b):
    b.mul_(x.sum(0))  # here
    return (x * b,)


def changes_a_shape(x, b):
    b.t_()  # here
    return (x * b,)


def detached_then_changed(x, b):
    y = x * 2
    other = y.detach()
    return y, other.add_(x)  # here


def two_halves(x, b):
    return (x * b).chunk(2)  # here


def conjugate(x, b):
    return x * b, torch.view_as_complex(x).conj()  # here


REFUSED = [
    (detached_then_changed, ["input", "buffer"], [], "outputs 0 and 1 share memory, made by aten.add_"),
    (two_halves, ["input", "buffer"], [], "outputs 0 and 1 share memory"),
    (conjugate, ["input", "buffer"], [], "output 1 shares memory with t0, made by aten._conj"),
    (changes_an_argument, ["input", "buffer"], [], "t0 is changed in place by aten.mul_"),
    (changes_what_gets_a_gradient, ["input", "parameter"], [], "t1 is changed in place by aten.mul_"),
    (changes_what_gets_a_gradient, ["input", "buffer"], [], "t1 gets a value in place that needs a gradient"),
    (changes_what_gets_a_gradient, ["input", "buffer"], [1, 2], "t1, in whose memory another tensor"),
    (changes_a_shape, ["input", "buffer"], [], "t1 gets another shape in place"),
]


@pytest.mark.parametrize(("fn", "kinds", "shared", "what"), REFUSED)
def test_what_a_worker_could_not_do_faithfully_is_refused(
    fn: Callable[..., Any], kinds: list[str], shared: list[int], what: str
) -> None:
    train = not shared and fn in (changes_what_gets_a_gradient, detached_then_changed)
    x, b = torch.randn(3, 2, requires_grad=train), torch.randn(2)
    b = torch.randn(2, 3) if fn is changes_a_shape else b
    with pytest.raises(UnsupportedGraph, match=re.escape(what)) as refused:
        export_call(fn, [x, b], ["t0", "t1"], region="r", train=train, kinds=kinds, shared=shared)
    assert refused.value.details["line"] == line_of(fn)


def test_a_kept_tensor_that_shares_memory_with_an_argument_is_refused_at_the_call() -> None:
    executable = runner(
        prepare(
            lambda x, n: (x + n.add_(1),),
            [torch.ones(3), torch.zeros(3)],
            train=False,
            kinds=["input", "buffer"],
        )
    )
    memory = torch.zeros(6)
    with pytest.raises(CallRefused, match="t1, which it changes in place, shares its memory with t0"):
        executable.infer([memory[:3], memory[3:]])
    assert not memory.any()


def test_effects_are_in_the_content_key() -> None:
    def with_probability(p: float) -> Any:
        return prepare(lambda x: (F.dropout(x, p),), [torch.ones(3)], train=False)

    def kept(x, n):
        return (x * 2, n.add_(1))

    contents = [
        with_probability(0.5).content,
        with_probability(0.25).content,
        prepare(lambda x: (x * 2,), [torch.ones(3)], train=False).content,
        prepare(lambda x: (x * 2, x), [torch.ones(3)], train=False).content,
        prepare(lambda x: (x * 2, x[1:]), [torch.ones(3)], train=False).content,
        prepare(kept, [torch.ones(3), torch.ones(3)], train=False, kinds=["input", "buffer"]).content,
        prepare(lambda x, n: (x * 2, n + 1), [torch.ones(3)] * 2, train=False).content,
    ]
    assert len(set(contents)) == len(contents)


def _manifest() -> Manifest:
    def fn(x, n):
        return F.dropout(x, 0.5) * n.add_(1), x[1:]

    return runner(
        prepare(fn, [torch.ones(3), torch.ones(3)], train=False, kinds=["input", "buffer"])
    ).manifest


def test_a_manifest_survives_json_and_one_that_names_what_is_not_there_is_refused() -> None:
    manifest = _manifest()
    again = Manifest.from_json(manifest.to_json(), where="here")
    assert (again.inputs, again.mutations, again.aliases) == (
        manifest.inputs,
        manifest.mutations,
        manifest.aliases,
    )
    assert again.inputs[2].draw == Draw("aten.dropout.default", (0.5,))
    (mutation,), (alias,), random = manifest.mutations, manifest.aliases, manifest.inputs[2]
    assert alias.view == View((2,), (1,), 1)
    call = manifest.inputs[:2]
    wrong = [
        {"inputs": (*call, replace(random, draw=None))},
        {"inputs": (*call, replace(random, draw=Draw("aten.system.default", (0.5,))))},
        {"inputs": (*call, replace(random, draw=Draw("aten.dropout.default", ())))},
        {"inputs": (random, *call)},
        {"mutations": (replace(mutation, input=2),)},
        {"mutations": (replace(mutation, output=0),)},
        {"outputs": (manifest.outputs[0], replace(manifest.outputs[1], dtype="float64"))},
        {"aliases": (replace(alias, index=2),)},
        {"aliases": (replace(alias, position=2),)},
        {"aliases": (replace(alias, of="output", index=1),)},
    ]
    for changes in wrong:
        with pytest.raises(ManifestError, match="delete the entry and warm it again"):
            Around(replace(manifest, **changes))  # type: ignore[arg-type]
