"""Activation checkpoints inside of a region.

A graph says once what is computed; what its backward computes again is chosen when it is
split (`memory_budget`). So a region is exported and checked as if it had no checkpoints,
which changes no value. Where it would change one, the region is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint

from aotcache.errors import UnsupportedGraph

# private torch names, tried on 2.13.0
_KINDS = ("_checkpoint_without_reentrant_generator", "CheckpointFunction")
"""What `torch.utils.checkpoint.checkpoint` uses: without reentrance, and with it."""
# end of private torch names


@dataclass(slots=True)
class Met:
    """The checkpoints of one run of a region.

    Attributes:
        region: The region's name.
        functions: Names of the functions that were to be run again.
        unseeded: Those of them that were to draw other random numbers then.
    """

    region: str
    functions: list[str] = field(default_factory=list)
    unseeded: list[str] = field(default_factory=list)

    def require_pure(self, *, updates: bool, draws: bool) -> None:
        """Refuse what eager's second run of a function would do once more, and an artifact does not.

        Raises:
            UnsupportedGraph: the region has checkpoints and changes what it keeps, or draws anew.
        """
        if updates and self.functions:
            raise UnsupportedGraph(
                f"region {self.region!r} changes buffers of its own and runs {self.functions[0]} under a checkpoint, "
                "which may change them once more in the backward; end the region inside of the checkpoint",
                region=self.region,
            )
        if draws and self.unseeded:
            raise UnsupportedGraph(
                f"region {self.region!r} draws random numbers and runs {self.unseeded[0]} under a checkpoint with "
                "preserve_rng_state=False, whose backward draws others; pass True",
                region=self.region,
            )


@contextmanager
def left_out(region: str) -> Iterator[Met]:
    """Within it, checkpoints call their function plainly. For the builder alone: process-wide.

    Yields:
        What was met so far.

    Raises:
        UnsupportedGraph: a reentrant checkpoint, with gradients. Its results want gradients even
            where nothing in it does, and its weights get none where no argument wants one.
    """
    met = Met(region)

    def plain(function: Callable[..., Any], preserve: bool, *_: Any, **__: Any) -> Iterator[None]:
        met.functions.append(_name(function))
        if not preserve:
            met.unseeded.append(_name(function))
        yield

    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
            if torch.is_grad_enabled():
                raise UnsupportedGraph(
                    f"region {region!r}: {_name(function)} runs under a reentrant checkpoint; pass "
                    "use_reentrant=False, or end the region inside of the checkpoint",
                    region=region,
                )
            return function(*args)

    saved = [getattr(torch_checkpoint, kind) for kind in _KINDS]
    try:
        for kind, stand_in in zip(_KINDS, (plain, Reentrant), strict=True):
            setattr(torch_checkpoint, kind, stand_in)
        yield met
    finally:
        for kind, own in zip(_KINDS, saved, strict=True):
            setattr(torch_checkpoint, kind, own)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)
