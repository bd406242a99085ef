"""A pair of graphs as one differentiable call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Protocol

import torch

from aotcache.errors import CallRefused, ManifestError
from aotcache.manifest import Manifest, OutputSlot
from aotcache.runtime.effects import Around
from aotcache.runtime.memory import is_aligned, is_materialised, relayout


# private torch names, tried on 2.13.0
def _apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without its Python part, which serves functorch alone and costs as
    much as the rest; the dispatcher sends no call here under a functorch transform."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def _saved_tensor_hooks() -> bool:
    """Whether what is saved now comes back from a hook (offloading, checkpointing)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor is one of its own, and does not stand for several at once (vmap)."""
    return bool(torch._C._has_storage(tensor))


# end of private torch names


class Runs(Protocol):
    """A graph, however it is run: see `runner.Library.run`."""

    @property
    def run(self) -> Callable[[list[Any]], list[Any]]: ...


class Executable:
    """An opened artifact: what a call that passed its guards runs.

    Thread-safe.

    Args:
        manifest: Its manifest.
        forward, backward: Its graphs; no backward for `infer`.

    Raises:
        ManifestError: the manifest names slots that it does not have.
    """

    def __init__(self, manifest: Manifest, forward: Runs, backward: Runs | None) -> None:
        self.manifest = manifest
        self._forward = forward
        self._outputs = len(manifest.outputs)
        self.around = Around.of(manifest)
        self.compared: set[str] = set()
        """Modes in which a first call was compared with eager in this process, see `first_use.py`."""
        self.comparing = threading.RLock()
        slots = differentiable, others = _by_gradient(manifest)
        self._pick_differentiable, self._pick_others = _picker(differentiable), _picker(others)
        if backward is not None:
            _require_slots(manifest)
            self._apply = _apply_of(_make_function(manifest, forward, backward, slots, self.around))

    def infer(self, tensors: list[torch.Tensor], own: Sequence[torch.Tensor] | None = None) -> list[Any]:
        """The tensors of the result, without a backward.

        Args:
            tensors: One per input slot that is not drawn, as the manifest describes them.
            own: The very tensors of the call, where some were copied into another layout:
                what the region changes in place, and what its result lies in.
        """
        around = self.around
        if around is None:
            return self._forward.run(tensors)[: self._outputs]
        own = tensors if own is None else own
        found = self._forward.run(around.before(tensors, own))[: self._outputs]
        return around.after(own, found, trained=False)

    def train(self, tensors: list[torch.Tensor], own: Sequence[torch.Tensor] | None = None) -> list[Any]:
        """The tensors of the result, with gradients for every input slot that wants one.

        Args:
            tensors, own: As for `infer`.
        """
        around = self.around
        if around is None:
            return list(self._apply(self._pick_others(tensors), *self._pick_differentiable(tensors)))
        own = tensors if own is None else own
        fed = around.before(tensors, own)
        rest = self._pick_others(fed)
        if around.writes_early:
            rest = (*rest, own)
        found = list(self._apply(rest, *self._pick_differentiable(fed)))
        return around.after(own, found, trained=True)


def _require_slots(manifest: Manifest) -> None:
    pair = manifest.pair
    if (
        pair is None
        or not {*pair.saved_inputs, *pair.gradients} <= {*range(len(manifest.inputs))}
        or not {*pair.saved_outputs, *pair.tangents} <= {*range(len(manifest.outputs))}
        or len(pair.paths) not in (0, len(pair.gradients))
    ):
        raise ManifestError(
            f"the manifest of key {manifest.key} has {len(manifest.inputs)} inputs and {len(manifest.outputs)} "
            f"outputs, but its pair is {pair}; delete the entry and warm it again",
            key=manifest.key,
        )


def _by_gradient(manifest: Manifest) -> tuple[list[int], list[int]]:
    """The input slots that autograd is to know of, and the others.

    What wants a gradient and never gets one, such as a weight that this call does not use, is
    no part of eager's graph either: its hooks must not fire, and DDP must see it as unused.
    """
    reached = frozenset(manifest.pair.gradients) if manifest.pair is not None else frozenset[int]()
    wanting = [i for i, slot in enumerate(manifest.inputs) if slot.requires_grad]
    differentiable = [i for i in wanting if i in reached] or wanting
    return differentiable, sorted({*range(len(manifest.inputs))} - {*differentiable})


def _picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that takes the items at `positions`, in C."""
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda items: tuple(items[i] for i in positions)


