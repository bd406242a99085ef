"""Redirected threads run the handler, all others run what torch ships."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._dynamo import convert_frame
from torch._guards import TracingContext
from torch.fx import _symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from aotcache.graph.redirect import redirect_flex

early = torch.compile(flex_attention, backend="eager")
early_fullgraph = torch.compile(flex_attention, backend="eager", fullgraph=True)


def fours(query: Any, key: Any, value: Any, score_mod: Any, block_mask: Any, scale: Any, options: Any) -> Any:
    """A handler that no attention agrees with by chance."""
    empty = query.new_empty(0)
    return query * 0 + 4, empty, empty


def qkv(*, grad: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(torch.randn(1, 2, 16, 8, requires_grad=grad) for _ in range(3))  # type: ignore[return-value]


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


@contextmanager
def traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of threads in which Dynamo or FX traced something."""
    seen: list[str] = []

    def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            seen.append(f"{name} in {threading.current_thread().name}")
            return original(*args, **kwargs)

        return wrapper

    with monkeypatch.context() as patch:
        patch.setattr(convert_frame, "compile_frame", counting("frame", convert_frame.compile_frame))
        patch.setattr(_symbolic_trace.Tracer, "trace", counting("fx", _symbolic_trace.Tracer.trace))
        yield seen


