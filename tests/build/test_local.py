"""Warming: what is refused and how it is told, builders that die, and one compile for one graph."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import aotcache
from aotcache.build import WarmReport, plan
from aotcache.errors import AotcacheError, BuilderDied, CaptureError, Unfingerprintable, UnsupportedGraph
from tests.homes import new_home

SPECS = Path(__file__).parent / "specs"
PROBE = Path(__file__).parents[1] / "runtime" / "specs"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def write_spec(folder: Path, factory: str, modes: list[str], **kwargs: Any) -> Path:
    shutil.copy(SPECS / "builds.py", folder)
    path = folder / "builds.toml"
    table = "\n".join(f"{k} = {json.dumps(v)}" for k, v in kwargs.items())
    path.write_text(
        f'[drafter]\nname = "builds"\nfactory = "builds:{factory}"\nbatch = "builds:batch"\n'
        f'regions = ["layers.*"]\nmodes = {json.dumps(modes)}\n'
        f"[drafter.kwargs]\n{table}\n[buckets]\nrows = [3]\n"
    )
    return path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = new_home(tmp_path / "home")
    monkeypatch.setenv("AOTCACHE_HOME", str(home))
    return home


def line_of(text: str) -> int:
    lines = (SPECS / "builds.py").read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if text in line)


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, AotcacheError]:
    """Why each region of one drafter could not be built."""
    folder = tmp_path_factory.mktemp("refused")
    spec = write_spec(folder, "build", ["train"], kinds=["input", "random", "alias"])
    report = aotcache.warm(spec, store=str(folder / "store"))
    assert not report.ok
    assert report.lock is None
    return {b.cell.region: b.error for b in report.failed if b.error is not None}


@pytest.mark.parametrize(
    ("kind", "operator", "line"),
    [
        ("input", "mul_", "changes what it was given"),
        ("random", "bernoulli", "draws by values"),
        ("alias", "slice", "shares memory"),
    ],
)
def test_a_refusal_names_region_operator_and_line(
    refused: dict[str, AotcacheError], kind: str, operator: str, line: str
) -> None:
    error = refused[f"layers.{kind}"]
    assert isinstance(error, UnsupportedGraph)
    text = str(error)
    assert f"region 'layers.{kind}'" in text
    assert f"builds.py:{line_of(line)}" in text
    assert operator in text


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("hook", UnsupportedGraph, r"region 'layers.hook': submodule 'lin' has a hook .*scale_output"),
        ("unstable", Unfingerprintable, r"region 'layers.unstable': .*generator is a torch.*Generator"),
        ("counts", UnsupportedGraph, r"region 'layers.counts': .*calls differs"),
    ],
)
def test_what_cannot_be_captured_is_refused_before_anything_is_built(
    tmp_path: Path, home: Path, kind: str, error: type[AotcacheError], text: str
) -> None:
    with pytest.raises(error, match=text):
        aotcache.warm(write_spec(tmp_path, "build", ["train"], kinds=[kind]), store=str(tmp_path / "store"))
    assert not list(home.glob("warm-*"))


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize(
    ("what", "text", "limits"),
    [
        ("exit", "exit code 7", {}),
        ("segfault", "SIGSEGV", {}),
        ("hang", "AOTCACHE_BUILD_SECONDS", {"AOTCACHE_BUILD_SECONDS": "12"}),
        ("memory", "AOTCACHE_BUILD_MEMORY", {"AOTCACHE_BUILD_MEMORY_GIB": "1"}),
    ],
)
def test_a_builder_that_dies_is_an_error_with_its_log(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, what: str, text: str, limits: dict[str, str]
) -> None:
    for name, value in limits.items():
        monkeypatch.setenv(name, value)
    told = tmp_path / "pid"
    spec = write_spec(tmp_path, "build_then", ["train"], what=what, pid_file=str(told))
    with pytest.raises(BuilderDied, match=text) as caught:
        aotcache.warm(spec, store=str(tmp_path / "store"))
    if what != "hang" or told.exists():
        assert "the factory was here" in caught.value.details["log"]
        assert _gone(int(told.read_text()))
    assert not list(home.glob("warm-*"))
    assert not list(aotcache.open_store(str(tmp_path / "store")).list())


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_builder_ends_with_its_parent(tmp_path: Path, home: Path, how: signal.Signals) -> None:
    told = tmp_path / "pid"
    spec = write_spec(tmp_path, "build_then", ["train"], what="hang", pid_file=str(told))
    warm = subprocess.Popen(
        [sys.executable, "-c", "import aotcache, sys; aotcache.warm(sys.argv[1])", str(spec)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    _until(lambda: told.exists() and told.read_text() != "")
    assert not _gone(int(told.read_text()))
    warm.send_signal(how)
    assert warm.wait(60) == -how
    _until(lambda: _gone(int(told.read_text())))


def _until(true: Callable[[], bool]) -> None:
    """Wait for it; the test's own limit ends what never comes."""
    while not true():
        time.sleep(0.05)


