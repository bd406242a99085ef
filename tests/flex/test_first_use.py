"""attach(verify="first-use") compares the drop-in functions as it compares regions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import aotcache
from aotcache.runtime import registry
from aotcache.spec import Spec
from tests.flex import dropin
from tests.flex.conftest import SEQ


def trained(functions: Spec, verify: Any) -> list[Tensor]:
    model, given = dropin.build(), dropin.batch({"seq": SEQ}, seed=3, padding=5)[1]
    with aotcache.attach(model, functions, verify=verify) as handle:
        loss = model(**given)
        loss.backward()
        with torch.no_grad():
            model(**given)
    stats = handle.stats()
    assert stats["verified"] == (3 if verify else 0)
    assert stats["misses"] == stats["eager_calls"] == stats["traces"] == 0
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def test_masks_and_attention_pass_and_give_what_they_give_without_a_check(
    functions: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_opened", {})
    without = trained(functions, None)
    registry._opened.clear()
    for found, expected in zip(trained(functions, "first-use"), without, strict=True):
        assert torch.equal(found, expected)