@pytest.mark.parametrize(
    "call", [flex_attention, early, early_fullgraph], ids=["plain", "early", "fullgraph"]
)
@pytest.mark.parametrize("grad", [False, True])
def test_every_way_to_call_it_runs_the_handler_and_traces_nothing(
    call: Any, grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = qkv(grad=grad)
    with traces(monkeypatch) as seen, redirect_flex(fours):
        out = call(q, k, v)
    assert torch.equal(out, torch.full_like(out, 4.0))
    assert seen == []


def test_the_handler_gets_what_the_operator_would(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[Any] = []

    def spy(*args: Any) -> Any:
        got.extend(args)
        lse = torch.full(args[0].shape[:3], 2.0)
        return args[0], lse, lse

    def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score

    q, k, v = qkv()
    mask = create_block_mask(causal, 1, 1, 16, 16, device="cpu", BLOCK_SIZE=16)
    with redirect_flex(spy):
        out, aux = flex_attention(
            q,
            k,
            v,
            score_mod=score_mod,
            block_mask=mask,
            scale=0.25,
            return_aux=flex.AuxRequest(lse=True),
        )
    assert got[0] is q
    assert got[1] is k
    assert got[2] is v
    assert got[3] is score_mod
    assert got[4][-1] is causal
    assert got[5] == 0.25
    assert got[6]["OUTPUT_LOGSUMEXP"] is True
    assert out is q
    torch.testing.assert_close(aux.lse, torch.full((1, 2, 16), 2.0).mul(torch.tensor(2.0).log()))


def test_what_torch_refuses_is_still_refused() -> None:
    q, k, v = qkv()
    mask = create_block_mask(causal, 1, 1, 8, 8, device="cpu", BLOCK_SIZE=8)
    with redirect_flex(fours), pytest.raises((ValueError, RuntimeError), match="smaller length"):
        flex_attention(q, k, v, block_mask=mask)


def test_contexts_nest_and_survive_exceptions() -> None:
    q, k, v = qkv()

    def fives(*args: Any) -> Any:
        return args[0] * 0 + 5, args[0].new_empty(0), args[0].new_empty(0)

    with redirect_flex(fours):
        with redirect_flex(fives):
            assert flex_attention(q, k, v).mean() == 5
        with pytest.raises(ValueError, match="same number of heads"), redirect_flex(fives):
            flex_attention(q, k[:, :1], v)
        assert flex_attention(q, k, v).mean() == 4
    assert torch.compile(flex_attention, backend="eager")(q, k, v).mean() != 4


def test_nothing_is_left_behind() -> None:
    places = [(flex, name) for name in vars(flex)] + [(torch, "compile"), (TracingContext, "try_get")]
    before = {(id(owner), name): vars(owner)[name] for owner, name in places}
    with redirect_flex(fours):
        assert vars(torch)["compile"] is not before[id(torch), "compile"]
    changed = [name for owner, name in places if vars(owner)[name] is not before[id(owner), name]]
    assert changed == []


def test_another_thread_goes_on_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv()
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    compiled = torch.compile(flex_attention, backend="eager", fullgraph=True)
    compiled(q, k, v)
    results: dict[str, Any] = {}

    def elsewhere() -> None:
        results["compiled"] = compiled(q, k, v)
        results["fresh"] = torch.compile(lambda x: x.sin() + 1, backend="eager")(q)
        try:
            flex_attention(*qkv(grad=True))
        except NotImplementedError as error:
            results["refused"] = str(error)

    with traces(monkeypatch) as seen, redirect_flex(fours):
        assert compiled(q, k, v).mean() == 4
        thread = threading.Thread(target=elsewhere, name="elsewhere")
        thread.start()
        thread.join()
    torch.testing.assert_close(results["compiled"], expected)
    torch.testing.assert_close(results["fresh"], q.sin() + 1)
    assert "does not support backward on CPU" in results["refused"]
    assert "frame in elsewhere" in seen
    assert all(entry.endswith("elsewhere") for entry in seen)


def test_a_thread_that_compiled_before_recompiles_at_most_once(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv()
    compiled = torch.compile(lambda q, k, v: flex_attention(q, k, v) * 2, backend="eager", fullgraph=True)
    compiled(q, k, v)
    release, entered = threading.Event(), threading.Event()

    def redirected() -> None:
        with redirect_flex(fours):
            entered.set()
            release.wait(60)

    with traces(monkeypatch) as seen:
        for _ in range(4):
            thread = threading.Thread(target=redirected)
            thread.start()
            assert entered.wait(60)
            compiled(q, k, v)
            release.set()
            thread.join()
            entered.clear()
            release.clear()
            compiled(q, k, v)
    assert len([entry for entry in seen if entry.startswith("frame")]) <= 1


@pytest.mark.parametrize("early_wrapper", [True, False])
def test_a_compiled_mask_builder_runs_eagerly(early_wrapper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile(create_block_mask, backend="eager") if early_wrapper else None
    expected = create_block_mask(causal, 1, 1, 64, 64, device="cpu", BLOCK_SIZE=16)
    with traces(monkeypatch) as seen, redirect_flex(fours):
        build = compiled or torch.compile(create_block_mask, backend="eager")
        mask = build(causal, 1, 1, 64, 64, device="cpu", BLOCK_SIZE=16)
    assert torch.equal(mask.kv_indices, expected.kv_indices)
    assert mask.mask_mod is causal
    assert seen == []


@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")
def test_the_compile_flag_of_create_block_mask_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    with traces(monkeypatch) as seen, redirect_flex(fours):
        mask = create_block_mask(causal, 1, 1, 64, 64, device="cpu", BLOCK_SIZE=16, _compile=True)
    assert mask.shape == (1, 1, 64, 64)
    assert seen == []


def test_a_wrapper_made_inside_compiles_once_it_is_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    with redirect_flex(fours):
        wrapper = torch.compile(backend="eager", fullgraph=True)(lambda x: x.cos() + 2)
    x = torch.randn(3)
    with traces(monkeypatch) as seen:
        torch.testing.assert_close(wrapper(x), x.cos() + 2)
        assert [entry.split()[0] for entry in seen] == ["frame"]
        with redirect_flex(fours):
            torch.testing.assert_close(wrapper(x.repeat(2)), x.repeat(2).cos() + 2)
        assert len(seen) == 1


def test_compiled_modules_run_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    module = torch.nn.Linear(4, 4)
    compiled = torch.compile(module, backend="eager")
    x = torch.randn(2, 4)
    with traces(monkeypatch) as seen, redirect_flex(fours):
        assert torch.equal(compiled(x), module(x))
    assert seen == []


def test_it_holds_while_another_thread_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """On torch up to 2.13 a trace in any thread makes compiled callables of all others raise."""
    q, k, v = qkv(grad=True)
    inside, leave = threading.Event(), threading.Event()

    def traced(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        assert leave.wait(60)
        return x + 1

    thread = threading.Thread(target=lambda: _symbolic_trace.symbolic_trace(traced))
    thread.start()
    assert inside.wait(60)
    try:
        with redirect_flex(fours):
            assert early_fullgraph(q, k, v).mean() == 4
    finally:
        leave.set()
        thread.join()


@pytest.mark.parametrize("how", ["make_fx", "make_fx_fake", "export"])
def test_the_handler_runs_inside_a_trace(how: str) -> None:
    class Region(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return early(q, k, v, score_mod=lambda s, b, h, qi, ki: s) + 1

    q, k, v = qkv()
    with redirect_flex(fours):
        if how == "export":
            graph: Any = torch.export.export(Region(), (q, k, v), strict=False).module()
        else:
            mode = "fake" if how.endswith("fake") else "real"
            graph = make_fx(Region(), tracing_mode=mode)(q, k, v)
    targets = [str(node.target) for node in graph.graph.nodes]
    assert not any("flex" in target for target in targets)
    assert torch.equal(graph(q, k, v), torch.full_like(q, 5.0))


def test_four_threads_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(grad=True)
    failures: list[BaseException] = []
    start = threading.Barrier(4)

    def work(number: int) -> None:
        def handler(*args: Any) -> Any:
            return args[0] * 0 + number, args[0].new_empty(0), args[0].new_empty(0)

        try:
            start.wait(60)
            for _ in range(200):
                with redirect_flex(handler):
                    assert early_fullgraph(q, k, v).mean() == number
        except BaseException as error:
            failures.append(error)

    with traces(monkeypatch) as seen:
        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
    assert seen == []
    assert flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG is False
