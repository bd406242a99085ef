"""What every test shares: a home of its own, and no GPU tests where there is no GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Before torch is loaded, for child processes as well: several test processes on a few cores would wait for
# each other's spinning threads most of the time.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_LONG = ("cases", "runtime", "integration", "build", "cli", "faults", "api")
"""Folders whose tests take longest, the longest first."""


@pytest.fixture(scope="session", autouse=True)
def _home_of_this_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Points AOTCACHE_HOME, also of child processes, away from the user's own cache."""
    home = tmp_path_factory.mktemp("aotcache-home")
    # Precompiled headers of torch's, which all processes of a run share.
    headers = (home.parents[1] if "PYTEST_XDIST_WORKER" in os.environ else home.parent) / "headers"
    headers.mkdir(mode=0o700, exist_ok=True)
    (home / "headers").symlink_to(headers)
    patch = pytest.MonkeyPatch()
    patch.setenv("AOTCACHE_HOME", str(home))
    patch.setenv("AOTCACHE_CONFIG_HOME", str(home / "config"))
    patch.delenv("AOTCACHE_TOKEN", raising=False)
    patch.delenv("AOTCACHE_STORE", raising=False)
    yield home
    patch.undo()


@pytest.fixture(scope="session")
def importable() -> Iterator[None]:
    """Builders and fresh processes find `tests` as this process does."""
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[1]))
    yield
    patch.undo()


@pytest.fixture(scope="module", autouse=True)
def _wires_end_with_their_module() -> Iterator[None]:
    """No file's tests may leave a drafter attached: it would forbid tracing to all that follow."""
    yield
    tripwire = sys.modules.get("aotcache.runtime.tripwire")
    left = tripwire._points.wires if tripwire is not None else ()
    for wire in left:
        wire.close()
    assert not left


@pytest.fixture(autouse=True)
def _circuits_end_with_their_test() -> Iterator[None]:
    """What one test could not reach, another may ask at once."""
    yield
    circuit = sys.modules.get("aotcache.store.circuit")
    if circuit is not None:
        circuit._circuit.cache_clear()


@pytest.fixture(scope="session")
def warmed(_home_of_this_run: Path) -> Callable[..., str]:
    """Warms a spec once in a session, into the store of this run; returns the store's URL."""
    import aotcache

    done: dict[tuple[str, str], str] = {}

    def warm(spec: Any, **options: Any) -> str:
        loaded = aotcache.load_spec(spec) if isinstance(spec, str | Path) else spec
        mark = (str(loaded.path), repr(options))
        if mark not in done:
            report = aotcache.warm(loaded, **options)
            assert report.ok, [str(built.error) for built in report.failed]
            done[mark] = aotcache.open_store(options.get("store")).url
        return done[mark]

    return warm


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long folders first, so that none is left for one process at the end."""
    order = {name: number for number, name in enumerate(_LONG)}
    items.sort(key=lambda item: order.get(item.path.parent.name, len(order)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than cores, since a seventh of the time is spent waiting; each may need some gigabytes."""
    return min(4, (os.cpu_count() or 1) + 1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of one folder run in one process (`make test` starts several): they share what they compile."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFolder(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return nodeid.partition("::")[0].rpartition("/")[0]

    return ByFolder(config, log)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """tests/gpu is collected only where a CUDA device is."""
    if collection_path.name == "gpu" and collection_path.parent == Path(__file__).parent:
        import torch

        return not torch.cuda.is_available() or None
    return None
