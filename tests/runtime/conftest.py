"""The probe drafter, warmed once in a session, and eager references for it."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aotcache
from aotcache.errors import AotcacheError
from aotcache.runtime.attach import Handle

SPECS = Path(__file__).parent / "specs"


@dataclass(frozen=True)
class Probe:
    """The probe drafter's module, its spec, and the store that covers it."""

    module: Any
    spec: Path
    store: str

    def batch(self, seed: int = 0) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        made: dict[str, Tensor] = self.module.batch({"batch": 4}, "cpu")[1]
        return made

    def attach(self, model: nn.Module, **options: Any) -> Handle:
        return aotcache.attach(model, self.spec, store=self.store, **options)

    def attach_to(self, region: nn.Module, **options: Any) -> Handle:
        """Attach one `Probe` on its own."""
        drafter = nn.Module()
        drafter.probes = nn.ModuleList([region])
        spec = aotcache.load_spec(self.spec)
        narrowed = replace(spec, drafter=replace(spec.drafter, regions=["probes.*"]))
        return aotcache.attach(drafter, narrowed, store=self.store, **options)

    def region_call(self, seed: int = 0) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
        """Arguments of `probes.0` as the drafter gives them."""
        batch = self.batch(seed)
        shift = torch.randn(self.module.WIDTH, requires_grad=True)
        function = self.module.transform(shift, 0.5)
        return (batch["x"], batch["y"]), {"settings": self.module.Settings(), "function": function}


@pytest.fixture(scope="session")
def probe_spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the probe's folder, for the lock file that warming writes."""
    folder = tmp_path_factory.mktemp("probe")
    for file in SPECS.iterdir():
        if file.suffix in (".py", ".toml"):
            shutil.copy(file, folder)
    return folder / "probe.toml"


@pytest.fixture(scope="session")
def probe_module(probe_spec: Path) -> Iterator[Any]:
    sys.path.insert(0, str(probe_spec.parent))
    yield importlib.import_module("probe")
    sys.path.remove(str(probe_spec.parent))
    del sys.modules["probe"]


@pytest.fixture(scope="session")
def probe(probe_spec: Path, probe_module: Any, warmed: Callable[..., str]) -> Probe:
    return Probe(probe_module, probe_spec, warmed(probe_spec))


@dataclass(frozen=True)
class Outcome:
    """What a call gave: outputs and gradients, or the type of the error."""

    values: tuple[Tensor, ...] = ()
    error: type[Exception] | None = None


REFUSALS = (AotcacheError, RuntimeError, TypeError, ValueError, KeyError)


def outcome(call: Callable[[], Any], wanted: list[Tensor]) -> Outcome:
    """Run `call`, then the backward of the sum of its outputs for `wanted`."""
    try:
        found = call()
        flat = [found] if isinstance(found, Tensor) else list(found)
        differentiable = [t for t in flat if t.requires_grad]
        gradients: list[Tensor] = []
        if differentiable and wanted:
            seeds = [torch.linspace(-1, 1, t.numel()).view(t.shape).to(t.dtype) for t in differentiable]
            made = torch.autograd.grad(differentiable, wanted, seeds, allow_unused=True)
            gradients = [torch.zeros(1) if g is None else g for g in made]
        return Outcome(tuple(t.detach() for t in flat) + tuple(gradients))
    except REFUSALS as error:
        return Outcome(error=type(error))


def agree(found: Outcome, expected: Outcome, tolerance: float = 2e-5) -> None:
    """Both gave the same within float32 round-off."""
    assert found.error is None, found.error
    assert expected.error is None, expected.error
    assert len(found.values) == len(expected.values)
    for i, (a, b) in enumerate(zip(found.values, expected.values, strict=True)):
        assert a.shape == b.shape, i
        scale = max(1.0, float(b.abs().max())) if b.numel() else 1.0
        assert float((a.double() - b.double()).abs().max()) <= tolerance * scale, i
