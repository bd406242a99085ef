"""Random numbers for the float64 reference: those of the working precision, widened.

A generator gives other numbers in float64 than in float32. While the reference runs,
each operator that draws does so in the dtype in which the artifact's numbers are drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode  # private torch name, tried on 2.13.0

from aotcache.errors import CertificateFailed
from aotcache.graph import draws
from aotcache.manifest import InputSlot


@contextmanager
def working_precision(slots: Sequence[InputSlot], region: str) -> Iterator[None]:
    """Within it, the draws of this thread are made in the dtypes of `slots`, in order.

    Args:
        slots: What the artifact draws.
        region: The region's name, for messages.

    Raises:
        CertificateFailed: more or fewer draws are made than there are slots.
    """
    mode = _WorkingPrecision(slots, region)
    with mode:
        yield
    if mode.made != mode.wanted:
        raise mode.other_count()


class _WorkingPrecision(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees operators below autograd, where dropout is a mask that is drawn and a product."""

    def __init__(self, slots: Sequence[InputSlot], region: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._slots = [slot for slot in slots if draws.asks_generator(slot)]
        self._region = region
        self.made = 0
        self.wanted = len(self._slots)

    def other_count(self) -> CertificateFailed:
        return CertificateFailed(
            f"region {self._region!r}: float64 eager draws random numbers {self.made} times, the artifact "
            f"{self.wanted} times; the region must draw alike in every precision",
            region=self._region,
            what="random numbers",
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if not draws.is_random(func, args, given):
            return func(*args, **given)
        self.made += 1
        if self.made > self.wanted:
            raise self.other_count()
        return _draw(func, args, given, getattr(torch, self._slots[self.made - 1].dtype))


def _draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Any:
    operand = next((a for a in args if isinstance(a, torch.Tensor)), None)
    wide = kwargs.get("dtype") or (torch.get_default_dtype() if operand is None else operand.dtype)
    if not wide.is_floating_point or wide == dtype:
        return func(*args, **kwargs)
    if func is torch.ops.aten.native_dropout.default:
        assert operand is not None
        _, mask = func(operand.to(dtype), *args[1:], **kwargs)
        p = float(args[1])
        return operand * mask * (0.0 if p == 1.0 else 1 / (1 - p)), mask
    if operand is not None:
        low = torch.empty_strided(operand.shape, operand.stride(), dtype=dtype, device=operand.device)
        args = tuple(low if a is operand else a for a in args)
    if operand is None or kwargs.get("dtype") is not None:
        kwargs = {**kwargs, "dtype": dtype}
    made = func(*args, **kwargs)
    return operand.copy_(made) if operand is not None and made is args[0] else made.to(wide)
