"""Drafters that a builder must refuse, survive, or build once."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 4


class ChangesInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        x.mul_(2)  # changes what it was given
        return y


class Drops(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.bernoulli(x.detach().sigmoid())  # draws by values


class Aliases(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat([x, x + 1])
        return both[: len(x)], both[len(x) :]  # shares memory


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.lin.register_forward_hook(scale_output)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lin(x)
        return out


def scale_output(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out * 2


class Unstable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(1, generator=self.generator)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


class Layer(nn.Module):
    """Two of these differ in what code reads and no graph shows; the third in what it computes."""

    def __init__(self, index: int, factor: float) -> None:
        super().__init__()
        self.index = index
        self.factor = factor
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.index < 0:
            raise IndexError(self.index)
        return self.drop(torch.relu(x)) * (self.factor if self.training else -self.factor)


REFUSED = {
    "input": ChangesInput,
    "random": Drops,
    "alias": Aliases,
    "hook": Hooked,
    "unstable": Unstable,
    "counts": Counts,
}


class Drafter(nn.Module):
    def __init__(self, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)

    def forward(self, x: Tensor) -> Tensor:
        total = x.sum() * 0
        for layer in self.layers.values():
            out = layer(x * 1)
            total = total + (out[0] if isinstance(out, tuple) else out).pow(2).sum()
        return total


def build(kinds: list[str]) -> Drafter:
    return Drafter({kind: REFUSED[kind]() for kind in kinds})


def build_layers() -> Drafter:
    return Drafter({"a": Layer(0, 1.5), "b": Layer(1, 1.5), "c": Layer(2, 2.5)})


def build_then(what: str, pid_file: str) -> Drafter:
    """A factory that ends badly, after it told who it is."""
    Path(pid_file).write_text(str(os.getpid()))
    print("the factory was here", flush=True)
    if what == "exit":
        os._exit(7)
    if what == "segfault":
        ctypes.string_at(0)
    if what == "memory":
        kept = []
        while len(kept) < 40:
            kept.append(os.urandom(2**20) * 64)
    if what == "threads":
        threading.Thread(target=signal.pause).start()
        os._exit(0)
    signal.pause()
    raise AssertionError


def batch(bucket: dict[str, int], device: Any) -> tuple[tuple[()], dict[str, Tensor]]:
    return (), {"x": torch.randn(bucket["rows"], WIDTH, requires_grad=True)}
