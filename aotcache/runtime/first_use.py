"""`attach(verify="first-use")`: the first call of each artifact is compared with eager.

Before the call itself runs, the region's own code is run eagerly (attention as dense
operations, nothing traced) on the values of the call, and the artifact on the same. Outputs, new values
of buffers and, where the call wants gradients, the gradient of each of its tensors for random
incoming gradients are compared. A disagreement is an error before the caller sees a result.

Neither run leaves a trace: both work on tensors of their own (weights are shared, not copied),
draw from a generator of their own (`own_numbers.py`), and touch no `.grad` and no buffer of the model. The module
itself is not changed either, since other threads may be running it: while eager runs, operators of
this thread are handed the stand-ins in the place of the call's tensors.

How far the two may be apart: both round, and there is no float64 reference here as the builder
has it. So an output may differ by twice what is noise in the lowest precision that takes part, a
gradient by ten times as much, though not by a tenth of its largest entry; or by four times the largest error that
the artifact's certificate recorded, where that is more; never by half of the largest entry. Integers that
floating-point numbers decide may differ in as large a share of their entries as noise is of a number.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from aotcache.errors import AotcacheError, DisagreesWithEager, RejectedArtifact
from aotcache.graph import tree
from aotcache.graph.region import Call
from aotcache.manifest import Manifest
from aotcache.runtime.dense import eager_without_tracing
from aotcache.runtime.dispatch import Record
from aotcache.runtime.function import Executable
from aotcache.runtime.memory import relayout
from aotcache.runtime.own_numbers import OwnNumbers
from aotcache.runtime.tolerance import GRADIENT_FACTOR, NOISE, SMALL

logger = logging.getLogger(__name__)

_BOTH = 2.0
"""Artifact and eager are both that far from the truth."""
_MEASURED_FACTOR = 4.0
"""Of the certificate's errors: it measured both against float64, on other values than these."""
_MOST_NOISE = 0.1
"""In half precision, ten times noise would let a wrong gradient pass."""
_MOST = 0.5
"""A share of the largest entry that no rounding explains."""
_SEED = 20_011


@dataclass(frozen=True, slots=True)
class _Results:
    """What one run gave: tensors of the result, gradient of each slot, value afterwards of each that may change."""

    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    updates: dict[int, torch.Tensor]


