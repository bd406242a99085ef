"""A1: a second model is traced and compiled on request of a process whose threads are training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cases.conftest import Warm
from tests.cases.second import LAYERS
from tests.cases.support import answers, start, write_spec


@pytest.fixture(scope="module")
def report(tiny_d: Warm, specs: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    second = write_spec(
        specs / "second.toml",
        factory="tests.cases.second:build",
        batch_function="tests.cases.second:batch",
        regions=["layers.*"],
        modes=["infer"],
        buckets={"rows": [8]},
        axes="",
    )
    store = tmp_path_factory.mktemp("second-store").as_uri()
    process = start("training_beside_a_warm", str(tiny_d.spec.path), tiny_d.store, str(second.path), store)
    return answers([process], seconds=600)[0]


def test_the_second_model_was_built_meanwhile(report: Any) -> None:
    assert report["errors"] == []
    assert report["stages"].count("export") == LAYERS
    assert report["stages"].count("compile") == 1


def test_every_loss_is_bit_equal_to_that_of_a_quiet_process(report: Any) -> None:
    assert [len(losses) for losses in report["beside"]] == [200] * 4
    assert report["beside"] == report["quiet"]
    assert all(losses[-1] < losses[0] for losses in report["beside"])


def test_twenty_traces_give_one_graph(report: Any) -> None:
    assert len({built["key"] for built in report["built"]}) == LAYERS
    assert len({built["content"] for built in report["built"]}) == 1
    assert [built["reused"] for built in report["built"]].count(False) == 1


def test_nothing_was_traced_in_the_training_process(report: Any) -> None:
    assert report["counts"] == [0] * 5  # traces and misses of both runs, and the whole process
    assert report["same call"] is True