def _make_function(
    manifest: Manifest,
    forward: Runs,
    backward: Runs,
    slots: tuple[list[int], list[int]],
    around: Around | None,
) -> type[torch.autograd.Function]:
    """The autograd function of one pair, whose input slots are told apart by `_by_gradient`.

    Its first argument is a tuple of the tensors that get no gradient, which autograd then
    need not look at; the others follow. Where new values are written early, the very tensors
    of the call are the last item of that tuple. Inside, a call is one list: differentiable slots,
    other slots, outputs, intermediates.
    """
    pair = manifest.pair
    assert pair is not None
    outputs = manifest.outputs
    count = len(outputs)
    differentiable, others = slots
    place = {slot: i for i, slot in enumerate([*differentiable, *others])}
    total = len(place)
    to_slots = _picker([place[slot] for slot in range(total)])
    to_save = _picker(
        [
            *(place[slot] for slot in pair.saved_inputs),
            *(total + i for i in pair.saved_outputs),
            *(total + count + i for i in range(pair.intermediates)),
        ]
    )
    plain = [i for i, slot in enumerate(outputs) if not slot.differentiable]
    targets = [place[slot] for slot in pair.gradients]
    tangents = [(i, outputs[i]) for i in pair.tangents]
    paths = list(zip(targets, map(frozenset, pair.paths), strict=False))
    wanted = len(differentiable)
    early = around if around is not None and around.writes_early else None

    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rest: tuple[Any, ...], *inputs: torch.Tensor) -> Any:
            own: Sequence[torch.Tensor] = ()
            if early is not None:
                *rest, own = rest  # type: ignore[assignment]
            tensors: list[Any] = [*inputs, *rest]
            found = forward.run(list(to_slots(tensors)))
            if early is not None:
                # Packing what is saved may end a checkpoint's recomputation.
                early.write(own, found, late=False)
            tensors += found
            saved = to_save(tensors)
            ctx.save_for_backward(*saved)
            # A hook may give back the same values in memory laid out in another way.
            ctx.layouts = [_layout(t) for t in saved] if _saved_tensor_hooks() else None
            # What nothing came in for is told apart from zeros.
            ctx.set_materialize_grads(False)
            if plain:
                ctx.mark_non_differentiable(*(found[i] for i in plain))
            return tuple(found[:count])

        @staticmethod
        def backward(ctx: Any, *incoming: torch.Tensor | None) -> Any:
            if torch.is_grad_enabled():
                raise CallRefused(
                    f"region {manifest.region!r}: a graph of its gradients is asked for (create_graph=True), but an "
                    "artifact has no second derivative; leave the region out of the spec, or run it eagerly with "
                    "detach()",
                    region=manifest.region,
                )
            missing = {i for i, _ in tangents if incoming[i] is None}
            if len(missing) == len(tangents):
                return (None,) * (1 + wanted)
            tensors: list[torch.Tensor] = [*ctx.saved_tensors]
            if ctx.layouts is not None:
                tensors = [_as_saved(t, *layout) for t, layout in zip(tensors, ctx.layouts, strict=True)]
            tensors += (
                _with_zeros(incoming, tangents)
                if missing
                else [conform(incoming[i], slot, i) for i, slot in tangents]  # type: ignore[arg-type]
            )
            found = backward.run(tensors)
            result: list[torch.Tensor | None] = [None] * (1 + wanted)
            for position, gradient in zip(targets, found, strict=True):
                if ctx.needs_input_grad[1 + position]:
                    result[1 + position] = gradient
            if missing:
                for position, path in paths:
                    if path and path <= missing:
                        result[1 + position] = None
            return tuple(result)

    return Pair


def _layout(tensor: torch.Tensor | None) -> tuple[Any, ...]:
    return () if tensor is None else (tensor.dtype, tensor.device, tensor.shape, tensor.stride())


def _as_saved(tensor: Any, *layout: Any) -> Any:
    """A tensor that a hook gave back, in the memory layout it was saved with."""
    if not layout or _layout(tensor) == layout:
        return tensor
    dtype, device, shape, stride = layout
    if (tensor.dtype, tensor.device, tensor.shape) != (dtype, device, shape):
        raise CallRefused(
            f"a saved-tensor hook gave back {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, expected "
            f"{dtype} {tuple(shape)} on {device}; its unpack must undo what its pack did",
            expected=(str(dtype), tuple(shape)),
            found=(str(tensor.dtype), tuple(tensor.shape)),
        )
    return relayout(tensor, stride)


def _with_zeros(
    incoming: Sequence[torch.Tensor | None], tangents: Sequence[tuple[int, OutputSlot]]
) -> list[torch.Tensor]:
    """The incoming gradients, at least one of which came in; zeros for the others."""
    device = next(gradient.device for i, _ in tangents if (gradient := incoming[i]) is not None)
    found = []
    for i, slot in tangents:
        gradient = incoming[i]
        if gradient is None:
            dtype = getattr(torch, slot.dtype)
            gradient = torch.empty_strided(slot.shape, slot.stride, dtype=dtype, device=device).zero_()
        found.append(conform(gradient, slot, i))
    return found


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
            output=index,
            expected=(slot.dtype, tuple(slot.shape)),
            found=(found, tuple(gradient.shape)),
        )
    if type(gradient) not in (torch.Tensor, torch.nn.Parameter) or gradient.layout is not torch.strided:
        raise CallRefused(
            f"the incoming gradient of output {index} is a {type(gradient).__qualname__} of layout "
            f"{gradient.layout}, expected a plain strided tensor",
            output=index,
        )
    if not _has_memory(gradient):
        raise CallRefused(
            f"the incoming gradient of output {index} stands for several at once (vmap, is_grads_batched); an "
            "artifact runs one backward at a time: ask for the gradients one by one",
            output=index,
        )
    readable = gradient.stride() == slot.stride and is_materialised(gradient) and is_aligned(gradient)
    return gradient if readable else relayout(gradient, slot.stride)
