"""Attached drafters against eager ones: values, gradients, masks, weights, copies, misses."""

from __future__ import annotations

import copy
import io
import json
import pickle
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest
import torch
from torch import Tensor, nn

import aotcache
from aotcache.errors import ArtifactMiss, CallRefused, ConfigError, ManifestError
from aotcache.runtime import registry
from tests.runtime.conftest import Outcome, Probe, agree, outcome

pytestmark = pytest.mark.slow


def _pair(probe: Probe, **options: Any) -> tuple[nn.Module, nn.Module, Any]:
    """An attached drafter, an eager one of the same weights, and the handle."""
    attached, eager = probe.module.build(), probe.module.build()
    eager.load_state_dict(attached.state_dict())
    for one, other in zip(attached.probes, eager.probes, strict=True):
        other.table = one.table.clone()
    return attached, eager, probe.attach(attached, **options)


def _step(model: nn.Module, batch: dict[str, Tensor]) -> Outcome:
    with aotcache.runtime.dense.eager_without_tracing():
        return outcome(lambda: model(**batch), [*model.parameters(), batch["x"], batch["y"], batch["states"]])


def test_fifty_steps_equal_eager_in_every_gradient(probe: Probe) -> None:
    attached, eager, handle = _pair(probe)
    with handle:
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (attached, eager)]
        for step in range(50):
            found, expected = (_step(m, probe.batch(step)) for m in (attached, eager))
            agree(found, expected, 1e-4)
            for model, result, optimizer in zip(
                (attached, eager), (found, expected), optimizers, strict=True
            ):
                for parameter, gradient in zip(model.parameters(), result.values[1:], strict=False):
                    parameter.grad = gradient
                optimizer.step()
        stats = handle.stats()
        assert stats["hits"] == 150
        assert (stats["misses"], stats["traces"]) == (0, 0)
        assert {r["runner"] for r in stats["regions"].values()} == {"native"}


