from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aotcache.errors import SpecError
from aotcache.spec import CompileOptions, InputAxes, load_spec
from aotcache.types import Target

FULL = """
[drafter]
name    = "dflash-8b"
factory = "spec_test_drafters:build"
kwargs  = { layers = 5 }
batch   = "spec_test_drafters:batch"
regions = ["layers.*"]
modes   = ["train", "infer"]
dtype   = "bfloat16"
context = "spec_test_drafters:context"

[buckets]
seq = [4096, 1024, 2048]
anchors = [256]

[axes]
hidden_states = { 1 = "seq" }
input_ids     = { 1 = "seq", pad = 0 }
document_ids  = { -1 = "seq", pad = -1 }
targets.hidden = { 0 = "anchors", 1 = "seq" }

[compile]
max_autotune = true
memory_budget = 0.5

[targets]
archs = ["native", "cpu:x86_64-avx2", "cpu:x86_64-avx512"]
"""

LEAST = '[drafter]\nname = "d"\nfactory = "m:f"\nbatch = "m:b"\n'

MODULE = """
import contextlib
def build(layers): return ["layer"] * layers
def batch(bucket, device):
    import spec_test_neighbour
    return (), {"x": spec_test_neighbour.VALUE}
@contextlib.contextmanager
def context(): yield "inside"
not_callable = 3
"""


@pytest.fixture(autouse=True)
def _imports_are_undone(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in [n for n in sys.modules if n.startswith("spec_test_")]:
        del sys.modules[name]


def write(folder: Path, text: str, name: str = "aotcache.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_every_table_is_read(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, FULL))
    assert spec.path == tmp_path / "aotcache.toml"
    assert (spec.drafter.name, spec.drafter.dtype) == ("dflash-8b", "bfloat16")
    assert spec.drafter.kwargs == {"layers": 5}
    assert spec.drafter.regions == ["layers.*"]
    assert spec.drafter.modes == ["train", "infer"]
    assert spec.buckets == {"seq": (1024, 2048, 4096), "anchors": (256,)}
    assert spec.axes == (
        InputAxes("hidden_states", ((1, "seq"),), 0),
        InputAxes("input_ids", ((1, "seq"),), 0),
        InputAxes("document_ids", ((-1, "seq"),), -1),
        InputAxes("targets.hidden", ((0, "anchors"), (1, "seq")), 0),
    )
    assert spec.compile == CompileOptions(max_autotune=True, memory_budget=0.5)
    assert spec.compile_options() == {"max_autotune": True, "memory_budget": 0.5}


def test_the_least_spec_has_defaults(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, LEAST))
    assert spec.drafter.regions == [""]
    assert spec.drafter.modes == ["train", "infer"]
    assert spec.drafter.dtype == "float32"
    assert spec.cells() == [{}]
    assert spec.archs == ("native",)
    assert spec.compile_options() == {"max_autotune": False, "memory_budget": 1.0}


def test_cells_are_the_product_of_the_ladders(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, LEAST + "[buckets]\nseq = [128, 64]\nkv = [2, 1]\n"))
    assert spec.cells() == [
        {"seq": 64, "kv": 1},
        {"seq": 64, "kv": 2},
        {"seq": 128, "kv": 1},
        {"seq": 128, "kv": 2},
    ]


def test_targets_come_once_and_native_is_probed_only_when_asked_for(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, FULL))
    native = Target.parse("cpu:x86_64-avx512")
    assert spec.targets(lambda: native) == (native, Target.parse("cpu:x86_64-avx2"))
    named = load_spec(write(tmp_path, LEAST + '[targets]\narchs = ["cuda:sm_90"]\n'))
    assert named.targets(pytest.fail) == (Target.parse("cuda:sm_90"),)


