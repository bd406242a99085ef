"""Keys: what changes them, what does not, and that a later call is taken apart as the first was."""

from __future__ import annotations

import copy
import functools
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
from tests.graph.models import Layer, document_mask


def make_layer() -> Layer:
    torch.manual_seed(0)
    return Layer()


def describe(layer: nn.Module, *args: Any, options: dict[str, Any] | None = None, **kwargs: Any) -> Call:
    return Region("layers.0", layer, options or {}).describe(args, kwargs)


def documents(seed: int = 0) -> Tensor:
    return torch.randint(0, 3, (2, 128), generator=torch.Generator().manual_seed(seed))


def base_call(layer: Layer) -> Call:
    return describe(layer, torch.ones(2, 128, 64), document_mask(documents()))


def components_that_differ(a: Call, b: Call) -> set[str]:
    return {d.component for d in a.parts.diff(b.parts)}


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


class Pair(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b


def test_the_same_tensor_twice_is_another_layout() -> None:
    x, y = torch.ones(3), torch.ones(3)
    same, different = describe(Pair(), x, x), describe(Pair(), x, y)
    assert same.parts.key != different.parts.key
    assert (len(same.tensors), len(different.tensors)) == (1, 2)
    flatten = same.flattener.compile()
    assert flatten((y, y), {}, []) is not None
    assert flatten((x, y), {}, []) is None


class Reads:
    """A mask as a bound method of an object that holds tensors."""

    def __init__(self, table: Tensor, limit: int) -> None:
        self.table = table
        self.limit = limit
        self.label = "not read"

    def mask(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (self.table[q] == self.table[kv]) & (kv < self.limit)


class Apply(nn.Module):
    """Calls a function that was handed in."""

    def forward(self, function: Callable[..., Tensor], x: Tensor) -> Tensor:
        zero = torch.zeros((), dtype=torch.long)
        return x + function(zero, zero, torch.tensor(1), torch.tensor(2))


def in_closure(table: Tensor, limit: int) -> Callable[..., Tensor]:
    def outer(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        def inner() -> Tensor:
            return (table[q] == table[kv]) & (kv < limit)

        return inner()

    return outer


def nested(table: Tensor, limit: int) -> Callable[..., Tensor]:
    first = in_closure(table, limit)
    functions = (first, lambda b, h, q, kv: q < kv)
    return lambda b, h, q, kv: functions[0](b, h, q, kv) & functions[1](b, h, q, kv)


def in_defaults(table: Tensor, limit: int) -> Callable[..., Tensor]:
    def function(
        b: Tensor, h: Tensor, q: Tensor, kv: Tensor, table: Tensor = table, *, limit: int = limit
    ) -> Tensor:
        return (table[q] == table[kv]) & (kv < limit)

    return function


def read_table(table: Tensor, limit: int, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (table[q] == table[kv]) & (kv < limit)


SHAPES_OF_FUNCTIONS: dict[str, Callable[[Tensor, int], Callable[..., Tensor]]] = {
    "closure": in_closure,
    "nested functions in a tuple": nested,
    "defaults": in_defaults,
    "partial": lambda table, limit: functools.partial(read_table, table, limit),
    "bound method": lambda table, limit: Reads(table, limit).mask,
}


@pytest.mark.parametrize("shape", SHAPES_OF_FUNCTIONS)
def test_tensors_are_lifted_out_of_functions_and_put_back(shape: str) -> None:
    make, module, x = SHAPES_OF_FUNCTIONS[shape], Apply(), torch.zeros(3)
    equal, different = torch.tensor([0, 5, 5]), torch.tensor([0, 5, 6])
    region = Region("apply", module, {})
    call = region.describe((make(equal, 9), x), {})
    assert any(torch.equal(t, equal) for t in call.tensors)
    # Another batch's tensor in the place of the captured one, through the rebuilt function.
    moved = [different if torch.equal(t, equal) else t for t in call.tensors]
    assert region.run(call, call.tensors).tolist() == [1, 1, 1]
    assert region.run(call, moved).tolist() == [0, 0, 0]
    # A later call with a fresh function is taken apart without being described.
    flatten = call.flattener.compile()
    later = flatten((make(different, 9), x), {}, [])
    assert later is not None
    assert any(t is different for t in later)
    assert flatten((make(different, 2), x), {}, []) is None, "another constant is another layout"
    assert region.describe((make(equal, 2), x), {}).parts.key != call.parts.key


class Options:
    pass


class Given(nn.Module):
    """Hands what it is given, and what it holds, to a function that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.held = types.SimpleNamespace()
        self.kept = Options()

    def forward(self, x: Tensor, options: Any, function: Callable[..., Tensor], **terms: Tensor) -> Tensor:
        for term in terms.values():
            x = torch.tanh(x * term + 1)
        return function(x, options, self.kept) * function.factor  # type: ignore[attr-defined]


def later(x: Tensor, options: Any, kept: Any) -> Tensor:
    return x * options.deep * getattr(kept, "deeper", 1.0)


def given(**changes: Any) -> tuple[Given, tuple[Any, ...], dict[str, Tensor]]:
    def function(x: Tensor, options: Any, kept: Any) -> Tensor:
        return later(x, options, kept)

    module, options = Given(), Options()
    function.factor = changes.get("factor", 1.0)  # type: ignore[attr-defined]
    options.deep = changes.get("deep", 1.0)  # type: ignore[attr-defined]
    module.kept.deeper = changes.get("deeper", 1.0)  # type: ignore[attr-defined]
    terms = {name: torch.full((3,), float(i)) for i, name in enumerate(("first", "second"))}
    return module, (torch.ones(3), options, function), dict(sorted(terms.items(), reverse="order" in changes))


@pytest.mark.parametrize("change", ["factor", "deep", "deeper", "order"])
def test_what_a_function_among_the_arguments_reads_and_is_counts(change: str) -> None:
    module, args, terms = given()
    region = Region("given", module, {})
    call = region.describe(args, terms)
    flatten, holds = call.flattener.compile(), call.flattener.walker.checks.compile()
    assert flatten(args, terms, []) is not None
    assert torch.equal(region.run(call, call.tensors), module(*args, **terms))
    other, other_args, other_terms = given(**{change: 3.0})
    assert not torch.equal(other(*other_args, **other_terms), module(*args, **terms))
    module.kept = other.kept
    assert region.describe(other_args, other_terms).parts.key != call.parts.key
    assert not (call.static.still_true() and holds() and flatten(other_args, other_terms, []) is not None)


def test_numbers_of_a_class_of_the_users_and_slots_are_refused_as_arguments() -> None:
    class Number(float):
        pass

    class Slotted:
        __slots__ = ("scale",)

    class Both(Slotted):
        pass

    both = Both()
    both.scale = 2.0
    for value in (Number(2.0), both):
        with pytest.raises(CallRefused, match=r"options is a .*(Number|Both)"):
            describe(Given(), torch.ones(3), value, later)


def test_flattening_keeps_no_tensor_of_the_described_call_alive() -> None:
    import gc
    import weakref

    table = torch.arange(3)
    gone = weakref.ref(table)
    call = Region("apply", Apply(), {}).describe((in_closure(table, 9), torch.zeros(3)), {})
    flatten, still_true = call.flattener.compile(), call.flattener.walker.checks.compile()
    del call, table
    gc.collect()
    assert gone() is None
    assert flatten((in_closure(torch.arange(3), 9), torch.zeros(3)), {}, []) is not None
    assert still_true()


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.weight.requires_grad else x + 0


def test_whether_a_weight_is_trained_counts_without_gradients_where_code_asks() -> None:
    asks, layer = Asks(), make_layer()
    with torch.no_grad():
        before, other = describe(asks, torch.ones(3)), base_call(layer)
        assert before.requires_grad() == [True, False]
        asks.requires_grad_(False)
        layer.requires_grad_(False)
        assert describe(asks, torch.ones(3)).parts.key != before.parts.key
        assert base_call(layer).parts.key == other.parts.key


class Applies(nn.Module):
    """Runs what it is given, and asks for nothing itself."""

    def forward(self, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return function(x)


def doubles_for_gradients(x: Tensor) -> Tensor:
    return x * 2 if torch.is_grad_enabled() else x + 0


def doubles_if_trained(bias: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: x * 2 + bias if bias.requires_grad else x + bias


def test_grad_mode_counts_where_a_function_among_the_arguments_asks() -> None:
    module, x = Applies(), torch.ones(3)
    with torch.no_grad():
        without = describe(module, x, doubles_for_gradients)
        trained = describe(module, x, doubles_if_trained(torch.ones(3, requires_grad=True)))
        frozen = describe(module, x, doubles_if_trained(torch.ones(3)))
    within = describe(module, x, doubles_for_gradients)
    assert (without.mode, within.mode) == ("infer", "infer")
    assert without.parts.key != within.parts.key
    assert trained.parts.key != frozen.parts.key
    with torch.no_grad():
        # As the builder runs calls without gradients.
        assert within.region.run(within, [x]).tolist() == [2, 2, 2]
        assert without.region.run(without, [x]).tolist() == [1, 1, 1]


class Scaled:
    factor: float | None = 3.0

    def __init__(self, **attributes: Any) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)

    def __call__(self, x: Tensor) -> Tensor:
        return x + 0 if self.factor is None else x * self.factor * getattr(self, "more", 1.0)


def test_an_attribute_that_is_none_is_not_one_that_is_missing() -> None:
    module, x = Applies(), torch.ones(3)
    assert module(x, Scaled(factor=None)).tolist() != module(x, Scaled()).tolist()
    assert describe(module, x, Scaled(factor=None)).parts.key != describe(module, x, Scaled()).parts.key


def test_as_many_attributes_of_other_names_are_another_layout() -> None:
    module, x = Applies(), torch.ones(3)
    call = describe(module, x, Scaled(unread=5.0))
    flatten = call.flattener.compile()
    assert flatten((x, Scaled(unread=6.0)), {}, []) is not None
    assert flatten((x, Scaled(more=5.0)), {}, []) is None


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
