"""Probes this machine: its target, its toolchain and what it offers an artifact.

Nothing is probed at import. The answers cannot change while a process lives, so
each probe runs once per process; all functions may be called from any thread.
"""

from __future__ import annotations

import mmap
import os
import platform
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

from aotcache.compat import CPU_LEVELS, HostFacts
from aotcache.errors import ConfigError, UnsupportedTorch
from aotcache.types import Target, Toolchain

_TORCH_FROM = (2, 11)
_TORCH_BEFORE = (2, 15)
"""Releases whose sources were read for the private names used here; 2.13 is what the suite runs on."""

# private torch names, tried on 2.13.0


def _cuda_driver_number() -> int:
    """CUDA version of the driver as `1000 * major + 10 * minor`; 0 without a driver."""
    import torch

    return int(torch._C._cuda_getDriverVersion())  # type: ignore[attr-defined]  # not in CPU builds


def _operator_schemas(name: str) -> list[Any]:
    import torch

    return list(torch._C._jit_get_schemas_for_operator(name))


# end of private torch names


def host_target(device: str = "cpu") -> Target:
    """The target that code built for this machine's own device gets.

    Args:
        device: `cpu`, `cuda` or `cuda:<index>`.

    Raises:
        ConfigError: for another device type, or for `cuda` without such a device.
    """
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return Target("cpu", _cpu_arch())
    if kind != "cuda":
        raise ConfigError(f"device {device!r} is not supported; use cpu, cuda or cuda:<index>")
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            f"device {device!r} asked for, but torch {torch.__version__} sees no CUDA device; use cpu, or a "
            "torch built for CUDA on a machine that has one"
        )
    if index and not (index.isdigit() and int(index) < torch.cuda.device_count()):
        raise ConfigError(f"device {device!r} does not exist; torch sees {torch.cuda.device_count()}")
    major, minor = torch.cuda.get_device_capability(int(index or torch.cuda.current_device()))
    return Target("cuda", f"sm_{major}{minor}")


def native_target() -> Target:
    """What `native` stands for: the GPU that torch would use, or the CPU where it sees none."""
    import torch

    return host_target("cuda" if torch.cuda.is_available() else "cpu")


@cache
def host_toolchain() -> Toolchain:
    """The torch of this process.

    Raises:
        UnsupportedTorch: nobody has tried aotcache's private torch names on it.
    """
    import torch

    version = str(torch.__version__).partition("+")[0]
    release = tuple(int(part) for part in version.split(".")[:2])
    if not _TORCH_FROM <= release < _TORCH_BEFORE:
        raise UnsupportedTorch(
            f"torch {version} is not supported: expected {'.'.join(map(str, _TORCH_FROM))} or newer, and older than "
            f"{'.'.join(map(str, _TORCH_BEFORE))}; install one of these",
            found=version,
        )
    return Toolchain(version, torch.version.git_version, torch.version.cuda)


def host_facts() -> HostFacts:
    """What this host offers to an artifact, for `compat.verdict`.

    Custom operators are looked up when asked for: one that is registered later is
    found later.
    """
    return HostFacts(
        machine=platform.machine(),
        toolchain=host_toolchain(),
        cpu_features=cpu_features(),
        glibc=_glibc(),
        libstdcxx=_libstdcxx(),
        cuda_archs=_cuda_archs(),
        driver=_driver(),
        operator=operator_schema,
        library=Libraries(),
    )


def operator_schema(name: str) -> str | None:
    """Schema of a registered operator, as text.

    Args:
        name: `ns::name` for the default overload, or `ns::name.overload`.

    Returns:
        The schema, or None where this process has no such operator.
    """
    base, _, overload = name.partition(".")
    for schema in _operator_schemas(base):
        if schema.overload_name == ("" if overload == "default" else overload):
            return str(schema)
    return None


