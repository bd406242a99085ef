"""B3: batches that never repeat a shape run from two buckets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cases.conftest import Warm
from tests.cases.support import write_spec
from tests.loops import ranks

STEPS = 30
LADDER = (512, 1024)


@pytest.fixture(scope="module")
def ladder(specs: Path, warmed: Callable[..., str]) -> Warm:
    """TINY-D for one flat sample of up to 64 anchor blocks of 16."""
    spec = write_spec(specs / "ladder.toml", buckets={"batch": [1], "seq": LADDER}, modes=["train"], blocks=1)
    return Warm(spec, warmed(spec))


@pytest.mark.slow
def test_thirty_lengths_on_each_of_two_ranks(ladder: Warm) -> None:
    found = ranks.run(
        "tests.cases.parallel_steps:never_the_same_shape", str(ladder.spec.path), ladder.store, STEPS
    )
    for of_rank in found:
        assert len(set(of_rank["draws"])) == STEPS
        assert of_rank["hits"] == STEPS
        assert (of_rank["misses"], of_rank["eager_calls"], of_rank["traces"]) == (0, 0, 0)
        assert of_rank["used"].keys() == {str(rung) for rung in LADDER}
        assert sum(of_rank["used"].values()) == STEPS
        assert of_rank["loads"] == [2, 2]  # all of them before the first step
    assert found[0]["draws"] != found[1]["draws"]
    assert found[0]["weights"] == found[1]["weights"]
