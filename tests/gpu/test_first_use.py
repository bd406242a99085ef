"""attach(verify="first-use") on the device: dropout is compared, and stays what it is without a check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import aotcache
from aotcache.runtime import registry
from aotcache.spec import Spec
from tests.cases.noisy import ROWS, batch, build
from tests.gpu.conftest import DEVICE


@pytest.fixture(scope="module")
def spec(warm_gpu: Callable[..., Spec]) -> Spec:
    return warm_gpu(
        "noisy_first_use",
        factory="tests.cases.noisy:build",
        batch_function="tests.cases.noisy:batch",
        regions=["drop", "statistics"],
        modes=["train"],
        buckets={"rows": [ROWS]},
        axes="",
    )


def trained(spec: Spec, verify: Any) -> list[Tensor]:
    torch.manual_seed(5)
    model, given = build().to(DEVICE), batch({"rows": ROWS}, DEVICE)[1]
    with aotcache.attach(model, spec, verify=verify) as handle:
        loss = model(given["x"])
        loss.backward()
    stats = handle.stats()
    assert stats["verified"] == (2 if verify else 0)
    assert stats["misses"] == stats["traces"] == 0
    assert given["x"].grad is not None
    return [
        loss.detach(),
        given["x"].grad,
        *(b.clone() for b in model.buffers()),
        torch.rand(8, device=DEVICE),
    ]


def test_draws_buffers_and_gradients_are_those_of_one_run(
    spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_opened", {})
    without = trained(spec, None)
    registry._opened.clear()
    for found, expected in zip(trained(spec, "first-use"), without, strict=True):
        assert torch.equal(found, expected)
