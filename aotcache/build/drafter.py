"""The drafter of a spec, built and run for capture."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from aotcache.buckets import Buckets
from aotcache.build.replay import Replay
from aotcache.compile.graphs import error_line
from aotcache.errors import AotcacheError, CaptureError, CertificateFailed
from aotcache.graph.capture import find_regions, materialise, recording
from aotcache.graph.functions import function_regions
from aotcache.graph.redirect import redirect_flex
from aotcache.graph.region import Call
from aotcache.runtime.dense import dense_attention
from aotcache.spec import CALL, Spec
from aotcache.types import CacheKey, Mode

_Batch = tuple[Sequence[Any], dict[str, Any]]
"""Positional and keyword arguments of a drafter's forward."""

_LOSS_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}
"""How far the loss of a padded batch may be from that of the same batch unpadded, relative."""


class Drafter:
    """A drafter built by its spec's factory, on this host's device."""

    def __init__(self, spec: Spec, device: str) -> None:
        self.spec = spec
        self.device = torch.device(device)
        folder = spec.calls_folder
        self._recorded = None if folder is None else Replay(spec, folder)
        self._make_batch = spec.resolve_batch() if folder is None else None
        self.context = spec.resolve_context()
        factory = spec.resolve_factory()
        model = self._call("factory", lambda: factory(**spec.drafter.kwargs))
        if not isinstance(model, torch.nn.Module):
            raise CaptureError(
                f"{spec.path}: factory returned a {type(model).__qualname__}, expected a torch.nn.Module"
            )
        self.model = materialise(model, self.device).to(getattr(torch, spec.drafter.dtype))
        self.regions = find_regions(self.model, spec.drafter.regions, spec.compile_options())
        self.functions = function_regions(spec.compile_options())

    def capture(self, bucket: Mapping[str, int], mode: Mode) -> list[list[Call]]:
        """The calls of every region in one bucket: of two full batches, and of a shorter one padded.

        Of recorded calls a bucket is one, made again in the mode of the run and no other.

        Returns:
            One list of calls for each batch.

        Raises:
            CaptureError: the drafter fails, a region is never called, or two batches of
                one bucket lead to different layouts.
            CertificateFailed: padding a shorter batch changes the loss.
        """
        if self._recorded is not None:
            return self._replay(self._recorded, bucket, mode)
        first = self._run(self._batch(bucket), mode)
        second = self._run(self._batch(bucket), mode)
        batches = [first, second]
        self._require_same_layouts(bucket, first, second)
        short = self._shorter(bucket)
        if short is not None:
            third = self._padded(bucket, short, mode)
            self._require_same_layouts(bucket, first, third)
            batches.append(third)
        called = {call.region.name for call in first}
        silent = [r.name for r in self.regions if r.name not in called]
        if silent:
            raise CaptureError(
                f"{self.spec.path}: region {silent[0]!r} was never called in mode {mode}, bucket {dict(bucket)}; "
                "leave it out of regions, or let batch() reach it",
                regions=silent,
            )
        return batches

    def _replay(self, recorded: Replay, bucket: Mapping[str, int], mode: Mode) -> list[list[Call]]:
        call = recorded.call(bucket)
        if call.mode != mode:
            return []
        batches: list[list[Call]] = []
        for given in recorded.examples(call, self.model, self.device):
            made: list[Call] = []
            with recording(self.regions, made.append, self.functions), given.state(self.model):
                with redirect_flex(dense_attention), self.context():
                    self._call(
                        f"drafter, given recorded call {bucket[CALL]},",
                        functools.partial(self.model, *given.args, **given.kwargs),
                    )
            batches.append(made)
            self._require_same_layouts(bucket, batches[0], made)
        recorded.require_made(call, batches[0])
        return batches

    def _batch(self, bucket: Mapping[str, int]) -> _Batch:
        assert self._make_batch is not None
        make = self._make_batch
        batch = self._call("batch", lambda: make(dict(bucket), self.device))
        if not (isinstance(batch, tuple) and len(batch) == 2 and isinstance(batch[1], dict)):
            raise CaptureError(
                f"{self.spec.path}: batch returned {type(batch).__name__}, expected (args, kwargs)"
            )
        return tuple(batch[0]), batch[1]

    def _run(self, batch: _Batch, mode: Mode) -> list[Call]:
        calls: list[Call] = []
        with recording(self.regions, calls.append, self.functions):
            self._forward(batch, mode)
        return calls

    def _forward(
        self,
        batch: _Batch,
        mode: Mode,
        *,
        training: bool | None = None,
        seeded: bool = False,
        what: str = "drafter",
    ) -> Any:
        if seeded:
            # What is drawn among real positions, such as anchors, is then the same with and without padding.
            # And what the drafter keeps, such as running statistics, is what it was.
            with torch.random.fork_rng(devices=[]), _kept(self.model):
                torch.manual_seed(0)
                return self._forward(batch, mode, training=training, what=what)
        args, kwargs = batch
        self.model.train(mode == "train" if training is None else training)
        with torch.set_grad_enabled(mode == "train"), redirect_flex(dense_attention), self.context():
            return self._call(what, lambda: self.model(*args, **kwargs))

    def _call(self, what: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except AotcacheError:
            raise
        except Exception as error:
            place = error_line(error)
            raise CaptureError(
                f"{self.spec.path}: the {what} failed{f' at {place}' if place else ''}: "
                f"{type(error).__name__}: {error}",
                what=what,
            ) from error

    def _require_same_layouts(self, bucket: Mapping[str, int], first: list[Call], other: list[Call]) -> None:
        known: dict[CacheKey, Call] = {call.parts.key: call for call in first}
        for call in other:
            if call.parts.key in known:
                continue
            alike = [c for c in first if c.region.name == call.region.name and c.mode == call.mode]
            differences = (
                [str(d) for d in alike[0].parts.diff(call.parts)] if alike else ["no such call before"]
            )
            raise CaptureError(
                f"{self.spec.path}: two batches of bucket {dict(bucket)} call region {call.region.name!r} in "
                f"different ways: {'; '.join(differences[:3])}. Every such value would be a miss in training: "
                "make it a tensor, derive it from the bucket, or name its axis in [axes]",
                region=call.region.name,
                differences=differences,
            )

    def _shorter(self, bucket: Mapping[str, int]) -> dict[str, int] | None:
        """Sizes of a batch that has to be padded to fill `bucket`, or None where none exists."""
        padded = {dim for rule in self.spec.axes for _, dim in rule.axes}
        short = dict(bucket)
        for dim in padded:
            ladder = self.spec.buckets[dim]
            below = max((rung for rung in ladder if rung < bucket[dim]), default=0)
            short[dim] = max(below + 1, bucket[dim] - max(1, bucket[dim] // 4))
        return short if short != dict(bucket) else None

    def _padded(self, bucket: Mapping[str, int], short: dict[str, int], mode: Mode) -> list[Call]:
        args, kwargs = self._batch(short)
        batch = (args, kwargs)
        padded = (args, Buckets.from_spec(self.spec).pad(kwargs, sizes=short).batch)
        plain = self._forward(batch, mode, seeded=True)
        wrong = next((f"{i} {float(x)}" for i, x in enumerate(_scalars(plain)) if not x.isfinite()), None)
        if wrong is not None:
            raise CertificateFailed(
                f"{self.spec.path}: a batch of {short}, not padded yet, makes scalar result {wrong}, so whether "
                "padding is harmless cannot be checked; look for it in what batch() returns and in what the factory "
                "leaves unset, or let the drafter return 0 where there is nothing to count",
                short=short,
            )
        calls: list[Call] = []
        with recording(self.regions, calls.append, self.functions):
            what = f"drafter, given a batch of {short} that [axes] pads to {dict(bucket)},"
            result = self._forward(padded, mode, seeded=True, what=what)
        changed = _changed(plain, result)
        if changed is not None and _changed(plain, self._forward(batch, mode)) is not None:
            changed = self._changed_without_dropout(batch, padded, mode)
        if changed is not None:
            raise CertificateFailed(
                f"{self.spec.path}: padding a batch of {short} to {dict(bucket)} changes {changed}; padded "
                "positions must not count: mask them in the loss, and name every input that has the axis in [axes]",
                short=short,
            )
        return calls

    def _changed_without_dropout(self, batch: _Batch, padded: _Batch, mode: Mode) -> str | None:
        """What padding changes in a drafter no two runs of which are alike: compared in eval mode."""
        plain, result = (self._forward(b, mode, training=False, seeded=True) for b in (batch, padded))
        changed = _changed(plain, result)
        differs = changed and _changed(plain, self._forward(batch, mode, training=False))
        if differs:
            raise CertificateFailed(
                f"{self.spec.path}: one batch, run twice in eval mode, changes {differs}: the drafter draws random "
                "numbers, other ones for a padded batch, so whether padding is harmless cannot be checked; draw them "
                "in batch(), only in training mode, or one for each position that counts",
            )
        return changed


@contextmanager
def _kept(model: torch.nn.Module) -> Iterator[None]:
    """Gives a model's buffers back the values that they have now."""
    saved = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in saved:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


def _changed(before: Any, after: Any) -> str | None:
    """The first loss in which two results differ, in words, or None where they agree."""
    for i, (want, got) in enumerate(zip(_scalars(before), _scalars(after), strict=True)):
        bound = _LOSS_TOLERANCE.get(want.dtype, 1e-4) * max(1.0, abs(float(want)))
        if not abs(float(want) - float(got)) <= bound:
            return f"scalar result {i} from {float(want):.6g} to {float(got):.6g}"
    return None


def _scalars(value: Any) -> list[torch.Tensor]:
    """Every floating-point scalar in a drafter's result: its losses."""
    return list(_walk(value))


def _walk(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.dim() == 0 and value.is_floating_point():
            yield value.detach()
    elif isinstance(value, dict):
        for item in value.values():
            yield from _walk(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _walk(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _walk(getattr(value, field.name))
