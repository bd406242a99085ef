"""Named tuples, dataclasses and model outputs as results and as arguments."""

from __future__ import annotations

import dataclasses
import json
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from aotcache.errors import CallRefused, ManifestError, RejectedArtifact, UnsupportedGraph
from aotcache.graph import tree
from aotcache.graph.region import Call, Region
from tests.graph.results import CausalOutput, Frozen, Listed, ModelOutput, Output, Top


def _travelled(value: Any) -> tuple[Any, list[Tensor]]:
    """A result as a worker puts it together, on other tensors."""
    tensors: list[Tensor] = []
    template = tree.flatten_output(value, tensors, "r")
    tree.require_rebuilds(value, template, tensors, "r")
    others = [t + 1 for t in tensors]
    return tree.from_json(json.loads(json.dumps(tree.to_json(template)))).build(others), others


def test_a_dataclass_comes_back_with_fields_order_none_and_what_its_constructor_added() -> None:
    a, b = torch.zeros(2), torch.ones(3)
    got, (x, y) = _travelled(Output(None, a, parts=(b, a)))
    assert type(got) is Output
    assert got.loss is None
    assert got.hidden is None
    assert got.logits is x
    assert got.parts[0] is y
    assert got.parts[1] is x
    assert [f.name for f in dataclasses.fields(got)] == ["loss", "logits", "hidden", "parts"]
    assert got.made == "by the constructor"


