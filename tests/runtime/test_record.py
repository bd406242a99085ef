"""Recording: what is kept of a run, what is left out, and that the run does not notice."""

from __future__ import annotations

import copy
import functools
import io
import json
import logging
import pickle
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aotcache
from aotcache.build.drafter import Drafter
from aotcache.errors import ArtifactMiss, CaptureError, ConfigError
from aotcache.recorded import EXAMPLES, Index, calls_folder, output_path, read_index
from aotcache.runtime.attach import Handle
from aotcache.spec import load_spec

MODULE = """
import torch
from torch import nn

from aotcache.flex import create_block_mask, flex_attention


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = 2.0

    def forward(self, x, weigh=None):
        y = torch.relu(self.linear(x)) * self.scale
        return y if weigh is None else weigh(y)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(4, 4)

    def forward(self, x, reduce=None, fail=False, add=0.0):
        if add:
            x.add_(add)
        table = torch.arange(4.0)
        for layer in self.layers:
            x = layer(x, weigh=lambda y: y * table)
        if fail:
            raise RuntimeError("on request")
        return x.mean() if reduce is None else reduce(x)


class DropIns(nn.Module):
    def __init__(self):
        super().__init__()
        self.keys = nn.Parameter(torch.randn(1, 1, 16, 8))

    def forward(self, x, docs):
        same = lambda b, h, q, kv: docs[q] == docs[kv]
        mask = create_block_mask(same, None, None, 16, 16, device="cpu")
        return flex_attention(x, self.keys, x, block_mask=mask).sum()


def build():
    return Model()


def doubled(x, factor=2.0):
    return x.sum() * factor
"""

SPEC = '[drafter]\nname = "d"\nfactory = "recorded_model:build"\nregions = ["layers.*"]\n'


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "recorded_model.py").write_text(MODULE)
    (folder / "drafter.toml").write_text(SPEC)
    sys.path.insert(0, str(folder))
    import recorded_model  # type: ignore[import-not-found]

    yield recorded_model
    sys.path.remove(str(folder))
    del sys.modules["recorded_model"]


class Own(Tensor):
    """A tensor subclass, which no artifact takes."""


