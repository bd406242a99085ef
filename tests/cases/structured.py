"""A drafter whose heads take keywords and return a dataclass and a named tuple of torch's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from tests.cases.head_output import HeadOutput

ROWS, HIDDEN, WORDS = 8, 16, 12


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(HIDDEN, WORDS)

    def forward(self, *, hidden: Tensor, scale: Tensor, target: Tensor | None = None) -> HeadOutput:
        from tests.cases.head_output import HeadOutput

        logits = self.out(hidden * scale)
        loss = None if target is None else nn.functional.cross_entropy(logits, target)
        return HeadOutput(loss, logits, None, (logits.logsumexp(-1), hidden.mean(0)))


class Best(nn.Module):
    """Returns what `topk` does; takes the dataclass."""

    def forward(self, head: HeadOutput, count: int = 3) -> Any:
        return (head.logits + head.parts[0][:, None]).topk(count)


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = Head()
        self.best = Best()

    def forward(self, hidden: Tensor, scale: Tensor, target: Tensor) -> Tensor:
        head = self.head(hidden=hidden, scale=scale, target=target)
        rest = self.head(hidden=hidden, scale=scale)
        values, _ = self.best(head)
        return head.loss + values.mean() + rest.parts[1].mean()


def build() -> Structured:
    """The factory."""
    torch.manual_seed(0)
    return Structured()


def batch(bucket: dict[str, int], device: Any) -> tuple[tuple[()], dict[str, Tensor]]:
    """Hidden states for which a gradient is wanted, a scale and classes."""
    rows = bucket["rows"]
    return (), {
        "hidden": torch.randn(rows, HIDDEN, device=device).requires_grad_(),
        "scale": torch.rand(HIDDEN, device=device) + 0.5,
        "target": torch.randint(WORDS, (rows,), device=device),
    }
