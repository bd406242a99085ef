"""Flat calls run by the worker's own code on graphs that were not compiled: all but the compiler, fast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx

from aotcache.compile import pipeline
from aotcache.host import host_toolchain
from aotcache.runtime.function import Executable
from aotcache.runtime.runner import Runner
from aotcache.types import Target
from tests.manifests import make_manifest


class GraphRunner:
    """Runs a graph as a library would: without autograd, on memory alone."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module

    def run(self, tensors: list[torch.Tensor]) -> list[Any]:
        with torch.no_grad():
            # A library's results are views of nothing, as detached tensors are.
            return [t.detach() for t in self.module(*(t.detach() for t in tensors))]


def prepare(
    fn: Callable[..., Any],
    examples: Sequence[torch.Tensor],
    *,
    train: bool,
    kinds: Sequence[Any] | None = None,
    names: Sequence[str] | None = None,
    shared: Sequence[int] = (),
) -> pipeline.Prepared:
    kinds = kinds or ["input"] * len(examples)
    names = names or [f"t{i}" for i in range(len(examples))]
    exported = pipeline.export(fn, examples, names, region="r", train=train, kinds=kinds, shared=shared)
    return pipeline.prepare(
        exported, examples, names=names, kinds=kinds, region="r", mode="train" if train else "infer",
        target=Target("cpu", "x86_64-avx2"), toolchain=host_toolchain(), options={},
    )  # fmt: skip


def runner(prepared: pipeline.Prepared) -> Executable:
    """What a worker would open, with the graphs themselves in the libraries' places."""
    manifest = make_manifest(
        mode=prepared.mode,
        inputs=prepared.inputs,
        outputs=prepared.outputs,
        pair=prepared.pair,
        mutations=prepared.mutations,
        aliases=prepared.aliases,
    )
    backward = None if prepared.backward is None else cast(Runner, GraphRunner(prepared.backward))
    return Executable(manifest, cast(Runner, GraphRunner(prepared.forward)), backward)
