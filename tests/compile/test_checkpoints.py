"""A region with activation checkpoints inside is built as if it had none, or refused."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint

from aotcache.build.worker import FlatCall, example_tensors
from aotcache.compile.certify import certify
from aotcache.compile.checkpoints import left_out
from aotcache.errors import UnsupportedGraph
from aotcache.graph.region import Region
from aotcache.runtime.function import Executable
from aotcache.spec import CompileOptions
from tests.compile.flat import assert_close
from tests.compile.uncompiled import prepare, runner

OWN = [torch_checkpoint._checkpoint_without_reentrant_generator, torch_checkpoint.CheckpointFunction]


class Layer(nn.Module):
    """Two weights around dropout, all of it under a checkpoint."""

    calls: Tensor

    def __init__(self, *, counts: bool = False, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.counts, self.options = counts, options
        self.register_buffer("calls", torch.zeros(()))

    def inner(self, x: Tensor) -> Tensor:
        if self.counts:
            with torch.no_grad():
                self.calls.add_(1)
        return self.down(F.dropout(self.up(x).relu(), 0.5, self.training))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.inner, x, **self.options)
        return x + found


def call_of(layer: Layer, seed: int) -> Any:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    return Region("layer", layer, CompileOptions().for_key()).describe((x,), {})


def graphs_of(call: Any) -> Executable:
    """The call's graphs, uncompiled."""
    names, kinds = call.names, call.kinds
    return runner(prepare(FlatCall(call), example_tensors(call), train=True, kinds=kinds, names=names))


def test_values_gradients_and_numbers_drawn_are_those_of_eager_with_its_checkpoint() -> None:
    layer = Layer(use_reentrant=False)
    calls = [call_of(layer, seed) for seed in (1, 2)]
    executable = graphs_of(calls[0])
    certificate = certify(executable, calls, nullcontext)
    assert certificate.batches == 2

    ours = [t.detach().clone().requires_grad_(t.requires_grad) for t in calls[1].tensors]
    found = {}
    for run in (
        lambda: executable.train(ours)[0],
        lambda: layer(*calls[1].arguments.build(calls[1].tensors).values()),
    ):
        torch.manual_seed(3)
        out = run()
        out.sin().sum().backward()
        found[len(found)] = out.detach(), torch.rand(3)
    for a, b in zip(*found.values(), strict=True):
        assert_close(a, b.double(), "output")
    for mine, theirs, name in zip(ours, calls[1].tensors, calls[1].names, strict=True):
        assert (mine.grad is None) == (theirs.grad is None) == (not theirs.requires_grad)
        if mine.grad is not None:
            assert_close(mine.grad, theirs.grad.double(), name)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"use_reentrant": True}, "inner runs under a reentrant checkpoint; pass use_reentrant=False"),
        ({"use_reentrant": False, "counts": True}, "changes buffers of its own and runs .*inner under"),
        (
            {"use_reentrant": False, "preserve_rng_state": False},
            "preserve_rng_state=False, whose backward draws",
        ),
    ],
)
def test_what_a_second_run_would_change_is_refused(options: dict[str, Any], named: str) -> None:
    call = call_of(Layer(**options), 1)
    with pytest.raises(UnsupportedGraph, match=named):
        certify(graphs_of(call), [call], nullcontext)
    assert [
        torch_checkpoint._checkpoint_without_reentrant_generator,
        torch_checkpoint.CheckpointFunction,
    ] == OWN


def test_without_gradients_a_reentrant_checkpoint_is_its_function() -> None:
    layer = Layer(use_reentrant=True).eval()
    x = torch.ones(4, 8)
    with torch.no_grad(), left_out("layer") as met:
        assert torch.equal(layer(x), x + layer.inner(x))
    assert met.functions == []
