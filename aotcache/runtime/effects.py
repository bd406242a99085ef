"""What a worker does around the forward graph of an artifact, where eager does more than compute.

Before it: numbers that eager would draw are drawn, from the calling thread's generator.
After it: new values are written into the tensors that the region keeps, and results
that lie in another tensor's memory are made again there.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from aotcache.errors import CallRefused, ManifestError
from aotcache.graph import draws
from aotcache.manifest import Alias, InputSlot, Manifest, OutputSlot

_CPU = torch.device("cpu")


class Around:
    """The effects that one manifest describes. Thread-safe.

    Raises:
        ManifestError: it names slots or operators that there are not.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.region = manifest.region
        self.names = [slot.name for slot in manifest.called]
        self._draws = manifest.inputs[len(self.names) :]
        self._mutations = manifest.mutations
        self._aliases = sorted(manifest.aliases, key=lambda alias: alias.position)
        self._kept = len(manifest.outputs) - len(manifest.mutations)
        self._require_slots(manifest)

    @classmethod
    def of(cls, manifest: Manifest) -> Around | None:
        """The effects of a manifest, or None where its graphs are all there is."""
        if manifest.mutations or manifest.aliases or len(manifest.called) < len(manifest.inputs):
            return cls(manifest)
        return None

    def _require_slots(self, manifest: Manifest) -> None:
        inputs, kept, results = len(self.names), self._kept, manifest.results
        positions = [alias.position for alias in self._aliases]
        fits = (
            all(slot.kind == "random" and draws.is_known(slot) for slot in self._draws)
            and all(0 <= m.input < inputs and m.output == kept + i for i, m in enumerate(self._mutations))
            and all(_alike(manifest.inputs[m.input], manifest.outputs[m.output]) for m in self._mutations)
            and len(set(positions)) == len(positions)
            and all(0 <= position < results for position in positions)
            and all(0 <= a.index < (inputs if a.of == "input" else kept) for a in self._aliases)
        )
        if not fits:
            raise ManifestError(
                f"the manifest of key {manifest.key} describes draws, new values or aliases of slots that it does "
                "not have, or by operators that are not known here; upgrade aotcache, or delete the entry and warm "
                "it again",
                key=manifest.key,
            )

    def before(self, fed: list[torch.Tensor], own: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What the forward graph is to be run on.

        Args:
            fed: A tensor for each slot of the call, in the compiled layout.
            own: The very tensors of the call.

        Raises:
            CallRefused: a tensor that is written afterwards shares its memory with another of the
                call, whose value eager would take in turns.
        """
        if self._mutations:
            self._require_apart(own)
        if not self._draws:
            return fed
        device = fed[0].device if fed else _CPU
        return [*fed, *(draws.draw(slot, device) for slot in self._draws)]

    def _require_apart(self, own: Sequence[torch.Tensor]) -> None:
        written = {own[m.input].untyped_storage().data_ptr(): m.input for m in self._mutations}
        for slot, tensor in enumerate(own):
            other = written.get(tensor.untyped_storage().data_ptr(), slot)
            if other != slot and tensor.numel() and own[other].numel():
                raise CallRefused(
                    f"region {self.region!r}: {self.names[other]}, which it changes in place, shares its memory with "
                    f"{self.names[slot]}; expected memory of its own: pass a copy",
                    region=self.region,
                    input=self.names[slot],
                )

    def write(self, own: Sequence[torch.Tensor], found: Sequence[Any], *, late: bool) -> None:
        """Write the new values that eager writes after all that it saves for a backward, or the others."""
        with torch.no_grad():
            for mutation in self._mutations:
                if mutation.late is late:
                    own[mutation.input].copy_(found[mutation.output])

    def after(self, own: Sequence[torch.Tensor], found: list[Any], *, trained: bool) -> list[Any]:
        """The tensors of the region's result, given the outputs of the forward graph.

        Args:
            own: The very tensors of the call.
            found: What the forward graph returned.
            trained: Whether new values that are not late have been written.
        """
        if self._mutations:
            if not trained:
                self.write(own, found, late=False)
            self.write(own, found, late=True)
        results = found[: self._kept]
        for alias in self._aliases:
            results.insert(alias.position, _made(alias, own, found))
        return results

    @property
    def writes_early(self) -> bool:
        """Whether new values are to be written before anything is saved for a backward."""
        return any(not mutation.late for mutation in self._mutations)

    def views(self) -> list[int]:
        """Slots of which the result holds views: a caller's tensor in another layout cannot have them."""
        return [a.index for a in self._aliases if a.of == "input" and a.view is not None]


def _alike(slot: InputSlot, new: OutputSlot) -> bool:
    return (slot.dtype, slot.shape) == (new.dtype, new.shape)


def _made(alias: Alias, own: Sequence[torch.Tensor], found: Sequence[Any]) -> Any:
    base = own[alias.index] if alias.of == "input" else found[alias.index]
    view = alias.view
    if view is None:
        return base
    if alias.flow == "detached":
        base = base.detach()
    with nullcontext() if alias.flow == "recorded" else torch.no_grad():
        return base.as_strided(view.shape, view.stride, base.storage_offset() + view.offset)