def _optimizer(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def _load(model: nn.Module) -> None:
    model.load_state_dict({k: v + 0.1 for k, v in model.state_dict().items()})


def _load_assign(model: nn.Module) -> None:
    model.load_state_dict({k: v + 0.1 for k, v in model.state_dict().items()}, assign=True)
    model.probes[0].tied.weight = model.probes[0].lin.weight
    model.probes[1].tied.weight = model.probes[1].lin.weight


def _data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data + 0.1


def _replaced(model: nn.Module) -> None:
    for p in model.probes:
        p.lin.weight = p.tied.weight = nn.Parameter(p.lin.weight.detach() + 0.1)


def _strided(model: nn.Module) -> None:
    for p in model.probes:
        p.lin.weight = p.tied.weight = nn.Parameter((p.lin.weight.detach() + 0.1).t().contiguous().t())


def _buffer_and_table(model: nn.Module) -> None:
    for p in model.probes:
        p.offset = p.offset + 1
        p.table = p.table - 2


@pytest.mark.parametrize(
    "change", [_optimizer, _load, _load_assign, _data, _replaced, _strided, _buffer_and_table]
)
def test_changed_weights_are_the_ones_used(probe: Probe, change: Callable[[nn.Module], None]) -> None:
    attached, eager, handle = _pair(probe)
    with handle:
        first = _step(attached, probe.batch())
        for model in (attached, eager):
            change(model)
        second = _step(attached, probe.batch())
        agree(second, _step(eager, probe.batch()))
        assert not torch.equal(first.values[0], second.values[0])
        assert handle.stats()["misses"] == 0


def test_batches_of_equal_shape_get_their_own_masks(probe: Probe) -> None:
    attached, eager, handle = _pair(probe)
    with handle:
        results = []
        for cut in (5, 20, 5):
            batch = probe.batch()
            batch["documents"] = (torch.arange(probe.module.LENGTH) >= cut).long().expand(2, -1).contiguous()
            found = _step(attached, batch)
            agree(found, _step(eager, batch))
            results.append(found.values[0])
        assert torch.equal(results[0], results[2])
        assert not torch.equal(results[0], results[1])


def test_score_functions_that_differ_in_a_constant_never_share(probe: Probe) -> None:
    model = probe.module.build()
    batch = probe.batch()
    mask = probe.module.block_mask(batch["documents"])
    with probe.attach(model):
        model.scored(batch["states"], mask, probe.module.biased(model.bias))
        with pytest.raises(ArtifactMiss, match=r"factor differs: float:2.0 / float:1.0"):
            model.scored(batch["states"], mask, probe.module.biased(model.bias, 2.0))


def test_a_block_mask_of_another_block_size_is_a_miss(probe: Probe) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    model, batch = probe.module.build(), probe.batch()
    score = probe.module.biased(model.bias)
    mask = probe.module.block_mask(batch["documents"])
    other = create_block_mask(mask.mask_mod, 2, None, 32, 32, device="cpu", BLOCK_SIZE=32)
    with probe.attach(model):
        model.scored(batch["states"], mask, score)
        with pytest.raises(ArtifactMiss):
            model.scored(batch["states"], other, score)


def test_a_copy_trains_itself(probe: Probe) -> None:
    attached, eager, handle = _pair(probe)
    with handle:
        _step(attached, probe.batch())
        for parameter in attached.parameters():
            parameter.requires_grad_(True)
        twin = copy.deepcopy(attached)
        with torch.no_grad():
            for parameter in attached.parameters():
                parameter.zero_()
        agree(_step(twin, probe.batch()), _step(eager, probe.batch()))
        assert handle.stats()["hits"] == 6


@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_what_is_pickled_is_detached(probe: Probe, how: str) -> None:
    attached, eager, handle = _pair(probe)
    with handle:
        _step(attached, probe.batch())
        if how == "pickle":
            loaded = pickle.loads(pickle.dumps(attached))
        else:
            buffer = io.BytesIO()
            torch.save(attached, buffer)
            buffer.seek(0)
            loaded = torch.load(buffer, weights_only=False)
        hits = handle.stats()["hits"]
        agree(_step(loaded, probe.batch()), _step(eager, probe.batch()))
        assert handle.stats()["hits"] == hits
    with probe.attach(loaded) as again:
        agree(_step(loaded, probe.batch()), _step(eager, probe.batch()))
        assert again.stats()["hits"] == 3


def test_detach_restores_every_forward(probe: Probe) -> None:
    model = probe.module.build()
    own = lambda x: x  # noqa: E731 - a patched forward of a module outside every region
    model.bias_module = nn.Identity()
    model.bias_module.forward = own
    before = [(dict(m.__dict__), m.forward) for m in model.modules()]
    handle = probe.attach(model)
    _step(model, probe.batch())
    handle.detach()
    for module, (state, forward) in zip(model.modules(), before, strict=True):
        assert module.__dict__.keys() == state.keys()
        assert module.forward == forward
    with probe.attach(model):
        pass


def test_a_forward_patched_on_the_instance_after_attach_runs_and_stays(probe: Probe) -> None:
    model = probe.module.build()
    handle = probe.attach(model)
    mine = lambda *_, **__: "mine"  # noqa: E731
    model.probes[0].forward = mine
    assert model.probes[0](1) == "mine"
    handle.detach()
    assert model.probes[0].forward is mine


def test_a_method_held_over_detach_still_runs(probe: Probe) -> None:
    model = probe.module.build()
    handle = probe.attach(model)
    held = model.probes[0].forward
    handle.detach()
    args, kwargs = probe.region_call()
    agree(outcome(lambda: held(*args, **kwargs), []), outcome(lambda: model.probes[0](*args, **kwargs), []))


def test_attaching_twice_is_refused(probe: Probe) -> None:
    model = probe.module.build()
    with probe.attach(model), pytest.raises(ConfigError, match="attached already"):
        probe.attach(model)


def test_eager_misses_run_without_tracing_and_have_all_gradients(probe: Probe, tmp_path: Path) -> None:
    attached, eager = probe.module.build(), probe.module.build()
    with aotcache.attach(attached, probe.spec, store=str(tmp_path / "empty"), on_miss="eager") as handle:
        found = outcome(lambda: attached(**probe.batch()), list(attached.parameters()))
        stats = handle.stats()
    assert (stats["hits"], stats["misses"], stats["eager_calls"], stats["traces"]) == (0, 3, 3, 0)
    with aotcache.runtime.dense.eager_without_tracing():
        agree(found, outcome(lambda: eager(**probe.batch()), list(eager.parameters())))
    assert len(found.values) == 1 + len(list(eager.parameters()))


def test_a_miss_names_the_nearest_entry_and_the_way_out(probe: Probe) -> None:
    model = probe.module.build()
    (x, y), kwargs = probe.region_call()
    with probe.attach(model) as handle, pytest.raises(ArtifactMiss) as caught:
        model.probes[0](x[:3], y[:3], **kwargs)
    text = str(caught.value)
    assert "float32 (3, 8)" in text
    assert "float32 (4, 8)" in text
    assert f"aotcache warm {probe.spec} --store {handle.resolver.store.url}\n" in text
    assert "pad batches with aotcache.Buckets" in text
    assert handle.stats()["misses"] == 1


def test_a_miss_without_gradients_names_the_mode_that_the_spec_leaves_out(
    probe: Probe, tmp_path: Path
) -> None:
    spec = tmp_path / "train.toml"
    spec.write_text(probe.spec.read_text().replace('["train", "infer"]', '["train"]'))
    model = probe.module.build()
    with aotcache.attach(model, spec, store=str(tmp_path / "empty")):
        with (
            torch.no_grad(),
            pytest.raises(ArtifactMiss, match='add "infer" to the spec'),
        ):
            model(**probe.batch())
        with pytest.raises(ArtifactMiss) as caught:
            model(**probe.batch())
    assert "modes" not in str(caught.value)


def test_a_lock_file_restricts_only_where_it_is_named(probe: Probe, tmp_path: Path) -> None:
    import json

    lock = Path(f"{probe.spec}.lock")
    if not lock.exists():
        lock = probe.spec.with_suffix(".lock")
    data = json.loads(lock.read_text())
    data["cells"] = [c for c in data["cells"] if c["region"] == "scored"]
    narrowed = tmp_path / "narrowed.lock"
    narrowed.write_text(json.dumps(data))
    args, kwargs = probe.region_call()
    model = probe.module.build()
    with probe.attach(model, lock=narrowed), pytest.raises(ArtifactMiss, match="lock file names none"):
        model.probes[0](*args, **kwargs)
    with probe.attach(model, lock=lock) as handle:
        model.probes[0](*args, **kwargs)
        assert handle.stats()["hits"] == 1


def test_prefetch_opens_what_the_lock_file_names(probe: Probe) -> None:
    model = probe.module.build()
    with probe.attach(model) as handle:
        handle.prefetch()
        _step(model, probe.batch())
        assert handle.stats()["misses"] == 0


def test_regions_inside_regions_each_run_their_own(probe: Probe, tmp_path: Path) -> None:
    spec = probe.spec.parent / "nested.toml"
    spec.write_text(probe.spec.read_text().replace('["probes.*"', '["", "probes.*"'))
    attached, eager = probe.module.build(), probe.module.build()
    with aotcache.attach(attached, spec, store=probe.store, on_miss="eager") as handle:
        agree(_step(attached, probe.batch()), _step(eager, probe.batch()))
        stats = handle.stats()["regions"]
    assert stats[""]["eager_calls"] == 1
    assert stats["probes.0"]["hits"] == stats["probes.1"]["hits"] == stats["scored"]["hits"] == 1


def test_a_failing_call_in_one_thread_leaves_the_others_running(probe: Probe) -> None:
    model = probe.module.build()
    stop = threading.Event()
    errors: list[type[Exception]] = []

    def fail() -> int:
        (x, y), kwargs = probe.region_call()
        while not stop.is_set():
            try:
                model.probes[0](x[:3], y, **kwargs)
            except ArtifactMiss as error:
                errors.append(type(error))
        return 0

    def work(seed: int) -> int:
        for step in range(40):  # noqa: B007 - returned
            loss = model(**probe.batch(seed))
            torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        return step

    with probe.attach(model), ThreadPoolExecutor(4) as pool:
        failing = pool.submit(fail)
        assert [f.result() for f in [pool.submit(work, i) for i in range(3)]] == [39] * 3
        stop.set()
        failing.result()
    assert errors


def test_threads_under_different_autocast_share_a_module(probe: Probe) -> None:
    model = probe.module.build()
    args, kwargs = probe.region_call()
    with probe.attach(model):
        plain = outcome(lambda: model.probes[0](*args, **kwargs), [])

        def under(autocast: bool) -> list[Outcome]:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                return [outcome(lambda: model.probes[0](*args, **kwargs), []) for _ in range(20)]

        with ThreadPoolExecutor(2) as pool:
            cast, uncast = pool.map(under, [True, False])
    assert {o.error for o in cast} == {ArtifactMiss}
    for found in uncast:
        agree(found, plain, 0.0)


def test_nothing_saved_may_change_before_the_backward(probe: Probe) -> None:
    model = probe.module.build()
    with probe.attach(model):
        for change in ("weight", "input", "base of a view", "output"):
            (_, y), kwargs = probe.region_call()
            base = torch.randn(8, 8)
            x = (
                base[2:6].requires_grad_()
                if change == "base of a view"
                else torch.randn(4, 8, requires_grad=True)
            )
            hidden, soft = model.probes[0](x, y, **kwargs)
            with torch.no_grad():
                {"weight": model.probes[0].lin.weight, "input": x, "base of a view": base, "output": soft}[
                    change
                ].add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                (hidden.sum() + (soft * soft.detach()).sum()).backward()


def test_double_backward_raises_where_it_would_be_left_out(probe: Probe) -> None:
    model = probe.module.build()
    args, kwargs = probe.region_call()
    with probe.attach(model):
        hidden, _ = model.probes[0](*args, **kwargs)
        with pytest.raises(CallRefused, match=r"'probes\.0'.*no second derivative"):
            torch.autograd.grad(hidden.sum(), args[0], create_graph=True)


def _copied(module: nn.Module) -> nn.Module:
    return copy.copy(module)


def _replica(module: nn.Module) -> nn.Module:
    return module._replicate_for_data_parallel()  # type: ignore[no-any-return, operator]


def _cloned_by_hand(module: nn.Module) -> nn.Module:
    clone = type(module).__new__(type(module))
    clone.__dict__ = module.__dict__.copy()
    return clone


@pytest.mark.parametrize("make", [_copied, _replica, _cloned_by_hand])
def test_a_shallow_copy_with_weights_of_its_own_runs_on_them(
    probe: Probe, make: Callable[[nn.Module], nn.Module]
) -> None:
    attached, eager, handle = _pair(probe)
    args, kwargs = probe.region_call()
    with handle:
        before = outcome(lambda: attached.probes[0](*args, **kwargs), [])
        twin = make(attached.probes[0])
        twin._parameters, twin._buffers = {}, dict(eager.probes[0]._buffers)
        twin._modules = dict(eager.probes[0]._modules)
        with torch.no_grad():
            eager.probes[0].lin.weight.mul_(3)
        hits = handle.stats()["hits"]
        found = outcome(lambda: twin(*args, **kwargs), [args[0], eager.probes[0].lin.weight])
        agree(found, outcome(lambda: eager.probes[0](*args, **kwargs), [args[0], eager.probes[0].lin.weight]))
        assert handle.stats()["hits"] == hits + 1
        agree(outcome(lambda: attached.probes[0](*args, **kwargs), []), before)


def test_a_tensor_that_became_a_number_or_none_is_a_miss_that_says_so(probe: Probe) -> None:
    model = probe.module.build()
    args, kwargs = probe.region_call()
    with probe.attach(model):
        model.probes[0](*args, **kwargs)
        table, model.probes[0].table = model.probes[0].table, 2.0
        with pytest.raises(ArtifactMiss, match=r"table differs"):
            model.probes[0](*args, **kwargs)
        model.probes[0].table = table
        model.probes[0].lin.bias = None
        with pytest.raises(ArtifactMiss, match=r"lin\.bias differs"):
            model.probes[0](*args, **kwargs)


def test_saved_tensors_may_be_offloaded_and_come_back_in_another_layout(probe: Probe) -> None:
    attached, eager, handle = _pair(probe)
    expected = _step(eager, probe.batch())

    def pack(tensor: Tensor) -> Tensor:
        return (
            tensor.t().clone(memory_format=torch.contiguous_format) if tensor.dim() == 2 else tensor.clone()
        )

    def unpack(tensor: Tensor) -> Tensor:
        return tensor.t() if tensor.dim() == 2 else tensor

    with handle:
        with torch.autograd.graph.save_on_cpu():
            agree(_step(attached, probe.batch()), expected)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            agree(_step(attached, probe.batch()), expected)
        args, kwargs = probe.region_call()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: t):
            hidden, _ = attached.probes[0](*args, **kwargs)
        with pytest.raises(CallRefused, match=r"hook gave back torch\.float64"):
            hidden.sum().backward()


