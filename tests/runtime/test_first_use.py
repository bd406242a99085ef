"""attach(verify="first-use"): what disagrees with eager is refused before anybody sees its result."""

from __future__ import annotations

import importlib
import struct
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aotcache
from aotcache.errors import ConfigError, DisagreesWithEager, RejectedArtifact
from aotcache.graph.structure import ATTACHED
from aotcache.manifest import Manifest
from aotcache.runtime import first_use, registry
from aotcache.runtime.attach import Handle
from aotcache.runtime.dispatch import make_record
from aotcache.runtime.resolve import Resolved
from aotcache.types import Digest, sha256
from tests.runtime.conftest import Probe

GAIN = struct.pack("<f", 1.25) * 8
"""A constant of the probe, as compiled code keeps it for a vector of numbers."""
OTHER_GAIN = struct.pack("<f", 1.26) * 8


@pytest.fixture(autouse=True)
def _nothing_compared_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has opened nothing."""
    monkeypatch.setattr(registry, "_opened", {})


def step(model: nn.Module, given: dict[str, Tensor]) -> list[Tensor]:
    """A loss and all gradients."""
    loss = model(**given)
    wanted = [*model.parameters(), *(t for t in given.values() if t.requires_grad)]
    gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [loss.detach(), *(torch.zeros(1) if g is None else g for g in gradients)]


def infer(model: nn.Module, given: dict[str, Tensor]) -> list[Tensor]:
    model.eval()
    with torch.no_grad():
        return [model(**given)]


def infer_in_inference_mode(model: nn.Module, given: dict[str, Tensor]) -> list[Tensor]:
    model.eval()
    with torch.inference_mode():
        return [model(**given)]


Run = Callable[[nn.Module, dict[str, Tensor]], list[Tensor]]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(map(torch.equal, found, expected))


@pytest.mark.parametrize("run", [step, infer, infer_in_inference_mode])
def test_a_good_artifact_passes_once_and_gives_what_it_gives_without_a_check(probe: Probe, run: Run) -> None:
    given, results, stats = probe.batch(), [], []
    for verify in (None, "first-use"):
        model = probe.module.build()
        with probe.attach(model, verify=verify) as handle:
            state = torch.get_rng_state()
            results += [run(model, given), run(model, given)]
            assert torch.equal(torch.get_rng_state(), state)
        stats.append(handle.stats())
        assert all(p.grad is None for p in model.parameters())
    assert all(same(found, results[0]) for found in results[1:])
    assert [s["verified"] for s in stats] == [0, 3]
    assert [s["misses"] + s["eager_calls"] + s["traces"] for s in stats] == [0, 0]


def test_hooks_of_tensors_and_modules_see_the_call_alone(probe: Probe) -> None:
    given, model, seen = probe.batch(), probe.module.build(), []
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: seen.append(grad.shape))
    model.scored.register_forward_hook(lambda *_: seen.append("scored"))
    given["x"].register_hook(lambda grad: seen.append("x"))
    counts = []
    with probe.attach(model, verify="first-use"):
        for _ in range(2):
            model(**given).backward()
            counts.append(len(seen))
    assert counts[1] == 2 * counts[0]


def test_a_tensor_that_is_no_leaf_may_come_in(probe: Probe) -> None:
    region = probe.module.Probe(0)
    args, kwargs = probe.region_call()
    with probe.attach_to(region, verify="first-use") as handle:
        first = region(args[0] * 2, args[1], **kwargs)
        assert handle.stats()["verified"] == 1
    gradient = torch.autograd.grad(first[0].sum(), args[0])[0]
    plain = torch.autograd.grad(region(args[0] * 2, args[1], **kwargs)[0].sum(), args[0])[0]
    torch.testing.assert_close(gradient, plain)


def test_a_checkpoint_around_a_region_saves_and_recomputes_as_without_a_check(probe: Probe) -> None:
    from torch.utils.checkpoint import checkpoint

    args, kwargs = probe.region_call()
    results = []
    for reentrant in (False, True):
        region = probe.module.Probe(0)
        region.load_state_dict(probe.module.build().probes[0].state_dict())
        region.table = torch.ones(probe.module.WIDTH)
        with probe.attach_to(region, verify="first-use", on_miss="raise"):
            out = checkpoint(lambda *a, r=region: r(*a, **kwargs), *args, use_reentrant=reentrant)
            results.append(
                torch.autograd.grad(out[0].sum(), args[0], allow_unused=True)[0] if not reentrant else None
            )
            if reentrant:
                args[0].grad = None
                out[0].sum().backward()
                results[-1] = args[0].grad
    torch.testing.assert_close(results[0], results[1])


def test_threads_share_one_comparison_of_each_artifact(probe: Probe) -> None:
    given = probe.batch()
    models = [probe.module.build() for _ in range(4)]

    def work(model: nn.Module) -> tuple[list[Tensor], dict[str, Any]]:
        own = {name: t.detach().clone().requires_grad_(t.requires_grad) for name, t in given.items()}
        with probe.attach(model, verify="first-use") as handle:
            return step(model, own), handle.stats()

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(work, models))
    assert all(same(values, found[0][0]) for values, _ in found)
    assert sum(stats["verified"] for _, stats in found) == 3
    assert sum(stats["traces"] for _, stats in found) == 0


def compare(probe: Probe, region: nn.Module, original: Callable[..., Any]) -> bool:
    """A probe's artifact with what some other function gives eagerly, for a call with gradients."""
    args, kwargs = probe.region_call()
    with probe.attach_to(region) as handle:
        call = region.__dict__[ATTACHED].region.describe(args, kwargs)
        answer = handle.resolver.resolve(call)
        assert isinstance(answer, Resolved)
        record = make_record(call, answer.executable)
        compared = first_use.check(call, record, answer.executable, original, args, kwargs)
        assert handle.stats()["traces"] == 0
    assert all(tensor.grad is None for tensor in (*args, *region.parameters()))
    return compared


