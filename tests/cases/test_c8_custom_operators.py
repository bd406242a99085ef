"""C8: an artifact that needs an operator says so before it is opened, and names who has it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.cases.conftest import Warm
from tests.cases.places import KINDS, Places
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


Outcomes = dict[str | None, dict[str, Any]]


@pytest.fixture(scope="module")
def outcomes(softened: Warm, places: Places, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """What fresh processes make of it with every kind of store: without the operator, with its module, and with
    another operator of that name. Each has homes of its own."""
    operators = [None, "tests.cases.custom_op", "tests.cases.other_op"]
    with ExitStack() as stack:
        processes = []
        for operator in operators:
            made = {}
            for kind in KINDS:
                folder = tmp_path_factory.mktemp("host")
                place = stack.enter_context(places.place(kind, folder, softened.store, softened.manifests()))
                made[kind] = {"url": place.url, "environment": place.environment}
            processes.append(start("softening", str(softened.spec.path), made, operator))
        return dict(zip(operators, answers(processes), strict=True))


def test_the_operator_and_its_module_are_recorded(softened: Warm) -> None:
    [manifest] = softened.manifests()
    [(name, recorded)] = manifest.host.operators.items()
    assert name.startswith("aotcache_cases::soften")
    assert recorded["module"] == "tests.cases.custom_op"
    assert "float scale" in recorded["schema"]


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_operator_it_is_refused_by_name(outcomes: Outcomes, kind: str) -> None:
    found = outcomes[None][kind]
    assert len(found["refused"]) == 2  # at prefetch, and at the call
    for refusal in found["refused"]:
        assert refusal.startswith("ArtifactMiss")
        assert "needs operator aotcache_cases::soften" in refusal
        assert "import tests.cases.custom_op" in refusal
    assert (found["loads"], found["left"]) == (0, [])


@pytest.mark.parametrize("kind", KINDS)
def test_once_the_operator_is_there_the_same_process_runs_it(outcomes: Outcomes, kind: str) -> None:
    assert outcomes[None][kind]["error"] <= 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_with_the_operator_it_is_right(outcomes: Outcomes, kind: str) -> None:
    found = outcomes["tests.cases.custom_op"][kind]
    assert found["refused"] == []
    assert found["loads"] == 1
    assert found["error"] <= 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_with_another_signature_it_is_refused(outcomes: Outcomes, kind: str) -> None:
    found = outcomes["tests.cases.other_op"][kind]
    assert len(found["refused"]) == 2
    for refusal in found["refused"]:
        assert refusal.startswith("ArtifactMiss")
        assert "aotcache_cases::soften" in refusal
        assert "offset" in refusal
    assert (found["loads"], found["left"]) == (0, [])


def test_the_package_is_run_by_torchs_own_loader_and_says_so(softened: Warm) -> None:
    [manifest] = softened.manifests()
    assert manifest.runner == "torch"
