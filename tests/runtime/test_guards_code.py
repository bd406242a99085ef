"""Whatever a forward reads, in whatever way: once it changes, the key is another, or the call is refused."""

from __future__ import annotations

import argparse
import collections
import enum
import functools
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask

from aotcache.errors import CallRefused, Unfingerprintable
from aotcache.graph.region import Region

BY_DTYPE = {torch.float32: 2.0}
NAMES = {"a", "b"}


class Holder:
    scale = 1.0


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class Described:
    def __init__(self) -> None:
        self.scale = 1.0

    def __get__(self, owner: Any, kind: Any = None) -> float:
        return self.scale


class Activation(enum.Enum):
    DOUBLE = 2.0

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.value


def scaled(x: Tensor) -> Tensor:
    return x * scaled.scale  # type: ignore[attr-defined]


GAIN = 1.0


def by_gain(x: Tensor) -> Tensor:
    return x * GAIN


class Operators:
    """Does by syntax what no name in a forward shows."""

    fns = (by_gain,)
    weak = 1.0

    def __rmul__(self, x: Tensor) -> Tensor:
        return by_gain(x)

    def __iter__(self) -> Iterator[Callable[[Tensor], Tensor]]:
        yield by_gain

    def __bool__(self) -> bool:
        return GAIN < 2

    def __float__(self) -> float:
        return GAIN

    def __enter__(self) -> float:
        return GAIN

    def __exit__(self, *_: object) -> None:
        pass


class ModuleOperators(nn.Module):
    def __getitem__(self, i: int) -> Callable[[Tensor], Tensor]:
        return by_gain


class Number(float):
    pass


class Table(dict[str, float]):
    def __missing__(self, key: str) -> float:
        return GAIN


class HalfSlotted(Slotted):
    pass


class Wrapper:
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        functools.update_wrapper(self, function)
        self.function, self.factor = function, 1.0

    def __call__(self, x: Tensor) -> Tensor:
        return self.function(x) * self.factor


class Meta(type):
    @property
    def gain(cls) -> float:
        return GAIN


class WithMeta(metaclass=Meta):
    pass


