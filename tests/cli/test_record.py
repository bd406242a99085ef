"""`record` round a real program, `warm` of what it wrote, and the program again without a miss."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from aotcache.recorded import read_index
from aotcache.spec import load_spec
from tests.cli.conftest import Run

pytestmark = pytest.mark.slow

DRAFTER = """
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

SCALE = 2.0


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x, mask):
        q, k, v = self.qkv(x).unflatten(-1, (3, 1, 16)).permute(2, 0, 3, 1, 4)
        return flex_attention(q, k, v, block_mask=mask).transpose(1, 2).flatten(2) * SCALE


class Drafter(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer()])

    def forward(self, x, docs, loss):
        same = lambda b, h, q, kv: docs[b, q] == docs[b, kv]
        mask = create_block_mask(same, x.shape[0], None, x.shape[1], x.shape[1], device=x.device)
        for layer in self.layers:
            x = x + layer(x, mask)
        return loss(x)


def build():
    return Drafter()


def squares(x):
    return (x * x).mean()


def defined(model, x, docs):
    '''The same loss by the definition of attention, in float64.'''
    qkv = model.layers[0].qkv
    x = x.double()
    q, k, v = (x @ qkv.weight.double().T + qkv.bias.double()).unflatten(-1, (3, 16)).unbind(2)
    scores = (q @ k.transpose(1, 2)) / 4
    scores = scores.masked_fill(docs[:, :, None] != docs[:, None, :], float("-inf"))
    return squares(x + scores.softmax(-1) @ v * SCALE)
"""

SPEC = """
[drafter]
name = "recorded"
factory = "recorded_drafter:build"
regions = ["layers.*"]
"""

TRAIN = """
import json, os, sys, threading, torch, aotcache, recorded_drafter as drafter

torch.set_num_threads(1)
results = []

def work(seed):
    torch.get_num_threads()
    model = drafter.build()
    handle = aotcache.attach(model, "drafter.toml")
    made = torch.Generator().manual_seed(seed)
    worst = 0.0
    for _ in range(3):
        x, docs = torch.randn(2, 16, 16, generator=made), torch.randint(0, 3, (2, 16), generator=made)
        loss, wanted = model(x, docs, loss=drafter.squares), drafter.defined(model, x, docs)
        found = torch.autograd.grad(loss, model.parameters())
        expected = torch.autograd.grad(wanted, model.parameters())
        pairs = [(loss, wanted), *zip(found, expected)]
        worst = max([worst, *(float((a.double() - b).detach().abs().max()) for a, b in pairs)])
    stats = handle.stats()
    results.append({"worst": worst} | {k: stats[k] for k in ("hits", "misses", "eager_calls", "traces")})
    # No detach: what was recorded is written when the interpreter ends.

threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(json.dumps(results))
"""

STUCK = """
import sys, threading, torch, aotcache, recorded_drafter as drafter
model = drafter.build()
aotcache.attach(model, "drafter.toml")
for rows in (1, 2):
    model(torch.randn(rows, 16, 16), torch.zeros(rows, 16, dtype=torch.int64), loss=drafter.squares)
