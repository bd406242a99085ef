"""Records on disk: merging, numbers that stay, writers at once, damage."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aotcache.errors import ConfigError, ManifestError, SpecError
from aotcache.key import Component, KeyParts
from aotcache.recorded import (
    EXAMPLES,
    Example,
    Index,
    RecordedCall,
    RecordedKey,
    add,
    calls_folder,
    output_path,
    read_index,
    source_of,
)
from aotcache.spec import Spec, load_spec
from aotcache.types import CacheKey

ROOT = Path(__file__).parents[1]


@pytest.fixture
def spec(tmp_path: Path) -> Spec:
    return write_spec(tmp_path)


def write_spec(folder: Path, more: str = "") -> Spec:
    path = folder / "drafter.toml"
    path.write_text(f'[drafter]\nname = "d"\nfactory = "m:f"\nregions = ["layers.*"]\n{more}')
    return load_spec(path)


def parts_of(what: str) -> KeyParts:
    return KeyParts((Component("code", (("forward", "f"),)), Component("call", (("x", what),))))


def called(spec: Spec, folder: Path, *whats: str, run: str | None = None, count: int = 1) -> Index:
    """One call of the drafter that led to a region's call for each of `whats`, with its file."""
    folder.mkdir(exist_ok=True)
    index = Index(source_of(spec), run)
    keys: list[CacheKey] = []
    for what in whats:
        parts = parts_of(what)
        keys.append(parts.key)
        for component, plain in zip(parts.components, parts.to_json(), strict=True):
            index.components[component.digest] = plain
        digests = [component.digest for component in parts.components]
        index.keys[parts.key] = RecordedKey("train", {"layers.0": count}, digests)
    name = f"{'-'.join(whats)}-{len(list(folder.iterdir()))}.safetensors"
    (folder / name).write_bytes(b"")
    example = Example(name, [], {"x": 1}, True, True, [])
    index.calls.append(RecordedCall("train", sorted(keys), count, [example]))
    return index


def test_calls_keep_their_numbers_and_counts_add_up(spec: Spec) -> None:
    output = output_path(spec, None)
    folder = calls_folder(output)
    for what, count in (("b", 2), ("a", 1), ("b", 5), ("c", 1)):
        add(spec, output, called(spec, folder, what, count=count), seconds=10)
    index = read_index(folder)
    assert [call.count for call in index.calls] == [7, 1, 1]
    assert [call.keys for call in index.calls] == [[parts_of(what).key] for what in "bac"]
    assert index.keys[parts_of("b").key].regions == {"layers.0": 7}
    written = load_spec(output)
    assert written.buckets == {"call": (1, 2, 3)}
    assert written.drafter.modes == ["train"]
    assert (written.drafter.factory, written.drafter.regions) == ("m:f", ["layers.*"])
    assert written.calls_folder == folder


def test_no_more_examples_are_kept_than_needed(spec: Spec) -> None:
    output = output_path(spec, None)
    folder = calls_folder(output)
    for _ in range(EXAMPLES + 2):
        index = add(spec, output, called(spec, folder, "a"), seconds=10)
    assert len(index.calls[0].examples) == EXAMPLES
    assert {path.name for path in folder.glob("*.safetensors")} == index.files()


def test_a_run_begins_its_record_anew_and_its_ranks_add_to_it(spec: Spec) -> None:
    output = output_path(spec, None)
    folder = calls_folder(output)
    add(spec, output, called(spec, folder, "old", run="1"), seconds=10)
    add(spec, output, called(spec, folder, "a", run="2"), seconds=10)
    index = add(spec, output, called(spec, folder, "b", run="2"), seconds=10)
    assert set(index.keys) == {parts_of("a").key, parts_of("b").key}
    assert {path.name for path in folder.glob("*.safetensors")} == index.files()


def test_two_specs_of_one_run_do_not_share_a_file(spec: Spec, tmp_path: Path) -> None:
    output = tmp_path / "both.recorded.toml"
    folder = calls_folder(output)
    add(spec, output, called(spec, folder, "a", run="1"), seconds=10)
    other = write_spec(tmp_path, 'dtype = "bfloat16"\n')
    with pytest.raises(ConfigError, match=r"another spec.*--output"):
        add(other, output, called(other, folder, "b", run="1"), seconds=10)
    # Without a run, the spec may have been edited between two of them.
    index = add(other, output, called(other, folder, "b"), seconds=10)
    assert set(index.keys) == {parts_of("b").key}


