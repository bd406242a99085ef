"""A callback by which transformers' `Trainer` trains from artifacts."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import nn
from transformers import TrainerCallback
from transformers.modeling_layers import GradientCheckpointingLayer

from aotcache.graph.structure import ATTACHED
from aotcache.runtime.attach import Handle, attach
from aotcache.spec import Spec, load_spec

_OF_THE_LOSS = "num_items_in_batch"
"""What `Trainer` tells the loss, by way of every layer."""


_STEPS = 16
"""Ranks that agree wait for each other."""


class AotcacheCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Attaches the model when training begins, opens what its lock file names, and detaches at the end.

    Prints one line at either end: what was opened, and what ran from it. In a process group
    the ranks agree on what they run before the first step. Evaluation in between runs from
    artifacts too, where the spec has the mode "infer".

    It detaches where training fails, too, if it was given to the constructor:
    `Trainer(..., callbacks=[AotcacheCallback("model.toml")])`. With `add_callback` it is too late
    for that, since `Trainer` tells callbacks of no failure: then use it as a context manager.

    Args:
        spec: As for `aotcache.attach`.
        options: Further arguments of `aotcache.attach`.

    Attributes:
        handle: What `attach` returned; None while nothing is attached.
        stats: Counters of the last training that ended, as `Handle.stats` gives them.

    Raises:
        SpecError: the spec is wrong.
    """

    def __init__(self, spec: Spec | str | Path | None = None, **options: Any) -> None:
        self.spec = spec if isinstance(spec, Spec) else load_spec(spec)
        self.options = options
        self.handle: Handle | None = None
        self.stats: dict[str, Any] | None = None
        self._hooks: list[Any] = []

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See to it that nothing stays attached however `Trainer.train` ends."""
        trainer = _trainer_above(sys._getframe(1))
        if trainer is None:
            return
        train = trainer.train

        @functools.wraps(train)
        def train_and_detach(*args: Any, **kwargs: Any) -> Any:
            try:
                return train(*args, **kwargs)
            finally:
                self.detach()

        trainer.train = train_and_detach

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any
    ) -> None:
        """Attach, and open what is needed."""
        assert model is not None
        self.detach()
        self.handle = attach(model, self.spec, **self.options)
        try:
            for module in model.modules():
                if isinstance(module, GradientCheckpointingLayer) and ATTACHED in vars(module):
                    self._hooks.append(module.register_forward_pre_hook(_leave_out, with_kwargs=True))
            if self._hooks and self.handle.recorder is not None:
                self.handle.recorder.leave_out(_OF_THE_LOSS)
            found = self.handle.prefetch(group="world" if _is_one_of_many() else None)
        except BaseException:
            self.detach()
            raise
        _say(
            state,
            f"{self.spec.drafter.name}: opened {found['loads']} artifacts in {found['load_seconds']:.2f} s",
        )

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """With `on_miss="request"`, run from this step on what has come; ranks look every 16 steps."""
        if self.handle is None or self.handle.requests is None:
            return
        if not _is_one_of_many():
            self.handle.refresh()
        elif state.global_step % _STEPS == 0:
            self.handle.refresh(group="world")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Print the receipt and detach."""
        self.detach()
        if self.stats is not None:
            _say(
                state,
                "{hits} calls ran from artifacts, {misses} misses, {eager_calls} eager, {traces} traces".format(
                    **self.stats
                ),
            )

    def detach(self) -> None:
        """Give the model its own forwards back, as `Handle.detach` does. Safe to call twice."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self.handle is not None:
            self.stats = self.handle.stats()
            self.handle.detach()
            self.handle = None

    def __enter__(self) -> AotcacheCallback:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()


def _trainer_above(frame: FrameType | None) -> Any:
    """The `Trainer` whose method called, however far up: callbacks are not told which it is."""
    from transformers import Trainer

    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer):
            return found
        frame = frame.f_back
    return None


def _leave_out(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Layers do not look at it, and a spec's batch need not have it."""
    return args, {name: value for name, value in kwargs.items() if name != _OF_THE_LOSS}


def _is_one_of_many() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _say(state: Any, text: str) -> None:
    if state.is_world_process_zero:
        print(f"aotcache: {text}", flush=True)  # noqa: T201 - what the callback is for
