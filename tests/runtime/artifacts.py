"""Two artifacts that the tests of the runtime's lower half share, built once in a session."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from aotcache.compile import pipeline
from aotcache.host import host_toolchain
from aotcache.key import Component, KeyParts
from aotcache.manifest import Manifest
from aotcache.store import open_store
from aotcache.store.base import Store
from aotcache.types import Target
from tests.manifests import make_manifest
from tests.runtime import raising_op

ROWS, WIDTH = 8, 16
NAMES = ("x", "weight", "gain", "shift")


@dataclass(frozen=True)
class Artifact:
    """A compiled call, its manifest and the store that holds both."""

    manifest: Manifest
    archive: Path
    store: Store

    def renamed(self, name: str) -> Manifest:
        """The same archive under another key."""
        parts = KeyParts((Component("format", (("name", name),)),))
        return replace(self.manifest, key=parts.key, components=tuple(parts.to_json()))


def region(
    x: torch.Tensor, weight: torch.Tensor, gain: torch.Tensor, shift: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Begins with a product of its inputs, so that a wrong shape is found before any kernel runs."""
    hidden = torch.tanh(x @ weight) * gain
    return hidden, (hidden * x + shift).sum(-1), hidden.argmax(-1)


def inputs(seed: int = 0, *, grad: bool = True) -> list[torch.Tensor]:
    """Tensors for `region`: the last one never wants a gradient."""
    g = torch.Generator().manual_seed(seed)
    x, weight, gain = (torch.randn(size, generator=g) for size in ((ROWS, WIDTH), (WIDTH, WIDTH), (WIDTH,)))
    shift = torch.randn(WIDTH, generator=g)
    return [*(t.requires_grad_(grad) for t in (x, weight, gain)), shift]


def reference(
    tensors: list[torch.Tensor], weights: tuple[float, float]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs, and the gradients of `loss`, by eager autograd in float64."""
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
    outputs = region(*wide)
    grads = torch.autograd.grad(loss(outputs, weights), [t for t in wide if t.requires_grad])
    return [t.detach() for t in outputs], list(grads)


def loss(outputs: Any, weights: tuple[float, float] = (1.0, 0.5)) -> torch.Tensor:
    """A scalar that reaches the differentiable outputs whose weight is not zero."""
    terms = [weight * t.square().sum() for weight, t in zip(weights, outputs, strict=False) if weight]
    return torch.stack(terms).sum()


def close(found: torch.Tensor | None, wanted: torch.Tensor) -> bool:
    """Equal within float32 round-off of the largest entry."""
    assert found is not None
    return bool((found.double() - wanted).abs().max() <= 1e-5 * wanted.abs().max().clamp_min(1e-6))


_made: dict[str, Artifact] = {}


def pair(factory: pytest.TempPathFactory) -> Artifact:
    """`region` for training."""
    if "pair" not in _made:
        _made["pair"] = _make(factory.mktemp("pair"), region, inputs(), NAMES, train=True)
    return _made["pair"]


def proxied(factory: pytest.TempPathFactory) -> Artifact:
    """A call of a custom operator, which needs torch's own loader."""
    if "proxied" not in _made:
        _made["proxied"] = _make(
            factory.mktemp("proxied"),
            lambda x: (raising_op.positive(x * 2) + 1,),
            [torch.ones(3, 4)],
            ("x",),
            train=False,
        )
    return _made["proxied"]


def _make(
    folder: Path, fn: Any, examples: list[torch.Tensor], names: tuple[str, ...], *, train: bool
) -> Artifact:
    target, toolchain = Target("cpu", "x86_64-avx2"), host_toolchain()
    prepared = pipeline.prepare(
        pipeline.export(fn, examples, names, region="region", train=train),
        examples,
        names=names,
        kinds=["input"] * len(names),
        region="region",
        mode="train" if train else "infer",
        target=target,
        toolchain=toolchain,
        options={"max_autotune": False, "memory_budget": 1.0},
    )
    built = pipeline.compile_prepared(prepared, folder)
    assert built.archive is not None
    manifest = make_manifest(
        call=folder.name,
        target=str(target),
        toolchain=toolchain,
        host=built.host,
        mode=prepared.mode,
        digest=built.digest,
        size=built.size,
        members=built.members,
        inputs=prepared.inputs,
        outputs=prepared.outputs,
        pair=prepared.pair,
        content=prepared.content,
        runner=built.runner,
    )
    store = open_store(f"file://{folder / 'store'}")
    assert store.publish(manifest, built.archive)
    return Artifact(manifest, built.archive, store)
