"""What every test shares: a home of its own, and no GPU tests where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def _home_of_this_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Points AOTCACHE_HOME, also of child processes, away from the user's own cache."""
    home = tmp_path_factory.mktemp("aotcache-home")
    patch = pytest.MonkeyPatch()
    patch.setenv("AOTCACHE_HOME", str(home))
    patch.delenv("AOTCACHE_STORE", raising=False)
    yield home
    patch.undo()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """tests/gpu is collected only where a CUDA device is."""
    if collection_path.name == "gpu" and collection_path.parent == Path(__file__).parent:
        import torch

        return not torch.cuda.is_available() or None
    return None
