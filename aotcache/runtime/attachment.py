"""One attached module: how its calls are run, and the bound method that stands in its `forward`'s place.

`forward` is replaced on the instance by a bound method, so that `__call__`, hooks,
DDP, FSDP2 and checkpoint wrappers see what they always see, and so that a deep copy
of an attached model is attached to its own weights. Pickling drops the attachment.
"""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from aotcache.errors import ArtifactMiss, CallRefused, Unfingerprintable, UnsupportedGraph
from aotcache.graph import ambient
from aotcache.graph.region import Call, Region
from aotcache.graph.structure import ATTACHED
from aotcache.runtime import first_use
from aotcache.runtime.dense import eager_without_tracing
from aotcache.runtime.dispatch import Records, make_record
from aotcache.runtime.resolve import Resolved, explain
from aotcache.types import Miss

if TYPE_CHECKING:
    from aotcache.runtime.attach import Handle

logger = logging.getLogger(__name__)

_GRAD_MODE = frozenset(
    {"grad_fn", "is_grad_enabled", "is_inference", "is_inference_mode_enabled", "is_leaf", "requires_grad"}
)
"""Code that asks this may compute something else where gradients are made."""

_CALL = nn.Module._call_impl.__code__  # private torch name, tried on 2.13.0
"""What calls a module's `forward` when the module is called."""


class Attachment:
    """What an attached module carries in its `__dict__`: how its calls are run."""

    def __init__(self, name: str, module: nn.Module, original: Callable[..., Any], handle: Handle) -> None:
        self.name = name
        self.module = module
        self.handle = handle
        self.region = Region(name, module, handle.options, original)
        self.records = Records()
        handle.remember(self)

    @property
    def original(self) -> Callable[..., Any]:
        """What the module ran before, or runs now that its class was patched."""
        return self.region.current_forward()

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call."""
        if ambient.foreign_mode() is None:
            found = self.records.find(args, kwargs)
            if found is not None:
                record, tensors = found
                self.handle.counters.hit(self.name)
                return record.execute(tensors)
        return self._describe_and_run(args, kwargs)

    def _describe_and_run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.handle.recorder is not None:
            self.handle.recorder.region(self.region, args, kwargs)
            return self._eager(args, kwargs)
        mode = ambient.foreign_mode()
        if mode is not None:
            refusal = CallRefused(
                f"region {self.name!r} is called under {mode}, which wants to see every operator; "
                "an artifact has none to show. Leave it, or call the region outside of it",
                region=self.name,
            )
            return self._missed(args, kwargs, str(refusal), refusal)
        try:
            call = self.region.describe(args, kwargs)
        except (CallRefused, Unfingerprintable, UnsupportedGraph) as refusal:
            return self._missed(args, kwargs, str(refusal), refusal)
        # Of now: a refresh that meanwhile takes back what is resolved here puts others in their place.
        records = self.records
        answer = self.handle.resolver.resolve(call)
        if isinstance(answer, Miss):
            answer = self._in_training(call, args, kwargs) or answer
        if isinstance(answer, Miss):
            if self.handle.requests is not None:
                self.handle.requests.want(call)
            if self.handle.runs_eagerly:
                return self._missed(args, kwargs, answer.reason, None)
            self.handle.counters.miss(self.name)
            raise ArtifactMiss(
                explain(call, answer.reason, self.handle.resolver.store, self.handle.way_out()),
                key=call.parts.key,
                region=self.name,
            )
        try:
            record = make_record(call, answer.executable)
        except CallRefused as refusal:
            return self._missed(args, kwargs, str(refusal), refusal)
        if self.handle.verifies and first_use.check(
            call, record, answer.executable, self.original, args, kwargs
        ):
            self.handle.counters.verified()
        records.add(record)
        self.handle.counters.served(self.name, answer.executable.manifest.runner)
        self.handle.counters.hit(self.name)
        return record.execute(call.tensors)

    def _in_training(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Resolved | None:
        """The artifact of the same call with gradients, whose forward alone serves one without.

        Checkpointing of the reentrant kind makes such calls: in training, but under no_grad.
        """
        if call.mode == "train" or not call.reads.names.isdisjoint(_GRAD_MODE):
            return None
        with torch.enable_grad():
            other = self.region.describe(args, kwargs)
        answer = self.handle.resolver.resolve(other) if other.mode == "train" else None
        return answer if isinstance(answer, Resolved) else None

    def _missed(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str, error: Exception | None
    ) -> Any:
        self.handle.counters.miss(self.name)
        if not self.handle.runs_eagerly:
            assert error is not None
            raise error
        if self.handle.first_time(self.name, reason):
            logger.warning("region %r runs eagerly: %s", self.name, reason)
        return self._eager(args, kwargs)

    def _eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.handle.counters.eager(self.name)
        with eager_without_tracing():
            return self.original(*args, **kwargs)

    def rebound(self, module: nn.Module) -> Attachment:
        """The same attachment for a copy of the module."""
        original = self.original
        if isinstance(original, types.MethodType) and original.__self__ is self.module:
            original = types.MethodType(original.__func__, module)
        return Attachment(self.name, module, original, self.handle)

    def __deepcopy__(self, memo: dict[int, Any]) -> Attachment:
        module = memo.get(id(self.module))
        return self if module is None else self.rebound(module)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_nothing, ())


def _nothing() -> None:
    """What an attachment becomes in a pickle."""


def _references(holder: dict[str, Any]) -> int:
    attachment = holder.get(ATTACHED)
    return sys.getrefcount(attachment)


_ALONE = _references({ATTACHED: object()})
"""References to an attachment, as `forward` counts them, that one module's dictionary alone holds.

Counting them costs a tenth of asking who called, which is done where there are more."""


def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """The bound method that stands in an attached module's place of `forward`."""
    attachment: Attachment | None = self.__dict__.get(ATTACHED)
    if sys.getrefcount(attachment) > _ALONE:
        caller = sys._getframe(1)
        if caller.f_code is _CALL:
            called = caller.f_locals["self"]
            if called is not self and called.__dict__.get(ATTACHED) is attachment:
                # A copy of the dictionary (copy.copy, replicas of DataParallel) brought this method along,
                # bound to the module that was copied, whose weights are others.
                self = called
                self.__dict__["forward"] = types.MethodType(forward, self)
    if attachment is None:
        # Detached since the caller took hold of this method.
        return type(self).forward(self, *args, **kwargs)
    if attachment.module is not self:
        attachment = self.__dict__[ATTACHED] = attachment.rebound(self)
    return attachment.call(args, kwargs)


__all__ = ["Attachment", "forward"]
