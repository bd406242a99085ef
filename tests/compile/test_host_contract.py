"""What an archive asks of a host, against what binutils read out of it."""

from __future__ import annotations

import re
import subprocess

import pytest

from aotcache.compat import CPU_LEVELS
from aotcache.compile.host_contract import elf_needs, host_contract
from aotcache.host import operator_schema
from aotcache.types import Target, Toolchain
from tests.compile.conftest import Made

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_libraries_and_symbol_versions_are_those_readelf_finds(trained: Made) -> None:
    for library in trained.libraries():
        dynamic = subprocess.run(
            ["readelf", "-dVW", str(library)], capture_output=True, text=True, check=True
        ).stdout
        names, versions = elf_needs(library)
        assert list(names) == re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
        assert versions == set(re.findall(r"Name: ([A-Z]\w+[\d.]+)", dynamic))
        assert "RPATH" not in dynamic
        assert "RUNPATH" not in dynamic


def test_the_contract_names_the_floor_of_both_libraries(trained: Made) -> None:
    host = trained.built.host
    assert host.cpu_features == CPU_LEVELS["x86_64-avx2"]
    assert "libtorch_cpu.so" in host.libraries
    assert host.glibc is not None
    assert re.fullmatch(r"2\.\d+", host.glibc)
    assert host.libstdcxx is not None
    assert host.libstdcxx.startswith("3.4")
    assert host.operators == {}
    assert host.driver is None


def test_a_custom_operator_is_recorded_with_schema_and_module(operators: Made) -> None:
    recorded = operators.built.host.operators
    assert recorded == {
        "aotcache_tests::squash": {
            "schema": "aotcache_tests::squash(Tensor x) -> Tensor",
            "module": "tests.compile.custom_op",
        }
    }
    (name,) = recorded
    assert operator_schema(name) == recorded[name]["schema"]


def test_a_cuda_contract_asks_for_the_driver_of_its_toolchain() -> None:
    contract = host_contract([], [], Target("cuda", "sm_90"), Toolchain("2.13.0", "0" * 40, "12.8"))
    assert contract.driver == "12.8"
    assert contract.cpu_features == CPU_LEVELS["x86_64-avx2"]
