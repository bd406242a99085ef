"""E9: the last batch is smaller, and other on every rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cases.conftest import Warm
from tests.cases.support import write_spec
from tests.loops import ranks

_AXES = """
[axes]
x         = { 0 = "batch" }
target    = { 0 = "batch" }
documents = { 0 = "batch", pad = -1 }
"""


@pytest.fixture(scope="module")
def padded(specs: Path, warmed: Callable[..., str]) -> Warm:
    """TINY-D for 8 samples, of which some may be padding."""
    spec = write_spec(
        specs / "samples.toml", buckets={"batch": [8], "seq": [256]}, axes=_AXES, modes=["train"], blocks=1
    )
    return Warm(spec, warmed(spec))


@pytest.mark.slow
def test_ddp_trains_to_the_last_sample(padded: Warm) -> None:
    found = ranks.run(
        "tests.cases.parallel_steps:smaller_last_batch", str(padded.spec.path), padded.store
    )  # whoever waits 30 s for the other fails
    for of_rank in found:
        assert of_rank["hits"] == 4
        assert (of_rank["misses"], of_rank["eager_calls"], of_rank["traces"]) == (0, 0, 0)
        assert of_rank["loads"] == [1, 1]
    assert found[0]["weights"] == found[1]["weights"]
