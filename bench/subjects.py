"""Specs to measure with: set up in a folder of their own, warmed, and loaded in any process."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.common import ROOT, fresh, main

if TYPE_CHECKING:
    import torch

    from aotcache.manifest import Manifest
    from aotcache.runtime.attach import Handle
    from aotcache.spec import Spec

_FILES = (
    "bench/flex.toml",
    "bench/flex_calls.py",
    "bench/layer.py",
    "bench/layer.toml",
    "bench/lengths.toml",
    "bench/sixteen.toml",
    "bench/stream.toml",
    "bench/stream_drafter.py",
    "examples/dflash/dflash_drafter.py",
)


@dataclass(frozen=True, slots=True)
class Subject:
    """What a spec names, ready to build."""

    spec: Spec
    factory: Callable[..., torch.nn.Module]
    make_batch: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]

    def build(self) -> Any:
        """A drafter; its measured part is the attribute `region`."""
        return self.factory(**self.spec.drafter.kwargs)

    def batch(self) -> dict[str, Any]:
        """A batch of the first bucket, as keyword arguments."""
        return self.make_batch(self.spec.cells()[0], "cpu")[1]


def lay_out(root: Path, name: str) -> Path:
    """Copy the specs into `root`, so that lock files are written there; the path of one of them."""
    folder = root / "specs"
    folder.mkdir(exist_ok=True)
    for file in _FILES:
        shutil.copy(ROOT / file, folder)
    return folder / f"{name}.toml"


@dataclass(frozen=True, slots=True)
class Place:
    """A warmed spec: the spec, the store and the home that it was warmed with."""

    root: Path
    spec: Path
    store: Path
    home: Path


@cache
def folder() -> Path:
    """A temporary folder of this process, gone with it."""
    path = Path(tempfile.mkdtemp(prefix="aotcache-bench-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@cache
def warmed(name: str) -> Place:
    """Warm one of the specs; once in a process, whichever benchmark asks first."""
    root = folder() / name
    root.mkdir()
    place = Place(root, lay_out(root, name), root / "store", root / "home")
    warm(place.spec, place.store, place.home)
    return place


def warm(spec: Path, store: Path, home: Path, *, jobs: int = 1) -> dict[str, Any]:
    """Warm a spec into a store, in a fresh process. Returns `{"seconds", "builds"}`."""
    return fresh(
        "bench.subjects",
        "warm",
        env={"AOTCACHE_HOME": str(home)},
        spec=str(spec),
        store=store.as_uri(),
        jobs=jobs,
    )


def side_warm(spec: str, store: str, jobs: int) -> dict[str, Any]:
    """Warm in this process; `seconds` is the whole of it, planning included."""
    import aotcache

    report = aotcache.warm(spec, store=store, jobs=jobs)
    for built in report.failed:
        raise RuntimeError(f"{built.cell}: {built.error}")
    return {"seconds": report.seconds, "builds": len(report.built)}


def load(spec: str | Path) -> Subject:
    """Import what a spec names."""
    from aotcache import load_spec

    found = load_spec(spec)
    return Subject(found, found.resolve_factory(), found.resolve_batch())


def check(handle: Handle) -> None:
    """Refuse a figure that was not measured on artifacts alone."""
    stats = handle.stats()
    if not stats["hits"] or stats["misses"] or stats["eager_calls"] or stats["traces"]:
        raise RuntimeError(f"not every call ran from an artifact: {stats}")


def manifests(store: Path, mode: str) -> list[Manifest]:
    """The stored artifacts of one mode."""
    from aotcache import open_store

    return [m for m in open_store(store.as_uri()).list() if m.mode == mode]


def archive(store: Path, manifest: Manifest, dest: Path) -> Path:
    """Copy an artifact's archive out of the store."""
    from aotcache import open_store

    open_store(store.as_uri()).fetch(manifest.digest, dest)
    return dest


def inputs(manifest: Manifest, model: Any, batch: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors of a call in slot order, for loaders that take a flat list."""
    named = dict(model.region.named_parameters())
    for name, value in batch.items():
        parts = (
            {f"{name}[{i}]": part for i, part in enumerate(value)}
            if isinstance(value, tuple)
            else {name: value}
        )
        named.update(parts)
    return [named[slot.name].detach() for slot in manifest.inputs]


def nothing(quick: bool) -> Any:
    """There is no report here: this module has a side only."""
    raise SystemExit("bench.subjects measures nothing; run python -m bench")


if __name__ == "__main__":
    main("subjects", nothing, {"warm": side_warm})
