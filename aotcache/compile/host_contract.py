"""What a host must offer to an archive: read out of its libraries and its graphs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from torch import fx

from aotcache.compat import cpu_level_features
from aotcache.compile.graphs import call_nodes, target_name
from aotcache.manifest import HostContract
from aotcache.types import Target, Toolchain

# private torch names, tried on 2.13.0


def _python_definition(name: str) -> str | None:
    """Module of the function that a `torch.library.custom_op` was made from."""
    from torch._library.custom_ops import OPDEFS

    found = OPDEFS.get(name)
    return None if found is None else str(found._init_fn.__module__)


def _fake_source(name: str) -> str | None:
    """`file:line` where an operator's fake kernel was registered from Python."""
    from torch._library.simple_registry import singleton

    kernels = getattr(singleton.find(name).fake_impl, "kernels", None)
    kernel = kernels[0] if kernels else getattr(singleton.find(name).fake_impl, "kernel", None)
    return None if kernel is None else str(kernel.source)


# end of private torch names

HOST_LEVEL_OF_CUDA = "x86_64-avx2"
"""CPU level that the host code of a CUDA artifact is built for."""

_TORCHS_OWN = frozenset({"aten", "prims", "prim", "higher_order", "inductor", "flex_lib"})


def cpu_level(target: Target) -> str:
    """The CPU level that a target's host code is built for."""
    return target.arch if target.device == "cpu" else HOST_LEVEL_OF_CUDA


def host_contract(
    libraries: Iterable[Path], graphs: Iterable[fx.GraphModule], target: Target, toolchain: Toolchain
) -> HostContract:
    """Reads the contract of an archive before it is published.

    Args:
        libraries: The archive's shared libraries, unpacked.
        graphs: What they were compiled from.
        target: What they were compiled for.
        toolchain: What they were compiled with.

    Raises:
        ConfigError: for a CPU level that nobody has defined.
    """
    needed: dict[str, None] = {}
    versions: set[str] = set()
    for library in libraries:
        names, symbols = elf_needs(library)
        needed.update(dict.fromkeys(names))
        versions |= symbols
    return HostContract(
        cpu_features=cpu_level_features(cpu_level(target)),
        glibc=_highest(versions, "GLIBC_"),
        libstdcxx=_highest(versions, "GLIBCXX_"),
        libraries=tuple(needed),
        operators=dict(sorted(_operators(graphs))),
        driver=toolchain.cuda if target.device == "cuda" else None,
    )


def elf_needs(library: Path) -> tuple[tuple[str, ...], set[str]]:
    """Libraries that an ELF file is linked to, and the symbol versions that it needs."""
    names: list[str] = []
    versions: set[str] = set()
    with library.open("rb") as file:
        for section in ELFFile(file).iter_sections():
            if isinstance(section, DynamicSection):
                names += [str(getattr(tag, "needed", "")) for tag in section.iter_tags("DT_NEEDED")]
            elif isinstance(section, GNUVerNeedSection):
                for _, auxiliaries in section.iter_versions():
                    versions |= {auxiliary.name for auxiliary in auxiliaries}
    return tuple(names), versions


def _highest(versions: Iterable[str], prefix: str) -> str | None:
    numbers = [
        tuple(int(n) for n in name.removeprefix(prefix).split("."))
        for name in versions
        if name.startswith(prefix) and name.removeprefix(prefix).replace(".", "").isdigit()
    ]
    return ".".join(map(str, max(numbers))) if numbers else None


def _operators(graphs: Iterable[fx.GraphModule]) -> Iterator[tuple[str, dict[str, str]]]:
    for graph in graphs:
        for node in call_nodes(graph):
            target = node.target
            if isinstance(target, torch._ops.OpOverload) and target.namespace not in _TORCHS_OWN:
                schema = target._schema
                yield (
                    target_name(target),
                    {"schema": str(schema), "module": _registering_module(schema.name)},
                )


def _registering_module(name: str) -> str:
    """The module to import for an operator; empty where torch does not know."""
    if (module := _python_definition(name)) is not None:
        return module
    source = _fake_source(name)
    if source is None:
        return ""
    path = source.rpartition(":")[0]
    for known, loaded in list(sys.modules.items()):
        if getattr(loaded, "__file__", None) == path:
            return known
    return ""