def check(
    call: Call,
    record: Record,
    executable: Executable,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> bool:
    """Compare an artifact with eager, unless that was done in this process for this mode.

    Threads that want the same artifact wait for the one that compares.

    Args:
        call: The call that is to be run.
        record: How it would be run.
        executable: The artifact.
        original: The region's own forward.
        args, kwargs: Of the call.

    Returns:
        Whether this call compared them.

    Raises:
        DisagreesWithEager: names what differs, by how much, and the bound.
        RejectedArtifact: they cannot be compared, and why.
    """
    if call.mode in executable.compared:
        return False
    with executable.comparing:
        if call.mode in executable.compared:
            return False
        started = time.perf_counter()
        _compare(call, record, executable.manifest, original, args, kwargs)
        executable.compared.add(call.mode)
    logger.info(
        "region %r: archive %s agrees with eager on its first %s call, compared in %.3f s",
        call.region.name,
        executable.manifest.digest,
        call.mode,
        time.perf_counter() - started,
    )
    return True


def _compare(
    call: Call,
    record: Record,
    manifest: Manifest,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    flat = replace(record, build=list)
    # A checkpoint or an offloader around the region must not see what these runs save.
    with torch.autograd.graph.saved_tensors_hooks(_itself, _itself):
        tangents: list[torch.Tensor | None] = []
        try:
            eager = _run(
                call,
                manifest,
                lambda leaves: _eager(call, manifest, original, args, kwargs, leaves),
                tangents,
            )
        except AotcacheError:
            raise
        except Exception as error:
            raise RejectedArtifact(
                f"region {call.region.name!r} cannot be compared with eager on its first use: eager raises "
                f'{type(error).__name__}: {error}. Attach without verify="first-use", and check the artifact ahead '
                "of a run with `aotcache verify --run`",
                region=call.region.name,
            ) from error
        ours = _run(call, manifest, flat.execute, tangents)
    _Comparison(call, manifest, eager, ours).require_agreement()


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _run(
    call: Call,
    manifest: Manifest,
    run: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
    tangents: list[torch.Tensor | None],
) -> _Results:
    """One run on stand-ins for the call's tensors, with its backward where the call has one.

    Args:
        call, manifest: What is compared.
        run: The results, given the stand-ins.
        tangents: Incoming gradients; made from the first run's outputs, where there are none yet.
    """
    leaves = _stand_ins(call, manifest)
    numbers = OwnNumbers(_SEED, call.region.name)
    with numbers:
        outputs = list(run(leaves))
        numbers.close()
        if not tangents:
            tangents += _tangents(outputs, call.mode == "train")
        gradients = _gradients(call, leaves, outputs, tangents) if call.mode == "train" else []
    return _Results(
        [out.detach() for out in outputs],
        gradients,
        {slot: leaves[slot].detach() for slot in _kept(call, manifest)},
    )


def _stand_ins(call: Call, manifest: Manifest) -> list[torch.Tensor]:
    """Tensors with the call's values: of their own where a region may write, else in the same memory."""
    kept = _kept(call, manifest)
    made = []
    for slot, tensor in enumerate(call.tensors):
        stand_in = tensor.detach()
        if slot in kept and not _overlaps(tensor):
            stand_in = relayout(stand_in, tensor.stride())
        wanted = tensor.requires_grad and not torch.is_inference_mode_enabled()
        made.append(stand_in.requires_grad_(wanted))
    return made


def _kept(call: Call, manifest: Manifest) -> set[int]:
    """Slots that may hold another value after the call: what the artifact says it writes, and every buffer.

    Of what it does not say it writes, eager's new value would be missed in silence.
    """
    buffers = {slot for slot, kind in enumerate(call.kinds) if kind == "buffer"}
    return buffers | {mutation.input for mutation in manifest.mutations}


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether several of its entries are one number in memory, as after `expand`; nothing writes into those."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _eager(
    call: Call,
    manifest: Manifest,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    leaves: list[torch.Tensor],
) -> list[torch.Tensor]:
    """The region's own result on the stand-ins, taken apart; new values of what it rebinds are put into `leaves`."""
    instead = {id(tensor): leaf for tensor, leaf in zip(call.tensors, leaves, strict=True)}
    with _bindings_kept(call, leaves), eager_without_tracing(), _Instead(instead):
        result = original(*args, **kwargs)
    found: list[torch.Tensor] = []
    template = tree.to_json(tree.flatten_output(result, found, call.region.name))
    if template != manifest.output_tree:
        raise _disagrees(call, manifest, f"eager returns {template}, the artifact {manifest.output_tree}")
    return [instead.get(id(tensor), tensor) for tensor in found]


@contextmanager
def _bindings_kept(call: Call, leaves: list[torch.Tensor]) -> Iterator[None]:
    """Undo what a region's code binds to the names of its tensors, as in `self.count = self.count + 1`."""
    try:
        yield
    finally:
        for holder, slot in zip(call.static.holders, call.holder_slots, strict=True):
            bound = holder.holder.get(holder.name)
            if bound is not call.tensors[slot]:
                if isinstance(bound, torch.Tensor):
                    leaves[slot] = bound
                holder.holder[holder.name] = call.tensors[slot]


class _Instead(TorchFunctionMode):
    """Hands this thread's operators other tensors than they were given.

    Args:
        instead: What to hand them, by the id of what they were given.
    """

    def __init__(self, instead: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self._instead = instead

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*self._put(args), **self._put(kwargs or {}))

    def _put(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._instead.get(id(value), value)
        if type(value) in (tuple, list):
            return type(value)(map(self._put, value))
        if type(value) is dict:
            return {name: self._put(item) for name, item in value.items()}
        return value


def _tangents(outputs: Sequence[torch.Tensor], training: bool) -> list[torch.Tensor | None]:
    """Random incoming gradients for what has a gradient."""
    generator = torch.Generator("cpu").manual_seed(_SEED)
    return [
        torch.randn(out.shape, generator=generator, device="cpu").to(out)
        if training and out.requires_grad
        else None
        for out in outputs
    ]


def _gradients(
    call: Call,
    leaves: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    tangents: Sequence[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """The gradient of each slot; None where none arrives."""
    pairs = [
        (out, tangent)
        for out, tangent in zip(outputs, tangents, strict=True)
        if tangent is not None and out.requires_grad
    ]
    wanted = [slot for slot, leaf in enumerate(leaves) if leaf.requires_grad]
    gradients: list[torch.Tensor | None] = [None] * len(leaves)
    if not pairs or not wanted:
        return gradients
    # Where no operator of torch's Python interface was given a tensor, as by a custom autograd function,
    # it was the call's own that was used.
    asked = [*(leaves[slot] for slot in wanted), *(call.tensors[slot] for slot in wanted)]
    with torch.autocast(call.device, enabled=False):
        found = torch.autograd.grad(
            [out for out, _ in pairs], asked, [tangent for _, tangent in pairs], allow_unused=True
        )
    for slot, *parts in zip(wanted, found, found[len(wanted) :], strict=False):
        there = [part for part in parts if part is not None]
        gradients[slot] = sum(there[1:], there[0]) if there else None
    return gradients


class _Comparison:
    """What eager gave, and what the artifact gave."""

    def __init__(self, call: Call, manifest: Manifest, eager: _Results, ours: _Results) -> None:
        self._call, self._manifest = call, manifest
        self._eager, self._ours = eager, ours
        self._noise = _noise(call, eager.outputs)
        worst = manifest.certificate.worst
        self._measured = max((max(m.artifact, m.eager) for m in worst), default=0.0)

    def require_agreement(self) -> None:
        """Raise DisagreesWithEager for the first thing that differs."""
        if len(self._eager.outputs) != len(self._ours.outputs):
            raise _disagrees(
                self._call,
                self._manifest,
                f"eager returns {len(self._eager.outputs)} tensors, the artifact {len(self._ours.outputs)}",
            )
        for i, (want, got) in enumerate(zip(self._eager.outputs, self._ours.outputs, strict=True)):
            self._same(f"output {i}", want, got)
        for slot, got in self._ours.updates.items():
            self._same(f"the new value of {self._call.names[slot]}", self._eager.updates[slot], got)
        largest = max((_largest(g) for g in self._eager.gradients if g is not None), default=0.0)
        pairs = zip(self._eager.gradients, self._ours.gradients, strict=True)
        for slot, (want_g, got_g) in enumerate(pairs):
            self._same_gradient(f"the gradient of {self._call.names[slot]}", want_g, got_g, largest)

    def _same_gradient(
        self, what: str, want: torch.Tensor | None, got: torch.Tensor | None, largest: float
    ) -> None:
        if want is not None and got is not None:
            self._same(what, want, got, factor=GRADIENT_FACTOR, floor=SMALL * largest)
            return
        there = got if want is None else want
        if there is not None and bool(there.any()):  # none, and one of zeros, are the same step
            raise _disagrees(
                self._call,
                self._manifest,
                f"{what} is {'absent' if got is None else 'there'} in the artifact and "
                f"{'absent' if want is None else 'there'} in eager",
            )

    def _same(
        self, what: str, want: torch.Tensor, got: torch.Tensor, *, factor: float = 1.0, floor: float = 0.0
    ) -> None:
        if (want.shape, want.dtype) != (got.shape, got.dtype):
            raise _disagrees(
                self._call,
                self._manifest,
                f"{what} is {got.dtype} {tuple(got.shape)} in the artifact, in eager {want.dtype} "
                f"{tuple(want.shape)}",
            )
        if not want.is_floating_point():
            error = float((want != got).sum()) / max(want.numel(), 1)
            bound = _BOTH * self._noise
        else:
            error = _error(want, got, floor)
            bound = min(_MOST_NOISE, _BOTH * self._noise * factor)
            bound = min(_MOST, max(bound, _MEASURED_FACTOR * self._measured))
        if not error <= bound:
            where = "of its largest entry" if want.is_floating_point() else "of its entries"
            raise _disagrees(
                self._call,
                self._manifest,
                f"{what} differs by {error:.2e} {where}, the bound is {bound:.2e}",
                what=what,
                error=error,
                bound=bound,
            )


def _noise(call: Call, outputs: Sequence[torch.Tensor]) -> float:
    """What is noise in the lowest precision that takes part; 0 where there are no floating-point numbers."""
    dtypes = {tensor.dtype for tensor in (*call.tensors, *outputs) if tensor.is_floating_point()}
    if dtypes and torch.is_autocast_enabled(call.device):
        dtypes.add(torch.get_autocast_dtype(call.device))
    return max((NOISE.get(dtype, NOISE[torch.float32]) for dtype in dtypes), default=0.0)


def _largest(tensor: torch.Tensor) -> float:
    finite = tensor[torch.isfinite(tensor)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _error(want: torch.Tensor, got: torch.Tensor, floor: float) -> float:
    """The largest difference over the largest entry; infinite where only one of the two is finite."""
    finite = torch.isfinite(want)
    others = want[~finite], got[~finite]
    if not torch.equal(torch.isfinite(got), finite) or not torch.allclose(*others, equal_nan=True):
        return float("inf")
    if want.dtype != torch.float64:
        want, got = want.float(), got.float()
    want, got = want[finite], got[finite]
    if not want.numel():
        return 0.0
    return float((got - want).abs().max()) / max(float(want.abs().max()), floor, 1e-30)


def _disagrees(call: Call, manifest: Manifest, how: str, **details: Any) -> DisagreesWithEager:
    name, short = call.region.name, manifest.digest[:12]
    return DisagreesWithEager(
        f"region {name!r}: archive {manifest.digest} (key {manifest.key}) disagrees with eager on its first "
        f"{call.mode} call: {how}. Its result is not used. `aotcache verify --run` compares it with float64; "
        f"`aotcache recall {short} --reason ...` keeps it from being opened, `aotcache warm --force` builds it anew",
        region=name,
        key=manifest.key,
        digest=manifest.digest,
        mode=call.mode,
        **details,
    )


__all__ = ["check"]
