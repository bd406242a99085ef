"""What export takes and what it refuses, and that a refusal names the line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from aotcache.compile.effects import export_call
from aotcache.compile.export import export_flat, fresh_examples
from aotcache.compile.graphs import output_nodes
from aotcache.errors import CompileFailed, UnsupportedGraph
from tests.compile.flat import line_of


def _bump(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1)  # here


def in_place_in_a_helper(x):
    y = x * 2
    _bump(x)
    return (y,)


def in_place_through_a_view(x):
    with torch.no_grad():
        x.view(-1)[1:].mul_(2)  # here
    return (x * 2,)


def random_by_value(x):
    return (x * torch.bernoulli(x.sigmoid()),)  # here


def random_by_value_without_gradient(x):
    with torch.no_grad():
        chosen = torch.multinomial(x.sigmoid(), 2)  # here
    return (x.gather(1, chosen),)


def random_of_a_generator(x):
    return (x + torch.empty_like(x).uniform_(generator=GENERATOR),)  # here


def recurrent_dropout(x):
    h = torch.zeros(2, 3, 3)
    return (torch.rnn_tanh(x[None], h, [*[x] * 2, *[x] * 2], False, 2, 0.5, True, False, True)[0],)  # here


def attention_with_dropout(x):
    q = x.view(1, 1, 3, 3).bfloat16()
    return (F.scaled_dot_product_attention(q, q, q, dropout_p=0.5),)  # here


def view_of_an_input_of_another_dtype(x):
    y = x * 2
    return y, x.view(torch.int32)  # here


def two_views_of_one_tensor(x):
    y = x * 2
    return y[0], y[1:]  # here


def branch_on_a_value(x):
    if x.sum() > 0:  # here
        return (x + 1,)
    return (x * 2,)


def size_from_a_value(x):
    return (x.nonzero(),)  # here


TABLE = torch.ones(3)
GENERATOR = torch.Generator()


def table_from_elsewhere(x):
    return (x * TABLE,)  # here


def table_from_elsewhere_without_gradient(x):
    with torch.no_grad():
        y = x * torch.tensor([1.0, 2.0, 3.0]) * TABLE  # here
    return (x * y,)


def sparse_on_the_way(x):
    return (x.to_sparse().sum(),)  # here


REFUSED = [
    (table_from_elsewhere, None, "no parameter, no buffer and no input is read"),
    (table_from_elsewhere_without_gradient, None, "would be baked in, by aten.mul.Tensor"),
    (sparse_on_the_way, None, "a tensor of layout torch.sparse_coo is made by aten.to_sparse"),
    (in_place_in_a_helper, _bump, "x is changed in place by aten.add_.Tensor"),
    (in_place_through_a_view, None, "x is changed in place by aten.mul_.Tensor"),
    (random_by_value, None, "random numbers are drawn by aten.bernoulli"),
    (random_by_value_without_gradient, None, "random numbers are drawn by aten.multinomial"),
    (random_of_a_generator, None, "uniform_"),
    (recurrent_dropout, None, "random numbers are drawn by aten.rnn_tanh"),
    (attention_with_dropout, None, "random numbers are drawn by aten.scaled_dot_product_attention"),
    (view_of_an_input_of_another_dtype, None, "output 1 shares memory with x, made by aten.view"),
    (two_views_of_one_tensor, None, "outputs 0 and 1 share memory"),
    (branch_on_a_value, None, "depends on a tensor's values"),
    (size_from_a_value, None, "depends on a tensor's values"),
]


@pytest.mark.parametrize(("fn", "where", "what"), REFUSED, ids=lambda v: getattr(v, "__name__", ""))
def test_unsupported_call_is_refused_with_region_operator_and_line(
    fn: Callable[..., Any], where: Callable[..., Any] | None, what: str
) -> None:
    with pytest.raises(UnsupportedGraph) as refused:
        export_call(fn, [torch.randn(3, 3)], ["x"], region="layers.0", train=False)
    text = str(refused.value)
    assert "'layers.0'" in text
    assert what in text
    assert f"{line_of(where or fn)}." in text or f"{line_of(where or fn)}:" in text
    assert refused.value.details["line"] == line_of(where or fn)


@pytest.mark.parametrize("fn", [in_place_in_a_helper, random_by_value, two_views_of_one_tensor])
def test_training_call_is_refused_alike(fn: Callable[..., Any]) -> None:
    where = _bump if fn is in_place_in_a_helper else fn
    with pytest.raises(UnsupportedGraph) as refused:
        export_call(fn, [torch.randn(3, 3, requires_grad=True)], ["x"], region="r", train=True)
    assert refused.value.details["line"] == line_of(where)


def test_refusals_look_into_blocks_under_another_autocast_or_grad_mode() -> None:
    for fn, where in ((in_place_in_a_helper, _bump), (two_views_of_one_tensor, two_views_of_one_tensor)):
        with pytest.raises(UnsupportedGraph) as refused, torch.autocast("cpu", torch.bfloat16):
            export_call(fn, [torch.randn(3, 3)], ["x"], region="r", train=False)
        assert refused.value.details["line"] == line_of(where)


def test_returning_something_else_than_a_tensor_is_refused() -> None:
    x = torch.randn(3)
    with pytest.raises(UnsupportedGraph, match="output 1 is int 3"):
        export_flat(lambda x: (x + 1, 3), [x], region="r", train=False)  # type: ignore[arg-type, return-value]


def test_an_error_of_the_model_is_reported_with_its_line() -> None:
    def broken(x):
        raise ValueError("no such head")  # here

    with pytest.raises(CompileFailed, match="ValueError: no such head") as failed:
        export_flat(broken, [torch.randn(3)], region="r", train=False)
    assert failed.value.details["line"] == line_of(broken)


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-100, 100)


def own_backward(x):
    return (Clipped.apply(x * 2),)  # here


def hook_on_a_tensor(x):
    y = x * 2
    if y.requires_grad:
        y.register_hook(lambda g: g.clamp(-100, 100))  # here
    return (y,)


def asks_whether_a_leaf(x):
    return (x * 2 if x.is_leaf else x * 3,)  # here


def asks_what_made_it(x):
    return (x * 2 if getattr(x, "grad_fn", None) is None else x * 3,)  # here


def asks_what_it_is_a_view_of(x):
    return (x * 2 if x._base is None else x * 3,)  # here


def asks_for_an_earlier_gradient(x):
    return (x * 2 if x.grad is None else x * 3,)  # here


def asks_whether_a_parameter(x):
    return (x * 2 if isinstance(x, torch.nn.Parameter) else x * 3,)  # here


@pytest.mark.parametrize(
    "fn",
    [
        asks_whether_a_leaf,
        asks_what_made_it,
        asks_what_it_is_a_view_of,
        asks_for_an_earlier_gradient,
        asks_whether_a_parameter,
    ],
)
def test_asking_for_the_history_of_a_tensor_is_refused_by_line(fn: Callable[..., Any]) -> None:
    known = {name: member for name, member in vars(torch.Tensor).items() if not name.startswith("__")}
    with pytest.raises(UnsupportedGraph, match=r"is read at|is a Parameter at") as refused:
        export_flat(fn, (torch.ones(3, 3, requires_grad=True),), region="r", train=True)
    assert refused.value.details["line"] == line_of(fn, "# here")
    assert {n: m for n, m in vars(torch.Tensor).items() if not n.startswith("__")} == known
    leaf = torch.ones(3, requires_grad=True)
    assert (leaf.is_leaf, leaf.grad, (leaf * 1).grad_fn is not None) == (True, None, True)
    assert (isinstance(leaf, torch.nn.Parameter), isinstance(torch.nn.Parameter(leaf), torch.Tensor)) == (
        False,
        True,
    )


@pytest.mark.parametrize("fn", [own_backward, hook_on_a_tensor])
def test_what_changes_gradients_outside_of_the_graph_is_refused_where_gradients_are_wanted(
    fn: Callable[..., Any],
) -> None:
    x = torch.randn(3, 3, requires_grad=True)
    with pytest.raises(UnsupportedGraph, match=r"Clipped|register_hook") as refused:
        export_flat(fn, [x], region="r", train=True)
    assert refused.value.details["line"] == line_of(fn)
    export_flat(fn, [x], region="r", train=False)
    (out,) = fn(x)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], torch.full((3, 3), 2.0))


def test_tensors_made_of_numbers_are_taken_in_every_block() -> None:
    def fine(x):
        with torch.no_grad():
            y = x * torch.tensor([1.0, 2.0, 3.0])
        with torch.autocast("cpu", torch.bfloat16):
            z = x @ x * torch.tensor(3.0)
        return (x * y * torch.arange(3) + z,)

    export_flat(fine, [torch.randn(3, 3, requires_grad=True)], region="r", train=True)


def test_writes_to_own_tensors_and_switched_off_dropout_are_taken() -> None:
    def fine(x):
        y = x * 2
        y.add_(1)
        y[0] = 0
        y = F.dropout(F.dropout(y, 0.0), 0.5, training=False)
        q = y.view(1, 1, 3, 3)
        return F.scaled_dot_product_attention(q, q, q), None

    program = export_flat(fine, [torch.randn(3, 3)], region="r", train=False)
    assert len([n for n in output_nodes(program.graph) if n is not None]) == 1


def test_examples_become_fresh_tensors_of_the_same_layout() -> None:
    base = torch.randn(4, 6)
    given = [
        base.t(),
        base[1:, ::2],
        torch.randn(3, 1).expand(3, 5),
        torch.arange(6).view(2, 3),
        torch.randn(2, requires_grad=True),
        torch.empty(2, 3, device="meta").t(),
    ]
    with FakeTensorMode():
        given.append(torch.empty(3, 2))
    fresh = fresh_examples(given)
    for old, new in zip(given, fresh, strict=True):
        assert type(new) is torch.Tensor
        assert new._base is None
        assert (new.shape, new.stride(), new.dtype) == (old.shape, old.stride(), old.dtype)
        assert new.requires_grad == old.requires_grad
    for old, new in zip(given[:5], fresh, strict=False):
        assert torch.equal(old, new)
        assert old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr()


def test_code_that_asks_a_weight_whether_it_is_trained_gets_the_answer_without_gradients_too() -> None:
    def asks(x):
        return (x * 2 if x.requires_grad else x + 1,)

    for trained in (True, False):
        x = torch.randn(3, requires_grad=trained)
        program = export_flat(asks, [x], region="r", train=False)
        with torch.no_grad():
            assert torch.equal(program.module()(x)[0], asks(x)[0])
