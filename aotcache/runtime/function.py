"""A pair of graphs as one differentiable call."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from aotcache.errors import CallRefused
from aotcache.manifest import Manifest, OutputSlot
from aotcache.runtime.runner import Runner


class Executable:
    """An opened artifact: what a call that passed its guards runs.

    Thread-safe.

    Args:
        manifest: Its manifest.
        forward, backward: Its graphs; no backward for `infer`.
    """

    def __init__(self, manifest: Manifest, forward: Runner, backward: Runner | None) -> None:
        self.manifest = manifest
        self._forward = forward
        self._outputs = len(manifest.outputs)
        slots = range(len(manifest.inputs))
        wanted = [slot.requires_grad for slot in manifest.inputs]
        self._differentiable = [i for i in slots if wanted[i]]
        self._others = [i for i in slots if not wanted[i]]
        self._plain_outputs = [i for i, slot in enumerate(manifest.outputs) if not slot.differentiable]
        if backward is not None:
            self._function = _make_function(self, manifest, forward, backward)

    def infer(self, tensors: list[torch.Tensor]) -> list[Any]:
        """The outputs, without a backward.

        Args:
            tensors: One per input slot, as the manifest describes them.
        """
        with torch.no_grad():
            return self._forward.run(tensors)[: self._outputs]

    def train(self, tensors: list[torch.Tensor]) -> list[Any]:
        """The outputs, with gradients for every input slot that wants one.

        Args:
            tensors: One per input slot, as the manifest describes them.
        """
        others = tuple(tensors[i] for i in self._others)
        found = self._function.apply(others, *(tensors[i] for i in self._differentiable))
        return list(found) if isinstance(found, tuple) else [found]


def _make_function(executable: Executable, manifest: Manifest, forward: Runner, backward: Runner) -> Any:
    pair = manifest.pair
    assert pair is not None
    outputs = manifest.outputs
    count = len(outputs)
    differentiable, others = executable._differentiable, executable._others
    # Where each input slot is found again: position among the differentiable ones, or the others.
    places = {slot: (True, i) for i, slot in enumerate(differentiable)}
    places |= {slot: (False, i) for i, slot in enumerate(others)}
    saved_inputs = [places[slot] for slot in pair.saved_inputs]
    positions = {slot: i for i, slot in enumerate(differentiable)}
    targets = [positions.get(slot) for slot in pair.gradients]
    plain_outputs = executable._plain_outputs
    saved_outputs = pair.saved_outputs

    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rest: tuple[torch.Tensor, ...], *inputs: torch.Tensor) -> Any:
            slots: list[Any] = [None] * (len(inputs) + len(rest))
            for i, slot in enumerate(differentiable):
                slots[slot] = inputs[i]
            for i, slot in enumerate(others):
                slots[slot] = rest[i]
            found = forward.run(slots)
            results, intermediates = found[:count], found[count:]
            ctx.save_for_backward(
                *(inputs[i] if own else rest[i] for own, i in saved_inputs),
                *(results[i] for i in saved_outputs),
                *intermediates,
            )
            if plain_outputs:
                ctx.mark_non_differentiable(*(results[i] for i in plain_outputs))
            return tuple(results)

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            saved = ctx.saved_tensors
            tangents = [conform(gradients[i], outputs[i], i) for i in pair.tangents]
            found = backward.run([*saved, *tangents])
            result: list[torch.Tensor | None] = [None] * len(differentiable)
            for place, gradient in zip(targets, found, strict=True):
                if place is not None and ctx.needs_input_grad[place + 1]:
                    result[place] = gradient
            return (None, *result)

    return Pair


def conform(gradient: torch.Tensor, slot: OutputSlot, index: int) -> torch.Tensor:
    """An incoming gradient in the layout that the backward graph was compiled for.

    Raises:
        CallRefused: another shape or dtype, or not a plain tensor.
    """
    found = str(gradient.dtype).removeprefix("torch.")
    if tuple(gradient.shape) != tuple(slot.shape) or found != slot.dtype:
        raise CallRefused(
            f"the incoming gradient of output {index} is {found} {tuple(gradient.shape)}, expected "
            f"{slot.dtype} {tuple(slot.shape)}",
            output=index, expected=(slot.dtype, tuple(slot.shape)), found=(found, tuple(gradient.shape)),
        )
    if type(gradient) is not torch.Tensor or gradient.layout is not torch.strided:
        raise CallRefused(
            f"the incoming gradient of output {index} is a {type(gradient).__qualname__} of layout "
            f"{gradient.layout}, expected a plain strided tensor",
            output=index,
        )
    strides = gradient.stride()
    if strides == slot.stride and not gradient.is_neg() and not gradient.is_conj() and _aligned(gradient):
        return gradient
    return torch.empty_strided(slot.shape, slot.stride, dtype=gradient.dtype, device=gradient.device).copy_(
        gradient
    )


def _aligned(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cuda" or tensor.data_ptr() % 16 == 0
