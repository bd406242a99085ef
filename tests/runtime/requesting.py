"""What ranks and a single process do with `on_miss="request"`, against a service that is there."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

import aotcache
from aotcache.config import Settings
from aotcache.spec import load_spec
from aotcache.store.local import locked
from tests.build.specs import serviced
from tests.services.building import until

NAMES = "ab"
LIMIT = 120.0


def ranks(rank: int, environments: list[dict[str, str]], spec: str, digests: list[str]) -> dict[str, Any]:
    """Both layers of the drafter come one after the other; rank 1 has neither before it may fetch it."""
    os.environ.update(environments[rank])
    model = serviced.build(NAMES).eval()
    x = torch.randn(3, serviced.WIDTH)
    found: dict[str, Any] = {"steps": []}
    with torch.no_grad(), aotcache.attach(model, load_spec(spec), on_miss="request") as handle:

        def step() -> None:
            handle.refresh(group="world")
            model(x)
            stats = handle.stats()
            found["steps"].append([stats["hits"], stats["eager_calls"]])

        def ready() -> int:
            assert handle.requests is not None
            return len(handle.requests.ready())

        config = Settings()
        tier = handle.resolver.store.local.url  # type: ignore[attr-defined]
        locks = [locked(config.locks, f"{tier} {digest}", LIMIT) for digest in digests]
        if rank == 1:
            for lock in locks:
                lock.__enter__()  # as a process that fetches them
        step()
        if rank == 0:
            until(lambda: ready() == len(digests))
        dist.barrier()
        step()
        found["ready"] = ready()
        if rank == 1:
            locks[0].__exit__(None, None, None)
            until(lambda: ready() == 1)
        dist.barrier()
        step()
        if rank == 1:
            locks[1].__exit__(None, None, None)
            until(lambda: ready() == 1)
        dist.barrier()
        step()
        found["stats"] = handle.stats()
    return found
