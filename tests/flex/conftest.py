"""The drop-in drafter, warmed once in a session for both of its uses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from aotcache.spec import Spec
from tests.cases.support import write_spec

SEQ = 64


@pytest.fixture(scope="session", autouse=True)
def _importable(importable: None) -> None:
    """Builders import `tests.flex`."""


def _spec(path: Path, regions: list[str], modes: list[str]) -> Spec:
    return write_spec(
        path,
        factory="tests.flex.dropin:build",
        batch_function="tests.flex.dropin:batch",
        regions=regions,
        modes=modes,
        buckets={"seq": [SEQ]},
    )


@pytest.fixture(scope="session")
def functions(tmp_path_factory: pytest.TempPathFactory, warmed: Callable[..., str]) -> Spec:
    """A spec that names no region: the drafter's functions alone are compiled."""
    spec = _spec(tmp_path_factory.mktemp("functions") / "functions.toml", [], ["train", "infer"])
    warmed(spec)
    return spec


@pytest.fixture(scope="session")
def layers(tmp_path_factory: pytest.TempPathFactory, warmed: Callable[..., str]) -> Spec:
    """A spec whose regions contain the calls of flex attention."""
    spec = _spec(tmp_path_factory.mktemp("layers") / "layers.toml", ["layers.*"], ["train"])
    warmed(spec)
    return spec