@pytest.mark.parametrize("change", ["inputs", "result", "pair"])
def test_a_manifest_that_does_not_fit_its_key_is_refused(
    probe: Probe, tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_opened", {})
    shutil.copytree(url2pathname(urlsplit(probe.store).path), tmp_path / "store")
    for path in (tmp_path / "store" / "refs").glob("*/*/*.json"):
        manifest = json.loads(path.read_bytes())
        del manifest["unsigned_sha256"]  # whoever wrote it so had it from their own hand
        if change == "inputs":
            manifest["inputs"].reverse()
        elif change == "result":
            manifest["output_tree"] = {"t": len(manifest["outputs"])}
        elif manifest["pair"]:
            manifest["pair"]["gradients"][0] = 99
        path.write_text(json.dumps(manifest))
    model = probe.module.build()
    args, kwargs = probe.region_call()
    with (
        aotcache.attach(model, probe.spec, store=str(tmp_path / "store")),
        pytest.raises(ManifestError, match="manifest of key"),
    ):
        model.probes[0](*args, **kwargs)


def test_a_wrong_lock_or_option_is_refused(probe: Probe) -> None:
    with pytest.raises(ConfigError, match="on_miss"):
        probe.attach(probe.module.build(), on_miss="never")
    with pytest.raises(ConfigError, match="forbid_tracing"):
        probe.attach(probe.module.build(), forbid_tracing="galaxy")


def test_modes_that_want_single_operators_are_refused(probe: Probe) -> None:
    model = probe.module.build()
    args, kwargs = probe.region_call()
    with probe.attach(model):
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False), pytest.raises(CallRefused, match="FlopCounterMode"):
            model.probes[0](*args, **kwargs)
        with pytest.raises(CallRefused, match="functorch"):
            torch.func.vmap(lambda x: model.probes[0](x, args[1], **kwargs)[0])(args[0][None])
