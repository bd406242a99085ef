"""Keys: what changes them, what does not, and that a later call is taken apart as the first was."""

from __future__ import annotations

import copy
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aotcache.errors import CallRefused, Unfingerprintable, UnsupportedGraph
from aotcache.graph.region import Call, Region, contiguous_parts
from tests.graph import models
from tests.graph.models import (
    Layer,
    base_call,
    components_that_differ,
    describe,
    document_mask,
    documents,
    make_layer,
)


def scale_twice(self: Layer, x: Tensor, block_mask: Any = None, *, residual: bool = True) -> Tensor:
    return x * 2


def other_rsqrt(x: Tensor) -> Tensor:
    return x.rsqrt()


CHANGES: dict[str, tuple[str, Callable[[Layer], Any]]] = {
    "constant read by forward": ("structure", lambda m: setattr(m, "heads", 2)),
    "float of equal value and other type": ("structure", lambda m: setattr(m, "heads", 4.0)),
    "constant of a submodule": ("structure", lambda m: setattr(m.norm, "eps", 1e-5)),
    "forward patched on the instance": (
        "code",
        lambda m: setattr(m, "forward", types.MethodType(scale_twice, m)),
    ),
    "forward of a submodule patched": (
        "code",
        lambda m: setattr(m.norm, "forward", types.MethodType(lambda self, x: x * self.weight, m.norm)),
    ),
    "submodule exchanged": ("code", lambda m: setattr(m, "norm", nn.LayerNorm(64))),
    "parameter dtype": ("structure", lambda m: m.out.double()),
    "frozen parameter": ("structure", lambda m: m.out.weight.requires_grad_(False)),
    "tied parameters": ("structure", lambda m: setattr(m.out, "bias", m.norm.weight)),
    "bias removed": ("structure", lambda m: m.out.register_parameter("bias", None)),
    "buffer added": ("structure", lambda m: m.register_buffer("extra", torch.ones(3))),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_shapes_the_graph_changes_the_key_by_name(name: str) -> None:
    component, change = CHANGES[name]
    layer = make_layer()
    before = base_call(layer)
    change(layer)
    after = base_call(layer)
    assert after.parts.key != before.parts.key
    assert component in components_that_differ(before, after)


HARMLESS: dict[str, Callable[[Layer], Any]] = {
    "attribute that no code reads": lambda m: setattr(m, "rank", 7),
    "new attribute that no code reads": lambda m: setattr(m, "hostname", "elsewhere"),
    "train and eval of a module that does not ask": lambda m: m.eval(),
    "other weights": lambda m: m.out.weight.data.normal_(),
    "replaced Parameter": lambda m: setattr(m.out, "weight", nn.Parameter(torch.ones(64, 64))),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_does_not_shape_the_graph_leaves_the_key(name: str) -> None:
    layer = make_layer()
    before = base_call(layer)
    HARMLESS[name](layer)
    assert base_call(layer).parts.diff(before.parts) == []


def test_a_changed_helper_function_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer()
    region = Region("layers.0", layer, {})
    before = region.describe((torch.ones(2, 128, 64),), {})
    static = region.static()
    monkeypatch.setattr(models, "flex_attention", other_rsqrt)
    assert not static.still_true()
    after = region.describe((torch.ones(2, 128, 64),), {})
    assert components_that_differ(before, after) == {"code"}


class Wrapped(nn.Module):
    """Reaches its function through a wrapper of Dynamo's."""

    def __init__(self, factor: float, wrap: Callable[..., Any]) -> None:
        super().__init__()

        def scaled(x: Tensor) -> Tensor:
            return x * factor

        self.scaled = wrap(scaled)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.scaled(x)
        return out


@pytest.mark.parametrize("wrap", [torch.compile, torch.compiler.disable])
def test_what_dynamo_wraps_counts_as_its_original(wrap: Callable[..., Any]) -> None:
    keys = [describe(Wrapped(f, wrap), torch.ones(2)).parts.key for f in (2.0, 2.0, 3.0)]
    assert keys[0] == keys[1] != keys[2]


def test_training_flag_counts_where_a_module_reads_it() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    before = describe(block, torch.ones(1, 4))
    block.eval()
    after = describe(block, torch.ones(1, 4))
    assert [d.item for d in before.parts.diff(after.parts)] == ["1.training"]


CALLS: dict[str, Callable[[Layer], Call]] = {
    "shape": lambda m: describe(m, torch.ones(1, 128, 64), document_mask(documents()[:1])),
    "dtype": lambda m: describe(m, torch.ones(2, 128, 64).double(), document_mask(documents())),
    "strides": lambda m: describe(m, torch.ones(128, 2, 64).transpose(0, 1), document_mask(documents())),
    "requires_grad of an input": lambda m: describe(
        m, torch.ones(2, 128, 64, requires_grad=True), document_mask(documents())
    ),
    "constant in a mask": lambda m: describe(m, torch.ones(2, 128, 64), document_mask(documents(), 32)),
    "dtype of a tensor in a mask": lambda m: describe(
        m, torch.ones(2, 128, 64), document_mask(documents().int())
    ),
    "no mask": lambda m: describe(m, torch.ones(2, 128, 64)),
    "constant argument": lambda m: describe(
        m, torch.ones(2, 128, 64), document_mask(documents()), residual=False
    ),
    "compile option": lambda m: describe(
        m, torch.ones(2, 128, 64), document_mask(documents()), options={"memory_budget": 0.5}
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_shapes_the_call_changes_the_key(name: str) -> None:
    layer = make_layer()
    assert CALLS[name](layer).parts.key != base_call(layer).parts.key


def test_values_of_tensors_in_a_mask_do_not_count_and_are_slots() -> None:
    layer = make_layer()
    one = base_call(layer)
    two = describe(layer, torch.zeros(2, 128, 64), document_mask(documents(1)))
    assert one.parts.key == two.parts.key
    slot = next(i for i, name in enumerate(two.names) if name.endswith(".documents"))
    assert torch.equal(two.tensors[slot], documents(1))


def test_two_masks_of_different_source_have_different_keys() -> None:
    layer = make_layer()

    def strict(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q > kv

    def loose(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q >= kv

    mask = document_mask(documents())
    keys = set()
    for function in (strict, loose):
        mask.mask_mod = function
        keys.add(describe(layer, torch.ones(2, 128, 64), mask).parts.key)
    assert len(keys) == 2


@pytest.mark.parametrize("spelling", ["default left out", "keyword", "default given"])
def test_spelling_of_a_call_does_not_count(spelling: str) -> None:
    layer = make_layer()
    x, mask = torch.ones(2, 128, 64), document_mask(documents())
    call = {
        "default left out": lambda: describe(layer, x, mask),
        "keyword": lambda: describe(layer, block_mask=mask, x=x),
        "default given": lambda: describe(layer, x, mask, residual=True),
    }[spelling]()
    assert call.parts.key == base_call(layer).parts.key


def test_unknown_keyword_is_a_type_error_as_in_eager() -> None:
    with pytest.raises(TypeError, match="nonsense"):
        describe(make_layer(), torch.ones(2, 128, 64), nonsense=1)


def test_ambient_state_of_the_thread_counts() -> None:
    layer = make_layer()
    plain = base_call(layer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = base_call(layer)
    with torch.no_grad():
        inference = base_call(layer)
    assert components_that_differ(plain, cast) == {"ambient"}
    assert inference.mode == "infer"
    assert inference.parts.key != plain.parts.key
    with torch.inference_mode():
        assert base_call(layer).parts.key == inference.parts.key


def test_deterministic_mode_and_matmul_precision_count() -> None:
    layer = make_layer()
    plain = base_call(layer)
    torch.set_float32_matmul_precision("high")
    try:
        assert base_call(layer).parts.key != plain.parts.key
    finally:
        torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(True)
    try:
        assert base_call(layer).parts.key != plain.parts.key
    finally:
        torch.use_deterministic_algorithms(False)
    assert base_call(layer).parts.key == plain.parts.key


def test_expanded_inputs_have_the_key_of_contiguous_ones() -> None:
    layer = make_layer()
    expanded = describe(layer, torch.ones(1, 128, 64).expand(2, -1, -1), document_mask(documents()))
    assert expanded.parts.key == base_call(layer).parts.key


def test_contiguous_parts_are_the_key_of_the_contiguous_call() -> None:
    layer = make_layer()
    transposed = describe(layer, torch.ones(128, 2, 64).transpose(0, 1), document_mask(documents()))
    assert contiguous_parts(transposed).key == base_call(layer).parts.key


class Holds(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 if self.value is None else 2)


@pytest.mark.parametrize("value", [open(__file__), iter([1]), [torch.ones(2)], {nn.Linear(2, 2)}])  # noqa: SIM115
def test_attributes_without_a_stable_value_are_refused_by_name(value: Any) -> None:
    with pytest.raises(Unfingerprintable, match=r"layers\.0.*value"):
        describe(Holds(value), torch.ones(2))


def test_a_tensor_held_as_plain_attribute_is_lifted() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = torch.full((2,), 3.0)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.factor

    module = Scaled()
    region = Region("scaled", module, {})
    call = region.describe((torch.ones(2),), {})
    assert (call.kinds, call.names) == (["lifted", "input"], ["factor", "x"])
    assert region.run(call, [torch.full((2,), 5.0), torch.ones(2)]).tolist() == [5, 5]
    assert module.factor.tolist() == [3, 3]


TABLE = torch.arange(4)


class ReadsGlobal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + TABLE


def test_a_tensor_read_from_a_global_is_refused() -> None:
    with pytest.raises(Unfingerprintable, match="TABLE"):
        describe(ReadsGlobal(), torch.ones(4))


def test_hooks_inside_a_region_are_refused_and_on_it_are_not() -> None:
    layer = make_layer()
    layer.register_forward_hook(lambda *_: None)
    describe(layer, torch.ones(2, 128, 64))
    layer.norm.register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedGraph, match=r"'norm' has a hook"):
        describe(layer, torch.ones(2, 128, 64))


def test_tensor_subclasses_are_refused() -> None:
    class Special(torch.Tensor):
        pass

    with pytest.raises(CallRefused, match=r"x is a .*Special"):
        describe(make_layer(), torch.ones(2, 128, 64).as_subclass(Special))


def test_a_copied_module_has_the_same_key() -> None:
    layer = make_layer()
    assert base_call(copy.deepcopy(layer)).parts.key == base_call(layer).parts.key


def test_the_key_is_the_same_in_every_process(tmp_path: Path) -> None:
    program = (
        "import torch; from tests.graph.test_region import *; torch.set_num_threads(1);"
        "print(base_call(make_layer()).parts.key)"
    )
    root = Path(__file__).parents[2]
    keys = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(root), "PYTHONHASHSEED": seed, "HOSTNAME": seed},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert keys == {base_call(make_layer()).parts.key}


class Softened(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.aotcache_region_tests.soften(x)
        return result


def test_a_key_does_not_depend_on_whether_an_operator_is_registered_yet() -> None:
    x = torch.ones(2)
    before = Region("softened", Softened(), {}).describe((x,), {}).parts
    library = torch.library.Library("aotcache_region_tests", "DEF")
    library.define("soften(Tensor x) -> Tensor")
    assert isinstance(torch.ops.aotcache_region_tests.soften, torch._ops.OpOverloadPacket)
    assert Region("softened", Softened(), {}).describe((x,), {}).parts.diff(before) == []
