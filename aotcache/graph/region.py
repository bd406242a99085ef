"""A region: one submodule, its fingerprint, and its calls described.

`describe` is the one way to a key. The builder's capture and the worker's
dispatcher both call it, so they cannot disagree about what a call is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from aotcache.errors import ArgumentsRefused, CallRefused, CaptureError
from aotcache.graph import ambient, tree
from aotcache.graph.findings import NOTHING, Items, Reads
from aotcache.graph.fingerprint import Walker
from aotcache.graph.layout import EXACT, Flattener
from aotcache.graph.strides import contiguous_strides, describe_tensor
from aotcache.graph.structure import (
    Holder,
    SlotKind,
    Static,
    files_of,
    fingerprint_module,
    original_forward,
)
from aotcache.key import FORMAT, Component, KeyParts
from aotcache.types import Mode


@dataclass(slots=True)
class Call:
    """One call of a region, described.

    Attributes:
        region: The region.
        mode: `train` where a gradient is wanted, else `infer`.
        tensors: Each distinct tensor once: parameters, buffers, lifted attributes, arguments.
        kinds, names: Of each slot.
        static: The region's fingerprint at the time of the call.
        arguments: Template of the call's arguments, by parameter name.
        parts: The key's components.
        flattener: Makes the function that takes later calls of this layout apart.
        holder_slots: The slot of each of the static holders; tied tensors share one.
        training: Training flags of the region's modules, in the order of `modules()`.
        reads: What the region and the functions among the arguments read.
        grad: Whether gradients were enabled; they may be where none is wanted.
    """

    region: Region
    mode: Mode
    tensors: list[torch.Tensor]
    kinds: list[SlotKind]
    names: list[str]
    static: Static
    arguments: tree.Template
    parts: KeyParts
    flattener: Flattener
    holder_slots: list[int]
    training: tuple[bool, ...]
    reads: Reads
    grad: bool

    @property
    def device(self) -> str:
        """Type of the device that all its tensors are on."""
        return self.tensors[0].device.type if self.tensors else "cpu"

    def requires_grad(self) -> list[bool]:
        """Per slot, whether a gradient is wanted, or code looks whether one could be."""
        seen = self.mode == "train" or _reads_requires_grad(self.reads)
        return [seen and t.requires_grad for t in self.tensors]

    def describe(self, tensor: torch.Tensor, strides: tuple[int, ...] | None = None) -> str:
        """A tensor of the call as the key sees it, with its own strides unless others are given."""
        return _describe_tensor(self.reads, self.mode, tensor, strides)


class Region:
    """One submodule of a drafter.

    Args:
        name: Its name in the drafter.
        module: The module.
        options: Compile options of the spec, for the key.
        forward: What calls run, where it is not the module's own current forward. One that
            comes from the class is looked up anew when the class is patched.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        options: Mapping[str, Any],
        forward: Callable[..., Any] | None = None,
    ) -> None:
        self.name = name
        self.module = module
        forward = forward or original_forward(module)
        self._own_forward = None if _is_of_class(forward, module) else forward
        self.forward = forward
        self.signature = inspect.signature(forward)
        self._compile = Component("compile", tuple((k, repr(options[k])) for k in sorted(options)))
        self._statics: dict[Reads | None, Static] = {}

    def current_forward(self) -> Callable[..., Any]:
        """What a call would run without aotcache."""
        return self._own_forward or _of_class(self.module)

    def static(self, reads: Reads | None = None) -> Static:
        """The fingerprint, made anew when anything it was made from has changed.

        Args:
            reads: What functions among the arguments read, where that takes in something of the
                region that its own code leaves out.

        Raises:
            Unfingerprintable: something that shapes the graph has no stable value.
            UnsupportedGraph: a hook inside the region.
        """
        known = self._statics.get(reads)
        if known is None or not known.still_true() or not known.holds_tensors():
            self.forward = self.current_forward()
            self.signature = inspect.signature(self.forward)
            known = fingerprint_module(self.name, self.module, self.forward, reads or NOTHING)
            self._statics = {**self._statics, reads: known}
        return known

    def describe(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Describe a call: its tensors by slot, and its key.

        Raises:
            ArgumentsRefused: the arguments do not fit forward's signature; a TypeError, as eager raises.
            CallRefused: an argument that no artifact can take.
            Unfingerprintable: see `static`.
        """
        static = self.static()
        walker = Walker(self.name, {}, static.reads)
        while True:
            # Functions among the arguments may read what was passed over before.
            call = self._describe(static, walker, args, kwargs)
            reads = walker.reads()
            if static.passed_over(reads):
                static = self.static(reads)
            elif not walker.passed_over(reads):
                return call
            walker = Walker(self.name, {}, static.reads | reads)

    def _describe(
        self, static: Static, walker: Walker, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Call:
        slots: dict[int, int] = {}
        tensors: list[torch.Tensor] = []
        holder_slots: list[int] = []
        kinds: list[SlotKind] = []
        names: list[str] = []
        structure: Items = list(static.structure)
        for holder in static.holders:
            value = holder.holder[holder.name]
            _require_plain(self.name, holder, value)
            slot = slots.get(id(value))
            if slot is None:
                slot = slots[id(value)] = len(tensors)
                tensors.append(value)
                kinds.append(holder.kind)
                names.append(holder.qualname)
            holder_slots.append(slot)
            structure.append((holder.qualname, f"{holder.kind} slot {slot}"))
        flattener = Flattener(self.name, walker, slots)
        arguments = self._arguments(flattener, args, kwargs)
        walker.read_environment()
        tensors += flattener.tensors
        kinds += ["lifted" if inside else "input" for inside in flattener.lifted]
        names += flattener.names
        grad = torch.is_grad_enabled()
        mode: Mode = "train" if grad and any(t.requires_grad for t in tensors) else "infer"
        reads = walker.reads()
        metadata = [(f"slot {i} {names[i]}", _describe_tensor(reads, mode, t)) for i, t in enumerate(tensors)]
        own = len(tensors) - len(flattener.tensors)
        device = _device_type(self.name, names, tensors)
        ambient_items = ambient.read(device).items()
        if "is_grad_enabled" in reads.names:
            ambient_items.append(("grad_enabled", str(grad)))
        if "is_inference_mode_enabled" in reads.names:
            ambient_items.append(("inference_mode", str(torch.is_inference_mode_enabled())))
        parts = KeyParts(
            (
                Component("format", (("version", str(FORMAT)),)),
                static.code,
                Component("structure", tuple(structure + metadata[:own])),
                Component(
                    "call",
                    (
                        ("device", device),
                        ("mode", mode),
                        *flattener.items,
                        *metadata[own:],
                        *walker.items,
                        *files_of(walker),
                    ),
                ),
                Component("ambient", tuple(ambient_items)),
                self._compile,
            )
        )
        training = tuple(m.training for m in self.module.modules())
        return Call(
            self, mode, tensors, kinds, names, static, arguments, parts, flattener, holder_slots, training,
            reads, grad,
        )  # fmt: skip

    def _arguments(
        self, flattener: Flattener, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tree.Template:
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            found = ", ".join([*("a positional argument" for _ in args), *(f"{name}=..." for name in kwargs)])
            raise ArgumentsRefused(
                f"region {self.name!r}: {error}; expected {self.signature}, found ({found})",
                region=self.name,
            ) from error
        given = set(bound.arguments)
        bound.apply_defaults()
        flattener.lines.append(
            f"if len(args) != {len(args)} or kwargs.keys() != {flattener._env(frozenset(kwargs))}: return None"
        )
        keys: list[str] = []
        items: list[tree.Template] = []
        position = 0
        for name, parameter in self.signature.parameters.items():
            value = bound.arguments[name]
            keys.append(name)
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                parts = []
                for i, item in enumerate(value):
                    parts.append(flattener.visit(f"{name}[{i}]", item, f"args[{position + i}]"))
                flattener.items.append((name, f"*{len(value)}"))
                items.append(tree.Items(tuple, tuple(parts)))
                position = len(args)
            elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
                flattener.items.append((name, f"**{list(value)}"))
                flattener.require_order(tuple(value))
                items.append(
                    tree.Entries(
                        tuple(value),
                        tuple(flattener.visit(f"{name}.{k}", v, f"kwargs[{k!r}]") for k, v in value.items()),
                    )
                )
            else:
                expr: str | None = None
                if name in given:
                    if position < len(args) and parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
                        expr, position = f"args[{position}]", position + 1
                    else:
                        expr = f"kwargs[{name!r}]"
                items.append(flattener.visit(name, value, expr))
        return tree.Entries(tuple(keys), tuple(items))

    def require_unchanged(self, call: Call) -> None:
        """Check that `run` would run what the call was: the drafter may have run on since.

        Raises:
            CaptureError: code, structure or attributes of the region are others now.
        """
        with _swapped(call, call.tensors):
            now = fingerprint_module(self.name, self.module, self.forward, call.static.reads)
        was = KeyParts((call.static.code, Component("structure", call.static.structure)))
        changed = was.diff(KeyParts((now.code, Component("structure", now.structure))))
        if changed:
            raise CaptureError(
                f"region {self.name!r} changed between its call and the build: "
                f"{'; '.join(str(d) for d in changed[:3])}; a drafter whose calls change its own attributes "
                "cannot be built: pass what changes as an argument",
                region=self.name,
                differences=[str(d) for d in changed],
            )

    def run_flat(self, call: Call, tensors: Sequence[Any]) -> tuple[list[torch.Tensor], tree.Template]:
        """As `run`, the result taken apart: its tensors, each once, and the template around them."""
        flat: list[torch.Tensor] = []
        template = tree.flatten_output(self.run(call, tensors), flat, self.name)
        return flat, template

    def run(self, call: Call, tensors: Sequence[Any]) -> Any:
        """Run the original forward of a described call on other tensors, slot by slot.

        The tensors take the places of the parameters, of the lifted attributes and of
        everything found in the arguments, and training flags are as they were in the call.
        Single-threaded: the module is changed meanwhile.
        """
        arguments = call.arguments.build(tensors)
        bound = inspect.BoundArguments(self.signature, dict(arguments))
        # Inference is run without gradients, which code that asks for them would notice.
        asks = call.grad and call.mode == "infer" and "is_grad_enabled" in call.reads.names
        with _swapped(call, tensors), torch.enable_grad() if asks else nullcontext():
            return self.forward(*bound.args, **bound.kwargs)


def _reads_requires_grad(reads: Reads) -> bool:
    return "requires_grad" in reads.names


def _describe_tensor(
    reads: Reads, mode: Mode, tensor: torch.Tensor, strides: tuple[int, ...] | None = None
) -> str:
    # Code may ask a weight under no_grad whether it is trained, too.
    return describe_tensor(tensor, "train" if _reads_requires_grad(reads) else mode, strides)


def _of_class(module: nn.Module) -> Callable[..., Any]:
    """The forward that the module's class gives it now."""
    found = inspect.getattr_static(type(module), "forward").__get__(module, type(module))
    forward: Callable[..., Any] = found
    return forward


def _is_of_class(forward: Callable[..., Any], module: nn.Module) -> bool:
    # Bound methods are equal where function and object are the same.
    return forward == _of_class(module)


def _require_plain(region: str, holder: Holder, value: Any) -> None:
    if type(value) not in EXACT or value.layout is not torch.strided or value.is_meta:
        raise CallRefused(
            f"region {region!r}: {holder.kind} {holder.qualname} is a {type(value).__module__}."
            f"{type(value).__qualname__}"
            + (f" of layout {value.layout} on {value.device}" if isinstance(value, torch.Tensor) else "")
            + ", expected a plain strided torch.Tensor with memory of its own",
            region=region,
            input=holder.qualname,
        )


@contextmanager
def _swapped(call: Call, tensors: Sequence[Any]) -> Iterator[None]:
    saved = [h.holder[h.name] for h in call.static.holders]
    modules = list(call.region.module.modules())
    flags = [m.training for m in modules]
    try:
        for module, flag in zip(modules, call.training, strict=True):
            module.training = flag
        for holder, slot in zip(call.static.holders, call.holder_slots, strict=True):
            holder.holder[holder.name] = tensors[slot]
        yield
    finally:
        for holder, value in zip(call.static.holders, saved, strict=True):
            holder.holder[holder.name] = value
        for module, flag in zip(modules, flags, strict=True):
            module.training = flag


def contiguous_parts(call: Call) -> KeyParts:
    """The key of the same call with every argument tensor contiguous."""
    texts = {}
    for i, tensor in enumerate(call.tensors):
        if call.kinds[i] in ("input", "lifted"):
            name = f"slot {i} {call.names[i]}"
            texts[name] = call.describe(tensor, contiguous_strides(tuple(tensor.shape)))
    components = []
    for part in call.parts.components:
        if part.name == "call":
            part = Component("call", tuple((n, texts.get(n, v)) for n, v in part.items))
        components.append(part)
    return KeyParts(tuple(components))


def _device_type(name: str, names: list[str], tensors: list[torch.Tensor]) -> str:
    devices = {t.device: i for i, t in reversed(list(enumerate(tensors)))}
    if len(devices) > 1:
        # A 0-d CPU tensor beside CUDA ones is what eager takes too, but not an artifact.
        where = ", ".join(f"{names[i]} on {device}" for device, i in devices.items())
        raise CallRefused(
            f"region {name!r}: expected all tensors on one device, found {where}; move them to one device",
            region=name,
        )
    return next(iter(devices)).type if devices else "cpu"