def test_a_module_is_as_it_was_while_it_is_compared(probe: Probe) -> None:
    """Another thread may be running it: what lies in its places are its own weights."""
    region, seen = probe.module.Probe(0), []
    own = dict(region.lin._parameters)

    def looking(*args: Any, **kwargs: Any) -> Any:
        seen.append(all(region.lin._parameters[name] is own[name] for name in own))
        return type(region).forward(region, *args, **kwargs)

    assert compare(probe, region, looking)
    assert seen == [True]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


class Plain(Doubled):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 1


def test_a_gradient_through_a_custom_autograd_function_is_compared_as_well(probe: Probe) -> None:
    for function in (Plain, Doubled):
        region = probe.module.Probe(0)

        def through(x: Tensor, *rest: Any, f: Any = function, r: nn.Module = region, **kwargs: Any) -> Any:
            return type(r).forward(r, f.apply(x), *rest, **kwargs)

        if function is Plain:
            assert compare(probe, region, through)
            registry._opened.clear()
        else:
            with pytest.raises(DisagreesWithEager, match="the gradient of x differs"):
                compare(probe, region, through)


def test_eager_that_fails_is_no_proof_of_anything(probe: Probe) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory: tried to allocate the matrix of scores")

    with pytest.raises(RejectedArtifact, match="out of memory") as caught:
        compare(probe, probe.module.Probe(0), fails)
    assert not isinstance(caught.value, DisagreesWithEager)
    assert "aotcache verify --run" in str(caught.value)


def test_a_result_of_another_form_disagrees(probe: Probe) -> None:
    region = probe.module.Probe(0)

    def one(*args: Any, **kwargs: Any) -> Any:
        return type(region).forward(region, *args, **kwargs)[0]

    with pytest.raises(DisagreesWithEager, match="eager returns"):
        compare(probe, region, one)


@pytest.fixture(scope="module")
def cast(probe_spec: Path, probe_module: Any, warmed: Callable[..., str]) -> tuple[Any, Path, str]:
    """A drafter under autocast; its spec lies beside the probe's."""
    spec = probe_spec.with_name("cast.toml")
    return importlib.import_module("cast"), spec, warmed(spec)


def test_a_good_artifact_passes_under_autocast(cast: tuple[Any, Path, str]) -> None:
    module, spec, store = cast
    model, given = module.build(), module.batch({"rows": 4}, "cpu")[1]
    results = []
    for verify in (None, "first-use"):
        with aotcache.attach(model, spec, store=store, verify=verify) as handle, module.context():
            results.append(step(model, given))
    assert same(*results)
    assert handle.stats()["verified"] == 1


