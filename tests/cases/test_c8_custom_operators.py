"""C8: an artifact that needs an operator says so before it is opened, and names who has it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cases.conftest import Warm
from tests.cases.support import answers, start, write_spec


@pytest.fixture(scope="module")
def softened(specs: Path, warmed: Callable[..., str]) -> Warm:
    spec = write_spec(
        specs / "softened.toml",
        factory="tests.cases.softening:build",
        batch_function="tests.cases.softening:batch",
        regions=["layer"],
        modes=["infer"],
        buckets={"rows": [8]},
        axes="",
    )
    return Warm(spec, warmed(spec))


@pytest.fixture(scope="module")
def outcomes(softened: Warm, tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Any]:
    """What fresh processes, each with a home of its own, make of it: without the operator,
    with its module, and with another operator of that name."""
    operators = [None, "tests.cases.custom_op", "tests.cases.other_op"]
    homes = [str(tmp_path_factory.mktemp("home")) for _ in operators]
    processes = [
        start(
            "softening", str(softened.spec.path), softened.store, operator,
            environment={"AOTCACHE_HOME": home, "TMPDIR": home},
        )
        for operator, home in zip(operators, homes, strict=True)
    ]  # fmt: skip
    return dict(zip(operators, answers(processes), strict=True))


def test_the_operator_and_its_module_are_recorded(softened: Warm) -> None:
    [manifest] = softened.manifests()
    [(name, recorded)] = manifest.host.operators.items()
    assert name.startswith("aotcache_cases::soften")
    assert recorded["module"] == "tests.cases.custom_op"
    assert "float scale" in recorded["schema"]


def test_without_the_operator_it_is_refused_by_name(outcomes: dict[str | None, Any]) -> None:
    found = outcomes[None]
    assert len(found["refused"]) == 2  # at prefetch, and at the call
    for refusal in found["refused"]:
        assert refusal.startswith("ArtifactMiss")
        assert "needs operator aotcache_cases::soften" in refusal
        assert "import tests.cases.custom_op" in refusal
    assert (found["loads"], found["left"]) == (0, [])


def test_once_the_operator_is_there_the_same_process_runs_it(outcomes: dict[str | None, Any]) -> None:
    assert outcomes[None]["error"] <= 1e-4


def test_with_the_operator_it_is_right(outcomes: dict[str | None, Any]) -> None:
    found = outcomes["tests.cases.custom_op"]
    assert found["refused"] == []
    assert found["loads"] == 1
    assert found["error"] <= 1e-4


def test_with_another_signature_it_is_refused(outcomes: dict[str | None, Any]) -> None:
    found = outcomes["tests.cases.other_op"]
    assert len(found["refused"]) == 2
    for refusal in found["refused"]:
        assert refusal.startswith("ArtifactMiss")
        assert "aotcache_cases::soften" in refusal
        assert "offset" in refusal
    assert (found["loads"], found["left"]) == (0, [])


def test_the_package_is_run_by_torchs_own_loader_and_says_so(softened: Warm) -> None:
    [manifest] = softened.manifests()
    assert manifest.runner == "torch"
