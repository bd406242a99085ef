"""D7: whatever changes the code changes the key or the variant; nothing else does."""

from __future__ import annotations

import base64
import itertools
import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import aotcache
from aotcache import compat, host
from aotcache.errors import ArtifactMiss
from aotcache.graph import ambient
from aotcache.manifest import Manifest
from aotcache.runtime import registry
from aotcache.spec import Spec
from aotcache.types import Target
from tests.cases import lora, switches, tiny
from tests.cases.conftest import Warm
from tests.cases.places import KINDS, REMOTE, Places
from tests.cases.support import answers, assert_close, copy_store, make_batch, start, write_spec


@pytest.fixture
def empty(tmp_path: Path) -> str:
    return (tmp_path / "empty").as_uri()


def key_of(model: torch.nn.Module, spec: Spec, store: str, *args: Any, **batch: Any) -> str:
    """The key of a model's first call, as the miss of an empty store names it."""
    with aotcache.attach(model, spec, store=store):
        with pytest.raises(ArtifactMiss) as miss:
            model(*args, **batch)
    return str(miss.value.details["key"])


@contextmanager
def precision(value: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(value)
    yield
    torch.set_float32_matmul_precision(before)


@contextmanager
def backend_precision() -> Iterator[None]:
    """The newer way, after which torch.get_float32_matmul_precision() raises."""
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    yield
    torch.backends.mkldnn.matmul.fp32_precision = before


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@contextmanager
def heads(count: int) -> Iterator[None]:
    before = tiny.HEADS
    tiny.HEADS = count
    yield
    tiny.HEADS = before


def same(model: tiny.Tiny) -> tiny.Tiny:
    return model


def wide(model: tiny.Tiny) -> tiny.Tiny:
    return model.double()


def frozen(model: tiny.Tiny) -> tiny.Tiny:
    model.blocks[0].out.requires_grad_(False)
    return model


def adapted(model: tiny.Tiny) -> tiny.Tiny:
    model.blocks[0].qkv = lora.Lora(model.blocks[0].qkv)
    return model


CHANGES: dict[str, tuple[Callable[[tiny.Tiny], tiny.Tiny], Callable[[], Any] | None, dict[str, Any]]] = {
    "nothing": (same, None, {}),
    "dtype": (wide, None, {"dtype": torch.float64}),
    "autocast": (same, lambda: torch.autocast("cpu", torch.bfloat16), {}),
    "autocast dtype": (same, lambda: torch.autocast("cpu", torch.float16), {}),
    "TF32": (same, lambda: precision("high"), {}),
    "bf16 products in float32": (same, backend_precision, {}),
    "deterministic": (same, deterministic, {}),
    "bucket": (same, None, {"length": 128}),
    "batch": (same, None, {"rows": 3}),
    "heads": (same, lambda: heads(8), {}),
    "requires_grad": (frozen, None, {}),
    "no grad": (same, torch.no_grad, {}),
    "module tree": (adapted, None, {}),
    "input grad": (same, None, {"leaf": True}),
}


def test_each_change_of_the_request_is_another_key(specs: Path, empty: str) -> None:
    spec = write_spec(specs / "d7.toml")
    keys = {}
    for name, (change, context, shape) in CHANGES.items():
        with ExitStack() as stack:
            if context is not None:
                stack.enter_context(context())
            batch = make_batch(shape.get("rows", 2), shape.get("length", 256))
            for entry in ("x", "target"):
                batch[entry] = batch[entry].to(shape.get("dtype", torch.float32))
            batch["x"].requires_grad_(shape.get("leaf", False))
            keys[name] = key_of(change(tiny.build()), spec, empty, **batch)
    for (one, key), (other, other_key) in itertools.combinations(keys.items(), 2):
        assert key != other_key, (one, other)
    assert key_of(tiny.build(), spec, empty, **make_batch(seed=8)) == keys["nothing"]


def test_compile_options_are_in_the_key(specs: Path, empty: str) -> None:
    spec = write_spec(specs / "d7.toml")
    others = [
        replace(spec, compile=replace(spec.compile, memory_budget=0.5)),
        replace(spec, compile=replace(spec.compile, max_autotune=True)),
    ]
    keys = {key_of(tiny.build(), one, empty, **make_batch()) for one in (spec, *others)}
    assert len(keys) == 3


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def banded(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & (q - kv < 64)


def test_mask_code_and_block_size_are_in_the_key(specs: Path, empty: str) -> None:
    spec = write_spec(specs / "d7.toml")

    def key(mask: Callable[..., Any], size: int) -> str:
        blocks = create_block_mask(mask, 2, None, 256, 256, device="cpu", BLOCK_SIZE=size)
        model = tiny.build(flex=True)
        # The region's own call: the mask is its argument.
        with aotcache.attach(model, spec, store=empty), pytest.raises(ArtifactMiss) as miss:
            model.blocks[0](make_batch()["x"], blocks)
        return str(miss.value.details["key"])

    keys = [key(causal, 128), key(banded, 128), key(causal, 64)]
    assert len(set(keys)) == 3
    assert key(causal, 128) == keys[0]


@pytest.mark.parametrize("way", ["os.environ", "environ", "getenv"])
def test_the_environment_that_code_reads_is_in_the_key(
    specs: Path, empty: str, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    spec = write_spec(specs / "d7.toml")
    x = torch.zeros(2, 8)
    monkeypatch.setenv("CASES_OTHER", "1")
    before = key_of(switches.Holder(way), spec, empty, x)
    monkeypatch.setenv("CASES_OTHER", "2")  # which no code here names
    assert key_of(switches.Holder(way), spec, empty, x) == before
    monkeypatch.setenv("CASES_FAST", "1")
    on = key_of(switches.Holder(way), spec, empty, x)
    monkeypatch.setenv("CASES_FAST", "2")
    assert len({before, on, key_of(switches.Holder(way), spec, empty, x)}) == 3


def test_constants_and_tables_that_code_reads_are_in_the_key(
    specs: Path, empty: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = write_spec(specs / "d7.toml")
    x = torch.zeros(2, 8)
    before = [key_of(switches.Holder(way), spec, empty, x) for way in ("constant", "table")]
    monkeypatch.setattr(switches, "FAST", True)
    monkeypatch.setitem(switches.TABLE, "gelu", 2.0)
    after = [key_of(switches.Holder(way), spec, empty, x) for way in ("constant", "table")]
    assert all(one != other for one, other in zip(before, after, strict=True))


def test_host_user_folder_rank_and_log_level_are_not(specs: Path, empty: str, tmp_path: Path) -> None:
    spec = write_spec(specs / "d7.toml")
    elsewhere = {
        "HOSTNAME": "another-host",
        "USER": "somebody",
        "LOGNAME": "somebody",
        "RANK": "3",
        "LOCAL_RANK": "3",
        "WORLD_SIZE": "8",
        "CUDA_VISIBLE_DEVICES": "1",
        "TORCH_LOGS": "inductor",
        "AOTCACHE_HOME": str(tmp_path / "another-home"),
    }
    here, there = answers(
        [
            start("keyed", str(spec.path), empty, None),
            start("keyed", str(spec.path), empty, str(tmp_path), environment=elsewhere),
        ]
    )
    assert len(set(here)) == 2
    assert there == here


def test_every_part_of_target_and_toolchain_is_another_variant(tiny_d: Warm) -> None:
    variant = tiny_d.manifests()[0].variant
    toolchain = variant.toolchain
    others = [
        replace(variant, toolchain=replace(toolchain, torch="2.99.0")),
        replace(variant, toolchain=replace(toolchain, git="f" * 40)),
        replace(variant, toolchain=replace(toolchain, cuda="13.0")),
        replace(variant, target=Target("cuda", "sm_90")),
        replace(variant, target=Target("cuda", "sm_100")),
        replace(variant, target=Target("cpu", "x86_64-baseline")),
    ]
    assert len({str(v) for v in (variant, *others)}) == len(others) + 1


def test_tf32_of_a_gpu_is_seen_and_not_that_of_a_cpu() -> None:
    before = {device: ambient.read(device) for device in ("cpu", "cuda")}
    allowed = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = not allowed
        found = {device: ambient.read(device) for device in ("cpu", "cuda")}
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    assert found["cuda"] != before["cuda"]
    assert found["cpu"] == before["cpu"]


Altered = Callable[[Any], Any]

ALTERED: dict[str, tuple[Altered, str]] = {
    "torch version": (
        lambda m: replace(m, toolchain=replace(m.toolchain, torch="2.99.0")),
        r"built with torch 2\.99\.0, this process runs torch",
    ),
    "torch build": (lambda m: replace(m, toolchain=replace(m.toolchain, git="f" * 40)), "at git f{40}"),
    "CUDA": (lambda m: replace(m, toolchain=replace(m.toolchain, cuda="99.0")), r"torch for CUDA 99\.0"),
    "GPU": (lambda m: replace(m, target=Target("cuda", "sm_999")), "built for cuda:sm_999"),
    "CPU features": (
        lambda m: replace(m, host=replace(m.host, cpu_features=(*m.host.cpu_features, "amx_cases"))),
        "CPU features that this host lacks: amx_cases",
    ),
    "C library": (lambda m: replace(m, host=replace(m.host, glibc="99.1")), r"needs glibc 99\.1"),
    "C++ ABI": (lambda m: replace(m, host=replace(m.host, libstdcxx="99.1")), r"GLIBCXX 99\.1"),
}


@pytest.mark.parametrize("name", ALTERED)
def test_an_artifact_of_another_toolchain_or_host_is_never_opened(
    tiny_d: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: list[str], name: str
) -> None:
    change, reason = ALTERED[name]
    # Nothing that an earlier test has opened is at hand.
    monkeypatch.setattr(registry, "_opened", {})
    monkeypatch.setattr(registry, "_libraries", {})
    store = copy_store(tiny_d.store, tmp_path / "store", tiny_d.manifests("infer"), change)
    monkeypatch.setenv("AOTCACHE_HOME", str(tmp_path / "home"))
    model = tiny.build()
    with aotcache.attach(model, tiny_d.spec, store=store) as handle, torch.no_grad():
        with pytest.raises(ArtifactMiss, match=reason):
            model(**make_batch())
        assert handle.stats()["loads"] == 0
    assert opened == []
    # The artifact itself is as good as before.
    model = tiny.build()
    with aotcache.attach(model, tiny_d.spec, store=tiny_d.store), torch.no_grad():
        assert_close(model(**make_batch()), tiny.build()(**make_batch()))


@pytest.mark.parametrize("kind", REMOTE)
def test_an_artifact_of_another_torch_is_never_fetched_or_opened_whichever_store_it_is_in(
    tiny_d: Warm, places: Places, tmp_path: Path, opened: list[str], kind: str
) -> None:
    change, reason = ALTERED["torch version"]
    model = tiny.build()
    with places.place(kind, tmp_path, tiny_d.store, tiny_d.manifests("infer"), change) as place:
        with aotcache.attach(model, tiny_d.spec, store=place.url) as handle, torch.no_grad():
            for load in (handle.prefetch, lambda: model(**make_batch())):
                with pytest.raises(ArtifactMiss, match=reason):
                    load()
        assert place.left() == []
    assert opened == []


def in_place(manifest: Manifest, document: bytes) -> bytes:
    """A ref that says another torch than its name, or than was signed."""
    here, other = (f'"torch":"{version}"'.encode() for version in (host.host_toolchain().torch, "2.99.0"))
    if here in document:
        return replace(manifest, toolchain=replace(manifest.toolchain, torch="2.99.0")).document()
    envelope = json.loads(document)
    payload = base64.b64decode(envelope["payload"])
    assert here in payload
    envelope["payload"] = base64.b64encode(payload.replace(here, other)).decode()
    return json.dumps(envelope, sort_keys=True, separators=(",", ":")).encode()


@pytest.mark.parametrize("kind", KINDS)
def test_a_torch_version_altered_in_place_is_a_miss_and_never_opened(
    tiny_d: Warm, places: Places, tmp_path: Path, opened: list[str], kind: str
) -> None:
    here = host.host_toolchain().torch
    manifests = tiny_d.manifests("infer")
    model = tiny.build()
    with places.place(kind, tmp_path, tiny_d.store, manifests) as place:
        for manifest in manifests:
            ref = f"refs/{manifest.key[:2]}/{manifest.key}/{manifest.variant}.json"
            document = place.behind._client.get(ref)
            assert document is not None
            place.behind._client.put(ref, in_place(manifest, document), create=False)
        with aotcache.attach(model, tiny_d.spec, store=place.url), torch.no_grad():
            with pytest.raises(ArtifactMiss) as missed:
                model(**make_batch())
        assert opened == []
        assert place.left() == []
    # What was expected is the file's name, what was found is in it. A service tells nothing of what it cannot serve.
    if kind != "service":
        assert re.search(rf"torch{re.escape(here)}\S* cannot be used: .*torch2\.99\.0", str(missed.value))


def test_an_older_driver_is_refused(tiny_d: Warm) -> None:
    manifest = tiny_d.manifests("infer")[0]
    facts = replace(host.host_facts(), cuda_archs=("sm_90",), driver="12.0")
    built = replace(manifest, target=Target("cuda", "sm_90"), host=replace(manifest.host, driver="12.8"))
    answer = compat.verdict(built, facts)
    assert isinstance(answer, compat.Rejected)
    assert "CUDA driver 12.8" in str(answer)
    assert "12.0" in str(answer)
