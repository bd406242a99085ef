"""From a call to an executable: guards, records, and the slow path behind them.

A record is what one described call has in common with later ones: generated code
that takes a call apart, the guards that must hold, and the executable to run. A
call that matches a record costs a few microseconds; any other call is described
anew, looked up by key, and leaves a record behind. Guards only ever send a call to
the slow path: whether an artifact may run is decided by the key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from aotcache.errors import CallRefused, ManifestError
from aotcache.graph import ambient, tree
from aotcache.graph.region import Call
from aotcache.graph.strides import has_strides
from aotcache.runtime.memory import is_aligned, is_materialised, relayout

if TYPE_CHECKING:
    from aotcache.manifest import Manifest
    from aotcache.runtime.function import Executable

# private torch names, tried on 2.13.0
from torch._C._dynamo.guards import TensorGuards

_MAX_RECORDS = 64
"""A function has records for every layer kind, step and bucket that calls it. Passing one over costs
a few microseconds, describing a call anew some thousand."""


class _TensorCheck(Protocol):
    def __call__(self, *tensors: torch.Tensor) -> bool: ...


@dataclass(frozen=True, slots=True)
class Record:
    """One call layout with its guards and its executable.

    Attributes:
        region_holds: Whether code, structure and attributes of the region are unchanged.
        arguments_hold: The same for globals read by functions in the arguments.
        fetch: The current parameters and buffers, or None where tying changed.
        flatten: The call's own tensors, or None where the layout differs.
        tensors_hold: Types, dtypes, devices, shapes, strides, requires_grad, identity.
        grad: Gradient mode of the described call.
        ambient: Ambient state of the described call.
        device: Device type of its tensors.
        relayout: `(slot, strides)` of tensors to copy into the compiled layout.
        run: Runs the graphs on the slots' tensors in the compiled layout; also given as they came.
        build: Puts the result together from the output tensors.
    """

    region_holds: Callable[[], bool]
    arguments_hold: Callable[[], bool]
    fetch: Callable[[], list[torch.Tensor] | None]
    flatten: Callable[[tuple[Any, ...], dict[str, Any], list[Any]], list[Any] | None]
    tensors_hold: _TensorCheck
    grad: bool
    ambient: tuple[Any, ...]
    device: str
    relayout: tuple[tuple[int, tuple[int, ...]], ...]
    run: Callable[[list[torch.Tensor], list[torch.Tensor]], list[Any]]
    build: Callable[[Sequence[Any]], Any]

    def match(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
        """The tensors of the call by slot, or None where this record does not fit."""
        if (
            torch.is_grad_enabled() is not self.grad
            or not self.region_holds()
            or not self.arguments_hold()
            or ambient.read_tuple(self.device) != self.ambient
        ):
            return None
        tensors = self.fetch()
        if tensors is None:
            return None
        own = self.flatten(args, kwargs, tensors)
        if own is None:
            return None
        tensors += own
        return tensors if self.tensors_hold(*tensors) else None

    def execute(self, tensors: list[torch.Tensor]) -> Any:
        """Run on tensors that matched."""
        own = tensors
        if self.relayout:
            tensors = list(tensors)
            for slot, strides in self.relayout:
                tensors[slot] = relayout(tensors[slot], strides)
        if self.device == "cuda":
            tensors = [t if is_aligned(t) else t.clone() for t in tensors]
        return self.build(self.run(tensors, own))


def make_record(call: Call, executable: Executable) -> Record:
    """A record for calls like `call`, to be run by `executable`.

    Raises:
        ManifestError: the manifest describes another call than the one its key stands for.
        RejectedArtifact: its result is of a class that this process cannot import.
        CallRefused: the result would hold a view of a tensor that comes in another layout.
    """
    manifest = executable.manifest
    template = require_fits(call, manifest)
    changes = tuple(
        (i, tuple(slot.stride))
        for i, (tensor, slot) in enumerate(zip(call.tensors, manifest.called, strict=True))
        if not has_strides(tensor, tuple(slot.stride)) or not is_materialised(tensor)
    )
    _require_views(call, executable, dict(changes))
    device = call.tensors[0].device.type if call.tensors else "cpu"
    return Record(
        region_holds=call.static.still_true,
        arguments_hold=call.flattener.walker.checks.compile(),
        fetch=_make_fetch(call),
        flatten=call.flattener.compile(),
        tensors_hold=_tensor_check(call.tensors),
        grad=torch.is_grad_enabled(),
        ambient=ambient.read_tuple(device),
        device=device,
        relayout=changes,
        run=executable.train if call.mode == "train" else executable.infer,
        build=_builder(template),
    )


def require_fits(call: Call, manifest: Manifest) -> tree.Template:
    """The template of an artifact's result, if its slots are the call's.

    Beyond this a tensor that is another than the graph's slot would be read as if it were that one.

    Raises:
        ManifestError, RejectedArtifact: see `make_record`.
    """
    template = tree.from_json(manifest.output_tree)
    wanted = [(name, *_metadata(tensor)) for name, tensor in zip(call.names, call.tensors, strict=True)]
    slots = [(slot.name, slot.dtype, tuple(slot.shape)) for slot in manifest.called]
    if slots != wanted:
        differing = [(w, s) for w, s in zip(wanted, slots, strict=False) if w != s]
        expected, found = differing[0] if differing else (f"{len(wanted)} inputs", f"{len(slots)}")
        raise _no_fit(manifest, f"its inputs are not those of the call: expected {expected}, found {found}")
    if not tree.positions(template) <= {*range(manifest.results)}:
        raise _no_fit(manifest, f"its result names a tensor beyond the {manifest.results} that there are")
    return template


def _require_views(call: Call, executable: Executable, changes: dict[int, tuple[int, ...]]) -> None:
    """A view of the copy that the graph was fed with would not be one of the caller's tensor."""
    for slot in executable.around.views() if executable.around is not None else ():
        if slot in changes:
            name, found = call.names[slot], tuple(call.tensors[slot].stride())
            raise CallRefused(
                f"region {call.region.name!r} returns a view of {name}, which the artifact expects with strides "
                f"{changes[slot]}, found {found}; pass it in that layout, or return a copy (`.clone()`)",
                region=call.region.name,
                input=name,
                expected=changes[slot],
                found=found,
            )