_KILLED = """
import os, signal, sys
import aotcache

class Kill:
    def planned(self, plan, builds): pass
    def finished(self, cell, seconds, error): pass
    def stage(self, cell, stage):
        if stage == "compile":
            os.kill(os.getpid(), signal.SIGKILL)

aotcache.warm(sys.argv[1], store=sys.argv[2], progress=Kill())
"""


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, WarmReport, int]:
    """Three layers in two modes, warmed after a first warm was killed in the middle of a compile."""
    folder = tmp_path_factory.mktemp("layers")
    spec = write_spec(folder, "build_layers", ["infer"])
    store = str(folder / "store")
    patch = pytest.MonkeyPatch()
    # Without the headers of the run: those that a killed compiler leaves are a part of it.
    patch.setenv("AOTCACHE_HOME", str(folder / "home"))
    try:
        killed = subprocess.run(
            [sys.executable, "-c", _KILLED, str(spec), store],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            check=False,
        )
        assert not list(aotcache.open_store(store).list())
        return spec, store, aotcache.warm(spec, store=store), killed.returncode
    finally:
        patch.undo()


def test_a_killed_warm_leaves_nothing_visible_and_nothing_locked(
    layers: tuple[Path, str, WarmReport, int],
) -> None:
    _, _, report, code = layers
    assert code == -signal.SIGKILL
    assert report.ok, [str(b.error) for b in report.failed]


def test_identical_graphs_are_compiled_once(layers: tuple[Path, str, WarmReport, int]) -> None:
    report = layers[2]
    built = {b.cell.region: b for b in report.built}
    assert len({b.cell.key for b in report.built}) == 3
    assert built["layers.a"].reused is False
    assert built["layers.b"].reused is True
    assert built["layers.c"].reused is False
    digests = [b.manifest.digest for b in report.built if b.manifest is not None]
    assert digests[0] == digests[1] != digests[2]
    assert str(report).startswith("3 cells: 3 built, 0 failed, in ")


def test_nothing_is_left_to_do(layers: tuple[Path, str, WarmReport, int]) -> None:
    spec, store, _, _ = layers
    again = aotcache.warm(spec, store=store)
    assert again.ok
    assert again.built == ()


def test_what_was_captured_in_eval_is_built_in_eval(layers: tuple[Path, str, WarmReport, int]) -> None:
    spec, store, _, _ = layers
    sys.path.insert(0, str(spec.parent))
    try:
        drafter = importlib.import_module("builds").build_layers()
    finally:
        sys.path.remove(str(spec.parent))
        del sys.modules["builds"]
    x = torch.randn(3, 4)
    drafter.eval()
    expected = drafter.layers.c(x)
    with aotcache.attach(drafter, spec, store=store), torch.no_grad():
        torch.testing.assert_close(drafter.layers.c(x), expected)
        assert torch.equal(expected.sign(), -torch.relu(x).sign())


@pytest.mark.parametrize("factory", ["build_meta", "build_fake"])
def test_factories_without_memory_ask_for_the_same_artifacts(tmp_path: Path, factory: str) -> None:
    keys = []
    for name in ("build", factory):
        folder = tmp_path / name
        folder.mkdir()
        shutil.copy(PROBE / "probe.py", folder)
        spec = folder / "probe.toml"
        spec.write_text((PROBE / "probe.toml").read_text().replace('"probe:build"', f'"probe:{name}"'))
        keys.append([row.cell.key for row in plan(spec, store=str(tmp_path / "store"))])
    assert keys[0] == keys[1]
    assert len(keys[0]) == 6


def test_calls_that_differ_between_batches_are_refused(tmp_path: Path, home: Path) -> None:
    spec = write_spec(tmp_path, "build", ["train"], kinds=["alias"])
    source = (tmp_path / "builds.py").read_text()
    grown = (
        source.replace('bucket["rows"], WIDTH', "next(ROWS), WIDTH")
        + "\nimport itertools\nROWS = itertools.count(1)\n"
    )
    (tmp_path / "builds.py").write_text(grown)
    with pytest.raises(CaptureError, match="in different ways"):
        aotcache.warm(spec, store=str(tmp_path / "store"))
