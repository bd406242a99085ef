"""A spec's drafter, run for capture: how what goes wrong is told, and what padding may change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from aotcache.build.drafter import Drafter
from aotcache.errors import AotcacheError, CaptureError, CertificateFailed, SpecError
from aotcache.spec import load_spec

SOURCE = """
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class Output:
    loss: torch.Tensor


class Drafter(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList([nn.Linear(4, 4)])
        self.drop = nn.Dropout(0.5)
        self.register_buffer("average", torch.ones(()))

    def forward(self, x, weights=None):
        x = self.layers[0](x)
        if self.kind == "drops":
            x = self.drop(x)
        if self.kind == "noise":
            x = x + torch.randn_like(x)
        if self.kind == "adds" and x.shape[1] != weights.shape[1]:
            x = x + weights[..., None]  # the line
        if self.kind == "anchors":
            real = weights[0].nonzero().squeeze(-1)
            return x[:, real[torch.randperm(len(real))[:3]]].pow(2).mean()
        if self.kind == "counts":
            return x.pow(2).mean()
        if self.kind == "divides":
            return (x.pow(2).mean(-1) * weights).sum() / (weights - weights).sum()
        if self.kind == "counts in a dataclass":
            return Output(x.pow(2).mean())
        if self.kind == "keeps":
            x = x * self.average
            with torch.no_grad():
                self.average.mul_(0.5)
        return (x.pow(2).mean(-1) * weights).sum()


def build(kind):
    if kind == "raises":
        torch.load("no such checkpoint")  # the file
    drafter = Drafter(kind)
    if kind == "not loaded":
        with torch.no_grad():
            drafter.layers[0].weight.fill_(torch.nan)
    return drafter


def batch(bucket, device):
    size = bucket["seq"]
    return (), {"x": torch.randn(2, size, 4), "weights": torch.ones(2, size)}
"""

WEIGHTS = 'weights = { 1 = "seq" }'


def drafter(folder: Path, kind: str, axes: str = WEIGHTS, regions: str = "layers.*") -> Drafter:
    module = f"drafter_of_{folder.name}".replace("-", "_")
    (folder / f"{module}.py").write_text(SOURCE)
    spec = folder / "drafter.toml"
    spec.write_text(
        f'[drafter]\nname = "d"\nfactory = "{module}:build"\nbatch = "{module}:batch"\n'
        f'kwargs = {{ kind = "{kind}" }}\nregions = ["{regions}"]\n[buckets]\nseq = [8]\n'
        f'[axes]\nx = {{ 1 = "seq" }}\n{axes}\n'
    )
    return Drafter(load_spec(spec), "cpu")


def line_of(text: str) -> int:
    return next(i for i, line in enumerate(SOURCE.splitlines(), 1) if text in line)


def test_dropout_beside_the_regions_is_not_taken_for_padding_that_counts(tmp_path: Path) -> None:
    made = drafter(tmp_path, "drops")
    assert [len(calls) for calls in made.capture({"seq": 8}, "train")] == [1, 1, 1]


def test_noise_that_eval_mode_does_not_stop_is_named(tmp_path: Path) -> None:
    with pytest.raises(CertificateFailed, match="run twice in eval mode, changes scalar result 0"):
        drafter(tmp_path, "noise").capture({"seq": 8}, "train")


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_anchors_drawn_among_real_positions_are_the_same_with_padding(tmp_path: Path, mode: Any) -> None:
    state = torch.random.get_rng_state()
    made = drafter(tmp_path, "anchors").capture({"seq": 8}, mode)
    assert [len(calls) for calls in made] == [1, 1, 1]
    assert not torch.equal(torch.random.get_rng_state(), state)  # batches go on being drawn anew


def test_what_a_drafter_keeps_is_not_taken_for_padding_that_counts(tmp_path: Path) -> None:
    made = drafter(tmp_path, "keeps")
    assert [len(calls) for calls in made.capture({"seq": 8}, "train")] == [1, 1, 1]
    # The runs that are compared begin and end with the same values; the two batches before them do not.
    assert float(made.model.average) == 0.25


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("kind", ["counts", "counts in a dataclass"])
def test_padding_that_counts_in_the_loss_is_refused(tmp_path: Path, mode: Any, kind: str) -> None:
    with pytest.raises(CertificateFailed, match="padded positions must not count"):
        drafter(tmp_path, kind).capture({"seq": 8}, mode)


def test_weights_that_are_loaded_later_do_not_hide_what_padding_changes(tmp_path: Path) -> None:
    made = drafter(tmp_path, "not loaded")
    assert [len(calls) for calls in made.capture({"seq": 8}, "train")] == [1, 1, 1]
    assert made.model.layers[0].weight.isfinite().all()


def test_a_loss_that_is_not_finite_is_not_taken_for_randomness(tmp_path: Path) -> None:
    with pytest.raises(CertificateFailed, match="not padded yet, makes scalar result 0 inf"):
        drafter(tmp_path, "divides").capture({"seq": 8}, "train")


@pytest.mark.parametrize(
    ("kind", "axes", "said", "line"),
    [
        ("raises", WEIGHTS, "the factory failed at ", "# the file"),
        ("adds", "", "given a batch of {'seq': 6} that [axes] pads to {'seq': 8}, failed at ", "# the line"),
    ],
)
def test_a_failure_names_the_line_of_the_users_own_code(
    tmp_path: Path, kind: str, axes: str, said: str, line: str
) -> None:
    with pytest.raises(CaptureError) as caught:
        drafter(tmp_path, kind, axes).capture({"seq": 8}, "train")
    assert said in str(caught.value)
    assert f".py:{line_of(line)}: " in str(caught.value)


def test_a_list_of_modules_is_no_region(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"'layers' is a ModuleList .* its members are 'layers\.\*'"):
        drafter(tmp_path, "drops", regions="layers")


def test_a_drafter_that_torch_compile_wraps_is_told_what_to_take(tmp_path: Path) -> None:
    from aotcache.graph.capture import find_regions

    with pytest.raises(AotcacheError, match="take the module itself, its _orig_mod"):
        find_regions(torch.compile(torch.nn.Linear(2, 2)), ["layers.*"], {})  # type: ignore[arg-type]