def test_a_spec_is_found_by_default_by_folder_and_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, LEAST)
    write(tmp_path, LEAST, "other.toml")
    monkeypatch.chdir(tmp_path)
    assert load_spec().path == load_spec(tmp_path).path == tmp_path / "aotcache.toml"
    assert load_spec("other").path == load_spec("other.toml").path == tmp_path / "other.toml"
    with pytest.raises(SpecError, match=r"no spec gone\.toml \(looked for [^,]*gone\.toml\)"):
        load_spec("gone.toml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (LEAST.replace("factory", "factroy"), ["drafter.factory is missing", "did you mean 'factory'"]),
        (LEAST + "[bucket]\nseq = [1]\n", ["bucket is not known", "did you mean 'buckets'"]),
        (LEAST + "[compile]\nmax_autotune = 1\n", ["compile.max_autotune", "boolean", "found 1 (int)"]),
        (LEAST + "[compile]\nmemory_budget = 2.0\n", ["compile.memory_budget", "less than or equal to 1"]),
        (LEAST + "[compile]\nautotune = true\n", ["compile.autotune", "did you mean 'max_autotune'"]),
        (LEAST.replace('"m:f"', '"m.f"'), ["drafter.factory", "'m.f'", "package.module:name"]),
        (LEAST + 'dtype = "bf16"\n', ["drafter.dtype", "bfloat16", "'bf16'"]),
        (LEAST + 'modes = ["training"]\n', ["drafter.modes.0", "'train'", "'training'"]),
        (LEAST + 'regions = "layers.*"\n', ["drafter.regions", "list", "'layers.*'"]),
        (LEAST + '[buckets]\nseq = ["1024"]\n', ["buckets.seq.0", "integer", "'1024'"]),
        (LEAST + "[buckets]\nseq = [true]\n", ["buckets.seq.0", "integer"]),
        (LEAST + "[buckets]\nseq = [0]\n", ["buckets.seq.0", "greater than 0"]),
        (LEAST + "[buckets]\nseq = []\n", ["buckets.seq", "at least 1"]),
        (LEAST + "[buckets]\nseq = [8, 8]\n", ["buckets.seq", "each size once"]),
        (LEAST + '[buckets]\nseq = [8]\n[axes]\nx = { 1 = "sqe" }\n', ["axes.x.1", "did you mean 'seq'"]),
        (LEAST + '[axes]\nx = { 1 = "seq" }\n', ["axes.x.1", "there are none"]),
        (LEAST + '[buckets]\nseq = [8]\n[axes]\nx = { one = "seq" }\n', ["axes.x.one", "axis number"]),
        (LEAST + "[axes]\nx = { pad = 0 }\n", ["axes.x", "no axis"]),
        (LEAST + "[axes]\nx = {}\n", ["axes.x", "no axis"]),
        (LEAST + '[buckets]\nseq = [8]\n[axes]\nx = { 1 = "seq", pad = "0" }\n', ["axes.x.pad", "number"]),
        (LEAST + '[targets]\narchs = ["avx2"]\n', ["targets.archs", "'avx2'", "native"]),
        ("drafter = 3\n", ["drafter", "found 3"]),
        ("", ["drafter is missing"]),
        ("[drafter\n", ["not TOML", "line 1"]),
    ],
)
def test_what_is_wrong_is_named_with_file_table_key_and_what_was_found(
    tmp_path: Path, text: str, said: list[str]
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    for part in [*said, str(path)]:
        assert part in str(caught.value)


def test_every_mistake_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec(write(tmp_path, LEAST + 'dtype = 3\ncontxt = "m:c"\n[compile]\nx = 1\n'))
    assert len(str(caught.value).splitlines()) == 3


def test_a_spec_that_is_not_there_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"drafter\.toml"):
        load_spec(tmp_path / "drafter")
    with pytest.raises(SpecError, match=r"aotcache\.toml"):
        load_spec(tmp_path)


def test_a_spec_may_name_no_region_where_drop_in_functions_are_all_there_is(tmp_path: Path) -> None:
    assert load_spec(write(tmp_path, LEAST + "regions = []\n")).drafter.regions == []


def test_names_are_resolved_from_the_specs_own_folder(tmp_path: Path) -> None:
    (tmp_path / "spec_test_drafters.py").write_text(MODULE)
    (tmp_path / "spec_test_neighbour.py").write_text("VALUE = 7\n")
    spec = load_spec(write(tmp_path, FULL))
    assert spec.resolve_factory()(layers=2) == ["layer", "layer"]
    assert spec.resolve_batch()({}, "cpu") == ((), {"x": 7})
    with spec.resolve_context()() as inside:
        assert inside == "inside"
    assert sys.path.count(str(tmp_path)) == 1


def test_without_a_context_nothing_is_done(tmp_path: Path) -> None:
    with load_spec(write(tmp_path, LEAST)).resolve_context()():
        pass


def test_reading_a_spec_runs_nothing_of_the_users(tmp_path: Path) -> None:
    (tmp_path / "spec_test_drafters.py").write_text("raise SystemExit('ran')")
    load_spec(write(tmp_path, FULL))


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (None, ["drafter.factory", "spec_test_drafters", "ModuleNotFoundError"]),
        ("1 / 0", ["ZeroDivisionError"]),
        ("def builds(): ...", ["no build", "did you mean 'builds'"]),
        ("build = 3", ["found int", "callable"]),
    ],
)
def test_a_name_that_cannot_be_resolved_is_told(tmp_path: Path, module: str | None, said: list[str]) -> None:
    if module is not None:
        (tmp_path / "spec_test_drafters.py").write_text(module)
    spec = load_spec(write(tmp_path, FULL))
    with pytest.raises(SpecError) as caught:
        spec.resolve_factory()
    for part in [*said, str(spec.path)]:
        assert part in str(caught.value)


def test_a_module_of_the_same_name_from_another_spec_is_never_used(tmp_path: Path) -> None:
    specs: list[Any] = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "spec_test_drafters.py").write_text(MODULE)
        specs.append(load_spec(write(tmp_path / name, FULL)))
    specs[0].resolve_factory()
    with pytest.raises(SpecError) as caught:
        specs[1].resolve_factory()
    assert str(tmp_path / "one" / "spec_test_drafters.py") in str(caught.value)
    assert str(tmp_path / "two" / "spec_test_drafters.py") in str(caught.value)


def test_reading_a_spec_loads_no_torch(tmp_path: Path) -> None:
    path = write(tmp_path, FULL)
    code = (
        "import sys; from aotcache import load_spec; "
        "load_spec(sys.argv[1]); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], cwd=Path(__file__).parents[1], check=True)
