"""What the requirement cases share: REF, CLOSE, specs, copies of stores, fresh processes."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import aotcache
from aotcache.manifest import Manifest
from aotcache.spec import Spec, load_spec

ROOT = Path(__file__).resolve().parents[2]

_AXES = """
[axes]
x         = { 1 = "seq" }
target    = { 1 = "seq" }
documents = { 1 = "seq", pad = -1 }
"""


def write_spec(
    path: Path,
    *,
    factory: str = "tests.cases.tiny:build",
    batch_function: str = "tests.cases.tiny:batch",
    regions: Sequence[str] = ("blocks.*",),
    modes: Sequence[str] = ("train", "infer"),
    buckets: Mapping[str, Sequence[int]] | None = None,
    axes: str = _AXES,
    context: str | None = None,
    archs: Sequence[str] = ("native",),
    **kwargs: Any,
) -> Spec:
    """A spec in a file of its own. TINY-D's unless told otherwise; `kwargs` are the factory's."""
    sizes = {"batch": [2], "seq": [256]} if buckets is None else buckets
    lines = [
        "[drafter]",
        f'name = "{path.stem}"',
        f'factory = "{factory}"',
        f'batch = "{batch_function}"',
        f"regions = {json.dumps(list(regions))}",
        f"modes = {json.dumps(list(modes))}",
        *([f'context = "{context}"'] if context else []),
        "[drafter.kwargs]",
        *(f"{name} = {json.dumps(value)}" for name, value in kwargs.items()),
        "[buckets]",
        *(f"{name} = {json.dumps(list(ladder))}" for name, ladder in sizes.items()),
        axes,
        "[targets]",
        f"archs = {json.dumps(list(archs))}",
    ]
    path.write_text("\n".join(lines) + "\n")
    return load_spec(path)


def copy_store(
    source: str,
    folder: Path,
    manifests: Iterable[Manifest],
    change: Callable[[Manifest], Manifest] = lambda manifest: manifest,
) -> str:
    """A store of its own with some of another's artifacts, their manifests changed on the way."""
    opened, made = aotcache.open_store(source), aotcache.open_store(folder.as_uri())
    for manifest in manifests:
        archive = opened.blob_path(manifest.digest)
        assert archive is not None
        made.publish(change(manifest), archive)
    return made.url


Gradients = dict[str, Tensor | None]


def gradients_of(model: nn.Module) -> Gradients:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def step(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Gradients]:
    """One forward and backward from clean gradients."""
    model.zero_grad(set_to_none=True)
    loss = model(**batch)
    loss.backward()
    return loss.detach(), gradients_of(model)


def reference(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Gradients]:
    """REF of a model that is not attached: a copy, eagerly, with plain autograd."""
    return step(copy.deepcopy(model), batch)


def assert_close(ours: Tensor, want: Tensor) -> None:
    """CLOSE for fp32 outputs."""
    assert ours.shape == want.shape
    assert torch.isfinite(ours).all()
    assert (ours - want).abs().max() <= 1e-4


def assert_gradients_close(ours: Gradients, want: Gradients) -> None:
    """CLOSE for fp32 gradients; what is None in one is None in both."""
    assert ours.keys() == want.keys()
    for name, expected in want.items():
        found = ours[name]
        if expected is None or found is None:
            assert expected is found, name
            continue
        assert torch.isfinite(found).all(), name
        error = (found - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
        assert error <= 1e-3, (name, float(error))


def documents(rows: int, length: int, seed: int = 0) -> Tensor:
    """Three documents in each row."""
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.randint(1, length, (rows, 2), generator=generator)
    positions = torch.arange(length)
    return (positions >= cuts[:, :1]).long() + (positions >= cuts[:, 1:]).long()


def make_batch(rows: int = 2, length: int = 256, seed: int = 0) -> dict[str, Tensor]:
    """A batch for TINY and TINY-D."""
    generator = torch.Generator().manual_seed(seed)
    x, target = torch.randn(2, rows, length, 256, generator=generator)
    return {"x": x, "documents": documents(rows, length, seed), "target": target}


def start(
    module: str, *arguments: Any, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """A fresh process that runs `main(*arguments)` of a module under tests/cases."""
    code = f"import json, sys; from tests.cases.{module} import main; main(*json.loads(sys.argv[1]))"
    return subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
    )


def answers(processes: Iterable[subprocess.Popen[str]], seconds: float = 240) -> list[Any]:
    """The JSON that each process prints as its last line."""
    found = []
    for process in processes:
        out, err = process.communicate(timeout=seconds)
        assert process.returncode == 0, err
        found.append(json.loads(out.splitlines()[-1]))
    return found
