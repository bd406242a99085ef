"""Can this host run that artifact? Answered with a value, before anything is opened.

Pure: the facts about the host come from `aotcache.host`, and what is registered
with torch comes from the caller, so every answer here can be tested anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from aotcache.errors import ConfigError
from aotcache.manifest import Manifest
from aotcache.types import Target, Toolchain, printable

_V2 = ("cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3")
_V3 = (*_V2, "abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave")
_V4 = (*_V3, "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")

CPU_LEVELS: dict[str, tuple[str, ...]] = {
    "x86_64-baseline": _V2,
    "x86_64-avx2": _V3,
    "x86_64-avx512": _V4,
}
"""CPU features of each named level, as `/proc/cpuinfo` spells them. They are the
x86-64-v2, -v3 and -v4 levels of the x86-64 psABI (`pni` is SSE3, `abm` is LZCNT)."""


def cpu_level_features(arch: str) -> tuple[str, ...]:
    """Features that code built for the CPU level `arch` may use.

    Raises:
        ConfigError: for a level that nobody has defined.
    """
    try:
        return CPU_LEVELS[arch]
    except KeyError:
        raise ConfigError(
            f"cpu:{arch} is not a known CPU level; known are {', '.join('cpu:' + n for n in CPU_LEVELS)}"
        ) from None


_CUDA_ARCH = re.compile(r"sm_(\d{1,3})(\d)([af]?)\Z")

_SPECIFIC_FROM = 90
"""Compute capability (times ten) from which Triton compiles for `sm_<n>a`, whatever the target is called."""


def _no_operators(name: str) -> str | None:
    return None


def _any_library(name: str) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What a host offers.

    Attributes:
        machine: The processor family as `uname -m` gives it, e.g. `x86_64`.
        toolchain: The torch that would load the artifact.
        cpu_features: Feature flags as Linux names them.
        glibc: Version of the C library, e.g. `2.36`; None if it is another library.
        libstdcxx: Highest GLIBCXX symbol version offered; None if unknown.
        cuda_archs: `sm_<n>` of the visible CUDA devices, n being ten times the compute capability.
        driver: Highest CUDA version that the driver supports, e.g. `12.4`, or None.
        operator: Schema text of a registered custom operator by its qualified name
            (`ns::name` or `ns::name.overload`), or None where it is not registered.
        library: Whether the dynamic linker would find a shared library by its name, e.g. `libgomp.so.1`.
    """

    machine: str
    toolchain: Toolchain
    cpu_features: frozenset[str] = frozenset()
    glibc: str | None = None
    libstdcxx: str | None = None
    cuda_archs: tuple[str, ...] = ()
    driver: str | None = None
    operator: Callable[[str], str | None] = field(default=_no_operators, compare=False)
    library: Callable[[str], bool] = field(default=_any_library, compare=False)


@dataclass(frozen=True, slots=True)
class Accepted:
    """This host can run the artifact."""

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Rejected:
    """This host must not open the artifact; one sentence per reason."""

    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return "; ".join(self.reasons)


def verdict(manifest: Manifest, facts: HostFacts) -> Accepted | Rejected:
    """Whether the host described by `facts` can run the artifact, and why not."""
    reasons = (
        *_toolchain_reasons(manifest.toolchain, facts.toolchain),
        *_target_reasons(manifest, facts),
        *_library_reasons(manifest, facts),
        *_operator_reasons(manifest, facts),
    )
    return Rejected(reasons) if reasons else Accepted(manifest)


def best(manifests: Iterable[Manifest], facts: HostFacts) -> Manifest | Rejected:
    """The accepted variant that asks most of the host, or every candidate's reasons.

    An artifact that uses more of the host's features is the faster one: avx512 is taken over avx2,
    code for the very GPU over code for an older one of its family. Of equals the first in the
    order of their variants is taken.
    """
    accepted: list[Manifest] = []
    reasons: list[str] = []
    for manifest in sorted(manifests, key=lambda m: str(m.variant)):
        match verdict(manifest, facts):
            case Accepted():
                accepted.append(manifest)
            case Rejected(why):
                reasons += [f"{manifest.variant}: {reason}" for reason in why]
    if accepted:
        return max(accepted, key=_asks)
    return Rejected(tuple(reasons) or ("there is no artifact for this key",))


def _asks(manifest: Manifest) -> tuple[int, int, int]:
    """How much an accepted variant asks of the host, for comparison."""
    arch = _CUDA_ARCH.match(manifest.target.arch) if manifest.target.device == "cuda" else None
    if arch is None:
        return (0, 0, len(manifest.host.cpu_features))
    return (int(arch[2]), ("", "f", "a").index(arch[3]), len(manifest.host.cpu_features))


