"""Specs and artifacts that the requirement cases share; each is warmed once in a session."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import aotcache
from aotcache.lockfile import lock_path, read_lock
from aotcache.manifest import Manifest
from aotcache.spec import Spec
from aotcache.trust import SigningKey, TrustedKeys
from tests.cases.places import Places
from tests.cases.support import write_spec
from tests.services.s3 import s3_server
from tests.services.serving import serving


@dataclass(frozen=True)
class Warm:
    """A spec and the store that covers it."""

    spec: Spec
    store: str

    def manifests(self, mode: str | None = None) -> list[Manifest]:
        """What the spec's lock file names, or that of one mode, each once."""
        cells = read_lock(lock_path(self.spec.path)).cells
        keys = dict.fromkeys(cell.key for cell in cells if mode in (None, cell.mode))
        opened = aotcache.open_store(self.store)
        return [manifest for key in keys for manifest in opened.lookup(key)]


@pytest.fixture(scope="session", autouse=True)
def _importable(importable: None) -> None:
    """Builders import `tests.cases`."""


@pytest.fixture(scope="session")
def specs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for specs, and for the lock files beside them."""
    return tmp_path_factory.mktemp("specs")


@pytest.fixture(scope="session")
def tiny_d(specs: Path, warmed: Callable[..., str]) -> Warm:
    """TINY-D with two blocks: the first one's input needs no gradient, the second one's does."""
    spec = write_spec(specs / "tiny_d.toml", blocks=2, marked=True)
    return Warm(spec, warmed(spec))


@pytest.fixture(scope="session")
def levels(specs: Path, warmed: Callable[..., str]) -> Warm:
    """TINY-D for batch 4 without gradients, for every CPU level that this host has."""
    archs = ["cpu:x86_64-avx2"]
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        archs.append("cpu:x86_64-avx512")
    spec = write_spec(
        specs / "levels.toml", modes=["infer"], buckets={"batch": [4], "seq": [256]}, archs=archs
    )
    return Warm(spec, warmed(spec))


@pytest.fixture(scope="session")
def noisy(specs: Path, warmed: Callable[..., str]) -> Warm:
    """Dropout alone, and a region with dropout, running statistics and results that alias."""
    spec = write_spec(
        specs / "noisy.toml",
        factory="tests.cases.noisy:build",
        batch_function="tests.cases.noisy:batch",
        regions=["drop", "statistics"],
        buckets={"rows": [64]},
        axes="",
    )
    return Warm(spec, warmed(spec))


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    """Stores of every kind, with one bucket server and one service behind them."""
    key = SigningKey.generate()
    folder = tmp_path_factory.mktemp("places")
    TrustedKeys(folder / "service" / "config" / "trusted").add(key.public, "builder")
    with s3_server(folder / "s3") as s3, serving(folder / "service") as service:
        yield Places(s3, service, key)


_opened: list[str] | None = None


def _listen(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "ctypes.dlopen" and _opened is not None:
        _opened.append(str(arguments[0]))


@pytest.fixture(scope="session")
def _audit() -> None:
    # An audit hook cannot be taken away again: one for the session.
    sys.addaudithook(_listen)


@pytest.fixture
def opened(_audit: None) -> Iterator[list[str]]:
    """Names of the libraries that were opened during the test."""
    global _opened
    _opened = []
    yield _opened
    _opened = None
