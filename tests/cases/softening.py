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
    """Load and run the artifact with one operator module or none; prints what came of it."""
    model = build(operator)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    refused, error, stats = "", None, {}
    with aotcache.attach(model, spec, store=store) as handle, torch.no_grad():
        try:
            y = model.layer(x)
        except AotcacheError as refusal:
            refused = f"{type(refusal).__name__}: {refusal}"
        else:
            z = model.layer.linear
            plain = torch.nn.functional.linear(x, z.weight, z.bias)
            error = float((y - plain / (0.5 + plain.abs())).abs().max())
        stats = handle.stats()
    home = Path(os.environ["AOTCACHE_HOME"])
    left = sorted(str(p.relative_to(home)) for p in home.rglob("*") if p.is_file() and "locks" not in p.parts)
    print(json.dumps({"refused": refused, "error": error, "loads": stats["loads"], "left": left}))
