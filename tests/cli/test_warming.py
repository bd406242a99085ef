"""`warm` from nothing to covered, with a real build, and what `why` says before and after."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from aotcache.build import plan
from aotcache.lockfile import read_lock
from aotcache.store import open_store
from tests.homes import new_home

DRAFTER = """
import torch
from torch import nn

SCALE = 2.0


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(self.linear(x)) * SCALE


class Drafter(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.mean()


def build():
    return Drafter()


def batch(bucket, device):
    return (), {"x": torch.randn(2, bucket["seq"], 8, device=device)}
"""

SPEC = """
[drafter]
name = "warmed-drafter"
factory = "warmed_drafter:build"
batch = "warmed_drafter:batch"
regions = ["layers.*"]
modes = ["infer"]

[buckets]
seq = [16]
"""


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Aotcache = Callable[..., Done]

_PROGRAM = """
import signal
# Ignored where the tests were started in the background of a script.
signal.signal(signal.SIGINT, signal.default_int_handler)
from aotcache.cli import main
main()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("warm")
    (made / "warmed_drafter.py").write_text(DRAFTER)
    (made / "drafter.toml").write_text(SPEC)
    return made


@pytest.fixture(scope="module")
def aotcache(folder: Path) -> Aotcache:
    environment = {**os.environ, "AOTCACHE_HOME": str(new_home(folder / "home"))}

    def run(*arguments: str) -> Done:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, *arguments],
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
            env=environment,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture(scope="module")
def story(aotcache: Aotcache) -> dict[str, Done]:
    """The commands of a first warm, in order."""
    return {
        "plan": aotcache("warm", "drafter.toml", "--plan"),
        "check": aotcache("warm", "drafter.toml", "--check", "--json"),
        "why": aotcache("why", "--spec", "drafter.toml"),
        "warm": aotcache("warm", "drafter.toml", "--json"),
        "warm again": aotcache("warm", "drafter.toml"),
        "check again": aotcache("warm", "drafter.toml", "--check"),
        "why again": aotcache("why", "--spec", "drafter.toml"),
    }


def test_plan_shows_missing_cells_and_succeeds(story: dict[str, Done]) -> None:
    assert story["plan"].code == 0, story["plan"].err
    assert "layers.0" in story["plan"].out
    assert "missing, as layers.0" in story["plan"].out  # the second of two equal layers
    assert "2 cells, 1 build missing" in story["plan"].out
    assert "to build: aotcache warm drafter.toml\n" in story["plan"].err


def test_check_exits_one_where_a_cell_is_missing(story: dict[str, Done]) -> None:
    assert story["check"].code == 1, story["check"].err
    assert story["check"].json["missing"] == 1
    assert [cell["state"] for cell in story["check"].json["cells"]] == ["missing", "missing"]


def test_why_has_nothing_to_compare_with_in_an_empty_store(story: dict[str, Done]) -> None:
    assert story["why"].code == 1
    assert "holds no infer artifact" in story["why"].out


def test_warm_builds_once_and_writes_the_lock_file(story: dict[str, Done], folder: Path) -> None:
    assert story["warm"].code == 0, story["warm"].err
    report = story["warm"].json
    assert report["ok"] is True
    assert len(report["built"]) == 1
    digests = {cell["digest"] for cell in report["cells"]}
    assert digests == {report["built"][0]["digest"]}
    assert read_lock(Path(report["lock"])).digests() == digests
    assert Path(report["lock"]).parent == folder


def test_progress_off_a_terminal_is_plain_lines_on_stderr(story: dict[str, Done]) -> None:
    assert "[1/1] layers.0 infer seq=16" in story["warm"].err
    assert "\x1b" not in story["warm"].err
    assert "capture infer seq=16\n" in story["warm"].err
    assert "compile layers.0 infer seq=16" in story["warm"].err


def test_a_second_warm_says_that_all_is_covered(story: dict[str, Done]) -> None:
    assert story["warm again"].code == 0
    assert story["warm again"].out.startswith("2 cells: all covered, nothing to build")
    assert "all covered" in story["check again"].out


