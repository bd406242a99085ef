"""DDP and FSDP2 around attached drafters, with every kind of checkpointing, wrapped before or after."""

from __future__ import annotations

from typing import Any

import pytest

from tests.loops import parallel, ranks
from tests.loops.conftest import Warm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def found(warm: Warm) -> list[dict[str, Any]]:
    """What each of two ranks found: started once for all scenarios."""
    return ranks.run("tests.loops.parallel:run", str(warm.spec.path), warm.store)


@pytest.mark.parametrize("scenario", parallel.SCENARIOS)
def test_losses_gradients_and_weights_equal_eager(found: list[dict[str, Any]], scenario: str) -> None:
    for of_rank in found:
        result = of_rank[scenario]
        assert result["error"] is None, result["error"]
        assert (result["misses"], result["eager_calls"], result["traces"]) == (0, 0, 0)
        # Two layers in each step, and once more each where they are checkpointed.
        micros = 3 if scenario.endswith("accumulate") else 1
        again = 1 if " / none / " in scenario else 2
        assert result["hits"] == 2 * parallel.STEPS * micros * again