print("recorded", flush=True)
threading.Event().wait(120)
"""

ATTACH = """
import json, os, pathlib
# What attach leaves there, see tests/runtime/test_record.py.
note = pathlib.Path(os.environ["AOTCACHE_RECORD_RUN"], "1.json")
note.write_text(json.dumps({"spec": "d.toml", "output": "/none/d.recorded.toml"}))
"""

_PROGRAM = """
import signal
# Ignored where the tests were started in the background of a script.
signal.signal(signal.SIGINT, signal.default_int_handler)
from aotcache.cli import main
main()
"""


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _project(tmp_path_factory.mktemp("record"))


def _project(made: Path) -> Path:
    (made / "recorded_drafter.py").write_text(DRAFTER)
    (made / "drafter.toml").write_text(SPEC)
    (made / "train.py").write_text(TRAIN)
    (made / "stuck.py").write_text(STUCK)
    return made


def _aotcache(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        start_new_session=True,  # away from the terminal of the tests, which would send Ctrl-C to all
    )


def _done(process: subprocess.Popen[str]) -> Done:
    out, err = process.communicate(timeout=300)
    return Done(process.returncode, out, err)


@dataclass(frozen=True)
class Story:
    recorded: Done
    store: str
    trained: Any


@pytest.fixture(scope="module")
def story(folder: Path, warmed: Callable[..., str]) -> Story:
    """The program recorded, what it needs built, and the program run on that."""
    recorded = _done(_aotcache(folder, "record", "--", sys.executable, "train.py"))
    store = warmed(folder / "drafter.recorded.toml")
    trained = subprocess.run(
        [sys.executable, "train.py"], cwd=folder, check=True, capture_output=True, text=True
    )
    return Story(recorded, store, json.loads(trained.stdout))


def test_a_recorded_run_compiles_nothing_and_ends_with_what_to_build(story: Story, folder: Path) -> None:
    done = story.recorded
    assert done.code == 0, done.err
    results = json.loads(done.out.splitlines()[0])
    assert [(r["eager_calls"], r["hits"], r["misses"], r["traces"]) for r in results] == [(3, 0, 0, 0)] * 2
    lines = [line.split() for line in done.out.splitlines()[1:]]
    assert lines[0] == ["region", "mode", "call", "count", "store", "key"]
    assert lines[1][:5] == ["layers.0", "train", "1", "6", "missing"]
    assert done.out.endswith(f"to build: aotcache warm {folder / 'drafter.recorded.toml'}\n")
    index = read_index(folder / "drafter.recorded.calls")
    assert [(call.mode, call.count, len(call.examples)) for call in index.calls] == [("train", 6, 3)]


def test_what_was_warmed_is_all_that_the_program_needs(story: Story) -> None:
    for result in story.trained:
        assert (result["hits"], result["misses"], result["eager_calls"], result["traces"]) == (3, 0, 0, 0)
        assert result["worst"] < 1e-5


def test_why_names_what_the_nearest_entry_has_instead(story: Story, folder: Path, run: Run) -> None:
    (folder / "recorded_drafter.py").write_text(DRAFTER.replace("SCALE = 2.0", "SCALE = 3.0"))
    try:
        done = run("why", "--spec", folder / "drafter.recorded.toml", "--store", story.store)
    finally:
        (folder / "recorded_drafter.py").write_text(DRAFTER)
    assert done.code == 1, done.err
    lines = done.out.splitlines()
    assert lines[0].startswith("layers.0 train call=1 cpu:")
    nearest = next(line for line in lines if "nearest stored entry" in line)
    assert nearest.endswith("(region 'layers.0', bucket call=1); the spec / that entry:")
    assert any("SCALE differs: float:3.0 / float:2.0" in line for line in lines)


def test_ctrl_c_keeps_what_was_recorded_and_its_exit_code(tmp_path: Path) -> None:
    process = _aotcache(
        _project(tmp_path), "record", "--output", "kept", "--json", "--", sys.executable, "-u", "stuck.py",
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:  # with --json the program's own output goes there
        if line == "recorded\n":
            break
    process.send_signal(signal.SIGINT)
    done = _done(process)
    assert done.code == 128 + signal.SIGINT, done.err
    (record,) = json.loads(done.out)["records"]
    assert record["spec"] == str(tmp_path / "kept" / "drafter.recorded.toml")
    assert record["calls"] == 2
    assert {row["count"] for row in record["keys"]} == {1}
    spec = load_spec(record["spec"])
    assert spec.buckets == {"call": (1, 2)}
    assert spec.module_folder == tmp_path


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        ("pass", 1, "never came to aotcache.attach"),
        ("raise SystemExit(7)", 7, "never came to aotcache.attach"),
        (ATTACH, 1, "nothing was recorded of d.toml: aotcache.attach was called"),
    ],
)
def test_a_run_of_which_nothing_was_recorded_is_told(run: Run, program: str, code: int, said: str) -> None:
    done = run("record", "--", sys.executable, "-c", program)
    assert done.code == code
    assert said in done.err


def test_a_program_that_is_not_there_is_wrong_usage(run: Run) -> None:
    done = run("record", "--json", "--", "no-such-program", "--json")
    assert done.code == 2
    assert "no-such-program" in done.json["error"]["message"]
    assert run("record").code == 2
