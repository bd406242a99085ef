"""The numerics check: a finished artifact against the drafter's own code.

The artifact is run by the worker's own runner, on the spec's own batches. The
reference is the original module with its original closures, run eagerly in float64,
with attention as a dense boolean mask: nothing that traced or compiled takes part
in it. The yardstick is eager in the artifact's precision: an artifact may be at most
twice as far from the reference as eager is, or within the precision's own noise.

Each run begins with the generator at one seed: the artifact must draw the very numbers
of eager, leave the generator where eager leaves it, give the tensors that the region
keeps the same new values, and return tensors that lie in the same memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_mask

from aotcache.compile.checkpoints import left_out
from aotcache.compile.graphs import storage_key
from aotcache.compile.precision import working_precision
from aotcache.errors import CertificateFailed
from aotcache.graph.redirect import redirect_flex
from aotcache.graph.region import Call
from aotcache.graph.strides import canonical_strides
from aotcache.manifest import Certificate, Manifest, Measurement
from aotcache.runtime.dense import dense_attention
from aotcache.runtime.function import Executable
from aotcache.runtime.tolerance import GRADIENT_FACTOR, NOISE, SMALL

_OTHER_NUMBERS = 0.25
"""An error of eager beyond which it and its float64 reference are taken to have drawn other numbers."""

_WORST = 8
"""How many measurements a certificate keeps."""


@dataclass(frozen=True, slots=True)
class Results:
    """What one run gives.

    Attributes:
        outputs: The tensors of the result.
        gradients: Of each slot; None where none arrived.
        updates: The values that the slots which the region changes have afterwards.
        places: For each output, what of the call or of the outputs before it is its memory,
            whether it is that very tensor, and whether a gradient flows through it.
        generator: The states of torch's generators after the forward.
    """

    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    updates: list[torch.Tensor]
    places: list[tuple[Any, ...]]
    generator: list[torch.Tensor]


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
        runs = _Runs(call, executable.manifest, index)
        reference, tangents = runs.reference(tensors)
        with context():
            eager = runs.run(partial(_eager, call), tensors, tangents)
        ours = runs.run(executable.train if call.mode == "train" else executable.infer, tensors, tangents)
        _require_same_effects(call, eager, ours)
        measured += _compare(call, runs, reference, eager, ours)
    measured.sort(key=lambda m: m.artifact, reverse=True)
    return Certificate(len(calls), NOISE[torch.float32], tuple(measured[:_WORST]))


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


def _eager(call: Call, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    with redirect_flex(dense_attention):
        return call.region.run_flat(call, tensors)[0]


class _Runs:
    """The runs of one call that are compared: same tensors, same seed."""

    def __init__(self, call: Call, manifest: Manifest, seed: int) -> None:
        self.call = call
        self.seed = seed
        self.drawn = manifest.inputs[len(manifest.called) :]
        self.mutated = [mutation.input for mutation in manifest.mutations]

    def run(
        self,
        run: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
        tensors: Sequence[torch.Tensor],
        tangents: Sequence[torch.Tensor | None],
    ) -> Results:
        training = self.call.mode == "train"
        leaves = [
            (t.detach().clone() if i in self.mutated else t.detach()).requires_grad_(t.requires_grad)
            for i, t in enumerate(tensors)
        ]
        devices = sorted({t.device.index or 0 for t in tensors if t.device.type == "cuda"})
        with torch.random.fork_rng(devices=devices), torch.set_grad_enabled(training):
            torch.manual_seed(self.seed)
            with left_out(self.call.region.name) as checkpoints:
                outputs = list(run(list(leaves)))
            checkpoints.require_pure(updates=bool(self.mutated), draws=bool(self.drawn))
            generator = [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in devices)]
        gradients: list[torch.Tensor | None] = []
        if training:
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
        return Results(
            outputs=[o.detach() for o in outputs],
            gradients=gradients,
            updates=[leaves[i] for i in self.mutated],
            places=_places(leaves, outputs),
            generator=generator,
        )

    def reference(self, tensors: Sequence[torch.Tensor]) -> tuple[Results, list[torch.Tensor | None]]:
        """Results in float64, and the incoming gradients they were made with."""
        wide = [
            (t.detach().double() if t.is_floating_point() else t.detach()).requires_grad_(t.requires_grad)
            for t in tensors
        ]
        tangents: list[torch.Tensor | None] = []
        generator = torch.Generator().manual_seed(self.seed)
        name = self.call.region.name

        def run(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
            with redirect_flex(boolean_attention), working_precision(self.drawn, name):
                outputs, _ = self.call.region.run_flat(self.call, leaves)
            tangents.extend(
                torch.randn(out.shape, generator=generator, dtype=torch.float64)
                if out.requires_grad
                else None
                for out in outputs
            )
            return outputs

        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return self.run(run, wide, tangents), tangents
        except (RuntimeError, TypeError) as error:
            raise CertificateFailed(
                f"region {name!r} cannot be run in float64, which the numerics check compares with: "
                f"{error}; take dtypes from the inputs instead of fixing them",
                region=name,
            ) from error
        finally:
            torch.set_default_dtype(default)


def _places(leaves: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
    """Where each output lies: see `Results.places`."""
    known: dict[int, tuple[str, int, torch.Tensor]] = {}
    for i, leaf in enumerate(leaves):
        known[storage_key(leaf)] = ("slot", i, leaf)
    found: list[tuple[Any, ...]] = []
    for i, out in enumerate(outputs):
        of, index, base = known.setdefault(storage_key(out), ("output", i, out))
        found.append((of, index, out is base, out.requires_grad, tuple(out.shape)))
    return found


def _require_same_effects(call: Call, eager: Results, ours: Results) -> None:
    name = call.region.name
    if not all(torch.equal(e, o) for e, o in zip(eager.generator, ours.generator, strict=True)):
        raise CertificateFailed(
            f"region {name!r}: eager takes other numbers from torch's generator than the artifact does; an operator "
            "draws some that the graph does not show. Leave this part out of the region, or draw the numbers "
            "outside of it and pass them in",
            region=name,
            what="random numbers",
        )
    for i, (want, got) in enumerate(zip(eager.places, ours.places, strict=True)):
        if want != got:
            raise CertificateFailed(
                f"region {name!r}: output {i} is in eager {_placed(want)}, and in the artifact {_placed(got)}; "
                "return a copy (`.clone()`)",
                region=name,
                what=f"output {i}",
            )


def _placed(place: tuple[Any, ...]) -> str:
    of, index, itself, grad, shape = place
    return (
        f"{'' if itself else 'in the memory of '}{of} {index}, of shape {shape}, "
        f"with{'' if grad else 'out'} a gradient"
    )


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
    index = functools.partial(torch.arange, device=query.device)
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


def _compare(call: Call, runs: _Runs, reference: Results, eager: Results, ours: Results) -> list[Measurement]:
    name = call.region.name
    measured = []
    for i, (want, low, got) in enumerate(zip(reference.outputs, eager.outputs, ours.outputs, strict=True)):
        measured.append(_measure(name, f"output {i}", want, low, got, floor=0.0, factor=1.0))
        if runs.drawn and measured[-1].eager > _OTHER_NUMBERS:
            raise CertificateFailed(
                f"region {name!r}: output {i} of eager is {measured[-1].eager:.2e} away from float64 eager under the "
                "same seed; they seem to draw other numbers, so the artifact cannot be checked",
                region=name,
                what=f"output {i}",
            )
    for slot, want, low, got in zip(
        runs.mutated, reference.updates, eager.updates, ours.updates, strict=True
    ):
        measured.append(
            _measure(name, f"new value of {call.names[slot]}", want, low, got, floor=0.0, factor=1.0)
        )
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
            _measure(name, what, want_g, low_g, got_g, floor=SMALL * largest, factor=GRADIENT_FACTOR)
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
    bound = max(2 * eager_error, NOISE.get(got.dtype, 1e-5) * factor)
    if not error <= bound:
        raise CertificateFailed(
            f"region {region!r}: {what} differs from float64 eager by {error:.2e} of its largest entry; "
            f"the bound is {bound:.2e} (eager itself: {eager_error:.2e})",
            region=region,
            what=what,
            error=error,
            bound=bound,
        )
    return Measurement(what, error, eager_error)