def test_ctrl_c_ends_a_warm_without_calling_it_a_failure(
    aotcache: Aotcache, folder: Path, tmp_path: Path
) -> None:
    source = DRAFTER + "\nimport os, signal, time\nos.kill(os.getppid(), signal.SIGINT)\ntime.sleep(60)\n"
    (tmp_path / "warmed_drafter.py").write_text(source)
    (tmp_path / "drafter.toml").write_text(SPEC)
    done = aotcache("warm", str(tmp_path / "drafter.toml"))
    assert done.code == 130
    assert done.err.endswith("run it again for the rest\n")
    assert "BuilderDied" not in done.err
    assert "Traceback" not in done.err
    assert not list((folder / "home").glob("warm-*"))


def test_a_covered_spec_passes_the_check(story: dict[str, Done]) -> None:
    assert story["check again"].code == 0
    assert story["why again"].code == 0
    assert "covered by" in story["why again"].out


def test_what_was_built_is_listed_shown_and_verified(story: dict[str, Done], aotcache: Aotcache) -> None:
    key = story["warm"].json["built"][0]["key"]
    assert key[:12] in aotcache("ls").out
    assert "accepted" in aotcache("why", key).out
    assert "against eager float64" in aotcache("show", key[:10]).out
    assert aotcache("verify").code == 0


def test_why_names_the_constant_that_was_changed(
    story: dict[str, Done], aotcache: Aotcache, folder: Path
) -> None:
    assert story["warm"].code == 0
    (folder / "warmed_drafter.py").write_text(DRAFTER.replace("SCALE = 2.0", "SCALE = 3.0"))
    try:
        done = aotcache("why", "--spec", "drafter.toml")
    finally:
        (folder / "warmed_drafter.py").write_text(DRAFTER)
    assert done.code == 1
    assert "SCALE differs: float:3.0 / float:2.0" in done.out


@pytest.mark.parametrize("target", ["cpu:z80", "cuda:sm_90"])
def test_a_target_that_cannot_be_built_is_wrong_usage(aotcache: Aotcache, target: str) -> None:
    done = aotcache("warm", "drafter.toml", "--plan", "--target", target)
    assert done.code == 2, done.out + done.err
    assert target in done.err
    assert "cpu:x86_64-avx2" in done.err


def test_what_was_built_agrees_when_it_is_run_again(story: dict[str, Done], aotcache: Aotcache) -> None:
    assert story["warm"].code == 0
    done = aotcache("verify", "--run", "--spec", "drafter.toml", "--json")
    assert done.code == 0, done.err
    assert done.json["ok"] is True
    (cell,) = done.json["cells"]  # both layers are one
    assert (cell["state"], cell["region"], cell["error"]) == ("agrees", "layers.0", None)
    assert cell["certificate"]["batches"] >= 2
    assert "compile" not in done.err
    assert "[1/1] layers.0 infer seq=16" in done.err


def test_an_artifact_that_computes_something_else_disagrees(
    story: dict[str, Done], aotcache: Aotcache, folder: Path, tmp_path: Path
) -> None:
    """What was built, validly described as that of a drafter with another constant."""
    assert story["warm"].code == 0
    (tmp_path / "other_drafter.py").write_text(DRAFTER.replace("SCALE = 2.0", "SCALE = 2.001"))
    spec = tmp_path / "other.toml"
    spec.write_text(SPEC.replace("warmed_drafter", "other_drafter"))
    (source,) = {m.digest: m for m in open_store(folder / "home" / "store").list()}.values()
    archive = open_store(folder / "home" / "store").blob_path(source.digest)
    assert archive is not None
    parts = next(iter(plan(spec))).cell.parts
    store = open_store(tmp_path / "store")
    assert store.publish(replace(source, key=parts.key, components=tuple(parts.to_json())), archive)
    done = aotcache("verify", "--run", "--spec", str(spec), "--store", store.url)
    assert done.code == 1
    assert "disagrees" in done.out
    assert "output 0 differs from float64 eager by " in done.out
    assert "0 of 1 stored artifacts agree" in done.out


def test_spec_without_run_is_wrong_usage(aotcache: Aotcache) -> None:
    assert aotcache("verify", "--spec", "drafter.toml").code == 2
