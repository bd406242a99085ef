"""The numerics check: a finished artifact against the drafter's own code.

The artifact is run by the worker's own runner, on the spec's own batches. The
reference is the original module with its original closures, run eagerly in float64,
with attention as a dense boolean mask: nothing that traced or compiled takes part
in it. The yardstick is eager in the artifact's precision: an artifact may be at most
twice as far from the reference as eager is, or within the precision's own noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_mask

from aotcache.errors import CertificateFailed
from aotcache.graph.redirect import redirect_flex
from aotcache.graph.region import Call
from aotcache.graph.strides import canonical_strides
from aotcache.manifest import Certificate, Measurement
from aotcache.runtime.dense import dense_attention
from aotcache.runtime.function import Executable

_NOISE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Relative error that is never held against an artifact, by dtype: some hundred roundings in
float32, two to four in half precision."""

_GRADIENT_FACTOR = 10.0
"""Gradients add up over the batch and the sequence; their noise is larger than the outputs'."""

_SMALL = 1e-3
"""A gradient below this share of the largest one is measured against that one: a true gradient
of zero, like that of a bias under softmax, has no relative error."""

_WORST = 8
"""How many measurements a certificate keeps."""


@dataclass(frozen=True, slots=True)
class Results:
    """Outputs and gradients of one run; a gradient is None where none arrived."""

    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor | None]


def certify(
    executable: Executable,
    calls: Sequence[Call],
    context: Callable[[], AbstractContextManager[Any]],
) -> Certificate:
    """Check an artifact on every captured call of its key.

    Between two calls every weight is changed, so an artifact with frozen weights fails.

    Args:
        executable: The artifact, opened by the worker's own loader.
        calls: Calls on different batches.
        context: The spec's context, under which eager in the artifact's precision runs.

    Raises:
        CertificateFailed: names the output or gradient, its error and the bound.
    """
    measured: list[Measurement] = []
    for index, call in enumerate(calls):
        tensors = _values(call, calls[0], index)
        generator = torch.Generator().manual_seed(index)
        reference, tangents = _reference(call, tensors, generator)
        with context():
            eager = _run(call, partial(_eager, call), tensors, tangents)
        run = executable.train if call.mode == "train" else executable.infer
        ours = _run(call, run, tensors, tangents)
        measured += _compare(call, reference, eager, ours)
    measured.sort(key=lambda m: m.artifact, reverse=True)
    return Certificate(len(calls), _NOISE[torch.float32], tuple(measured[:_WORST]))


def _values(call: Call, first: Call, index: int) -> list[torch.Tensor]:
    """The call's tensors as fresh leaves; from the second batch on, weights and whatever
    floating-point input was the same in the first batch have other values."""
    made = []
    generator = torch.Generator().manual_seed(1000 + index)
    for tensor, before, grad in zip(call.tensors, first.tensors, call.requires_grad(), strict=True):
        # In the compiled layout, which a clone has only where memory has no gaps.
        value = tensor.new_empty_strided(tensor.shape, canonical_strides(tensor)).copy_(tensor.detach())
        if index and value.is_floating_point() and torch.equal(tensor, before):
            noise = torch.randn(value.shape, generator=generator).to(value)
            value += 0.1 * value.abs().mean() * noise
        made.append(value.requires_grad_(grad))
    return made


def _run(
    call: Call,
    run: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
    tensors: Sequence[torch.Tensor],
    tangents: Sequence[torch.Tensor | None],
) -> Results:
    leaves = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
    with torch.set_grad_enabled(call.mode == "train"):
        outputs = list(run(list(leaves)))
    gradients: list[torch.Tensor | None] = []
    if call.mode == "train":
        pairs = [
            (out, tangent.to(out.dtype))
            for out, tangent in zip(outputs, tangents, strict=True)
            if tangent is not None and out.requires_grad
        ]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found = iter(
            torch.autograd.grad([o for o, _ in pairs], wanted, [t for _, t in pairs], allow_unused=True)
        )
        gradients = [next(found) if leaf.requires_grad else None for leaf in leaves]
    return Results([o.detach() for o in outputs], gradients)


