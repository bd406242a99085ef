"""Layers whose code asks a switch: a constant, a table, the environment, three ways."""

from __future__ import annotations

import os
from os import environ, getenv

from torch import Tensor, nn

FAST = False
TABLE = {"gelu": 1.0}


class Switched(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.linear = nn.Linear(8, 8)
        self.forward = {  # type: ignore[method-assign]
            "constant": self.constant,
            "table": self.table,
            "os.environ": self.through_os,
            "environ": self.through_environ,
            "getenv": self.through_getenv,
        }[way]

    def constant(self, x: Tensor) -> Tensor:
        return x if FAST else self.linear(x)

    def table(self, x: Tensor) -> Tensor:
        return self.linear(x) * TABLE["gelu"]

    def through_os(self, x: Tensor) -> Tensor:
        return x if os.environ.get("CASES_FAST") else self.linear(x)

    def through_environ(self, x: Tensor) -> Tensor:
        return x if environ.get("CASES_FAST") else self.linear(x)

    def through_getenv(self, x: Tensor) -> Tensor:
        return x if getenv("CASES_FAST") else self.linear(x)


class Holder(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Switched(way)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x)
