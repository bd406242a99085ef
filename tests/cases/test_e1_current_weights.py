"""E1: an artifact runs with the weights of the moment, and holds none of its own."""

from __future__ import annotations

import copy
import zipfile
from collections.abc import Iterator

import pytest
import torch

import aotcache
from aotcache.config import Settings
from tests.cases import tiny
from tests.cases.conftest import Warm
from tests.cases.support import assert_close, assert_gradients_close, make_batch, reference, step


@pytest.fixture
def attached(tiny_d: Warm) -> Iterator[tiny.Tiny]:
    model = tiny.build(blocks=2)
    with aotcache.attach(model, tiny_d.spec, store=tiny_d.store) as handle:
        yield model
        stats = handle.stats()
    assert stats["misses"] == stats["eager_calls"] == stats["traces"] == 0
    assert stats["hits"] > 0


def evaluate(model: tiny.Tiny) -> None:
    """An eval under no_grad, against eager with copies of the weights of this moment."""
    batch = make_batch(seed=3)
    eager = tiny.build(blocks=2)
    eager.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    model.eval()
    with torch.no_grad():
        assert_close(model(**batch), eager.eval()(**batch))
    model.train()


def test_every_way_to_change_weights_shows_in_the_next_eval(attached: tiny.Tiny) -> None:
    model, batch = attached, make_batch(seed=1)
    generator = torch.Generator().manual_seed(5)
    seen = []

    def check() -> None:
        evaluate(model)
        with torch.no_grad():
            seen.append(float(model(**make_batch(seed=3))))

    check()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss, gradients = step(model, batch)
    plain = tiny.build(blocks=2)
    plain.load_state_dict(model.state_dict())
    want, want_gradients = reference(plain, batch)
    assert_close(loss, want)
    assert_gradients_close(gradients, want_gradients)
    optimizer.step()
    check()
    other = {name: torch.randn(v.shape, generator=generator) * 0.1 for name, v in model.state_dict().items()}
    model.load_state_dict(other)
    check()
    weight = model.get_parameter("blocks.0.out.weight")
    weight.data = torch.randn(weight.shape, generator=generator) * 0.1
    check()
    new = torch.nn.Parameter(torch.randn(weight.shape, generator=generator) * 0.1)
    model.blocks[1].out.weight = new
    check()
    assert len(set(seen)) == len(seen)  # each change is one that an eval can see
    _, gradients = step(model, batch)
    plain = tiny.build(blocks=2)
    plain.load_state_dict(model.state_dict())
    assert_gradients_close(gradients, reference(plain, batch)[1])
    assert new.grad is not None


def test_a_deep_copy_trains_the_copy(attached: tiny.Tiny) -> None:
    twin = copy.deepcopy(attached)
    before = {name: value.clone() for name, value in attached.state_dict().items()}
    loss = twin(**make_batch())
    loss.backward()
    assert all(p.grad is None for p in attached.parameters())
    assert all(p.grad is not None for p in twin.parameters())
    assert all(torch.equal(before[name], value) for name, value in attached.state_dict().items())


def test_no_weight_is_in_the_package(tiny_d: Warm) -> None:
    pattern = tiny.MARK.numpy().tobytes()
    assert len(pattern) == 4096
    model = tiny.build(blocks=2, marked=True)
    assert pattern in model.get_parameter("blocks.0.qkv.weight").detach().numpy().tobytes()
    store = aotcache.open_store(tiny_d.store)
    ours = tiny_d.manifests()
    assert {m.mode for m in ours} == {"train", "infer"}
    for manifest in ours:
        archive = store.blob_path(manifest.digest)
        assert archive is not None
        with zipfile.ZipFile(archive) as package:
            members = [package.read(name) for name in package.namelist()]
        assert any(member.startswith(b"\x7fELF") for member in members)
        assert not any(pattern[:64] in member for member in members)
    unpacked = [path for path in (Settings().home / "unpacked").rglob("*") if path.is_file()]
    assert not any(pattern[:64] in path.read_bytes() for path in unpacked)