def _metadata(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def _no_fit(manifest: Manifest, why: str) -> ManifestError:
    return ManifestError(
        f"the manifest of key {manifest.key} does not fit its key: {why}; delete the entry and warm it again",
        key=manifest.key,
    )


def _builder(template: tree.Template) -> Callable[[Sequence[Any]], Any]:
    match template:
        case tree.TensorAt(index):
            return lambda tensors: tensors[index]
        case tree.Items(kind, items) if kind is tuple and items == tuple(
            tree.TensorAt(i) for i in range(len(items))
        ):
            return tuple
    return template.build


def _make_fetch(call: Call) -> Callable[[], list[torch.Tensor] | None]:
    """Generated code that reads every parameter, buffer and lifted attribute.

    Reading anew at every call is what makes optimizers, `load_state_dict`, FSDP and
    replaced Parameters work; tied tensors must still be one and the same.
    """
    env: dict[str, Any] = {}
    known: dict[int, str] = {}

    def name(holder: dict[str, Any]) -> str:
        if id(holder) not in known:
            known[id(holder)] = f"d{len(env)}"
            env[known[id(holder)]] = holder
        return known[id(holder)]

    lines: list[str] = []
    reads: dict[int, str] = {}
    for holder, slot in zip(call.static.holders, call.holder_slots, strict=True):
        read = f"{name(holder.holder)}[{holder.name!r}]"
        if slot in reads:
            lines.append(f"if {read} is not {reads[slot]}: return None")
        else:
            reads[slot] = read
    body = "\n      ".join([*lines, f"return [{', '.join(reads[s] for s in sorted(reads))}]"])
    source = (
        f"def make({', '.join(env)}):\n"
        "  def fetch():\n"
        "    try:\n"
        f"      {body}\n"
        "    except KeyError:\n"
        "      return None\n"
        "  return fetch\n"
    )
    scope: dict[str, Any] = {}
    exec(source, scope)
    made: Callable[[], list[torch.Tensor] | None] = scope["make"](*env.values())
    return made


def _tensor_check(tensors: Sequence[torch.Tensor]) -> _TensorCheck:
    # Strides of size-1 dimensions mean nothing; None is the wildcard.
    if not tensors:
        return lambda *_: True
    sizes: Any = [list(t.shape) for t in tensors]
    strides: Any = [
        [None if size == 1 else stride for size, stride in zip(t.shape, t.stride(), strict=True)]
        for t in tensors
    ]
    guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    check: _TensorCheck = guards.check
    return check


class Records:
    """The records of one region on one module, most recently used first.

    Threads may share a module: the tuple is replaced whole, never changed.
    """

    __slots__ = ("_records",)

    def __init__(self) -> None:
        self._records: tuple[Record, ...] = ()

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Record, list[torch.Tensor]] | None:
        """The record that fits the call, with the call's tensors by slot."""
        for i, record in enumerate(self._records):
            tensors = record.match(args, kwargs)
            if tensors is not None:
                if i > 1:
                    records = self._records
                    self._records = (record, *(r for r in records if r is not record))
                return record, tensors
        return None

    def add(self, record: Record) -> None:
        """Put a record in front; the least recently used one may go."""
        self._records = (record, *self._records)[:_MAX_RECORDS]
