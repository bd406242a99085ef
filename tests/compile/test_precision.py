"""The float64 reference draws the numbers of the working precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from aotcache.compile.precision import working_precision
from aotcache.errors import CertificateFailed
from aotcache.manifest import InputSlot
from tests.compile.flat import assert_close
from tests.compile.test_effects import attentions, dropouts, factories, fills
from tests.compile.uncompiled import prepare


def _drawn(fn: Callable[..., Any], x: torch.Tensor) -> list[InputSlot]:
    return [slot for slot in prepare(fn, [x], train=False).inputs if slot.draw is not None]


@pytest.mark.parametrize("fn", [dropouts, attentions, factories, fills])
def test_wide_results_are_those_of_the_working_precision_but_for_its_roundings(
    fn: Callable[..., Any],
) -> None:
    x = torch.randn((360,) if fn is attentions else (4, 5), generator=torch.Generator().manual_seed(3))
    drawn = _drawn(fn, x)
    torch.manual_seed(0)
    low = fn(x)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        with working_precision(drawn, "r"):
            wide = fn(x.double())
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), state)
    for i, (got, want) in enumerate(zip(low, wide, strict=True)):
        assert want.dtype in (torch.float64, torch.int64, torch.bool)
        assert_close(got, want, f"output {i}", bound=1e-5)


def test_gradients_flow_through_dropout_in_the_reference() -> None:
    def dropped(x):
        return (F.dropout(x * x, 0.5),)

    x = torch.full((4, 5), 3.0)
    drawn = _drawn(dropped, x)
    leaf = x.double().requires_grad_()
    with working_precision(drawn, "r"):
        (out,) = dropped(leaf)
    (gradient,) = torch.autograd.grad(out.sum(), leaf)
    assert torch.equal(gradient, torch.where(out > 0, 12.0, 0.0).double())


def test_more_or_fewer_draws_than_the_artifact_makes_are_an_error() -> None:
    x = torch.ones(3, dtype=torch.float64)
    drawn = _drawn(lambda x: (F.dropout(x, 0.5),), torch.ones(3))
    with (
        pytest.raises(CertificateFailed, match="2 times, the artifact 1 times"),
        working_precision(drawn, "r"),
    ):
        F.dropout(F.dropout(x, 0.5), 0.5)
    with (
        pytest.raises(CertificateFailed, match="0 times, the artifact 1 times"),
        working_precision(drawn, "r"),
    ):
        F.dropout(x, 0.5, training=False)
