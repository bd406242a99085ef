"""A drafter that calls a custom operator by name, and processes that load its artifact."""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import aotcache
from aotcache.errors import AotcacheError
from aotcache.runtime import registry
from aotcache.runtime.attach import Handle


class Softened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.aotcache_cases.soften(self.linear(x), 0.5)


class Drafter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Softened()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).pow(2).mean()


def build(operator: str | None = "tests.cases.custom_op") -> Drafter:
    if operator is not None:
        importlib.import_module(operator)
    torch.manual_seed(0)
    return Drafter()


def batch(bucket: dict[str, int], device: Any) -> tuple[tuple[()], dict[str, Tensor]]:
    return (), {"x": torch.randn(bucket["rows"], 16, device=device)}


def main(spec: str, places: dict[str, Any], operator: str | None) -> None:
    """Load and run the artifact from each place, with one operator module or none; prints what came of it.

    Where there was none, the module is imported then, and the artifacts are loaded anew.

    Args:
        spec: Its path.
        places: By kind: the store's `url`, and the `environment` of a host that uses it.
        operator: The module.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        hosts = {}
        for kind, place in places.items():
            hosts[kind] = host = Host(place["environment"], build(operator))
            host.handle = stack.enter_context(aotcache.attach(host.model, spec, store=place["url"]))
            host.load()
        if operator is None:
            importlib.import_module("tests.cases.custom_op")
            for host in hosts.values():
                host.enter()
                host.handle.refresh()
                host.error = error_of(host.model)
        print(json.dumps({kind: host.found() for kind, host in hosts.items()}))


class Host:
    """One place's drafter, and a home of its own: this process is a host for each place in turn."""

    handle: Handle
    refused: list[str]
    error: float | None = None
    loads: int
    left: list[str]

    def __init__(self, environment: dict[str, str], model: Drafter) -> None:
        self.environment, self.model = environment, model
        self.refused = []
        self.enter()
        self.before = lying()

    def enter(self) -> None:
        """Its home, where temporary files go too. What was opened for another place does not count."""
        home = self.environment["AOTCACHE_HOME"]
        os.makedirs(home, exist_ok=True)
        os.environ |= {**self.environment, "TMPDIR": home}
        tempfile.tempdir = None
        registry._opened.clear()

    def load(self) -> None:
        """By a prefetch, and by a call."""
        self.enter()
        for load in (self.handle.prefetch, lambda: error_of(self.model)):
            try:
                self.error = load()
            except AotcacheError as refusal:
                self.refused.append(f"{type(refusal).__name__}: {refusal}")
        self.loads = self.handle.stats()["loads"]
        self.left = sorted(lying() - self.before)

    def found(self) -> dict[str, Any]:
        """What is printed of it."""
        return {"refused": self.refused, "error": self.error, "loads": self.loads, "left": self.left}


def error_of(model: Drafter) -> float:
    """Of one call, against the operator's formula."""
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    linear = model.layer.linear
    plain = torch.nn.functional.linear(x, linear.weight, linear.bias)
    return float((model.layer(x) - plain / (0.5 + plain.abs())).abs().max())


def lying() -> set[str]:
    """What lies in this process's home, but for locks, and for when a store was asked for recalls."""
    home = Path(os.environ["AOTCACHE_HOME"])
    paths = (path.relative_to(home) for path in home.rglob("*"))
    return {str(path) for path in paths if path.parts[0] not in ("locks", "recalls")}
