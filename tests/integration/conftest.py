"""Specs of real drafters, warmed once per session."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor, nn

import aotcache
from aotcache.spec import Spec

HERE = Path(__file__).parent
NAMES = ("dflash", "eagle3", "peagle")


@dataclass(frozen=True)
class Warmed:
    """One drafter of the package: its spec, warmed, and how to build it and its batches."""

    name: str
    spec: Spec
    store: str
    report: Any
    drafters: ModuleType

    def build(self, **changes: Any) -> Any:
        """The spec's drafter; `attention="eager"` builds the reference."""
        return self.spec.resolve_factory()(**{**self.spec.drafter.kwargs, **changes})

    def batch(self, seed: int, **sizes: int) -> Any:
        """A batch of the spec's bucket, or of other sizes."""
        make: Callable[..., Any] = self.spec.resolve_batch()
        return make({**self.spec.cells()[0], **sizes}, "cpu", seed=seed)

    def attach(self, model: Any, **options: Any) -> Any:
        """Attach to what was warmed."""
        return aotcache.attach(model, self.spec, store=self.store, **options)


@pytest.fixture(scope="session")
def _specs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Copies, because warming writes a lock file beside the spec.
    folder = tmp_path_factory.mktemp("specs")
    for file in ("speculators_drafters.py", *(f"{name}.toml" for name in NAMES)):
        shutil.copy(HERE / file, folder)
    return folder


@pytest.fixture(scope="session")
def _warm_once(_specs: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Warmed]:
    store = (tmp_path_factory.mktemp("store") / "artifacts").as_uri()
    done: dict[str, Warmed] = {}

    def warm(name: str) -> Warmed:
        if name not in done:
            spec = aotcache.load_spec(_specs / f"{name}.toml")
            report = aotcache.warm(spec, store=store)
            for failed in report.failed:
                raise AssertionError(f"{failed.cell}: {failed.error}")
            spec.resolve_factory()
            done[name] = Warmed(name, spec, store, report, sys.modules["speculators_drafters"])
        return done[name]

    return warm


@pytest.fixture(params=NAMES)
def warmed(request: pytest.FixtureRequest, _warm_once: Callable[[str], Warmed]) -> Warmed:
    """Every drafter in turn."""
    return _warm_once(request.param)


@pytest.fixture
def warmed_named(_warm_once: Callable[[str], Warmed]) -> Callable[[str], Warmed]:
    """One drafter by name."""
    return _warm_once


@dataclass(frozen=True)
class WarmedModel:
    """A spec of this folder, warmed."""

    spec: Spec
    store: str

    def build(self, **changes: Any) -> Any:
        return self.spec.resolve_factory()(**{**self.spec.drafter.kwargs, **changes})

    def batch(self, length: int, seed: int) -> dict[str, Tensor]:
        make: Callable[..., Any] = self.spec.resolve_batch()
        return make({"seq": length}, "cpu", seed=seed)[1]  # type: ignore[no-any-return]

    def attach(self, model: nn.Module, **options: Any) -> Any:
        return aotcache.attach(model, self.spec, store=self.store, **options)

    @property
    def lock(self) -> str:
        return f"{self.spec.path}.lock"


@pytest.fixture(scope="session")
def transformers_specs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies, because warming writes a lock file beside the spec."""
    folder = tmp_path_factory.mktemp("transformers")
    for file in ("transformers_models.py", "llama.toml", "qwen3.toml"):
        shutil.copy(HERE / file, folder)
    return folder


@pytest.fixture(scope="session")
def models_of(transformers_specs: Path) -> Callable[[str], WarmedModel]:
    """Warms a spec once. Both share a store, and the masks that both need."""
    store = (transformers_specs / "store").as_uri()
    done: dict[str, WarmedModel] = {}

    def warm(name: str) -> WarmedModel:
        if name not in done:
            spec = aotcache.load_spec(transformers_specs / f"{name}.toml")
            report = aotcache.warm(spec, store=store)
            assert report.ok, [str(failed.error) for failed in report.failed]
            done[name] = WarmedModel(spec, store)
        return done[name]

    return warm


@pytest.fixture
def unwarmed(transformers_specs: Path, tmp_path: Path) -> Callable[[str], WarmedModel]:
    """A spec of this folder beside an empty store."""

    def find(name: str) -> WarmedModel:
        return WarmedModel(
            aotcache.load_spec(transformers_specs / f"{name}.toml"), (tmp_path / "empty").as_uri()
        )

    return find


@pytest.fixture
def eager(unwarmed: Callable[[str], WarmedModel]) -> Iterator[Any]:
    """A handle under which calls of `aotcache.flex` run without artifacts."""
    warmed = unwarmed("qwen3")
    with warmed.attach(nn.Module(), on_miss="eager") as handle:
        yield handle
        assert handle.stats()["traces"] == 0
