"""The tripwire: whatever traces or compiles is seen, wherever it happens; whatever does not costs nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._functorch.aot_autograd
import torch._inductor.graph
import torch.export._trace
from torch.fx.experimental.proxy_tensor import make_fx  # imported early and by name, on purpose
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from aotcache import forbid_tracing
from aotcache.errors import TracingForbidden
from aotcache.runtime import tripwire


class Model(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1


def _flex() -> None:
    q, k, v = (torch.randn(1, 1, 16, 16) for _ in range(3))
    flex_attention(q, k, v)


def _flex_with_gradients() -> None:
    # What torch.compiler.set_stance("force_eager") leaves: no Dynamo, but make_fx.
    from torch._higher_order_ops.flex_attention import flex_attention as operator

    q, k, v = (torch.randn(1, 1, 16, 16, requires_grad=True) for _ in range(3))
    mask = create_block_mask(lambda b, h, q, kv: q >= kv, 1, 1, 16, 16, device="cpu", BLOCK_SIZE=16)
    with torch.enable_grad():
        operator(q, k, v, lambda s, b, h, q, kv: s * 2, mask.as_tuple(), 1.0, {}, (), ())


compiled_before = torch.compile(Model(), backend="eager")

ATTEMPTS: dict[str, Callable[[], Any]] = {
    "torch.compile": lambda: torch.compile(Model(), backend="eager")(torch.ones(3)),
    "compiled before, traced now": lambda: (torch._dynamo.reset(), compiled_before(torch.ones(3))),
    "strict export": lambda: torch.export.export(Model(), (torch.ones(3),), strict=True),
    "non-strict export": lambda: torch.export.export(Model(), (torch.ones(3),), strict=False),
    "make_fx": lambda: make_fx(torch.sin)(torch.ones(3)),
    "symbolic_trace": lambda: torch.fx.symbolic_trace(Model()),
    "flex attention": _flex,
    "flex attention's operator": _flex_with_gradients,
    "aot_function": lambda: torch._functorch.aot_autograd.aot_function(torch.sin, lambda g, _: g)(
        torch.ones(3)
    ),
    "g++": lambda: subprocess.run(["g++", "--version"], capture_output=True, check=False),
    "g++ by path": lambda: subprocess.Popen(args=["/usr/bin/x86_64-linux-gnu-g++-12", "-c", "x.cpp"]),
    "cc in a shell": lambda: subprocess.run("cc --version", shell=True, check=False),  # noqa: S602
    "nvcc": lambda: subprocess.run(["/usr/local/cuda/bin/nvcc", "x.cu"], check=False),
    "ccache": lambda: subprocess.run(["ccache", "clang++-17", "x.cpp"], check=False),
}


NOT_HERE = ("nvcc", "ccache", "g++ by path", "flex attention's operator")
"""Attempts that fail without a tripwire too: no such program, or nothing that torch does on the CPU."""


class Attempting(torch.autograd.Function):
    """Its backward does something."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, attempt: Callable[[], Any]) -> torch.Tensor:
        ctx.attempt = attempt
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.attempt()
        return grad, None


def _in_backward(attempt: Callable[[], Any]) -> None:
    Attempting.apply(torch.ones(3, requires_grad=True), attempt).sum().backward()


def _in_autograd_thread(attempt: Callable[[], Any]) -> None:
    """Backwards within backwards, until autograd goes on in a thread of its own pool."""
    mine = threading.get_ident()

    def deeper() -> None:
        if threading.get_ident() == mine:
            with torch.enable_grad():
                _in_backward(deeper)
        else:
            attempt()

    _in_backward(deeper)


def _in_thread(attempt: Callable[[], Any]) -> None:
    with ThreadPoolExecutor(1, thread_name_prefix="trainer") as pool:
        pool.submit(attempt).result()


PLACES = {
    "main thread": lambda attempt: attempt(),
    "training thread": _in_thread,
    "backward": _in_backward,
    "autograd thread": _in_autograd_thread,
}


def _originals() -> dict[str, Any]:
    found: dict[str, Any] = {"Popen": vars(subprocess.Popen)["__init__"]}
    for module, path, _ in tripwire._POINTS:
        owner: Any = sys.modules[module]
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        found[f"{module}.{path}"] = vars(owner)[name]
    return found


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_every_attempt_is_stopped_and_counted(attempt: str, place: str) -> None:
    before = _originals()
    where: list[int] = []

    def try_it() -> None:
        where.append(threading.get_ident())
        ATTEMPTS[attempt]()

    with forbid_tracing("process") as receipt:
        with pytest.raises(TracingForbidden, match="tracing is forbidden") as stopped:
            PLACES[place](try_it)
    assert receipt.total == 1
    assert receipt.thread(where[0]) == 1
    assert (where[0] == threading.get_ident()) == (place in ("main thread", "backward"))
    assert stopped.value.details["thread"] == where[0]
    assert str(where[0]) in str(stopped.value)
    assert stopped.value.details["what"] in str(receipt)
    assert _originals() == before


