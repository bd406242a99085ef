"""States of the process's generators of random numbers: torch's on the CPU, Python's and numpy's.

A drafter that draws, say, how many tokens it masks, calls its regions by what it drew.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

_TORCH, _PYTHON, _NUMPY = "random torch", "random python", "random numpy"
_GAUSS = " gauss"
"""What is appended to the name of a state for the second number of a pair that was drawn."""


def read() -> dict[str, Any]:
    """The states of this moment, to be given to `as_tensors`. Some microseconds."""
    states: dict[str, Any] = {_TORCH: torch.get_rng_state(), _PYTHON: random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states[_NUMPY] = numpy.random.get_state()
    return states


def as_tensors(states: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """States as tensors, by names that begin with `random `."""
    _, words, gauss = states[_PYTHON]
    made = {_TORCH: states[_TORCH]} | _pair(_PYTHON, words, gauss)
    if _NUMPY in states:
        kind, words, position, has_gauss, gauss = states[_NUMPY]
        if kind == "MT19937":
            made |= _pair(_NUMPY, [*map(int, words), position], gauss if has_gauss else None)
    return made


def _pair(name: str, words: Any, gauss: float | None) -> dict[str, torch.Tensor]:
    made = {name: torch.tensor(words, dtype=torch.int64, device="cpu")}
    if gauss is not None:
        made[name + _GAUSS] = torch.tensor([gauss], dtype=torch.float64, device="cpu")
    return made


@contextmanager
def set_to(tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Within it, the generators go on from the states in `tensors`; afterwards they are as before."""
    before = read()
    try:
        if _TORCH in tensors:
            torch.set_rng_state(tensors[_TORCH])
        if _PYTHON in tensors:
            version, *_ = random.getstate()
            random.setstate((version, tuple(tensors[_PYTHON].tolist()), _gauss(tensors, _PYTHON)))
        if _NUMPY in tensors:
            import numpy

            *words, position = tensors[_NUMPY].tolist()
            gauss = _gauss(tensors, _NUMPY)
            numpy.random.set_state(
                ("MT19937", numpy.array(words, numpy.uint32), position, int(gauss is not None), gauss or 0.0)
            )
        yield
    finally:
        torch.set_rng_state(before[_TORCH])
        random.setstate(before[_PYTHON])
        if _NUMPY in before:
            sys.modules["numpy"].random.set_state(before[_NUMPY])


def _gauss(tensors: Mapping[str, torch.Tensor], name: str) -> float | None:
    found = tensors.get(name + _GAUSS)
    return None if found is None else float(found)


__all__ = ["as_tensors", "read", "set_to"]
