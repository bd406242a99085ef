"""E11: gradients are synchronised and accumulated around artifacts as around eager modules."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases.conftest import Warm
from tests.loops import ranks


@pytest.fixture(scope="module")
def found(tiny_d: Warm) -> list[dict[str, Any]]:
    """What each of two ranks found, by `set_to_none`."""
    return ranks.run("tests.cases.parallel_steps:accumulation", str(tiny_d.spec.path), tiny_d.store)


@pytest.mark.slow
@pytest.mark.parametrize("set_to_none", [True, False])
def test_four_micro_batches_under_ddp(found: list[dict[str, Any]], set_to_none: bool) -> None:
    for of_rank in (each[str(set_to_none)] for each in found):
        assert of_rank["hits"] == 2 * 4 * 2  # steps, micro-batches, blocks
        assert (of_rank["misses"], of_rank["eager_calls"], of_rank["traces"]) == (0, 0, 0)
        assert of_rank["gradients alike"] == [True, True]
        assert of_rank["fired"] == of_rank["eager fired"]
        once = of_rank["fired"].pop("extra")
        # In each step one micro-batch uses it; everything else has a backward in all four.
        assert once == [2, 2]
        assert all(count == [8, 8] for count in of_rank["fired"].values())
