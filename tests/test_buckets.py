from __future__ import annotations

from collections import UserDict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aotcache.buckets import Buckets
from aotcache.errors import NoBucket, SpecError
from aotcache.spec import InputAxes

SEQ = Buckets(
    {"seq": (8, 16, 32)},
    (
        InputAxes("hidden", ((1, "seq"),)),
        InputAxes("ids", ((-1, "seq"),), -1),
    ),
)


def batch(size: int = 5, ids: int | None = None) -> dict[str, Any]:
    return {
        "hidden": torch.arange(2.0 * size * 3).reshape(2, size, 3),
        "ids": torch.arange(2 * (size if ids is None else ids)).reshape(2, -1),
        "scale": torch.ones(2),
        "name": "x",
    }


ladders = st.dictionaries(
    st.sampled_from("abc"),
    st.sets(st.integers(1, 40), min_size=1, max_size=5).map(lambda rungs: tuple(sorted(rungs))),
    min_size=1,
)


@given(ladders, st.data())
def test_the_chosen_bucket_holds_the_sizes_and_no_smaller_one_does(
    ladder: dict[str, tuple[int, ...]], data: st.DataObject
) -> None:
    buckets = Buckets(ladder)
    sizes = {dim: data.draw(st.integers(0, max(rungs))) for dim, rungs in ladder.items()}
    chosen = buckets.choose(sizes)
    holding = [cell for cell in buckets.cells() if all(cell[dim] >= sizes[dim] for dim in sizes)]
    assert chosen in holding
    assert all(all(chosen[dim] <= cell[dim] for dim in sizes) for cell in holding)


@given(st.integers(1, 32), st.integers(1, 3), st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
def test_padding_keeps_the_batch_adds_the_value_and_is_cut_away(
    size: int, rows: int, dtype: torch.dtype
) -> None:
    buckets = Buckets({"seq": (8, 16, 32)}, (InputAxes("x", ((1, "seq"),), 7),))
    x = torch.randint(-100, 100, (rows, size, 2)).to(dtype)
    padded = buckets.pad({"x": x})
    found = padded.batch["x"]
    assert found.shape == (rows, padded.bucket["seq"], 2)
    assert found.dtype == dtype
    assert torch.equal(found[:, :size], x)
    assert bool((found[:, size:] == 7).all())
    assert torch.equal(buckets.cut(found, {"": {1: "seq"}}, padded.sizes), x)


def test_only_named_axes_of_named_inputs_are_padded() -> None:
    given_batch = batch()
    padded = SEQ.pad(given_batch)
    assert padded.bucket == {"seq": 8}
    assert padded.sizes == {"seq": 5}
    assert padded.batch["hidden"].shape == (2, 8, 3)
    assert padded.batch["ids"].tolist()[0] == [0, 1, 2, 3, 4, -1, -1, -1]
    assert padded.batch["scale"] is given_batch["scale"]
    assert padded.batch["name"] == "x"
    assert given_batch["hidden"].shape == (2, 5, 3)


def test_a_batch_that_fills_its_bucket_is_passed_on() -> None:
    given_batch = batch(16)
    padded = SEQ.pad(given_batch)
    assert padded.bucket == {"seq": 16}
    assert padded.batch is given_batch


def test_a_batch_that_is_too_large_names_dimension_size_and_ladder() -> None:
    with pytest.raises(NoBucket, match=r"seq = 33.*8, 16, 32") as caught:
        SEQ.pad(batch(33))
    assert caught.value.details == {"dimension": "seq", "size": 33, "ladder": (8, 16, 32)}


def test_inputs_that_disagree_are_both_named() -> None:
    with pytest.raises(NoBucket, match=r"size 5 at axis 1 of 'hidden' but 6 at axis -1 of 'ids'"):
        SEQ.sizes(batch(5, ids=6))


def test_a_missing_input_is_told_with_its_likeness() -> None:
    given_batch = batch()
    given_batch["hiden"] = given_batch.pop("hidden")
    with pytest.raises(SpecError, match=r"'hidden' is not there; did you mean 'hiden'.*\[axes\] names it"):
        SEQ.pad(given_batch)


def test_an_input_that_is_none_is_left_out() -> None:
    padded = SEQ.pad({**batch(), "ids": None})
    assert padded.batch["ids"] is None
    assert padded.batch["hidden"].shape == (2, 8, 3)


@pytest.mark.parametrize("axis", [2, -3])
def test_an_axis_that_is_not_there_is_told_with_the_shape(axis: int) -> None:
    buckets = Buckets({"seq": (8,)}, (InputAxes("x", ((axis, "seq"),)),))
    with pytest.raises(SpecError, match=r"2 axes \(shape \(2, 3\)\)"):
        buckets.pad({"x": torch.ones(2, 3)})


def test_two_axes_of_one_input_are_padded_together() -> None:
    buckets = Buckets({"q": (4,), "kv": (6,)}, (InputAxes("mask", ((0, "q"), (1, "kv")), True),))
    found = buckets.pad({"mask": torch.zeros(3, 5, dtype=torch.bool)}).batch["mask"]
    expected = torch.ones(4, 6, dtype=torch.bool)
    expected[:3, :5] = False
    assert torch.equal(found, expected)


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


def test_nested_entries_are_reached_and_containers_keep_their_kind() -> None:
    rules = tuple(InputAxes(name, ((0, "seq"),)) for name in ("d.x", "l.0", "t.1", "n.1", "u.x"))
    five = torch.ones(5)
    given_batch = {
        "d": {"x": five, "y": five},
        "l": [five, five],
        "t": (five, five),
        "n": Pair(five, five),
        "u": UserDict({"x": five}),
    }
    found = Buckets({"seq": (8,)}, rules).pad(given_batch).batch
    assert [found["d"]["x"].numel(), found["d"]["y"].numel()] == [8, 5]
    assert [t.numel() for t in found["l"]] == [8, 5]
    assert isinstance(found["l"], list)
    assert [t.numel() for t in found["t"]] == [5, 8]
    assert isinstance(found["t"], tuple)
    assert isinstance(found["n"], Pair)
    assert found["n"].second.numel() == 8
    assert isinstance(found["u"], UserDict)
    assert found["u"]["x"].numel() == 8
    assert given_batch["d"]["x"].numel() == 5  # type: ignore[index, call-overload]
    assert given_batch["u"]["x"].numel() == 5  # type: ignore[index, call-overload]


def test_one_tensor_under_two_names_stays_one_tensor() -> None:
    x = torch.ones(2, 5)
    rules = (InputAxes("a", ((1, "seq"),)), InputAxes("b", ((1, "seq"),)), InputAxes("c", ((1, "seq"),), 9))
    found = Buckets({"seq": (8,)}, rules).pad({"a": x, "b": x, "c": x}).batch
    assert found["a"] is found["b"]
    assert found["c"] is not found["a"]
    assert found["c"][0, 7] == 9


def test_gradients_flow_through_the_padding_to_the_batch_alone() -> None:
    x = torch.randn(2, 5, requires_grad=True)
    found = Buckets({"seq": (8,)}, (InputAxes("x", ((1, "seq"),), 3),)).pad({"x": x}).batch["x"]
    assert found.requires_grad
    weights = torch.arange(16.0).reshape(2, 8)
    (found * weights).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, weights[:, :5])


