"""Two minutes of everything at once. `python -m tests.faults --soak-minutes 20` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import soak


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_everything_that_was_acknowledged_outlives_a_service_that_is_killed_again_and_again(
    tmp_path: Path,
) -> None:
    tally = soak.run(2.0, tmp_path, restart_seconds=30)
    tally.require()
    assert tally.acknowledged > 20
    for what in ("read", "stored", "collections", "copies collected", "recalls"):
        assert tally.notes[what] > 0, (what, tally.notes)