class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        nn.utils.parametrize.register_parametrization(self, "weight", nn.Identity())

    def helper(self, x: Tensor) -> Tensor:
        return by_gain(x) * (2 if self.training else 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.helper(x) * self.weight


class Reads(nn.Module):
    held = Holder()
    described = Described()

    def __init__(self) -> None:
        super().__init__()
        self.namespace = argparse.Namespace(scale=2.0)
        self.simple = types.SimpleNamespace(scale=2.0)
        self.deque = collections.deque([1.0, 2.0])
        self.slotted = Slotted()
        self.nested = ([1.0],)
        self.w0 = 1.0
        self.namespace0 = argparse.Namespace(scale=2.0)
        self.operators = Operators()
        self.module = ModuleOperators()
        self.number = Number(1.0)
        self.table = Table()
        self.ordered = {"a": 2.0, "b": 0.5}
        self.half_slotted = HalfSlotted()
        self.wrapper = Wrapper(torch.sin)
        self.weak = weakref.ref(self.operators)
        self.other = sys.modules["probe_other"]
        self.get = operator.attrgetter("namespace.scale")
        self.parametrized = Parametrized()
        self.linear = nn.Linear(4, 4)
        self.act = nn.functional.silu


class Base(nn.Module):
    def helper(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.helper(x)


class Derived(Base):
    pass


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Derived()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


def reader(read: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    """A module whose forward is `read`."""
    return type("Reader", (Reads,), {"forward": read, "__module__": __name__})()


@pytest.fixture(autouse=True)
def _other(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module of the user's that functions import when they run."""
    module = types.ModuleType("probe_other")
    exec("GAIN = 1.0\ndef gain():\n    return GAIN\n", vars(module))
    package = types.ModuleType("probe_package")
    package.probe_other = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "probe_other", module)
    monkeypatch.setitem(sys.modules, "probe_package", package)
    monkeypatch.setattr(scaled, "scale", 2.0, raising=False)
    return module


def _import_from(self: Any, x: Tensor) -> Tensor:
    from probe_other import gain

    return x * gain()


def _import_whole(self: Any, x: Tensor) -> Tensor:
    import probe_other

    return x * probe_other.GAIN


def _made_up_name(self: Any, x: Tensor) -> Tensor:
    for i in range(1):
        x = x * getattr(self, f"w{i}")
    return x


def _import_module_in(self: Any, x: Tensor) -> Tensor:
    from probe_package import probe_other

    return x * probe_other.GAIN


def _local_name(self: Any, x: Tensor) -> Tensor:
    other = self.other
    return x * other.GAIN


def _context(self: Any, x: Tensor) -> Tensor:
    with self.operators as gain:
        return x * gain


def _in_order(self: Any, x: Tensor) -> Tensor:
    for value in self.ordered.values():
        x = torch.tanh(x * value + 1)
    return x


def _move_to_end(module: Any, patch: pytest.MonkeyPatch) -> None:
    module.ordered["a"] = module.ordered.pop("a")


def _more(change: Callable[[Any, Tensor], Tensor]) -> tuple[Any, Any]:
    return change, lambda m, p: p.setattr(sys.modules[__name__], "GAIN", 3.0)


def _replace(name: str, key: str, value: Any) -> Callable[[Any, pytest.MonkeyPatch], None]:
    return lambda m, patch: patch.setattr(sys.modules[name], key, value)


CASES: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[Any, pytest.MonkeyPatch], Any]]] = {
    "argparse namespace": (
        lambda self, x: x * self.namespace.scale,
        lambda m, p: setattr(m.namespace, "scale", 3.0),
    ),
    "simple namespace": (lambda self, x: x * self.simple.scale, lambda m, p: setattr(m.simple, "scale", 3.0)),
    "deque changed in place": (lambda self, x: x * self.deque[0], lambda m, p: m.deque.__setitem__(0, 5.0)),
    "slots": (lambda self, x: x * self.slotted.scale, lambda m, p: setattr(m.slotted, "scale", 3.0)),
    "list in a tuple": (lambda self, x: x * self.nested[0][0], lambda m, p: m.nested[0].__setitem__(0, 3.0)),
    "table by dtype": (
        lambda self, x: x * BY_DTYPE[x.dtype],
        lambda m, p: p.setitem(BY_DTYPE, torch.float32, 3.0),
    ),
    "object in a class": (
        lambda self, x: x * self.held.scale,
        lambda m, p: p.setattr(Reads.held, "scale", 3.0, raising=False),
    ),
    "object in a class exchanged": (
        lambda self, x: x * self.held.scale,
        lambda m, p: p.setattr(Reads, "held", types.SimpleNamespace(scale=7.0)),
    ),
    "descriptor": (
        lambda self, x: x * self.described,
        lambda m, p: p.setattr(vars(Reads)["described"], "scale", 3.0),
    ),
    "attribute of a function": (lambda self, x: scaled(x), lambda m, p: p.setattr(scaled, "scale", 3.0)),
    "attribute by a name made up": (_made_up_name, lambda m, p: setattr(m, "w0", 3.0)),
    "import inside": (_import_from, lambda m, p: p.setattr(sys.modules["probe_other"], "gain", lambda: 9.0)),
    "global of what is imported inside": (_import_from, _replace("probe_other", "GAIN", 9.0)),
    "import of a module inside": (_import_whole, _replace("probe_other", "GAIN", 9.0)),
    "function in an attribute": (
        lambda self, x: self.act(x),
        lambda m, p: setattr(m, "act", nn.functional.gelu),
    ),
    "torch function patched": (
        lambda self, x: torch.relu(x),
        lambda m, p: p.setattr(torch, "relu", lambda x: x * 7),
    ),
    "functional patched": (
        lambda self, x: nn.functional.gelu(x),
        lambda m, p: p.setattr(nn.functional, "gelu", lambda x: x * 7),
    ),
    "operator": _more(lambda self, x: x * self.operators),
    "loop over an object": _more(lambda self, x: next(iter(self.operators))(x)),
    "truth of an object": _more(lambda self, x: x * 2 if self.operators else x),
    "number of an object": _more(lambda self, x: x * float(self.operators)),
    "context manager": _more(_context),
    "functions in a class": _more(lambda self, x: self.operators.fns[0](x)),
    "index into a module": _more(lambda self, x: self.module[0](x)),
    "class of a class": _more(lambda self, x: x * WithMeta.gain),
    "missing key of a dict of the user's": _more(lambda self, x: x * self.table["q"]),
    "table of globals": _more(lambda self, x: globals()["by_gain"](x)),
    "method of a parametrized module": _more(lambda self, x: self.parametrized(x)),
    "training flag of a parametrized module": (
        lambda self, x: self.parametrized(x),
        lambda m, p: m.parametrized.eval(),
    ),
    "number of a class of the user's": (
        lambda self, x: x * float(self.number),
        lambda m, p: setattr(m, "number", Number(3.0)),
    ),
    "order of a table": (_in_order, _move_to_end),
    "slots under a dict": (
        lambda self, x: x * self.half_slotted.scale,
        lambda m, p: setattr(m.half_slotted, "scale", 3.0),
    ),
    "wrapper with a state": (
        lambda self, x: self.wrapper(x),
        lambda m, p: setattr(m.wrapper, "factor", 3.0),
    ),
    "weak reference": (
        lambda self, x: x * self.weak().weak,
        lambda m, p: setattr(m.operators, "weak", 3.0),
    ),
    "module in an attribute": (lambda self, x: x * self.other.GAIN, _replace("probe_other", "GAIN", 9.0)),
    "module under a local name": (_local_name, _replace("probe_other", "GAIN", 9.0)),
    "module imported from a package": (_import_module_in, _replace("probe_other", "GAIN", 9.0)),
    "attribute getter": (
        lambda self, x: x * self.get(self),
        lambda m, p: setattr(m.namespace, "scale", 3.0),
    ),
    "object by a name made up": (
        lambda self, x: x * getattr(self, f"namespace{0}").scale,
        lambda m, p: setattr(m.namespace0, "scale", 3.0),
    ),
    "text of a namespace": (
        lambda self, x: x * len(str(self.simple)),
        lambda m, p: setattr(m.simple, "scale", 1000.0),
    ),
    "functional patched under torch's module": (
        lambda self, x: self.linear(x),
        lambda m, p: p.setattr(nn.functional, "linear", lambda x, w, b: x * 7),
    ),
    "tensor method patched": (
        lambda self, x: x.softmax(-1),
        lambda m, p: p.setattr(torch.Tensor, "softmax", lambda x, d: x * 7, raising=False),
    ),
    "method of an enum": (
        lambda self, x: Activation.DOUBLE(x),
        lambda m, p: p.setattr(Activation, "__call__", lambda self, x: x * 9),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_forward_reads_is_in_the_key(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, change = CASES[case]
    module, x = reader(read), torch.randn(2, 4)
    region = Region("reads", module, {})
    before, eager_before = region.describe((x,), {}).parts.key, module(x)
    assert region.describe((x,), {}).parts.key == before
    change(module, monkeypatch)
    assert not torch.equal(module(x), eager_before)
    assert region.describe((x,), {}).parts.key != before


def test_how_a_module_gives_its_attributes_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    class Given(nn.Module):
        def __getattribute__(self, name: str) -> Any:
            return GAIN if name == "gain" else super().__getattribute__(name)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.gain

    region, x = Region("given", Given(), {}), torch.randn(2)
    before = region.describe((x,), {}).parts.key
    monkeypatch.setattr(sys.modules[__name__], "GAIN", 3.0)
    assert region.describe((x,), {}).parts.key != before


def test_other_bases_of_a_class_are_noticed() -> None:
    class Doubles:
        def helper(self, x: Tensor) -> Tensor:
            return x * 2

    class Keeps:
        def helper(self, x: Tensor) -> Tensor:
            return x + 0

    class Mixed(Keeps, nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return self.helper(x)

    region, x = Region("mixed", Mixed(), {}), torch.randn(2)
    before = region.describe((x,), {}).parts.key
    Mixed.__bases__ = (Doubles, nn.Module)
    assert region.describe((x,), {}).parts.key != before


def test_the_order_of_submodules_is_noticed() -> None:
    module, x = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.randn(2)
    region = Region("sequential", module, {})
    before, eager_before = region.describe((x,), {}), module(x)
    module._modules["0"] = module._modules.pop("0")
    assert not torch.equal(module(x), eager_before)
    assert not before.static.still_true()
    assert region.describe((x,), {}).parts.key != before.parts.key


@pytest.mark.parametrize(
    "held",
    [
        lambda: torch.distributions.Normal(torch.zeros(2), torch.ones(2)),
        lambda: create_block_mask(lambda b, h, q, k: q >= k, 1, None, 32, 32, device="cpu", BLOCK_SIZE=16),
    ],
    ids=["distribution", "block mask"],
)
def test_tensors_in_an_object_of_torchs_are_not_taken_for_its_text(held: Callable[[], Any]) -> None:
    module = reader(lambda self, x: x + self.held_object.mean)
    module.held_object = held()
    with pytest.raises(Unfingerprintable, match=r"held_object is a torch.*holds tensors"):
        Region("reads", module, {}).describe((torch.randn(2),), {})


def test_a_tensor_read_by_a_name_made_up_is_lifted() -> None:
    module = reader(lambda self, x: x * getattr(self, f"tensor{0}"))
    module.tensor0 = torch.ones(2)
    assert Region("reads", module, {}).describe((torch.randn(2),), {}).names[-2] == "tensor0"


def test_a_set_changed_in_place_at_equal_length_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = reader(lambda self, x: x * 2 if "a" in NAMES else x), torch.randn(2)
    region = Region("reads", module, {})
    before = region.describe((x,), {}).parts.key
    try:
        NAMES.discard("a")
        NAMES.add("c")
        assert region.describe((x,), {}).parts.key != before
    finally:
        NAMES.discard("c")
        NAMES.add("a")


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Derived, "helper"), (Derived, "forward"), (Derived, "__call__"), (Base, "helper"), (Base, "forward")],
)
def test_a_method_patched_anywhere_in_the_class_tree_is_noticed(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = Outer(), torch.randn(2)
    region = Region("outer", module, {})
    before = region.describe((x,), {}).parts.key
    monkeypatch.setattr(owner, name, lambda self, x: x * 7, raising=False)
    assert torch.equal(module(x), x * 7)
    assert region.describe((x,), {}).parts.key != before


def test_the_regions_own_class_patched_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = Derived(), torch.randn(2)
    region = Region("derived", module, {})
    before = region.describe((x,), {})
    monkeypatch.setattr(Derived, "forward", lambda self, x: x * 7, raising=False)
    after = region.describe((x,), {})
    assert after.parts.key != before.parts.key
    assert torch.equal(region.run(after, [x]), x * 7)


def test_an_array_that_export_would_bake_in_is_refused() -> None:
    module = reader(lambda self, x: x + float(self.array.sum()))
    module.array = np.zeros(5000)
    with pytest.raises(Unfingerprintable, match=r"array is a numpy.ndarray"):
        Region("reads", module, {}).describe((torch.randn(2),), {})


def test_a_constant_name_in_getattr_does_not_pull_every_attribute_in() -> None:
    module, x = reader(lambda self, x: x * getattr(self, "w0", 1.0)), torch.randn(2)
    region = Region("reads", module, {})
    module.rank = 0
    before = region.describe((x,), {}).parts.key
    module.rank = 5
    assert region.describe((x,), {}).parts.key == before


class _Sub(torch.Tensor):
    pass


def test_a_parameter_that_is_more_than_its_memory_is_refused() -> None:
    module, x = nn.Linear(4, 4), torch.randn(2, 4)
    region = Region("linear", module, {})
    region.describe((x,), {})
    module._parameters["weight"] = torch.randn(4, 4).as_subclass(_Sub)  # type: ignore[assignment]
    with pytest.raises(CallRefused, match=r"parameter weight is a .*_Sub"):
        region.describe((x,), {})
    module._parameters["weight"] = torch.randn(4, 4).to_sparse()  # type: ignore[assignment]
    with pytest.raises(CallRefused, match=r"weight .*sparse"):
        region.describe((x,), {})
    with torch.device("meta"):
        module.weight = nn.Parameter(torch.randn(4, 4))
    with pytest.raises(CallRefused, match=r"weight .*meta"):
        region.describe((x,), {})
