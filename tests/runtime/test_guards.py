"""Calls that differ from the captured one: right, or refused; never an old or a wrong artifact."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aotcache.errors import ArtifactMiss, CallRefused, UnsupportedGraph
from tests.runtime.conftest import Outcome, Probe, agree, outcome

pytestmark = pytest.mark.slow

Call = tuple[list[Any], dict[str, Any]]


def _run(module: nn.Module, call: Call, wanted: list[Tensor]) -> Outcome:
    args, kwargs = call
    return outcome(lambda: module(*args, **kwargs), wanted)


def _twins(probe: Probe) -> tuple[nn.Module, nn.Module]:
    first, second = probe.module.build(), probe.module.build()
    return first.probes[0], second.probes[0]


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


def _transposed(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def _sliced(x: Tensor) -> Tensor:
    return torch.cat([x, x], 1)[:, : x.shape[1]]


def _stepped(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, 1)[:, ::2]


def _expanded(x: Tensor) -> Tensor:
    return x[:1].expand(x.shape)


def _unaligned(x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def _negated(x: Tensor) -> Tensor:
    return torch.complex(x, -x).conj().imag


LAYOUTS = [_transposed, _sliced, _stepped, _expanded, _unaligned]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("first", [True, False], ids=["met first", "met later"])
def test_inputs_in_any_memory_layout_are_right(
    probe: Probe, layout: Callable[[Tensor], Tensor], first: bool
) -> None:
    region, eager = _twins(probe)
    (x, y), kwargs = probe.region_call()
    with probe.attach_to(region):
        if not first:
            region(x, y, **kwargs)
        for _ in range(2):
            leaves = [_leaf(x), _leaf(y)]
            call: Call = ([layout(leaves[0]), layout(leaves[1])], kwargs)
            agree(_run(region, call, leaves), _run(eager, call, leaves))
            plain: Call = (leaves, kwargs)
            agree(_run(region, plain, leaves), _run(eager, plain, leaves))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_incoming_gradients_in_any_memory_layout_are_right(
    probe: Probe, layout: Callable[[Tensor], Tensor]
) -> None:
    region, eager = _twins(probe)
    args, kwargs = probe.region_call()
    seed = layout(torch.randn(4, 8))
    with probe.attach_to(region):
        found = torch.autograd.grad(region(*args, **kwargs), args, (seed, seed))
        expected = torch.autograd.grad(eager(*args, **kwargs), args, (seed, seed))
    agree(Outcome(tuple(found)), Outcome(tuple(expected)))


def test_a_negative_bit_is_resolved(probe: Probe) -> None:
    region, eager = _twins(probe)
    (x, y), kwargs = probe.region_call()
    with probe.attach_to(region):
        for _ in range(2):
            negated = _negated(x.detach())
            assert negated.is_neg()
            found, expected = (m(negated.requires_grad_(), y, **kwargs)[0].detach() for m in (region, eager))
            agree(Outcome((found,)), Outcome((expected,)))
            seed = _negated(torch.randn(4, 8))
            pair = [torch.autograd.grad(m(x, y, **kwargs)[0], [x], seed) for m in (region, eager)]
            agree(Outcome(tuple(pair[0])), Outcome(tuple(pair[1])))


def test_an_output_that_nobody_uses_counts_as_zero(probe: Probe) -> None:
    region, eager = _twins(probe)
    args, kwargs = probe.region_call()
    with probe.attach_to(region):
        for i in (0, 1):
            found, expected = (
                torch.autograd.grad(m(*args, **kwargs)[i].pow(2).sum(), args) for m in (region, eager)
            )
            agree(Outcome(tuple(found)), Outcome(tuple(expected)))


def test_one_tensor_for_two_inputs_and_two_tensors_for_one(probe: Probe) -> None:
    region, eager = _twins(probe)
    (x, y), kwargs = probe.region_call()
    with probe.attach_to(region):
        region(x, y, **kwargs)
        with pytest.raises(ArtifactMiss, match="same tensor"):
            region(x, x, **kwargs)
        with pytest.raises(ArtifactMiss, match="same tensor"):
            region(x, y, settings=kwargs["settings"], function=probe.module.transform(region.lin.bias, 0.5))
        call: Call = ([x, x.view_as(x)], kwargs)
        agree(_run(region, call, [x]), _run(eager, call, [x]))


def test_weights_untied_or_tied_after_attach_are_misses(probe: Probe) -> None:
    region, _ = _twins(probe)
    args, kwargs = probe.region_call()
    with probe.attach_to(region):
        region(*args, **kwargs)
        region.tied.weight = nn.Parameter(region.lin.weight.detach().clone())
        with pytest.raises(ArtifactMiss):
            region(*args, **kwargs)
        region.tied.weight = region.lin.weight
        region(*args, **kwargs)
        region.tied.bias = region.lin.bias
        with pytest.raises(ArtifactMiss):
            region(*args, **kwargs)


WRONG: dict[str, Callable[[Tensor, Tensor, dict[str, Any]], Call]] = {
    "shape": lambda x, y, k: ([x[:3], y[:3]], k),
    "rank": lambda x, y, k: ([x[None], y[None]], k),
    "dtype": lambda x, y, k: ([x.double(), y], k),
    "integers": lambda x, y, k: ([x, y.long()], k),
    "device": lambda x, y, k: ([x.to("meta"), y], k),
    "missing": lambda x, y, k: ([x], k),
    "missing keyword": lambda x, y, k: ([x, y], {"settings": k["settings"]}),
    "extra": lambda x, y, k: ([x, y, y], k),
    "extra keyword": lambda x, y, k: ([x, y], {**k, "more": 1}),
    "None": lambda x, y, k: ([x, None], k),
    "number": lambda x, y, k: ([x, 1.0], k),
    "subclass": lambda x, y, k: ([x.detach().as_subclass(type("Own", (Tensor,), {})), y], k),
    "sparse": lambda x, y, k: ([x.detach().to_sparse(), y], k),
    "no gradient": lambda x, y, k: ([x.detach(), y], k),
    "inference tensor": lambda x, y, k: ([_inference(x), y], k),
}


def _inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("first", [True, False], ids=["met first", "met later"])
def test_a_wrong_input_is_refused_and_the_region_goes_on(probe: Probe, what: str, first: bool) -> None:
    region, eager = _twins(probe)
    (x, y), kwargs = probe.region_call()
    with probe.attach_to(region):
        if not first:
            region(x, y, **kwargs)
        args, keywords = WRONG[what](x, y, kwargs)
        with pytest.raises((ArtifactMiss, CallRefused, TypeError)):
            region(*args, **keywords)
        call: Call = ([x, y], kwargs)
        agree(_run(region, call, [x, y]), _run(eager, call, [x, y]))


def test_a_gradient_of_another_kind_is_refused(probe: Probe) -> None:
    region, _ = _twins(probe)
    args, kwargs = probe.region_call()
    with probe.attach_to(region):
        hidden, _ = region(*args, **kwargs)
        with pytest.raises(RuntimeError):
            torch.autograd.grad(hidden, args, torch.ones(8, 8))


def _nothing() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


Change = Callable[[Any, nn.Module, pytest.MonkeyPatch], Any]

CHANGES: dict[str, Change] = {
    "eval": lambda p, m, patch: m.eval(),
    "submodule in eval": lambda p, m, patch: m.lin.eval(),
    "attribute by a made-up name": lambda p, m, patch: setattr(m, "scale0", 9.0),
    "attribute of an options object": lambda p, m, patch: setattr(m.options, "gain", 9.0),
    "attribute of the class": lambda p, m, patch: patch.setattr(
        p.Probe.constants, "bias", 9.0, raising=False
    ),
    "index": lambda p, m, patch: setattr(m, "index", 7),
    "global of a helper": lambda p, m, patch: patch.setattr(p, "GAIN", 9.0),
    "global helper": lambda p, m, patch: patch.setattr(p, "helper", lambda x: x),
    "global of the function in the call": lambda p, m, patch: patch.setattr(p, "OUTSIDE", 9.0),
    "entry of a table": lambda p, m, patch: patch.setitem(p.BY_DTYPE, torch.float32, 9.0),
    "set": lambda p, m, patch: patch.setattr(p, "FLAGS", set()),
    "method of the instance": lambda p, m, patch: setattr(m, "grow", lambda x: x),
    "method of the class": lambda p, m, patch: patch.setattr(p.Probe, "grow", lambda self, x: x),
    "forward of the class": lambda p, m, patch: patch.setattr(
        p.Probe, "forward", lambda self, x, y, *, settings, function: (x * 3, y * 3)
    ),
    "forward of a submodule": lambda p, m, patch: setattr(m.lin, "forward", lambda x: x),
    "forward of torch's class": lambda p, m, patch: patch.setattr(nn.Linear, "forward", lambda self, x: x),
    "torch function": lambda p, m, patch: patch.setattr(torch, "tanh", lambda x: x),
    "hook inside": lambda p, m, patch: m.lin.register_forward_hook(lambda *a: a[2] * 9),
    "pre-hook inside": lambda p, m, patch: m.lin.register_forward_pre_hook(lambda m, a: (a[0] * 9,)),
    "hook on the region": lambda p, m, patch: m.register_forward_hook(lambda m, a, out: (out[0] * 9, out[1])),
    "submodule exchanged": lambda p, m, patch: setattr(m, "lin", nn.Sequential(nn.Linear(8, 8))),
    "frozen": lambda p, m, patch: m.lin.bias.requires_grad_(False),
    "double": lambda p, m, patch: m.double(),
    "buffer removed": lambda p, m, patch: setattr(m, "offset", None),
    "default dtype": lambda p, m, patch: torch.set_default_dtype(torch.float64),
    "deterministic": lambda p, m, patch: torch.use_deterministic_algorithms(True),
    "matmul precision": lambda p, m, patch: torch.set_float32_matmul_precision("medium"),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.filterwarnings("ignore")
def test_after_a_change_the_old_code_never_runs(
    probe: Probe, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    region, eager = _twins(probe)
    (x, y), kwargs = probe.region_call()
    call: Call = ([x, y], kwargs)
    precision, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    try:
        with probe.attach_to(region):
            agree(_run(region, call, [x, y]), _run(eager, call, [x, y]))
            for module in (region, eager):
                torch.manual_seed(2)
                CHANGES[what](probe.module, module, monkeypatch)
            found = _run(region, call, [x, y])
            if found.error is None:
                agree(found, _run(eager, call, [x, y]))
            else:
                assert found.error in (ArtifactMiss, CallRefused, UnsupportedGraph)
    finally:
        torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision(precision)


def test_arguments_with_other_constants_are_misses_that_name_them(probe: Probe) -> None:
    region, _ = _twins(probe)
    (x, y), kwargs = probe.region_call()
    settings = probe.module.Settings
    with probe.attach_to(region):
        region(x, y, **kwargs)
        with pytest.raises(ArtifactMiss, match=r"settings.weight differs: float:3.0 / float:2.0"):
            region(x, y, **{**kwargs, "settings": settings(weight=3.0)})
        kwargs["settings"].weight = 4.0
        with pytest.raises(ArtifactMiss, match=r"settings.weight differs: float:4.0 / float:2.0"):
            region(x, y, **kwargs)
        with pytest.raises(ArtifactMiss, match=r"factor differs: float:0.25 / float:0.5"):
            region(
                x,
                y,
                **{**kwargs, "function": probe.module.transform(torch.randn(8, requires_grad=True), 0.25)},
            )


def test_a_captured_tensor_is_the_one_of_this_call(probe: Probe) -> None:
    region, eager = _twins(probe)
    (x, y), kwargs = probe.region_call()
    with probe.attach_to(region):
        for seed in range(3):
            shift = torch.full((8,), float(seed), requires_grad=True)
            call: Call = ([x, y], {**kwargs, "function": probe.module.transform(shift, 0.5)})
            agree(_run(region, call, [shift, x]), _run(eager, call, [shift, x]))


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "nothing wants a gradient"])
def test_the_inference_artifact_runs_where_no_gradient_is_wanted(probe: Probe, mode: str) -> None:
    region, eager = _twins(probe)
    (x, y), kwargs = probe.region_call()
    for module in (region, eager):
        module.eval()
        if mode == "nothing wants a gradient":
            module.requires_grad_(False)
    if mode == "nothing wants a gradient":
        kwargs["function"] = probe.module.transform(torch.randn(8), 0.5)
        x, y = x.detach(), y.detach()
    context = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(mode, _nothing)
    call: Call = ([x, y], kwargs)
    with probe.attach_to(region) as handle, context():
        found = region(*call[0], **kwargs)
        assert not any(t.requires_grad for t in found)
        agree(_run(region, call, []), _run(eager, call, []))
        assert handle.stats()["misses"] == 0


def test_another_autocast_is_a_miss_and_back_is_a_hit(probe: Probe) -> None:
    region, _ = _twins(probe)
    args, kwargs = probe.region_call()
    with probe.attach_to(region):
        region(*args, **kwargs)
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(ArtifactMiss, match="autocast differs"):
            region(*args, **kwargs)
        region(*args, **kwargs)