def _eager(call: Call, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    with redirect_flex(dense_attention):
        return call.region.run_flat(call, tensors)[0]


def _reference(
    call: Call, tensors: Sequence[torch.Tensor], generator: torch.Generator
) -> tuple[Results, list[torch.Tensor | None]]:
    """Results in float64, and the incoming gradients they were made with."""
    wide = [
        (t.detach().double() if t.is_floating_point() else t.detach()).requires_grad_(t.requires_grad)
        for t in tensors
    ]
    tangents: list[torch.Tensor | None] = []

    def run(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        with redirect_flex(boolean_attention):
            outputs, _ = call.region.run_flat(call, leaves)
        tangents.extend(
            torch.randn(out.shape, generator=generator, dtype=torch.float64) if out.requires_grad else None
            for out in outputs
        )
        return outputs

    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return _run(call, run, wide, tangents), tangents
    except (RuntimeError, TypeError) as error:
        raise CertificateFailed(
            f"region {call.region.name!r} cannot be run in float64, which the numerics check compares with: "
            f"{error}; take dtypes from the inputs instead of fixing them",
            region=call.region.name,
        ) from error
    finally:
        torch.set_default_dtype(default)


def boolean_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., torch.Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention by its definition: softmax(scale * q k^T, masked) v, one matrix at a time.

    Shapes as in torch's flex attention: query [B, Hq, Q, E], key and value [B, Hkv, KV, E].
    Rows that see no key give zero. The log-sum-exp and the maximum, in base 2, are made too.
    """
    batch, heads, rows, _ = query.shape
    columns = key.shape[-2]
    group = heads // key.shape[1]
    key = key.expand(batch, -1, -1, -1).repeat_interleave(group, 1)
    value = value.expand(batch, -1, -1, -1).repeat_interleave(group, 1)
    visible = create_mask(block_mask[-1], batch, heads, rows, columns, device=str(query.device))
    scores = torch.einsum("bhqe,bhke->bhqk", query, key) * scale
    index = torch.arange
    at = torch.vmap(score_mod, in_dims=(0, None, None, None, 0))
    at = torch.vmap(at, in_dims=(0, None, None, 0, None))
    at = torch.vmap(at, in_dims=(0, None, 0, None, None))
    at = torch.vmap(at, in_dims=(0, 0, None, None, None))
    with torch._dynamo._trace_wrapped_higher_order_op.TransformGetItemToIndex():
        scores = at(scores, index(batch), index(heads), index(rows), index(columns))
    scores = scores.to(query.dtype).masked_fill(~visible, -math.inf)
    dead = ~visible.any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)
    out = torch.einsum("bhqk,bhke->bhqe", weights, value)
    lse = torch.logsumexp(scores.masked_fill(dead, 0.0), -1).masked_fill(dead[..., 0], -math.inf)
    return out, lse / math.log(2), scores.amax(-1) / math.log(2)


def _compare(call: Call, reference: Results, eager: Results, ours: Results) -> list[Measurement]:
    name = call.region.name
    measured = []
    for i, (want, low, got) in enumerate(zip(reference.outputs, eager.outputs, ours.outputs, strict=True)):
        measured.append(_measure(name, f"output {i}", want, low, got, floor=0.0, factor=1.0))
    present = [g for g in reference.gradients if g is not None]
    largest = max((float(g.abs().max()) for g in present if g.numel()), default=0.0)
    for slot, (want_g, low_g, got_g) in enumerate(
        zip(reference.gradients, eager.gradients, ours.gradients, strict=True)
    ):
        what = f"gradient of {call.names[slot]}"
        if want_g is None or got_g is None:
            zero = want_g is None and (got_g is None or not bool(got_g.any()))
            unused = got_g is None and want_g is not None and not bool(want_g.any())
            if not (zero or unused):
                raise CertificateFailed(
                    f"region {name!r}: {what} is {'absent' if got_g is None else 'present'} in the artifact and "
                    f"{'absent' if want_g is None else 'present'} in eager",
                    region=name,
                    what=what,
                )
            continue
        assert low_g is not None
        measured.append(
            _measure(name, what, want_g, low_g, got_g, floor=_SMALL * largest, factor=_GRADIENT_FACTOR)
        )
    return measured


def _measure(
    region: str,
    what: str,
    want: torch.Tensor,
    low: torch.Tensor,
    got: torch.Tensor,
    *,
    floor: float,
    factor: float,
) -> Measurement:
    if got.shape != want.shape or got.dtype != low.dtype:
        raise CertificateFailed(
            f"region {region!r}: {what} is {got.dtype} {tuple(got.shape)} in the artifact, "
            f"{low.dtype} {tuple(want.shape)} in eager",
            region=region,
            what=what,
        )
    if not want.is_floating_point():
        if not torch.equal(got, low):
            raise CertificateFailed(f"region {region!r}: {what} differs from eager", region=region, what=what)
        return Measurement(what, 0.0, 0.0)
    if not want.numel():
        return Measurement(what, 0.0, 0.0)
    finite = torch.isfinite(want)
    if not torch.equal(torch.isfinite(got), finite) or not torch.equal(got[~finite].double(), want[~finite]):
        raise CertificateFailed(
            f"region {region!r}: {what} is not finite where eager is, or the other way round",
            region=region,
            what=what,
        )
    scale = max(float(want[finite].abs().max()) if bool(finite.any()) else 0.0, floor, 1e-30)
    error = float((got.double() - want)[finite].abs().max()) / scale if bool(finite.any()) else 0.0
    eager_error = float((low.double() - want)[finite].abs().max()) / scale if bool(finite.any()) else 0.0
    bound = max(2 * eager_error, _NOISE.get(got.dtype, 1e-5) * factor)
    if not error <= bound:
        raise CertificateFailed(
            f"region {region!r}: {what} differs from float64 eager by {error:.2e} of its largest entry; "
            f"the bound is {bound:.2e} (eager itself: {eager_error:.2e}). Nothing was published",
            region=region,
            what=what,
            error=error,
            bound=bound,
        )
    return Measurement(what, error, eager_error)
