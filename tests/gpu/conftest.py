"""Specs for the CUDA device of this machine. The folder is collected only where there is one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aotcache import host
from aotcache.spec import Spec
from tests.cases.support import write_spec

DEVICE = torch.device("cuda")

pytestmark = pytest.mark.gpu


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test of this folder is marked."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session", autouse=True)
def _exact(importable: None) -> None:
    """Cases compare with TF32 off; builders import `tests.gpu`."""
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(scope="session")
def warm_gpu(tmp_path_factory: pytest.TempPathFactory, warmed: Callable[..., str]) -> Callable[..., Spec]:
    """Writes and warms a spec for this machine's GPU, once for each name."""
    folder = tmp_path_factory.mktemp("gpu")
    made: dict[str, Spec] = {}

    def warm(name: str, **options: Any) -> Spec:
        if name not in made:
            target = str(host.host_target(DEVICE.type))
            made[name] = write_spec(folder / f"{name}.toml", archs=[target], **options)
            warmed(made[name])
        return made[name]

    return warm
