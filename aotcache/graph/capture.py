"""Capture: run a drafter on real tensors and write down the calls its regions receive."""

from __future__ import annotations

import fnmatch
import random
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from aotcache.errors import CaptureError, SpecError, UnsupportedGraph
from aotcache.graph.functions import recording_functions
from aotcache.graph.region import Call, Region
from aotcache.graph.structure import ATTACHED
from aotcache.graph.wrappers import named_modules


def find_regions(model: nn.Module, patterns: Sequence[str], options: Mapping[str, Any]) -> list[Region]:
    """The submodules whose names match one of the fnmatch patterns; "" is the whole model.

    A pattern names one level at a time: `layers.*` matches `layers.0` and not
    `layers.0.mlp`. Wrappers for data parallelism and checkpointing are looked through.

    Raises:
        SpecError: a pattern that matches nothing, or a container that is never called.
    """
    regions: dict[str, Region] = {}
    for pattern in patterns:
        found = False
        for name, module in named_modules(model):
            if (
                name.count(".") == pattern.count(".")
                and fnmatch.fnmatchcase(name, pattern)
                and (bool(name) == bool(pattern))
            ):
                found = True
                _require_forward(name, module)
                regions.setdefault(name, Region(name, module, options))
        if not found:
            names = sorted(
                {
                    n.rpartition(".")[0] + ".*" if n.rpartition(".")[2].isdigit() else n
                    for n, _ in named_modules(model)
                    if n.count(".") <= 1
                }
            )
            wrapped = (
                "; it is wrapped by torch.compile: take the module itself, its _orig_mod"
                if type(model).__name__ == "OptimizedModule"
                else ""
            )
            raise SpecError(
                f"region pattern {pattern!r} matches no submodule of {type(model).__qualname__}; "
                f"there are {', '.join(repr(n) for n in names[:20])}{wrapped}",
                pattern=pattern,
            )
    return list(regions.values())


def _require_forward(name: str, module: nn.Module) -> None:
    """A ModuleList is never called, so it cannot be a region."""
    if getattr(module.forward, "__func__", None) is nn.Module.forward:
        members = f"its members are {name + '.*'!r}" if name else "name some of its submodules"
        raise SpecError(
            f"region {name!r} is a {type(module).__qualname__} without a forward of its own, so nothing calls it; "
            f"{members}",
            region=name,
        )


class _Recorder:
    """Stands in a module's `__dict__` while its calls are recorded."""

    def __init__(self, region: Region, on_call: Callable[[Call], None]) -> None:
        self.region = region
        self.original = region.forward
        self.on_call = on_call

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self.region.describe(args, kwargs)
        drawn = _random_states()
        with recording_functions(None):
            result = self.original(*args, **kwargs)
        if _random_states() != drawn:
            raise UnsupportedGraph(
                f"region {self.region.name!r}: its forward draws random numbers from `random` or `numpy.random`; "
                "an artifact would repeat those of its build for ever. Draw them outside the region and pass "
                "them in",
                region=self.region.name,
            )
        after = self.region.describe(args, kwargs)
        changed = [str(d) for d in call.parts.diff(after.parts)]
        if not changed:
            # Another tensor of the same kind has the same key.
            changed = [
                f"{name} is another tensor"
                for name, tensor, now in zip(call.names, call.tensors, after.tensors, strict=True)
                if tensor is not now
            ]
        if changed:
            raise UnsupportedGraph(
                f"region {self.region.name!r}: its forward changes what it was given or what it is "
                f"({'; '.join(changed[:3])}); an artifact could not do that. Return the new value instead",
                region=self.region.name,
            )
        self.on_call(call)
        return result


def _random_states() -> tuple[Any, ...]:
    """Where the process's generators of Python and numpy stand; torch's are seen in the graph."""
    numpy = sys.modules.get("numpy")
    return (random.getstate(), repr(numpy.random.get_state()) if numpy is not None else None)


def _record_forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return self.__dict__[ATTACHED](args, kwargs)


@contextmanager
def recording(
    regions: Sequence[Region],
    on_call: Callable[[Call], None],
    functions: Mapping[str, Region] | None = None,
) -> Iterator[None]:
    """While open, `on_call` receives every call to a region, after it ran.

    So it does with this thread's calls of `functions`, unless they are made by a region.

    Raises (from the call itself):
        UnsupportedGraph: a forward that changes its arguments or its own attributes.
    """
    saved = [region.module.__dict__.get("forward") for region in regions]
    for region in regions:
        region.module.__dict__[ATTACHED] = _Recorder(region, on_call)
        region.module.__dict__["forward"] = types.MethodType(_record_forward, region.module)
    recorders = {name: _Recorder(region, on_call) for name, region in (functions or {}).items()}
    try:
        with recording_functions(recorders or None):
            yield
    finally:
        for region, forward in zip(regions, saved, strict=True):
            del region.module.__dict__[ATTACHED]
            if forward is None:
                del region.module.__dict__["forward"]
            else:
                region.module.__dict__["forward"] = forward


def materialise(model: nn.Module, device: torch.device) -> nn.Module:
    """Give real memory to parameters, buffers and tensor attributes that have none.

    A factory may build on the meta device or under its own FakeTensorMode. The key
    sees shapes alone, so any finite values serve for tracing and for the numerics
    check. Parameters that hold NaN are drawn anew as well: that is how packages mark weights which
    are loaded later. Tied tensors stay tied. Real tensors are moved to `device`.

    Raises:
        CaptureError: a parameter that is neither a plain tensor nor fake.
    """
    generator = torch.Generator(device="cpu").manual_seed(0)
    made: dict[int, torch.Tensor] = {}
    for label, module in model.named_modules():
        # Tensors held as plain attributes count as well: rotary tables often are.
        for table in (module._parameters, module._buffers, module.__dict__):
            for key, value in table.items():
                if not isinstance(value, torch.Tensor):
                    continue
                if id(value) not in made:
                    made[id(value)] = _real(f"{label}.{key}", value, device, generator)
                table[key] = made[id(value)]
    return model


def _real(name: str, value: torch.Tensor, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    parameter = isinstance(value, nn.Parameter)
    fake = value.is_meta or type(value).__name__ == "FakeTensor"
    if not fake:
        if type(value) not in (torch.Tensor, nn.Parameter):
            raise CaptureError(
                f"{name} is a {type(value).__qualname__}, expected a plain tensor; build the drafter without "
                "tensor subclasses (shard or quantise it after attach)",
                name=name,
            )
        if not (parameter and _has_nan(value)):
            if value.device.type == device.type:
                return value
            moved = value.detach().to(device)
            return nn.Parameter(moved, value.requires_grad) if parameter else moved
    size, stride = tuple(value.shape), tuple(value.stride())
    real = torch.empty_strided(size, stride, dtype=value.dtype, device=device)
    if value.dtype.is_floating_point or value.dtype.is_complex:
        centre = 1.0 if len(size) == 1 and parameter else 0.0
        noise = torch.randn(size, generator=generator) * 0.02 + centre
        real.copy_(noise if parameter else noise.abs() + 0.01)
    else:
        real.zero_()
    return nn.Parameter(real, value.requires_grad) if parameter else real


def _has_nan(value: torch.Tensor) -> bool:
    # Of other kinds, such as eight-bit ones, torch cannot tell everywhere.
    kinds = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    return value.dtype in kinds and bool(value.detach().isnan().any())
