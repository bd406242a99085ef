"""Training steps of two ranks under DDP, for the cases E9, E11 and B3: TINY-D attached and TINY-D eager.

Each function runs in every rank of `tests.loops.ranks` and returns what the case asks about.
Comparisons are made in the rank, where both models are; a failed one ends it.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import aotcache
from aotcache.runtime.attach import Handle
from tests.cases import tiny
from tests.cases.support import assert_close, assert_gradients_close, gradients_of, make_batch
from tests.loops.ranks import SIZE

RATE = 0.05


def smaller_last_batch(rank: int, spec: str, store: str) -> dict[str, Any]:
    """E9: batches of 8, 8, 8 and then 3 or 1, padded to 8; eager DDP gets them as they are."""
    ours, eager = tiny.build(), tiny.build()
    buckets = aotcache.Buckets.from_spec(spec)
    with aotcache.attach(ours, spec, store=store) as handle:
        loaded = handle.prefetch(group="world")["loads"]
        models = [DistributedDataParallel(m) for m in (ours, eager)]
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in models]
        for step, rows in enumerate((8, 8, 8, (3, 1)[rank])):
            batch = make_batch(rows, seed=10 * step + rank)
            padded = buckets.pad(batch)
            assert padded.batch["x"].shape[0] == 8
            losses = [model(**given) for model, given in zip(models, (padded.batch, batch), strict=True)]
            assert_close(*losses)
            for loss, optimizer in zip(losses, optimizers, strict=True):
                optimizer.zero_grad()
                loss.backward()
            assert_gradients_close(gradients_of(ours), gradients_of(eager))
            for optimizer in optimizers:
                optimizer.step()
        for name, parameter in ours.named_parameters():
            assert_close(parameter.detach(), eager.get_parameter(name).detach())
        return {"weights": digest(ours), "loads": [loaded, handle.stats()["loads"]], **counters(handle)}


class Once(nn.Module):
    """TINY-D, and a weight before it that only some micro-batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny.build(blocks=2, marked=True)
        self.extra = nn.Parameter(torch.full((tiny.HIDDEN,), 0.1))

    def forward(self, batch: dict[str, Tensor], use: bool) -> Tensor:
        loss: Tensor = self.inner(**{**batch, "x": batch["x"] + self.extra} if use else batch)
        return loss


def accumulation(rank: int, spec: str, store: str) -> dict[str, Any]:
    """E11, with `set_to_none` and without."""
    return {str(way): _accumulation(rank, spec, store, way) for way in (True, False)}


def _accumulation(rank: int, spec: str, store: str, set_to_none: bool) -> dict[str, Any]:
    """Two steps of 4 micro-batches each, 3 of them without synchronisation."""
    ours, eager = Once(), Once()
    with aotcache.attach(ours.inner, spec, store=store) as handle:
        models = [DistributedDataParallel(m, find_unused_parameters=True) for m in (ours, eager)]
        fired = [count_hooks(m) for m in (ours, eager)]
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (ours, eager)]
        same: list[bool] = []
        kept: dict[str, Any] = {}
        values: dict[str, Any] = {}
        for step in range(2):
            batches = [make_batch(seed=100 * step + 10 * micro + rank) for micro in range(4)]
            for micro, batch in enumerate(batches):
                for model in models:
                    with model.no_sync() if micro < 3 else nullcontext():
                        loss = model(batch, use=micro == 0)
                        if model is models[0] and micro == 1:
                            require_untouched(kept, values)
                        loss.backward()
                assert_gradients_close(gradients_of(ours), gradients_of(eager))
                if micro == 0:
                    kept = {name: p.grad for name, p in ours.named_parameters()}
                    values = gradients_of(ours)
                elif micro == 1:
                    require_added(ours, kept, values, batch)
            assert all(ours.get_parameter(name).grad is grad for name, grad in kept.items())
            same.append(alike(gradients_of(ours)))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
            if not set_to_none:
                assert all(ours.get_parameter(name).grad is grad for name, grad in kept.items())
                assert not any(grad.any() for grad in kept.values() if grad is not None)
        for name, parameter in ours.named_parameters():
            assert_close(parameter.detach(), eager.get_parameter(name).detach())
        return {"fired": fired[0], "eager fired": fired[1], "gradients alike": same, **counters(handle)}


