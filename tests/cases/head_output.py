"""The result of a head, in a module that is imported when a head first runs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class HeadOutput:
    loss: Tensor | None
    logits: Tensor
    hidden_states: tuple[Tensor, ...] | None
    parts: tuple[Tensor, Tensor]
