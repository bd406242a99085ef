from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from aotcache import host
from aotcache.compat import CPU_LEVELS, Accepted, verdict
from aotcache.errors import ConfigError, UnsupportedTorch
from aotcache.manifest import HostContract
from tests.manifests import make_manifest


def test_the_toolchain_is_torchs_own() -> None:
    found = host.host_toolchain()
    assert str(torch.__version__).startswith(found.torch)
    assert "+" not in found.torch
    assert len(found.git) == 40


@pytest.mark.skipif(platform.machine() != "x86_64", reason="levels are x86_64's")
def test_this_host_has_every_feature_of_its_own_target() -> None:
    target = host.host_target()
    assert target.device == "cpu"
    assert host.cpu_features().issuperset(CPU_LEVELS[target.arch])


@pytest.mark.skipif("avx2" not in host.cpu_features(), reason="needs a processor with AVX2")
def test_a_torch_capped_at_avx2_makes_an_avx2_target() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from aotcache.host import host_target; print(host_target())"],
        env={"ATEN_CPU_CAPABILITY": "avx2", "PATH": ""},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "cpu:x86_64-avx2"


def test_this_host_accepts_what_asks_for_what_it_offers() -> None:
    facts = host.host_facts()
    manifest = make_manifest(
        target=str(host.host_target()),
        toolchain=facts.toolchain,
        host=HostContract(tuple(facts.cpu_features), facts.glibc, facts.libstdcxx, (), {}),
    )
    assert verdict(manifest, facts) == Accepted(manifest)


def test_the_c_library_is_the_one_the_loader_reports() -> None:
    name, version = platform.libc_ver()
    assert host.host_facts().glibc == (version if name == "glibc" else None)


def test_libstdcxx_offers_what_torch_itself_needs() -> None:
    found = host.host_facts().libstdcxx
    assert found is not None
    assert tuple(map(int, found.split("."))) >= (3, 4, 21)


def test_the_libraries_that_torch_brings_and_the_linker_knows_are_there() -> None:
    there = host.host_facts().library
    assert all(
        there(name) for name in ("libtorch_cpu.so", "libc10.so", "libstdc++.so.6", "libm.so.6", "libc.so.6")
    )
    assert not there("libaotcache-has-none-such.so.1")


@pytest.mark.parametrize("name", ["", "../libc.so.6", "/proc/self/exe", "a b", "x" * 300])
def test_a_library_that_is_named_by_no_plain_name_is_never_there(name: str) -> None:
    """Such names come out of manifests, also of those that nobody vouches for."""
    assert not host.host_facts().library(name)


def test_operators_are_found_once_they_are_registered_and_with_their_schema() -> None:
    assert host.operator_schema("aotcache_test_host::scale") is None
    library = torch.library.Library("aotcache_test_host", "DEF")
    try:
        library.define("scale(Tensor x, float by) -> Tensor")
        library.define("scale.twice(Tensor x) -> Tensor")
        schema = "aotcache_test_host::scale(Tensor x, float by) -> Tensor"
        assert host.operator_schema("aotcache_test_host::scale") == schema
        assert host.operator_schema("aotcache_test_host::scale.default") == schema
        # The text that a builder records is the operator's own.
        assert str(torch.ops.aotcache_test_host.scale.default._schema) == schema
        twice = host.operator_schema("aotcache_test_host::scale.twice")
        assert twice == "aotcache_test_host::scale.twice(Tensor x) -> Tensor"
    finally:
        library._destroy()
    assert host.operator_schema("aotcache_test_host::scale") is None


@pytest.mark.parametrize("device", ["tpu", "", "cuda:x"])
def test_devices_that_do_not_exist_are_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="device"):
        host.host_target(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for hosts without a GPU")
def test_cuda_without_a_gpu_says_what_is_missing() -> None:
    with pytest.raises(ConfigError, match="sees no CUDA device; use cpu"):
        host.host_target("cuda")
    assert host.host_facts().cuda_archs == ()
    assert host.host_facts().driver is None


@pytest.mark.parametrize("version", ["2.10.1", "2.15.0", "3.0.0+cpu"])
def test_a_torch_that_nobody_tried_is_refused_by_name(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    host.host_toolchain.cache_clear()
    try:
        with pytest.raises(UnsupportedTorch, match=version.partition("+")[0]):
            host.host_toolchain()
    finally:
        host.host_toolchain.cache_clear()