def test_a_tensor_without_gradients_gets_none() -> None:
    assert not SEQ.pad(batch()).batch["hidden"].requires_grad


def test_padding_works_in_inference_mode_and_on_other_layouts() -> None:
    buckets = Buckets({"seq": (8,)}, (InputAxes("x", ((0, "seq"),)),))
    x = torch.arange(10.0).reshape(2, 5).t()
    with torch.inference_mode():
        found = buckets.pad({"x": x}).batch["x"]
    assert found.is_contiguous()
    assert torch.equal(found[:5], x)


@pytest.mark.parametrize(
    ("dtype", "pad"),
    [
        (torch.uint8, -1),
        (torch.int64, 0.5),
        (torch.bool, 2),
        (torch.int32, 2**31),
        (torch.int64, float("nan")),
        (torch.int64, float("-inf")),
    ],
)
def test_a_value_that_the_dtype_cannot_hold_is_refused(dtype: torch.dtype, pad: float) -> None:
    buckets = Buckets({"seq": (8,)}, (InputAxes("x", ((0, "seq"),), pad),))
    with pytest.raises(SpecError, match=r"axes\.x\.pad"):
        buckets.pad({"x": torch.zeros(5, dtype=dtype)})


def test_minus_infinity_pads_floats() -> None:
    buckets = Buckets({"seq": (8,)}, (InputAxes("x", ((0, "seq"),), float("-inf")),))
    assert buckets.pad({"x": torch.zeros(5)}).batch["x"][7] == float("-inf")


def test_a_dimension_that_no_axis_follows_has_one_rung_or_is_passed() -> None:
    one = Buckets({"seq": (8, 16), "anchors": (4,)}, (InputAxes("x", ((0, "seq"),)),))
    assert one.pad({"x": torch.ones(5)}).bucket == {"seq": 8, "anchors": 4}
    two = Buckets({"seq": (8, 16), "anchors": (4, 9)}, (InputAxes("x", ((0, "seq"),)),))
    with pytest.raises(NoBucket, match=r"'anchors' is not known.*4, 9"):
        two.pad({"x": torch.ones(5)})
    assert two.pad({"x": torch.ones(5)}, sizes={"anchors": 5}).bucket == {"seq": 8, "anchors": 9}


def test_an_unknown_dimension_is_told_with_its_likeness() -> None:
    with pytest.raises(NoBucket, match=r"'sep'; did you mean 'seq'"):
        SEQ.choose({"sep": 3})


def test_outputs_are_cut_by_name_and_the_rest_is_shared() -> None:
    outputs = {
        "logits": torch.arange(16.0).reshape(2, 8),
        "loss": torch.tensor(1.0),
        "h": (torch.ones(8), None),
    }
    found = SEQ.cut(outputs, {"logits": {-1: "seq"}, "h.0": {0: "seq"}}, {"seq": 5})
    assert torch.equal(found["logits"], outputs["logits"][:, :5])  # type: ignore[call-overload, index]
    assert found["h"][0].shape == (5,)
    assert found["loss"] is outputs["loss"]
    assert outputs["logits"].shape == (2, 8)  # type: ignore[union-attr]


def test_cutting_what_is_not_there_is_told() -> None:
    with pytest.raises(SpecError, match=r"output 'logit' is not there; did you mean 'logits'"):
        SEQ.cut({"logits": torch.ones(8)}, {"logit": {0: "seq"}}, {"seq": 5})
    with pytest.raises(SpecError, match=r"no size for dimension 'kv'"):
        SEQ.cut(torch.ones(8), {"": {0: "kv"}}, {"seq": 5})


def test_buckets_come_from_a_spec_or_its_path(tmp_path: Path) -> None:
    path = tmp_path / "aotcache.toml"
    path.write_text(
        '[drafter]\nname = "d"\nfactory = "m:f"\nbatch = "m:b"\n'
        '[buckets]\nseq = [8, 4]\n[axes]\nx = { 0 = "seq" }\n'
    )
    assert Buckets.from_spec(path) == Buckets({"seq": (4, 8)}, (InputAxes("x", ((0, "seq"),)),))