def runs_on(arch: str, device: str) -> bool:
    """Whether GPU code for `arch` runs on a device of the capability `device`; both as `sm_<n>`.

    By the rules of CUDA's binary compatibility: code runs on devices of the same major capability with
    an equal or higher minor one; with the suffix `f` it does so within its family, which is that range,
    too; with the suffix `a` it runs on exactly its own. What is named without a suffix is taken for `a`
    from 9.0 on, because it was compiled so: code for sm_100 would stop on sm_103 at its first launch.
    https://docs.nvidia.com/cuda/cuda-programming-guide, "Compute Capability and Compatibility".
    """
    built, here = _CUDA_ARCH.match(arch), _CUDA_ARCH.match(device)
    if built is None or here is None or built[1] != here[1]:
        return False
    capability, suffix = int(built[1] + built[2]), built[3]
    if suffix == "a" or (suffix == "" and capability >= _SPECIFIC_FROM):
        return built[2] == here[2]
    return int(built[2]) <= int(here[2])


def _toolchain_reasons(built: Toolchain, here: Toolchain) -> Iterator[str]:
    if built.torch != here.torch:
        yield f"built with torch {built.torch}, this process runs torch {here.torch}"
    elif built.git != here.git:
        yield f"built with torch {built.torch} at git {built.git}, this process runs git {here.git}"
    if built.cuda != here.cuda:
        yield f"built with torch for {_cuda(built)}, this process runs torch for {_cuda(here)}"


def _cuda(toolchain: Toolchain) -> str:
    return f"CUDA {toolchain.cuda}" if toolchain.cuda else "CPU only"


def _target_reasons(manifest: Manifest, facts: HostFacts) -> Iterator[str]:
    target: Target = manifest.target
    if target.device == "cpu" and target.arch.split("-")[0] != facts.machine:
        yield f"built for {target}, this host's processor is {facts.machine}"
    if target.device == "cuda":
        if not any(runs_on(target.arch, device) for device in facts.cuda_archs):
            found = ", ".join(facts.cuda_archs) or "no CUDA device"
            yield f"built for {target}, this host has {found}{_rule(target.arch)}"
        yield from _version_reasons("CUDA driver", manifest.host.driver, facts.driver)
    missing = sorted(set(manifest.host.cpu_features) - facts.cpu_features)
    if missing:
        yield f"needs CPU features that this host lacks: {', '.join(missing)}"


def _rule(arch: str) -> str:
    """Why a GPU of the same family may not do, in words."""
    parts = _CUDA_ARCH.match(arch)
    if parts is None:
        return "; that is no name of a GPU's architecture, such as sm_90"
    if parts[3] == "a" or (parts[3] == "" and int(parts[1] + parts[2]) >= _SPECIFIC_FROM):
        return f"; it runs on compute capability {parts[1]}.{parts[2]} alone"
    return f"; it runs on compute capability {parts[1]}.{parts[2]} and later ones of major {parts[1]}"


def _library_reasons(manifest: Manifest, facts: HostFacts) -> Iterator[str]:
    yield from _version_reasons("glibc", manifest.host.glibc, facts.glibc)
    yield from _version_reasons("libstdc++ GLIBCXX", manifest.host.libstdcxx, facts.libstdcxx)
    missing = [name for name in manifest.host.libraries if not facts.library(name)]
    if missing:
        yield (
            f"needs shared libraries that this host lacks: {', '.join(printable(name, 80) for name in missing)}; "
            "install them, or name their folder in LD_LIBRARY_PATH"
        )


def _version_reasons(what: str, needed: str | None, found: str | None) -> Iterator[str]:
    if needed is None:
        return
    if found is None or _older(found, needed):
        yield f"needs {what} {needed} or later, this host has {found or 'none that is known'}"


def _older(found: str, needed: str) -> bool:
    ours, theirs = _version(found), _version(needed)
    longest = max(len(ours), len(theirs))
    return ours + (0,) * (longest - len(ours)) < theirs + (0,) * (longest - len(theirs))


def _version(text: str) -> tuple[int, ...]:
    """The numbers of a version; what follows a number's digits is a distributor's own."""
    leading = (re.match(r"[0-9]{1,9}", part) for part in text.split("."))
    return tuple(0 if number is None else int(number[0]) for number in leading)


def _operator_reasons(manifest: Manifest, facts: HostFacts) -> Iterator[str]:
    for name, recorded in sorted(manifest.host.operators.items()):
        found = facts.operator(name)
        module = recorded.get("module")
        if found is None:
            hint = f"import {module}" if module else "import the module that registers it"
            yield f"needs operator {name}, which is not registered in this process; {hint} before attach"
        elif found != recorded.get("schema"):
            yield (
                f"needs operator {name} with schema {recorded.get('schema')!r}, "
                f"registered here is {found!r}" + (f" (built with the one from {module})" if module else "")
            )
