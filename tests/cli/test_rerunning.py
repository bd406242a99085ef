"""`verify --run` on artifacts that end the process which runs them, and on those that are not to be run."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aotcache.build import Cell, plan
from aotcache.build.plan import Row
from aotcache.build.rerun import rerun
from aotcache.config import settings
from aotcache.host import host_toolchain
from aotcache.manifest import InputSlot, Manifest, OutputSlot
from aotcache.recall import Recalls, publish_list
from aotcache.store import Store, open_store
from aotcache.trust import SigningKey, sign, trusted_keys
from aotcache.types import sha256
from tests.manifests import HOST, copies, make_manifest

LIBRARY = """
#include <stddef.h>
#include <stdlib.h>

int AOTInductorModelContainerCreateWithDevice(void **handle, size_t models, const char *device, const char *cubins) {
    *handle = (void *)1;
    return 0;
}
int AOTInductorModelContainerDelete(void *handle) { return 0; }
int AOTInductorModelContainerGetNumInputs(void *handle, size_t *number) { *number = 1; return 0; }
int AOTInductorModelContainerGetNumOutputs(void *handle, size_t *number) { *number = 1; return 0; }
int AOTInductorModelContainerRunSingleThreaded(void *handle, void **inputs, size_t number, void **outputs,
                                               size_t results, void *stream, void *proxy) {
    abort();
}
"""
"""Opens, and ends the process when it is run."""

DRAFTER = """
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


class Drafter(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(1.0), Layer(3.0), Layer(5.0), Layer(7.0)])

    def forward(self, x):
        return sum(layer(x).mean() for layer in self.layers)


def build():
    return Drafter()


def batch(bucket, device):
    return (), {"x": torch.randn(2, bucket["seq"], device=device)}
"""

SPEC = """
[drafter]
name = "handmade"
factory = "handmade:build"
batch = "handmade:batch"
regions = ["layers.*"]
modes = ["infer"]

[buckets]
seq = [16]
"""


def deadly_archive(folder: Path) -> tuple[Path, dict[str, Any]]:
    """An archive of that library, and its members."""
    source, library, path = folder / "library.c", folder / "library.so", folder / "archive.pt2"
    source.write_text(LIBRARY)
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(library)], check=True, timeout=60)
    member = "archive/data/aotinductor/forward/forward.so"
    with zipfile.ZipFile(path, "w") as package:
        package.write(library, member)
    return path, {member: sha256(library.read_bytes())}


def describe(cell: Cell, archive: tuple[Path, dict[str, Any]]) -> Manifest:
    """A manifest of a cell, of an archive that takes and gives one tensor."""
    path, members = archive
    made = make_manifest(
        path.read_bytes(),
        target=str(cell.target),
        toolchain=host_toolchain(),
        members=members,
        region=cell.region,
        mode="infer",
        inputs=(InputSlot("input", "x", "float32", (2, 16), (16, 1), False),),
        outputs=(OutputSlot("float32", (2, 16), (16, 1), False),),
        output_tree={"t": 0},
        pair=None,
    )
    return replace(made, key=cell.key, components=tuple(cell.parts.to_json()))


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    (tmp_path / "handmade.py").write_text(DRAFTER)
    path = tmp_path / "handmade.toml"
    path.write_text(SPEC)
    return path


def verify(spec: Path, store: Store, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "aotcache",
            "verify",
            "--run",
            "--spec",
            str(spec),
            "--store",
            store.url,
            *more,
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=spec.parent,
        timeout=300,
    )


def test_an_artifact_that_ends_its_process_costs_the_others_nothing(spec: Path, tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    deadly, rejected, again, missing = (row.cell for row in plan(spec, store=store))
    archive = deadly_archive(tmp_path)
    for cell in (deadly, again):
        assert store.publish(describe(cell, archive), archive[0])
    newer = replace(describe(rejected, archive), host=replace(HOST, glibc="99.0"))
    assert store.publish(newer, archive[0])
    done = verify(spec, store, "--json")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] is False
    cells = {cell["key"]: cell for cell in found["cells"]}
    assert cells[missing.key]["state"] == "missing"
    for cell, error, said in (
        (deadly, "BuilderDied", "SIGABRT"),
        (rejected, "RejectedArtifact", "99.0"),
        (again, "BuilderDied", "SIGABRT"),
    ):
        assert cells[cell.key]["state"] == "not checked"
        assert cells[cell.key]["error"]["type"] == error
        assert said in cells[cell.key]["error"]["message"]


def test_what_is_recalled_or_no_longer_signed_is_not_run(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where that came after the store was looked at."""
    monkeypatch.setenv("AOTCACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AOTCACHE_CONFIG_HOME", str(tmp_path / "config"))
    key, store, archive = SigningKey.generate(), copies(tmp_path / "copies"), deadly_archive(tmp_path)
    trusted_keys(settings()).add(key.public, "operator")
    before, later, unsigned, _ = (row.cell for row in plan(spec, store=store))
    for cell in (before, later, unsigned):
        assert store.publish(sign(describe(cell, archive), key), archive[0])

    def recall(cell: Cell) -> None:
        publish_list(store, key, Recalls(settings().home), recall={cell.key: "bad"}, seconds=3600.0)

    recall(before)

    def meanwhile(row: Row) -> bool:
        if row.cell.key == unsigned.key:
            recall(later)
            assert store.publish(describe(unsigned, archive), archive[0], replace=True)
        return True

    found = {one.cell.key: one for one in rerun(spec, store=store, wanted=meanwhile)}
    for cell, error in (
        (before, "RecalledArtifact"),
        (later, "RecalledArtifact"),
        (unsigned, "RejectedArtifact"),
    ):
        assert type(found[cell.key].error).__name__ == error
        assert "is not run" in str(found[cell.key].error)