@pytest.mark.parametrize("attempt", [a for a in ATTEMPTS if a not in NOT_HERE])
def test_outside_of_the_scope_it_works_again(attempt: str) -> None:
    with forbid_tracing("process"):
        pass
    ATTEMPTS[attempt]()


def test_what_only_looks_like_tracing_goes_on() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    with forbid_tracing("process") as receipt:
        for _ in range(2):
            checkpoint(model, torch.randn(2, 4), use_reentrant=False).sum().backward()
            optimizer.step()
        torch.vmap(torch.sin)(torch.ones(3))
        create_block_mask(lambda b, h, q, kv: q >= kv, 1, 1, 128, 128, device="cpu")
        torch.func.grad(lambda x: x.sin().sum())(torch.ones(3))
        graph = torch.fx.Graph()
        graph.output(graph.placeholder("x"))
        torch.fx.GraphModule(torch.nn.Module(), graph)(1)
        torch.compiler.disable(torch.sin)(torch.ones(3))
        subprocess.run([sys.executable, "-c", "print('gcc')"], capture_output=True, check=True)
        subprocess.run(["sh", "-c", "echo cclang gcc_helper"], capture_output=True, check=True)
    assert receipt.total == 0
    assert str(receipt) == "0 traces"


def test_a_compiled_function_runs_but_does_not_compile_again() -> None:
    function = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    function(torch.ones(3))
    with forbid_tracing() as receipt:
        assert function(torch.ones(3)).tolist() == [2, 2, 2]
        assert receipt.total == 0
        with pytest.raises(TracingForbidden):
            function(torch.ones(4))
    assert receipt.total == 1


def test_dynamo_that_suppresses_errors_is_still_counted_and_does_not_trace() -> None:
    seen: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        seen.append(graph)
        return graph

    function = torch.compile(lambda x: x * 3, backend=backend)
    with torch._dynamo.config.patch(suppress_errors=True), forbid_tracing() as receipt:
        assert function(torch.ones(2)).tolist() == [3, 3]
    assert receipt.total == 1
    assert not seen


def test_a_threads_scope_leaves_other_threads_alone() -> None:
    with forbid_tracing("thread") as receipt:
        _in_thread(ATTEMPTS["make_fx"])
        with pytest.raises(TracingForbidden):
            ATTEMPTS["make_fx"]()
    assert receipt.total == receipt.thread(threading.get_ident()) == 1


def test_another_thread_can_be_taken_into_the_scope() -> None:
    wire = tripwire.install("thread")
    try:

        def joined() -> None:
            wire.also(threading.get_ident())
            ATTEMPTS["symbolic_trace"]()

        with pytest.raises(TracingForbidden, match="trainer"):
            _in_thread(joined)
    finally:
        wire.close()
    assert wire.receipt.total == 1


def test_scopes_nest_and_end_in_any_order() -> None:
    before = _originals()
    outer, inner = tripwire.install("process"), tripwire.install("thread")
    with pytest.raises(TracingForbidden):
        ATTEMPTS["make_fx"]()
    outer.close()
    with pytest.raises(TracingForbidden):
        ATTEMPTS["make_fx"]()
    inner.close()
    inner.close()
    ATTEMPTS["make_fx"]()
    assert (outer.receipt.total, inner.receipt.total) == (1, 2)
    assert _originals() == before


def test_an_error_inside_restores_the_originals() -> None:
    before = _originals()
    finders = list(sys.meta_path)

    def fail() -> None:
        with forbid_tracing():
            assert all(found is not before[name] for name, found in _originals().items())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert _originals() == before
    assert sys.meta_path == finders


def test_who_patched_meanwhile_keeps_the_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    with forbid_tracing():
        placed = vars(subprocess.Popen)["__init__"]

        def patched(self: Any, *args: Any, **kwargs: Any) -> None:
            calls.append(args)
            placed(self, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(subprocess.Popen, "__init__", patched)
            wire = tripwire.install("process")
            wire.close()
            assert vars(subprocess.Popen)["__init__"] is patched
            with pytest.raises(TracingForbidden):
                subprocess.run(["g++", "--version"], check=False)
    assert len(calls) == 1


def test_many_threads_enter_and_leave_at_once() -> None:
    before = _originals()

    def work(index: int) -> int:
        with forbid_tracing("thread") as receipt:
            for _ in range(3):
                with pytest.raises(TracingForbidden):
                    make_fx(torch.sin)(torch.ones(index + 1))
        return receipt.total

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(200))) == [3] * 200
    assert _originals() == before