def require_untouched(kept: dict[str, Any], values: dict[str, Any]) -> None:
    """A forward writes into no gradient that somebody holds."""
    assert all(torch.equal(kept[name], value) for name, value in values.items())


def require_added(
    model: Once, kept: dict[str, Any], values: dict[str, Any], batch: dict[str, Tensor]
) -> None:
    """`.grad` is the tensor it was, and holds what it held and the gradient of this micro-batch alone."""
    plain = tiny.build(blocks=2)
    plain.load_state_dict(model.inner.state_dict())
    plain(**batch).backward()
    added = {f"inner.{name}": p.grad for name, p in plain.named_parameters()}
    assert all(model.get_parameter(name).grad is grad for name, grad in kept.items())
    want = {name: before + added.get(name, 0.0) for name, before in values.items()}
    assert_gradients_close(kept, want)


def count_hooks(model: nn.Module) -> dict[str, list[int]]:
    """Per parameter, how often its tensor hook and its post-accumulate hook fired."""
    counts: dict[str, list[int]] = {}
    for name, parameter in model.named_parameters():
        own = counts[name] = [0, 0]

        def fire(_: Any, own: list[int] = own, which: int = 0) -> None:
            own[which] += 1

        parameter.register_hook(lambda gradient, fire=fire: fire(gradient))  # type: ignore[misc]
        parameter.register_post_accumulate_grad_hook(
            lambda p, fire=fire: fire(p, which=1)  # type: ignore[misc]
        )
    return counts


def never_the_same_shape(rank: int, spec: str, store: str, steps: int) -> dict[str, Any]:
    """B3: every batch has another number of anchor blocks of 16, and so another flat length."""
    ours, eager = tiny.build(), tiny.build()
    buckets = aotcache.Buckets.from_spec(spec)
    draws = random.Random(rank).sample(range(1, 65), steps)
    used: Counter[int] = Counter()
    with aotcache.attach(ours, spec, store=store) as handle:
        loaded = handle.prefetch(group="world")["loads"]
        model = DistributedDataParallel(ours)
        for step, anchors in enumerate(draws):
            length = 16 * anchors
            batch = make_batch(1, length, seed=100 * step + rank)
            batch["documents"] = (torch.arange(length) // 16)[None]
            padded = buckets.pad(batch)
            used[padded.bucket["seq"]] += 1
            losses = [model(**padded.batch), eager(**batch)]
            assert_close(*losses)
            for loss in losses:
                loss.backward()
            for parameter in eager.parameters():
                dist.all_reduce(parameter.grad)  # REF of both ranks' batches, none of them padded
                parameter.grad /= SIZE
            assert_gradients_close(gradients_of(ours), gradients_of(eager))
            with torch.no_grad():
                for m in (ours, eager):
                    for parameter in m.parameters():
                        parameter -= RATE * parameter.grad
                        parameter.grad = None
        return {
            "draws": draws,
            "used": dict(used),
            "loads": [loaded, handle.stats()["loads"]],
            "weights": digest(ours),
            **counters(handle),
        }


def digest(model: nn.Module) -> str:
    """sha256 over all weights, to the last bit."""
    data = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(data).hexdigest()


def alike(gradients: dict[str, Any]) -> bool:
    """Whether all ranks have these very gradients."""
    own = {name: hashlib.sha256(g.numpy().tobytes()).hexdigest() for name, g in gradients.items()}
    found: list[Any] = [None] * SIZE
    dist.all_gather_object(found, own)
    return all(each == own for each in found)


def counters(handle: Handle) -> dict[str, int]:
    stats = handle.stats()
    return {name: stats[name] for name in ("hits", "misses", "eager_calls", "traces")}
