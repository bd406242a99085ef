"""What two ranks do before step 1: each prefetches from a store of its own, and they agree or raise."""

from __future__ import annotations

import logging
import os
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import aotcache
from aotcache.errors import AotcacheError
from aotcache.runtime import registry
from tests.loops import drafter
from tests.loops.conftest import assert_close, assert_same, gradients, make_batch


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def run(rank: int, folder: str, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Every case in turn, each in a home of its own: what one unpacked must not serve the next.

    Args:
        rank: This one.
        folder: For the homes.
        cases: By name, what differs between cases; see `_case`.
    """
    kept = _Kept()
    logging.getLogger("aotcache").addHandler(kept)
    found: dict[str, Any] = {}
    for number, (name, case) in enumerate(cases.items()):
        os.environ["AOTCACHE_HOME"] = str(Path(folder) / f"home-{number}-{rank}")
        registry._opened.clear()
        registry._libraries.clear()
        kept.texts.clear()
        try:
            found[name] = {"error": None, **_case(rank, **case)}
        except AotcacheError as error:
            found[name] = {"error": type(error).__name__, "text": str(error), "details": error.details}
            found[name]["cause"] = None if error.__cause__ is None else type(error.__cause__).__name__
        except Exception:
            found[name] = {"error": "not ours", "text": traceback.format_exc()}
        found[name]["log"] = list(kept.texts)
    return found


def _case(
    rank: int,
    specs: list[str],
    stores: list[str],
    on_miss: list[str],
    group: str = "world",
    patched: int | None = None,
    warmed_up: bool = False,
) -> dict[str, Any]:
    """Attach, prefetch, train.

    Args:
        rank: This one.
        specs, stores, on_miss: Of each rank.
        group: Which group is handed in.
        patched: The rank whose drafter's code is another.
        warmed_up: Whether a step is made before the prefetch, too.
    """
    ours, eager = drafter.build(), drafter.build()
    plain = drafter.Layer.forward
    if patched == rank:
        drafter.Layer.forward = _other_forward  # type: ignore[method-assign]
    groups: dict[str, Any] = {"world": "world", "WORLD": dist.group.WORLD, "new": None}
    try:
        with aotcache.attach(ours, specs[rank], store=stores[rank], on_miss=on_miss[rank]) as handle:
            if warmed_up:
                _step(ours, eager, 16)
            first = handle.stats()
            handle.prefetch(group=groups[group] or dist.new_group([0, 1]))
            before = handle.stats()
            for length in drafter.BUCKETS:
                _step(ours, eager, length)
            handle.refresh()  # the store is looked at again, but not for what all agreed to leave
            _step(ours, eager, 16)
            after = handle.stats()
    finally:
        drafter.Layer.forward = plain  # type: ignore[method-assign]
    return {
        "loads": before["loads"],
        "later": after["loads"] - before["loads"],
        "hits": after["hits"] - before["hits"],
        "eager": after["eager_calls"] - before["eager_calls"],
        "eager before": first["eager_calls"],
        "traces": after["traces"],
    }


def _other_forward(self: drafter.Layer, x: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    return self.base(x) + x, self.again(x)


def _step(ours: drafter.Drafter, eager: drafter.Drafter, length: int) -> None:
    for model in (ours, eager):
        model.zero_grad()
        model(**make_batch(length)).backward()
    assert_same(gradients(ours), gradients(eager))
    with torch.no_grad():
        assert_close(ours(**make_batch(length, 1)), eager(**make_batch(length, 1)))