FRESH = """
import json, subprocess, sys, threading
import torch
from aotcache.errors import TracingForbidden
from aotcache.runtime import tripwire

late = [m for m, _, _ in tripwire._POINTS if not m.startswith("torch.fx.")]
report = {"loaded_before": [m for m in late if m in sys.modules], "stopped": []}
wire = tripwire.install("process")
report["loaded_after_install"] = [m for m in late if m in sys.modules]

def attempt(name, call):
    try:
        call()
    except TracingForbidden:
        report["stopped"].append(name)

x = torch.ones(3)
model = torch.nn.Linear(3, 3)
class Fn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, g):
        attempt("compile in backward", lambda: torch.compile(torch.sin, backend="eager")(g))
        return g

def work():
    attempt("compile", lambda: torch.compile(model, backend="eager")(x))
    attempt("strict", lambda: torch.export.export(model, (x,), strict=True))
    attempt("non-strict", lambda: torch.export.export(model, (x,), strict=False))
    from torch.fx.experimental.proxy_tensor import make_fx
    attempt("make_fx", lambda: make_fx(torch.sin)(x))
    from torch.nn.attention.flex_attention import flex_attention
    q = torch.randn(1, 1, 16, 16)
    attempt("flex", lambda: flex_attention(q, q, q))
    Fn.apply(torch.ones(3, requires_grad=True)).sum().backward()

thread = threading.Thread(target=work); thread.start(); thread.join()
import torch._inductor.graph
import inspect
report["source"] = "class GraphLowering" in inspect.getsource(torch._inductor.graph)
report["total"] = wire.receipt.total
wire.close()
report["left"] = [
    f"{m}.{p}" for m, p, _ in tripwire._POINTS
    if eval("sys.modules[m]." + p).__code__.co_filename == tripwire.__file__
]
report["loader"] = type(torch._inductor.graph.__spec__.loader).__name__
torch.compile(model, backend="eager")(x)
print(json.dumps(report))
"""


@pytest.mark.slow
def test_modules_imported_after_the_wire_was_set_are_fitted_and_restored() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FRESH], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["loaded_before"] == report["loaded_after_install"] == []
    assert report["stopped"] == ["compile", "strict", "non-strict", "make_fx", "flex", "compile in backward"]
    assert report["total"] == 6
    assert report["left"] == []
    assert report["source"]
    assert report["loader"] == "SourceFileLoader"


RACE = """
import sys, threading
import torch
from aotcache.errors import TracingForbidden
from aotcache.runtime import tripwire

half = threading.Event()

class Watch:
    "Tells when torch._dynamo.eval_frame begins to be imported."
    def find_spec(self, name, path, target=None):
        if name == "torch._dynamo.types":  # what eval_frame imports in its first lines
            half.set()
        return None

sys.meta_path.insert(0, Watch())
importing = threading.Thread(target=lambda: __import__("torch._dynamo"))
importing.start()
half.wait()
wire = tripwire.install("process")
importing.join()
try:
    torch.compile(torch.sin, backend="eager")(torch.ones(3))
except TracingForbidden:
    print("stopped", wire.receipt.total)
"""


@pytest.mark.slow
def test_a_module_half_imported_by_another_thread_is_fitted_too() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RACE], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.stdout.split() == ["stopped", "1"], done.stderr


@pytest.mark.parametrize(
    ("command", "compiler"),
    [
        (["g++", "x.cpp"], "g++"),
        (["/opt/bin/aarch64-linux-gnu-gcc-13", "x.c"], "aarch64-linux-gnu-gcc-13"),
        ("cd /tmp && clang++ x.cpp", "clang++"),
        (["env", "ptxas", "x"], "ptxas"),
        (b"/usr/bin/cc", "cc"),
        (["git", "gcc"], None),
        (["python", "cc"], None),
        (["ccache", "--version"], None),
        ([], None),
    ],
)
def test_compilers_are_told_by_the_program_that_is_started(command: Any, compiler: str | None) -> None:
    assert tripwire._compiler_of(command) == compiler


def test_paths_count_as_programs_too(tmp_path: Any) -> None:
    assert tripwire._compiler_of(tmp_path / "nvcc") == "nvcc"
    assert tripwire._compiler_of([os.fsencode(tmp_path / "nvcc")]) == "nvcc"
