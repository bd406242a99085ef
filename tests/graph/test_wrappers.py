"""Wrappers of trainers are looked through; what only looks like one is not."""

from __future__ import annotations

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper

from aotcache.graph.capture import find_regions
from aotcache.graph.wrappers import named_modules, plain_class


class Holder(nn.Module):
    """Has a submodule of the name that DDP gives to what it wraps."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.module = inner
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)])


def test_names_and_modules_are_those_from_before_the_wrapping() -> None:
    model = Holder(nn.Linear(2, 2))
    before = dict(model.named_modules())
    model.layers[0][0] = checkpoint_wrapper(model.layers[0][0])
    model.layers[0] = offload_wrapper(checkpoint_wrapper(model.layers[0]))
    assert dict(named_modules(model)) == before
    assert dict(model.named_modules()).keys() != before.keys()


def test_a_wrapped_model_is_its_inside() -> None:
    model = Holder(nn.Linear(2, 2))
    inside = dict(model.named_modules())
    assert dict(named_modules(checkpoint_wrapper(model))) == inside


def test_regions_are_found_inside_of_wrappers() -> None:
    model = Holder(nn.Linear(2, 2))
    first, second = model.layers
    model.layers[1] = checkpoint_wrapper(second)
    found = find_regions(checkpoint_wrapper(model), ["layers.*", "module"], {})
    assert [(r.name, r.module) for r in found] == [
        ("layers.0", first),
        ("layers.1", second),
        ("module", model.module),
    ]


def test_a_class_of_ones_own_is_plain() -> None:
    class FSDPModule(Holder):
        """Of that name, and not torch's."""

    assert plain_class(FSDPModule(nn.Linear(2, 2))) is FSDPModule
    assert plain_class(nn.Linear(2, 2)) is nn.Linear
