"""Random numbers that two runs share and nobody else misses: drawn from a generator of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode  # private torch name, tried on 2.13.0

from aotcache.errors import RejectedArtifact
from aotcache.graph import draws

_NATIVE_DROPOUT = torch.ops.aten.native_dropout.default


class OwnNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, this thread's random operators draw from generators that begin at `seed`.

    torch's own generators are neither read nor moved: on a CPU all threads share one, and what
    others draw meanwhile must be no part of a comparison. The numbers are not those that torch's
    would give; two runs in two such modes draw the same ones.

    Args:
        seed: Where the generators begin.
        region: The region's name, for messages.

    Raises:
        RejectedArtifact: from an operator whose numbers cannot be taken from a generator, and from any once
            `close` was called.
    """

    def __init__(self, seed: int, region: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed, self._region = seed, region
        self._closed = False
        self._generators: dict[torch.device, torch.Generator] = {}

    def close(self) -> None:
        """No more numbers: what a backward draws again would be others than in the forward."""
        self._closed = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if not draws.is_random(func, args, given) or given.get("generator") is not None:
            return func(*args, **given)
        if self._closed:
            raise self._refused(
                f"{func} draws again in the backward, as under a checkpoint inside the region"
            )
        if func is _NATIVE_DROPOUT:
            return self._dropout(args[0], float(args[1]))
        drawing = _with_generator(func)
        if drawing is not None:
            return drawing(*args, **given, generator=self._generator(_device(args, given)))
        with self:
            found = func.decompose(*args, **given)
        if found is NotImplemented:
            raise self._refused(f"{func} takes its numbers from nothing but torch's own generator")
        return found

    def _generator(self, device: torch.device) -> torch.Generator:
        made = self._generators.get(device)
        if made is None:
            made = self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return made

    def _dropout(self, operand: torch.Tensor, p: float) -> tuple[torch.Tensor, torch.Tensor]:
        """What CUDA's dropout computes."""
        mask = torch.empty_like(operand, dtype=torch.bool)
        mask.bernoulli_(1 - p, generator=self._generator(operand.device))
        return operand * mask * (0.0 if p == 1.0 else 1 / (1 - p)), mask

    def _refused(self, why: str) -> RejectedArtifact:
        return RejectedArtifact(
            f"region {self._region!r} cannot be compared with eager on its first use: {why}. Attach without "
            'verify="first-use", and check the artifact ahead of a run with `aotcache verify --run`',
            region=self._region,
        )


def _with_generator(func: Any) -> Any:
    """The operator, or its overload, that takes a generator."""
    if any(argument.name == "generator" for argument in func._schema.arguments):
        return func
    packet, overload = func.overloadpacket, func._overloadname
    name = "generator" if overload == "default" else f"{overload}_generator"
    return getattr(packet, name) if name in packet.overloads() else None


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    operand = next((a for a in args if isinstance(a, torch.Tensor)), None)
    if operand is not None:
        return operand.device
    named = kwargs.get("device")
    return torch.device(named) if named is not None else torch.device("cpu")


__all__ = ["OwnNumbers"]
