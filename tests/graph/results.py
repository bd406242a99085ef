"""Classes of results and arguments, as drafters and transformers define them."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor
    hidden: Tensor | None = None
    parts: tuple[Tensor, ...] = ()

    def __post_init__(self) -> None:
        self.made = "by the constructor"


@dataclass(frozen=True, slots=True)
class Frozen:
    value: Tensor
    scale: float


class Top(NamedTuple):
    values: Tensor
    indices: Tensor
    count: int = 3


class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """What transformers calls so: a dataclass whose fields that are not None are also its items."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if getattr(self, field.name) is not None:
                OrderedDict.__setitem__(self, field.name, getattr(self, field.name))

    def __getitem__(self, key: Any) -> Any:
        return dict(self.items())[key] if isinstance(key, str) else self.to_tuple()[key]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.keys() and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(self[key] for key in self)


@dataclass
class CausalOutput(ModelOutput):
    logits: Tensor | None = None
    loss: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


@dataclass
class Listed(list):  # type: ignore[type-arg]
    """No worker can put this together: its items are beside its fields."""

    value: Tensor