def altered(
    probe: Probe,
    folder: Path,
    change: Callable[[str, bytes], bytes],
    describe: Callable[[Manifest], Manifest] = lambda manifest: manifest,
    *,
    of: Callable[[Manifest], bool] = lambda manifest: True,
) -> Probe:
    """The probe with a store of this user's own in which archives hold other bytes, validly described."""
    source, store = aotcache.open_store(probe.store), aotcache.open_store(folder / "store")
    for number, manifest in enumerate(m for m in source.list() if m.region != "layer" and of(m)):
        path, members = folder / f"{number}.pt2", {}
        archive = source.blob_path(manifest.digest)
        assert archive is not None
        with zipfile.ZipFile(archive) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
            for info in old.infolist():
                data = change(info.filename, old.read(info))
                new.writestr(info, data)
                members[info.filename] = sha256(data)
        data = path.read_bytes()
        made = replace(manifest, digest=Digest(sha256(data)), size=len(data), members=members)
        assert store.publish(describe(made), path)
    return replace(probe, store=store.url)


def gain_of(graph: str) -> Callable[[str, bytes], bytes]:
    """Puts another constant into one graph's library."""

    def change(name: str, data: bytes) -> bytes:
        if f"/{graph}/" in name and name.endswith(".so") and GAIN in data:
            return data.replace(GAIN, OTHER_GAIN)
        return data

    return change


def refused(handle: Handle, call: Callable[[], Any]) -> DisagreesWithEager:
    with pytest.raises(DisagreesWithEager) as caught:
        call()
    details = caught.value.details
    assert details["region"] == "probes.0"
    assert details["digest"] in str(caught.value)
    assert not details["error"] <= details["bound"]
    assert handle.stats()["hits"] == handle.stats()["traces"] == 0
    return caught.value


@pytest.mark.parametrize("on_miss", ["raise", "eager"])
def test_a_forward_with_an_altered_constant_is_refused_at_every_call(
    probe: Probe, tmp_path: Path, on_miss: Any
) -> None:
    other = altered(probe, tmp_path, gain_of("forward"), of=lambda m: m.mode == "train")
    model = probe.module.build()
    with other.attach(model, verify="first-use", on_miss=on_miss) as handle:
        for _ in range(2):
            error = refused(handle, lambda: model(**probe.batch()))
            assert error.details["what"] == "output 0"
            assert error.details["mode"] == "train"
    with other.attach(probe.module.build()):  # and nothing notices it without
        pass


def test_a_gradient_alone_that_is_wrong_is_refused_before_the_forward_is_seen(
    probe: Probe, tmp_path: Path
) -> None:
    other = altered(probe, tmp_path, gain_of("backward"), of=lambda m: m.mode == "train")
    model = probe.module.build()
    with other.attach(model, verify="first-use") as handle:
        error = refused(handle, lambda: model(**probe.batch()))
    assert error.details["what"].startswith("the gradient of ")
    model = probe.module.build()
    with other.attach(model):  # what it would have done
        wrong = step(model, probe.batch())
    with probe.attach(model):
        right = step(model, probe.batch())
    assert torch.equal(wrong[0], right[0])
    assert not same(wrong, right)


def test_an_inference_with_an_altered_constant_is_refused(probe: Probe, tmp_path: Path) -> None:
    other = altered(probe, tmp_path, gain_of("forward"), of=lambda m: m.mode == "infer")
    model = probe.module.build()
    with other.attach(model, verify="first-use") as handle:
        error = refused(handle, lambda: infer(model, probe.batch()))
    assert error.details["mode"] == "infer"


def test_an_artifact_of_another_region_with_the_same_slots_is_refused(probe: Probe, tmp_path: Path) -> None:
    """The inference of a module in eval mode, described as that of one in training mode."""
    model, given = probe.module.build(), probe.batch()
    arguments, options = probe.region_call()
    with probe.attach(model) as handle, torch.no_grad():
        call = model.probes[0].__dict__[ATTACHED].region.describe(arguments, options)
        assert handle.stats()["misses"] == 0

    def describe(manifest: Manifest) -> Manifest:
        return replace(manifest, key=call.parts.key, components=tuple(call.parts.to_json()))

    other = altered(
        probe,
        tmp_path,
        lambda _, data: data,
        describe,
        of=lambda m: (m.region, m.mode) == ("probes.0", "infer"),
    )
    with other.attach(model, verify="first-use") as handle, torch.no_grad():
        error = refused(handle, lambda: model(**given))
    assert error.details["what"] == "output 0"


def test_another_word_than_first_use_is_refused(probe: Probe) -> None:
    with pytest.raises(ConfigError, match="expected 'first-use' or None"):
        probe.attach(probe.module.build(), verify="always")