def test_a_spec_that_somebody_wrote_is_not_overwritten(spec: Spec) -> None:
    with pytest.raises(ConfigError, match="not overwritten"):
        output_path(spec, spec.path)


def test_a_record_elsewhere_finds_the_modules_of_the_attached_spec(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "records").mkdir()
    spec = write_spec(tmp_path / "project", 'kwargs = { layers = 2, name = "a \\"b\\"" }\ncontext = "m:c"\n')
    (tmp_path / "project" / "recorded_elsewhere.py").write_text("def build(): return 7\n")
    output = output_path(spec, tmp_path / "records")
    add(spec, output, called(spec, calls_folder(output), "a"), seconds=10)
    written = load_spec(output)
    assert output == tmp_path / "records" / "drafter.recorded.toml"
    assert (written.drafter.kwargs, written.drafter.context) == (spec.drafter.kwargs, "m:c")
    assert written.resolve_argument("recorded_elsewhere:build")() == 7


def test_what_was_left_out_is_told_unless_a_kept_call_leads_there(spec: Spec) -> None:
    output = output_path(spec, None)
    folder = calls_folder(output)
    index = called(spec, folder, "a", "b")
    index.outside[parts_of("a").key] = 4
    index.left_out["region 'head': its argument has no stable value"] = 2
    lone = called(spec, folder, "c")
    lone.outside[parts_of("c").key] = 3
    lone.calls[0] = RecordedCall("train", lone.calls[0].keys, 1, [], "argument loss is a lambda")
    add(spec, output, index, seconds=10)
    merged = add(spec, output, lone, seconds=10)
    problems = "\n".join(merged.problems())
    assert "its argument has no stable value (2 times)" in problems
    assert "outside of the drafter's own forward (3 times)" in problems
    assert "(4 times)" not in problems
    assert "argument loss is a lambda (once)" in problems
    assert merged.numbers() == [1]
    for line in merged.problems():
        assert f"#   {line}" in output.read_text()


def test_processes_that_write_at_once_lose_nothing(spec: Spec, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from tests.test_recorded import add, called, calls_folder, load_spec, output_path\n"
        "spec = load_spec(sys.argv[2]); output = output_path(spec, None); folder = calls_folder(output)\n"
        "for i in range(5): add(spec, output, called(spec, folder, f'{sys.argv[3]}.{i}'), seconds=60)\n"
    )
    ranks = [
        subprocess.Popen([sys.executable, "-c", program, str(ROOT), str(spec.path), str(rank)])
        for rank in range(3)
    ]
    assert [rank.wait() for rank in ranks] == [0, 0, 0]
    output = output_path(spec, None)
    index = read_index(calls_folder(output))
    assert set(index.keys) == {parts_of(f"{rank}.{i}").key for rank in range(3) for i in range(5)}
    assert load_spec(output).buckets["call"] == tuple(range(1, 16))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: "{", "not an index"),
        (lambda d: json.dumps({**d, "format": 99}), "format 99"),
        (lambda d: json.dumps({**d, "more": 1}), "more"),
        (lambda d: json.dumps({**d, "components": {}}), "not an index"),
        (lambda d: json.dumps({**d, "keys": {"0" * 64: next(iter(d["keys"].values()))}}), "not that of"),
    ],
)
def test_a_damaged_index_is_refused(spec: Spec, change: Any, said: str) -> None:
    output = output_path(spec, None)
    folder = calls_folder(output)
    add(spec, output, called(spec, folder, "a"), seconds=10)
    path = folder / "index.json"
    path.write_text(change(json.loads(path.read_text())))
    with pytest.raises(ManifestError, match=said) as caught:
        read_index(folder)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('calls = "c"\nbatch = "m:b"\n[buckets]\ncall = [1]\n', "both batch and calls"),
        ('calls = "c"\n[buckets]\nseq = [1]\n', "expected call alone"),
        ('calls = "c"\n[buckets]\ncall = [1]\n[axes]\nx = { 0 = "call" }\n', "not padded"),
    ],
)
def test_a_spec_of_recorded_calls_is_nothing_else(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        write_spec(tmp_path, text)


def test_a_spec_without_batches_may_be_attached_and_not_built(spec: Spec) -> None:
    with pytest.raises(SpecError, match=r"drafter\.batch is missing.*aotcache record"):
        spec.resolve_batch()
