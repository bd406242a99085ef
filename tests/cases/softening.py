"""A drafter that calls a custom operator by name, and processes that load its artifact."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import aotcache
from aotcache.errors import AotcacheError


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


def main(spec: str, store: str, operator: str | None) -> None:
    """Load and run the artifact with one operator module or none; prints what came of it.

    Where there was none, the module is imported then, and the artifact loaded anew.
    """
    model = build(operator)
    found: dict[str, Any] = {"refused": [], "error": None}
    with aotcache.attach(model, spec, store=store) as handle, torch.no_grad():
        for load in (handle.prefetch, lambda: error_of(model)):
            try:
                found["error"] = load()
            except AotcacheError as refusal:
                found["refused"].append(f"{type(refusal).__name__}: {refusal}")
        found |= {"loads": handle.stats()["loads"], "left": left()}
        if operator is None:
            importlib.import_module("tests.cases.custom_op")
            handle.refresh()
            found["error"] = error_of(model)
    print(json.dumps(found))


def error_of(model: Drafter) -> float:
    """Of one call, against the operator's formula."""
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    linear = model.layer.linear
    plain = torch.nn.functional.linear(x, linear.weight, linear.bias)
    return float((model.layer(x) - plain / (0.5 + plain.abs())).abs().max())


def left() -> list[str]:
    """What lies in this process's home, where its temporary files go too, but for locks."""
    home = Path(os.environ["AOTCACHE_HOME"])
    paths = (path.relative_to(home) for path in home.rglob("*"))
    return sorted(str(path) for path in paths if path.parts[0] != "locks")