def test_frozen_dataclasses_with_slots_come_back() -> None:
    got, (x,) = _travelled(Frozen(torch.zeros(2), 0.5))
    assert type(got) is Frozen
    assert (got.value is x, got.scale) == (True, 0.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        got.scale = 1.0


def test_named_tuples_and_torchs_own_come_back() -> None:
    got, (x, y, *_) = _travelled(
        {"own": Top(torch.zeros(2), torch.ones(2)), "torch": torch.arange(5.0).topk(2)}
    )
    assert type(got["own"]) is Top
    assert got["own"]._fields == ("values", "indices", "count")
    assert got["own"].values is x
    assert got["own"].count == 3
    assert type(got["torch"]) is torch.return_types.topk
    assert got["torch"].values.tolist() == [5.0, 4.0]
    assert got["own"].indices is y


def test_a_model_output_is_dataclass_and_dictionary_again() -> None:
    a, b = torch.zeros(2), torch.ones(3)
    value = CausalOutput(logits=a, hidden_states=(b, a))
    got, (x, y) = _travelled(value)
    assert type(got) is CausalOutput
    assert list(got.keys()) == ["logits", "hidden_states"]
    assert got.loss is None
    assert got["logits"] is got.logits is got[0] is x
    assert got.hidden_states == got["hidden_states"] == (y, x)
    assert isinstance(got, ModelOutput)
    got["logits"] = y
    assert got.logits is y


def test_what_cannot_travel_is_refused_by_name() -> None:
    class Local(NamedTuple):
        value: Tensor

    a = torch.zeros(2)
    with pytest.raises(UnsupportedGraph, match=r"<locals>\.Local, which is defined inside a function"):
        tree.flatten_output(Local(a), [], "r")
    with pytest.raises(UnsupportedGraph, match="Listed"):
        tree.flatten_output(Listed(a), [], "r")
    with pytest.raises(UnsupportedGraph, match="Random"):
        tree.flatten_output(__import__("random").Random(), [], "r")
    main = dataclasses.make_dataclass("Main", ["value"])
    main.__module__ = "__main__"
    with pytest.raises(UnsupportedGraph, match="__main__:Main, which is defined in the main program"):
        tree.flatten_output(main(a), [], "r")
    elsewhere = dataclasses.make_dataclass("Elsewhere", ["value"])
    elsewhere.__module__ = __name__
    with pytest.raises(UnsupportedGraph, match="Elsewhere, which is not what is found under that name"):
        tree.flatten_output(elsewhere(a), [], "r")


def test_a_class_that_went_or_changed_is_refused_by_name() -> None:
    tensors: list[Tensor] = []
    data = tree.to_json(tree.flatten_output(Top(torch.zeros(1), torch.zeros(1)), tensors, "r"))
    for name, why in [
        ("tests.graph.results:Gone", "Gone"),
        ("tests.graph.gone:Top", "No module named 'tests.graph.gone'"),
        ("tests.graph.results:dataclasses", "is a module"),
        ("tests.graph.results:Output", "no namedtuple"),
        ("torch.return_types:topk", "no namedtuple"),
    ]:
        data["structure"]["class"] = name
        with pytest.raises(RejectedArtifact, match=why) as refused:
            tree.from_json(data)
        assert name in str(refused.value)


@pytest.mark.parametrize(
    "change",
    [
        {"form": "object"},
        {"class": 3},
        {"fields": [["values"]]},
        {"fields": "abc"},
        {"keys": ["other"]},
        {"more": 1},
    ],
)
def test_a_damaged_structure_is_a_manifest_error(change: dict[str, Any]) -> None:
    data = tree.to_json(tree.flatten_output(Top(torch.zeros(1), torch.zeros(1)), [], "r"))
    data["structure"] |= change
    with pytest.raises(ManifestError):
        tree.from_json(data)


class Takes(nn.Module):
    def forward(self, given: Any) -> Tensor:
        if isinstance(given, ModelOutput):
            return given[0] * (2 if given.loss is None else 3) + given["hidden_states"][1]
        if isinstance(given, Frozen):
            return given.value * given.scale
        return given.values * given[2] if isinstance(given, Top) else given.values + given[1]


def _describe(given: Any) -> Call:
    return Region("r", Takes(), {}).describe((given,), {})


def _models(seed: int) -> CausalOutput:
    t = torch.randn(3, 2, generator=torch.Generator().manual_seed(seed))
    return CausalOutput(logits=t[0], hidden_states=(t[1], t[2]))


def _returned(seed: int) -> Any:
    return torch.randn(5, generator=torch.Generator().manual_seed(seed)).topk(2)


GIVEN: list[Callable[[int], Any]] = [
    _models,
    _returned,
    lambda seed: Top(torch.full((2,), float(seed)), torch.ones(2), 5),
    lambda seed: Frozen(torch.full((2,), float(seed)), 0.25),
]


@pytest.mark.parametrize("make", GIVEN)
def test_tensors_in_structured_arguments_are_slots_of_the_call(make: Callable[[int], Any]) -> None:
    call, given = _describe(make(1)), make(2)
    flatten = call.flattener.compile()
    fetched = flatten((given,), {}, [])
    assert fetched is not None
    assert len(fetched) == len(call.tensors)
    want = Takes()(given)
    assert torch.equal(call.region.run(call, fetched), want)
    assert call.parts.key == _describe(given).parts.key
    assert all(t.requires_grad is False for t in fetched)


def test_what_is_no_tensor_in_a_structured_argument_is_in_the_key_and_guarded() -> None:
    one, other = Top(torch.ones(2), torch.ones(2), 5), Top(torch.ones(2), torch.ones(2), 6)
    call = _describe(one)
    assert call.flattener.compile()((other,), {}, []) is None
    assert call.parts.key != _describe(other).parts.key
    assert call.flattener.compile()(((*one,),), {}, []) is None
    assert call.parts.key != _describe((*one,)).parts.key
    with_loss, without = _models(0), _models(0)
    with_loss.loss = torch.ones(())
    call = _describe(without)
    assert call.flattener.compile()((with_loss,), {}, []) is None
    assert call.parts.key != _describe(with_loss).parts.key
    reordered = CausalOutput()
    reordered["hidden_states"], reordered["logits"] = without.hidden_states, without.logits
    assert call.flattener.compile()((reordered,), {}, []) is None
    assert call.parts.key != _describe(reordered).parts.key


def test_a_model_output_whose_items_are_not_its_fields_is_refused() -> None:
    given = _models(0)
    OrderedDict.__setitem__(given, "more", torch.ones(2))
    with pytest.raises(CallRefused, match="CausalOutput, expected a plain dict"):
        _describe(given)


def test_torchs_named_tuples_without_tensors_are_compared_by_value() -> None:
    from torch.nn.attention.flex_attention import AuxRequest

    call = _describe(AuxRequest(lse=True))
    assert call.flattener.compile()((AuxRequest(lse=True),), {}, []) == []
    assert call.flattener.compile()((AuxRequest(),), {}, []) is None
    assert call.parts.key == _describe(AuxRequest(lse=True)).parts.key
    assert call.parts.key != _describe(AuxRequest()).parts.key
