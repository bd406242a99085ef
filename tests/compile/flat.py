"""Flat calls that the tests of the compile half share, and the yardstick: eager float64."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from aotcache.manifest import OutputSlot, PairContract

Run = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]

BATCH, LENGTH, HIDDEN, HEADS = 2, 32, 32, 2


def block(
    x: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, gain: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """RMSNorm, fused projection, dense attention, a constant tensor, a residual; two outputs and an index.

    The first output is what the second's gradient needs, and so does a view of `x`.
    """
    h = F.rms_norm(x, (HIDDEN,), gain)
    q, k, v = (
        t.transpose(1, 2) for t in F.linear(h, qkv).view(BATCH, LENGTH, 3, HEADS, HIDDEN // HEADS).unbind(2)
    )
    scores = (q @ k.transpose(-1, -2) / 4).masked_fill(~mask, float("-inf")).softmax(-1)
    mixed = (scores @ v).transpose(1, 2).reshape(BATCH, LENGTH, HIDDEN)
    scale = torch.tensor([0.5, 2.0]).to(x.dtype).repeat(HIDDEN // 2)
    y = x + F.linear(mixed, out) * scale
    return y, (y * x.transpose(1, 2)[0]).sum((1, 2)), y.argmax(-1)


BLOCK_NAMES = ("x", "qkv", "out", "gain", "mask")


def block_examples(*, train: bool, seed: int = 0) -> list[torch.Tensor]:
    """Tensors for `block`; `x` is not contiguous."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(LENGTH, BATCH, HIDDEN, generator=g).transpose(0, 1)
    weights = [
        torch.randn(3 * HIDDEN, HIDDEN, generator=g) / 6,
        torch.randn(HIDDEN, HIDDEN, generator=g) / 6,
        1 + torch.randn(HIDDEN, generator=g) / 10,
    ]
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return [*(t.requires_grad_(train) for t in (x, *weights)), mask]


def line_of(fn: Callable[..., Any], marker: str = "# here") -> str:
    """`file:line` of the marked line of a function."""
    lines, first = inspect.getsourcelines(fn)
    (offset,) = [i for i, text in enumerate(lines) if text.rstrip().endswith(marker)]
    return f"{inspect.getsourcefile(fn)}:{first + offset}"


def tangents_for(contract: PairContract, outputs: Sequence[OutputSlot], seed: int = 0) -> list[torch.Tensor]:
    """Incoming gradients in the layout that the contract promises: that of the outputs."""
    made = []
    for i in contract.tangents:
        values = torch.randn(outputs[i].shape, generator=torch.Generator().manual_seed(seed + i))
        made.append(torch.empty_strided(outputs[i].shape, outputs[i].stride).copy_(values))
    return made


def reference(
    fn: Callable[..., Any], inputs: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Outputs and gradients by eager autograd in float64."""
    leaves = [
        (t.detach().double() if t.is_floating_point() else t).requires_grad_(t.requires_grad) for t in inputs
    ]
    outputs = [t for t in fn(*leaves) if t is not None]
    differentiable = [t for t in outputs if t.requires_grad]
    wanted = [t for t in leaves if t.requires_grad]
    found = iter(
        torch.autograd.grad(differentiable, wanted, [t.double() for t in tangents], allow_unused=True)
        if differentiable
        else [None] * len(wanted)
    )
    return outputs, [next(found) if t.requires_grad else None for t in leaves]


def run_contract(
    contract: PairContract,
    outputs: int,
    forward: Run,
    backward: Run,
    inputs: Sequence[torch.Tensor],
    tangents: Sequence[torch.Tensor],
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Calls two graphs as `PairContract` says, and nothing else."""
    plain = [t.detach() for t in inputs]
    with torch.no_grad():
        results = list(forward(plain))
        assert len(results) == outputs + contract.intermediates
        grads = list(
            backward(
                [
                    *(plain[i] for i in contract.saved_inputs),
                    *(results[i] for i in contract.saved_outputs),
                    *results[outputs:],
                    *tangents,
                ]
            )
        )
    assert len(grads) == len(contract.gradients)
    placed: list[torch.Tensor | None] = [None] * len(inputs)
    for position, grad in zip(contract.gradients, grads, strict=True):
        placed[position] = grad
    return results[:outputs], placed


def assert_close(got: torch.Tensor | None, want: torch.Tensor | None, what: str, bound: float = 2e-5) -> None:
    """Largest error against the reference's own largest entry."""
    if got is None or want is None:
        zero = [t for t in (got, want) if t is not None]
        assert all(not t.any() for t in zero), f"{what}: {got} / {want}"
        return
    assert got.shape == want.shape, f"{what}: {got.shape} / {want.shape}"
    if not got.is_floating_point():
        assert torch.equal(got, want), what
        return
    error = (got.double() - want).abs().max() / want.abs().max().clamp_min(1e-30)
    assert error <= bound, f"{what}: relative error {error:.2e} beyond {bound:.0e}"