class Run:
    """One recorded run: an output of its own, beside a module that it shares with the others."""

    def __init__(self, module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.module = module
        self.output = folder / "out.recorded.toml"
        self.spec = Path(module.__file__).with_name("drafter.toml")
        monkeypatch.setenv("AOTCACHE_RECORD", str(self.output))

    def attach(self, model: nn.Module, **options: Any) -> Handle:
        return aotcache.attach(model, self.spec, **options)

    @property
    def index(self) -> Index:
        return read_index(calls_folder(self.output))

    def drafter(self) -> Drafter:
        """What warming makes of the record."""
        return Drafter(load_spec(self.output), "cpu")


@pytest.fixture
def run(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(module, tmp_path, monkeypatch)


def x(rows: int = 2, **options: Any) -> Tensor:
    return torch.randn(rows, 4, **options)


def test_each_different_call_is_kept_with_some_examples_and_made_again(run: Run) -> None:
    model = run.module.build()
    with run.attach(model) as handle:
        for _ in range(5):
            model(x(2)).backward()
        model(x(3), reduce=run.module.doubled)
        model.eval()
        with torch.no_grad():
            model(x(2))
        stats = handle.stats()
    assert (stats["eager_calls"], stats["misses"], stats["hits"], stats["traces"]) == (14, 0, 0, 0)
    index = run.index
    assert [(c.mode, c.count, len(c.examples)) for c in index.calls] == [
        ("train", 5, EXAMPLES), ("train", 1, 1), ("infer", 1, 1),
    ]  # fmt: skip
    regions = [sorted(key.regions.items()) for key in index.keys.values()]
    # Without gradients the two layers are called alike, and share a key.
    assert sorted(regions) == [
        [("layers.0", 1)], [("layers.0", 1), ("layers.1", 1)], [("layers.0", 5)],
        [("layers.1", 1)], [("layers.1", 5)],
    ]  # fmt: skip
    drafter = run.drafter()
    for number, call in enumerate(index.calls, 1):
        other = "infer" if call.mode == "train" else "train"
        assert drafter.capture({"call": number}, other) == []  # type: ignore[arg-type]
        batches = drafter.capture({"call": number}, call.mode)
        assert len(batches) == max(2, len(call.examples))
        assert {c.parts.key for batch in batches for c in batch} == set(call.keys)
    with pytest.raises(CaptureError, match=r"no recorded call 7 .* expected one of \[1, 2, 3\]"):
        drafter.capture({"call": 7}, "train")
    first = [batch[0].tensors[-2] for batch in drafter.capture({"call": 1}, "train")]
    assert not torch.equal(first[0], first[1])  # examples of their own, for the numerics check


def test_the_module_behaves_as_an_eager_one(run: Run) -> None:
    model, eager = run.module.build(), run.module.build()
    eager.load_state_dict(model.state_dict())
    given = x(3, requires_grad=True)
    with run.attach(model):
        found = model(given)
        gradients = torch.autograd.grad(found, [given, *model.layers.parameters()])
    expected = eager(given)
    wanted = torch.autograd.grad(expected, [given, *eager.layers.parameters()])
    assert torch.equal(found, expected)
    assert all(torch.equal(a, b) for a, b in zip(gradients, wanted, strict=True))
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    model(given)
    assert run.index.calls[0].count == 1


def test_threads_replicas_and_copies_make_one_record(run: Run) -> None:
    def work(rows: int) -> None:
        model = run.module.build()
        with run.attach(model, forbid_tracing=None):
            for _ in range(4):
                model(x(rows)).backward()
            copy.deepcopy(model)(x(2)).backward()

    threads = [threading.Thread(target=work, args=(rows,)) for rows in (2, 3, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(call.count for call in run.index.calls) == [4, 11]


def test_a_call_that_cannot_be_kept_breaks_nothing_and_is_told_once(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    model = run.module.build()
    with caplog.at_level(logging.WARNING), run.attach(model):
        for _ in range(4):
            assert model(x(2), reduce=lambda y: y.sum()).requires_grad
        model(x(3))
    assert run.index.numbers() == [2]
    (problem,) = run.index.problems()
    assert "argument reduce of the drafter" in problem
    assert "(4 times)" in problem
    assert problem in run.output.read_text()
    assert len([r for r in caplog.records if r.message.startswith("a call is not recorded")]) == 1
    assert load_spec(run.output).buckets["call"] == (2,)


def test_arguments_that_the_drafter_changes_are_not_kept_as_if_they_were_the_old_ones(run: Run) -> None:
    model = run.module.build()
    with run.attach(model):
        model(x(2), add=1.0)
    assert run.index.numbers() == []
    assert "argument args[0] of the drafter is changed in place" in run.index.problems()[0]


def test_a_call_that_fails_is_none(run: Run) -> None:
    model = run.module.build()
    with run.attach(model):
        with pytest.raises(RuntimeError, match="on request"):
            model(x(2), fail=True)
        try:
            raise ValueError("an error that is being handled is not the call's")
        except ValueError:
            model(x(3))
    assert [call.count for call in run.index.calls] == [1]


def test_calls_outside_of_the_drafters_forward_are_named(run: Run) -> None:
    model = run.module.build()
    with run.attach(model):
        model.layers[0](x(2))
        model.forward(x(5))
        model(x(5))
    (problem,) = run.index.problems()
    assert "'layers.0' in mode train" in problem
    assert "outside of the drafter's own forward (once)" in problem
    assert run.index.numbers() == [1]


def test_drop_in_functions_are_found_and_named_where_they_stand_outside(run: Run, tmp_path: Path) -> None:
    spec = tmp_path / "functions.toml"
    spec.write_text(SPEC.replace(":build", ":DropIns").replace('["layers.*"]', "[]"))
    model, given, docs = run.module.DropIns(), torch.randn(1, 1, 16, 8), torch.arange(16) // 4
    spec = load_spec(spec)
    written = replace(spec, path=run.spec.with_name("functions.toml"))  # where its factory's module lies
    with aotcache.attach(model, written):
        model(given, docs).backward()
        run.module.flex_attention(given, given, given)
    index = run.index
    names = [name for key in index.calls[0].keys for name in index.keys[key].regions]
    assert sorted(names) == ["create_block_mask", "flex_attention"]
    (problem,) = index.problems()
    assert "'flex_attention' in mode infer" in problem
    (batch, _) = run.drafter().capture({"call": 1}, "train")
    assert {call.parts.key for call in batch} == set(index.calls[0].keys)


def test_what_no_region_gets_can_be_kept_out(run: Run) -> None:
    model = run.module.build()
    with run.attach(model) as handle:
        handle.recorder.leave_out("reduce")  # type: ignore[union-attr]
        model(x(2), reduce=lambda y: y.sum())
    (example,) = run.index.calls[0].examples
    assert example.kwargs == {}


def test_calls_that_no_artifact_can_take_are_named(run: Run) -> None:
    model = run.module.build()
    with run.attach(model):
        model(torch.randn(2, 4).as_subclass(Own))
        model(x(2))
    assert run.index.numbers() == [1]
    assert any("Own, expected a plain" in problem for problem in run.index.problems())


def test_the_drafter_can_be_saved_and_sent_while_it_is_recorded(run: Run) -> None:
    model = run.module.build()
    with run.attach(model):
        loaded = pickle.loads(pickle.dumps(model))
        torch.save(model, io.BytesIO())
        given = x(2)
        assert torch.equal(loaded(given), model(given))
    assert run.index.calls[0].count == 1


def test_a_drafter_that_is_not_the_one_of_the_run_is_not_built(run: Run) -> None:
    model = run.module.build()
    model.layers[0].linear.bias.requires_grad_(False)
    with run.attach(model):
        model(x(2))
    with pytest.raises(
        CaptureError, match=r"'layers\.0' \(train\).*linear\.bias.*no grad / .* grad.*factory"
    ):
        run.drafter().capture({"call": 1}, "train")


def test_a_context_that_the_spec_lacks_is_named(run: Run) -> None:
    model = run.module.build()
    with run.attach(model), torch.autocast("cpu", torch.bfloat16):
        model(x(2))
    with pytest.raises(CaptureError, match=r"ambient\.autocast differs: torch\.bfloat16.*/ off.*context"):
        run.drafter().capture({"call": 1}, "train")


def test_code_that_was_edited_since_is_built_as_it_is_now(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "edited_model.py").write_text(MODULE)
    spec = tmp_path / "edited.toml"
    spec.write_text(SPEC.replace("recorded_model", "edited_model"))
    monkeypatch.syspath_prepend(str(tmp_path))
    import edited_model  # type: ignore[import-not-found]

    model = edited_model.build()
    handle = aotcache.attach(model, spec, on_miss="record")
    model(x(2))
    handle.detach()
    (tmp_path / "edited_model.py").write_text(MODULE.replace("torch.relu", "torch.tanh"))
    del sys.modules["edited_model"]
    drafter = Drafter(load_spec(tmp_path / "edited.recorded.toml"), "cpu")
    (first, _) = drafter.capture({"call": 1}, "train")
    recorded = read_index(tmp_path / "edited.recorded.calls").calls[0].keys
    assert {call.parts.key for call in first}.isdisjoint(recorded)
    del sys.modules["edited_model"]


def test_a_lock_file_and_prefetch_ask_for_nothing(run: Run, tmp_path: Path) -> None:
    model = run.module.build()
    with run.attach(model, lock=tmp_path / "not warmed yet.lock") as handle:
        assert handle.prefetch()["loads"] == 0
        model(x(2))
    assert run.index.numbers() == [1]


def test_a_miss_of_a_spec_without_a_batch_says_to_record(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("AOTCACHE_RECORD")
    model = run.module.build()
    said = "to build it: aotcache record -- <this program>, then aotcache warm"
    with run.attach(model, store=str(tmp_path / "store")), pytest.raises(ArtifactMiss, match=said):
        model(x(2))


def test_a_record_goes_on_where_it_was_attached_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AOTCACHE_RECORD")
    for rows in (2, 3, 2):
        model = run.module.build()
        with run.attach(model, on_miss="record"):
            model(x(rows))
    output = output_path(load_spec(run.spec), None)
    assert output.parent == run.spec.parent
    assert [call.count for call in read_index(calls_folder(output)).calls] == [2, 1]
    assert output_path(load_spec(output), None) == output


def test_a_refused_record_leaves_nothing_on_the_model(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AOTCACHE_RECORD", str(run.spec))
    model = run.module.build()
    with pytest.raises(ConfigError, match="not overwritten"):
        run.attach(model)
    assert not model._forward_pre_hooks
    assert "forward" not in model.layers[0].__dict__


def test_a_disk_that_cannot_be_written_does_not_stop_the_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AOTCACHE_RECORD", str(tmp_path / "file" / "out.recorded.toml"))
    model = run.module.build()
    with caplog.at_level(logging.WARNING), run.attach(model):
        assert model(x(2)).requires_grad
    assert "cannot write the record" in caplog.text


def test_attach_leaves_a_note_for_the_command_that_records(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("AOTCACHE_RECORD_RUN", str(tmp_path / "run"))
    with run.attach(run.module.build()):
        pass
    (note,) = (tmp_path / "run").iterdir()
    assert json.loads(note.read_text()) == {"spec": str(run.spec), "output": str(run.output)}
    assert run.index.run == "run"
    assert load_spec(run.output).buckets == {"call": (1,)}


def test_arguments_are_functions_that_can_be_imported(run: Run) -> None:
    model = run.module.build()
    with run.attach(model):
        model(x(2), reduce=functools.partial(run.module.doubled, factor=3.0))
    (batch, _) = run.drafter().capture({"call": 1}, "train")
    assert [call.region.name for call in batch] == ["layers.0", "layers.1"]
