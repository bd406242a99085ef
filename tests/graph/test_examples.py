"""A recorded call's arguments come back as they were, or are refused by name."""

from __future__ import annotations

import enum
import functools
import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import nn

from aotcache.errors import CaptureError, ManifestError
from aotcache.graph import generators
from aotcache.graph.examples import read_example, write_example
from aotcache.recorded import Example

HERE = __name__


class Kind(enum.Enum):
    FIRST = "first"


class Pair(NamedTuple):
    left: torch.Tensor
    right: int


@dataclass(frozen=True)
class Settings:
    scale: float
    table: torch.Tensor
    names: list[str] = field(default_factory=list)


@dataclass
class Slotted:
    __slots__ = ("scale",)
    scale: float


def loss(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return x.mean() * scale


def resolve(dotted: str) -> Any:
    module, _, name = dotted.partition(":")
    assert module == HERE
    return globals()[name]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 3)
        self.tied = nn.Linear(2, 3)
        self.tied.weight = self.head.weight


def back(
    folder: Path, *args: Any, model: nn.Module | None = None, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    written = write(folder, Model(), *args, **kwargs)
    given = read_example(folder, written, model or Model(), torch.device("cpu"), resolve)
    return given.args, given.kwargs


def write(folder: Path, model: nn.Module, *args: Any, grad: bool = True, **kwargs: Any) -> Example:
    return write_example(folder, model, args, kwargs, grad=grad, drawn=generators.read())


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(3, 4),
        lambda: torch.randn(3, 4).t(),
        lambda: torch.randn(6, 4)[::2, 1:],
        lambda: torch.randn(3, 1).expand(3, 5),
        lambda: torch.randn(1).expand(2, 3),
        lambda: torch.tensor(2.5),
        lambda: torch.empty(0, 3),
        lambda: torch.randn(2, 1, 3).transpose(0, 1),
        lambda: torch.randn(3).bfloat16(),
        lambda: torch.arange(5),
        lambda: torch.tensor([True, False]),
        lambda: torch.randn(3, requires_grad=True),
        lambda: torch.randn(3, requires_grad=True) * 2,
        lambda: nn.Parameter(torch.randn(3, 2)),
        lambda: torch.randn(2, 2).to(torch.float8_e4m3fn),
    ],
)
def test_a_tensor_keeps_values_layout_and_whether_it_wants_a_gradient(tmp_path: Path, make: Any) -> None:
    given = make()
    (found,), _ = back(tmp_path, given)
    assert found.dtype == given.dtype
    assert found.shape == given.shape
    assert found.stride() == given.stride()
    assert found.requires_grad == given.requires_grad
    assert found.is_leaf
    assert torch.equal(found.detach().to(torch.float64), given.detach().to(torch.float64))


def test_one_tensor_twice_is_one_tensor_and_equal_ones_are_two(tmp_path: Path) -> None:
    x, y = torch.ones(2), torch.ones(2)
    (a, (b, c)), kwargs = back(tmp_path, x, (x, y), z=y)
    assert a is b
    assert c is kwargs["z"]
    assert a is not c


def test_weights_of_the_model_are_those_of_the_model_that_is_called(tmp_path: Path) -> None:
    model, other = Model(), Model()
    written = write(tmp_path, model, model.tied.weight, bias=model.head.bias)
    given = read_example(tmp_path, written, other, torch.device("cpu"), resolve)
    assert given.args[0] is other.head.weight
    assert given.kwargs["bias"] is other.head.bias
    with pytest.raises(ManifestError, match="record it again"):
        read_example(tmp_path, written, nn.Linear(1, 1), torch.device("cpu"), resolve)


def test_plain_values_and_containers_come_back_as_they_were(tmp_path: Path) -> None:
    given = {
        "none": None, "yes": True, "int": 3, "big": 2**80, "float": 0.1, "whole": 1.0, "inf": -math.inf,
        "text": "ä\n", "list": [1, (2, [3])], "dict": {"a": {1: "b"}}, "size": torch.Size((2, 3)),
        "dtype": torch.bfloat16, "device": torch.device("cpu"), "kind": Kind.FIRST, "function": loss,
        "class": Settings,
    }  # fmt: skip
    _, found = back(tmp_path, **given)
    assert found == given
    assert list(found) == list(given)
    assert [type(value) for value in found.values()] == [type(value) for value in given.values()]


def test_structures_with_tensors_come_back(tmp_path: Path) -> None:
    x = torch.randn(3)
    partial = functools.partial(loss, scale=2.0)
    args, kwargs = back(tmp_path, Pair(x, 4), settings=Settings(0.5, x, ["a"]), loss=partial)
    assert type(args[0]) is Pair
    assert torch.equal(args[0].left, x)
    assert args[0].right == 4
    settings = kwargs["settings"]
    assert type(settings) is Settings
    assert settings.table is args[0].left
    assert (settings.scale, settings.names) == (0.5, ["a"])
    assert float(kwargs["loss"](x)) == float(2 * x.mean())


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (lambda x: x, "lambda"),
        (nn.Linear(1, 1), r"Linear"),
        ({1, 2}, "builtins.set"),
        (torch.eye(2).to_sparse(), "torch.Tensor"),
        (torch.empty(2, device="meta"), "torch.Tensor"),
        (torch.ones(2, dtype=torch.complex64), "complex64"),
        (Slotted(1.0), "Slotted"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(tmp_path: Path, value: Any, said: str) -> None:
    with pytest.raises(
        CaptureError, match=rf"argument batch\.inner\[1\] of the drafter is .*{said}"
    ) as caught:
        back(tmp_path, batch={"inner": [1, value]})
    assert caught.value.details["argument"] == "batch.inner[1]"
    assert not list(tmp_path.iterdir())


def test_modes_are_those_of_the_call(tmp_path: Path) -> None:
    model = Model()
    model.train()
    model.head.eval()
    given = read_example(tmp_path, write(tmp_path, model, grad=False), model, torch.device("cpu"), resolve)
    other = Model().eval()
    with given.state(other):
        assert (other.training, other.head.training, other.tied.training) == (True, False, True)
        assert not torch.is_grad_enabled()
    with pytest.raises(ManifestError, match="'head'"):
        with given.state(nn.Linear(1, 1)):
            pass


def test_what_the_drafter_draws_is_drawn_again_and_nothing_else_notices(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [float(torch.rand(())), random.random(), random.gauss(0, 1), float(numpy.random.randn())]

    draw()  # of a pair of normal numbers, one is left
    model = Model()
    given = read_example(tmp_path, write(tmp_path, model), model, torch.device("cpu"), resolve)
    first, second = draw(), draw()
    for _ in range(2):
        with given.state(model):
            assert draw() == first
            assert draw() == second
    after = draw()
    with given.state(model):
        draw()
    assert after not in (first, second)
    assert draw() not in (first, second, after)


def test_a_file_that_is_gone_is_told(tmp_path: Path) -> None:
    written = write(tmp_path, Model(), torch.ones(2))
    (tmp_path / written.file).unlink()
    with pytest.raises(ManifestError, match=written.file):
        read_example(tmp_path, written, Model(), torch.device("cpu"), resolve)