class Libraries:
    """Which shared libraries the dynamic linker would find for an artifact, by their names.

    Asked of manifests that nobody may vouch for, so nothing is opened to find out: a library is there
    if this process has it mapped, if the linker's cache names it, or if its file lies in a folder
    where the linker looks. What was found once stays found. Threads may share it.
    """

    def __init__(self) -> None:
        self._found: set[str] = set()

    def __call__(self, name: str) -> bool:
        if name in self._found:
            return True
        there = _is_library_name(name) and (_is_mapped(name) or _is_cached(name) or _lies_in_a_folder(name))
        if there:
            self._found.add(name)
        return there


def _is_library_name(name: str) -> bool:
    # A path would be looked at where it says, wherever that is.
    return re.match(r"[A-Za-z0-9_.+-]{1,200}\Z", name) is not None


def _is_mapped(name: str) -> bool:
    # Mapped files have their full version, `libm.so.6` being a link to one.
    return any(path.name == name or path.name.startswith(f"{name}.") for path in _mapped_files())


@cache
def _linker_cache() -> bytes:
    try:
        return Path("/etc/ld.so.cache").read_bytes()
    except OSError:
        return b""


def _is_cached(name: str) -> bool:
    # Its names stand there as texts that end with a zero.
    return b"\0" + name.encode() + b"\0" in _linker_cache()


@cache
def _library_folders() -> tuple[str, ...]:
    """Where the linker looks beside its cache, and Python's own `lib`, which interpreters of conda point it to."""
    try:
        # As it was when the process began: the linker reads it once.
        variables = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        variables = []
    prefix = b"LD_LIBRARY_PATH="
    named = next((v[len(prefix) :] for v in variables if v.startswith(prefix)), b"")
    folders = re.split(r"[:;]", os.fsdecode(named))
    triplet = f"{platform.machine()}-linux-gnu"
    roots = [
        f"{root}/{part}" for root in ("", "/usr", "/usr/local") for part in ("lib", "lib64", f"lib/{triplet}")
    ]
    return tuple(f for f in [*folders, *roots, f"{sys.prefix}/lib", f"{sys.base_prefix}/lib"] if f)


def _lies_in_a_folder(name: str) -> bool:
    return any(os.path.isfile(os.path.join(folder, name)) for folder in _library_folders())


@cache
def cpu_features() -> frozenset[str]:
    """Feature flags of the processor as `/proc/cpuinfo` spells them."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def _cpu_arch() -> str:
    machine = platform.machine()
    if machine != "x86_64":
        return f"{machine}-baseline"
    import torch

    # torch's own level may be below the processor's: its kernels are capped by
    # ATEN_CPU_CAPABILITY, and code that uses more than it would differ in rounding.
    capability = torch.backends.cpu.get_cpu_capability()
    for level in {"AVX512": ("avx512", "avx2"), "AVX2": ("avx2",)}.get(capability, ()):
        if cpu_features().issuperset(CPU_LEVELS[f"x86_64-{level}"]):
            return f"x86_64-{level}"
    return "x86_64-baseline"


def _glibc() -> str | None:
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except ValueError:
        return None
    return version if name == "glibc" else None


@cache
def _libstdcxx() -> str | None:
    import torch  # noqa: F401  # brings the libstdc++ that an artifact would be bound to

    path = next((p for p in _mapped_files() if p.name.startswith("libstdc++.so")), None)
    if path is None:
        return None
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        found = {
            tuple(int(part) for part in match[1].split(b"."))
            for match in re.finditer(rb"GLIBCXX_(\d+(?:\.\d+)+)\x00", data)
        }
    return ".".join(str(part) for part in max(found)) if found else None


def _mapped_files() -> list[Path]:
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = dict.fromkeys(fields[5] for line in lines if len(fields := line.split(None, 5)) == 6)
    return [path for name in paths if (path := Path(name)).is_file()]


def _cuda_archs() -> tuple[str, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    return tuple(f"sm_{major}{minor}" for major, minor in sorted(found))


def _driver() -> str | None:
    import torch

    if torch.version.cuda is None or not torch.cuda.is_available():
        return None
    number = _cuda_driver_number()
    return f"{number // 1000}.{number % 1000 // 10}" if number else None
