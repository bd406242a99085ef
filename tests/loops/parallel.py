"""What two ranks do with a drafter under DDP and FSDP2, each against eager on one process.

The reference is never wrapped: it sees the batches of both ranks and takes the mean of
their losses, which is what both kinds of data parallelism stand for.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import aotcache
from tests.loops import drafter
from tests.loops.conftest import assert_close, assert_same, gradients, make_batch
from tests.loops.ranks import SIZE

STEPS = 2
CHECKPOINTS = ("none", "reentrant", "not reentrant", "wrapper", "reentrant wrapper")
ORDERS = ("attach first", "wrap first")
SCENARIOS = [
    *(f"{kind} / {way} / {order}" for kind in ("ddp", "fsdp") for way in CHECKPOINTS for order in ORDERS),
    "ddp / none / accumulate",
    "fsdp / none / accumulate",
    "ddp / none / bucket views",
    "ddp / none / static graph",
    "ddp / not reentrant / static graph",
    "ddp / none / unused",
    "fsdp / none / keep",
    "ddp / none / unused outputs",
    "fsdp / none / unused outputs",
]


def run(rank: int, spec: str, store: str) -> dict[str, Any]:
    """Every scenario, in one order on all ranks; what went wrong in it, and the counters."""
    found = {}
    for scenario in SCENARIOS:
        kind, way, more = scenario.split(" / ")
        try:
            found[scenario] = {"error": None, **_scenario(rank, spec, store, kind, way, more)}
        except Exception:
            found[scenario] = {"error": traceback.format_exc()}
    return found


def _scenario(rank: int, spec: str, store: str, kind: str, way: str, more: str) -> dict[str, Any]:
    # FSDP2 wants tied weights in one group, as those inside of a layer are; and under DDP a weight may
    # not get gradients both inside of a reentrant checkpoint and outside.
    tied = kind == "ddp" and not way.startswith("reentrant")
    ours, plain = (drafter.build(tied) for _ in range(2))
    ours.with_sides = plain.with_sides = more != "unused outputs"
    parts = list(ours.layers)
    ours.checkpointing = {"reentrant": True, "not reentrant": False}.get(way)
    if more == "unused":
        ours.heads = nn.ModuleList([nn.Linear(2, 2)])  # which no batch reaches
    attach: Callable[[nn.Module], Any] = lambda model: aotcache.attach(model, spec, store=store)  # noqa: E731
    handle = None if more == "wrap first" else attach(ours)
    model = _wrap(ours, kind, way, more)
    handle = handle or attach(model)
    try:
        optimizers = [
            torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (model, plain)
        ]
        for step in range(STEPS):
            micros = 3 if more == "accumulate" else 1
            for micro in range(micros):
                batches = [make_batch((16, 32)[step], 100 * step + 10 * r + micro) for r in range(SIZE)]
                with _sync(model, kind, micro == micros - 1):
                    loss = model(**batches[rank])
                    loss.backward()
                losses = [plain(**batch) for batch in batches]
                assert_close(loss, losses[rank])
                (sum(losses) / SIZE).backward()
            assert_same(dict(_whole(ours)), gradients(plain))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        stats = handle.stats()
        weights = [(n, _full(p)) for n, p in _named(ours)]
        for (_, mine), theirs in zip(weights, plain.parameters(), strict=False):
            assert_close(mine, theirs)
    finally:
        handle.detach()
    assert not any("forward" in vars(part) for part in parts)
    return {k: stats[k] for k in ("hits", "misses", "eager_calls", "traces")}


def _wrap(ours: drafter.Drafter, kind: str, way: str, more: str) -> nn.Module:
    if "wrapper" in way:
        impl = CheckpointImpl.REENTRANT if way.startswith("reentrant") else CheckpointImpl.NO_REENTRANT
        apply_activation_checkpointing(
            ours,
            lambda module: checkpoint_wrapper(module, checkpoint_impl=impl),
            check_fn=lambda module: isinstance(module, drafter.Layer),
        )
    if kind == "ddp":
        return DistributedDataParallel(
            ours,
            gradient_as_bucket_view=more == "bucket views",
            static_graph=more == "static graph",
            find_unused_parameters=more.startswith("unused"),
        )
    for layer in ours.layers:
        fully_shard(layer, reshard_after_forward=more != "keep")
    fully_shard(ours, reshard_after_forward=more != "keep")
    return ours


def _sync(model: Any, kind: str, now: bool) -> AbstractContextManager[Any]:
    if kind == "ddp":
        return nullcontext() if now else model.no_sync()
    model.set_requires_gradient_sync(now)
    return nullcontext()


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        if not name.startswith("heads."):
            yield name.replace("_checkpoint_wrapped_module.", ""), parameter


def _whole(model: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    for name, parameter in _named(model):
        yield name, None if parameter.grad is None else _full(parameter.grad)


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
