"""Can this host run that artifact? Answered with a value, before anything is opened.

Pure: the facts about the host come from `aotcache.host`, and what is registered
with torch comes from the caller, so every answer here can be tested anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from aotcache.errors import ConfigError
from aotcache.manifest import Manifest
from aotcache.types import Target, Toolchain

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


def _no_operators(name: str) -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What a host offers.

    Attributes:
        machine: The processor family as `uname -m` gives it, e.g. `x86_64`.
        toolchain: The torch that would load the artifact.
        cpu_features: Feature flags as Linux names them.
        glibc: Version of the C library, e.g. `2.36`; None if it is another library.
        libstdcxx: Highest GLIBCXX symbol version offered; None if unknown.
        cuda_archs: `sm_<n>` of the visible CUDA devices.
        driver: Highest CUDA version that the driver supports, e.g. `12.4`, or None.
        operator: Schema text of a registered custom operator by its qualified name
            (`ns::name` or `ns::name.overload`), or None where it is not registered.
    """

    machine: str
    toolchain: Toolchain
    cpu_features: frozenset[str] = frozenset()
    glibc: str | None = None
    libstdcxx: str | None = None
    cuda_archs: tuple[str, ...] = ()
    driver: str | None = None
    operator: Callable[[str], str | None] = field(default=_no_operators, compare=False)


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
    """The accepted variant that asks most of the CPU, or every candidate's reasons.

    An artifact that uses more of the host's features is the faster one: avx512 is
    taken over avx2. Of equals the first in the order of their variants is taken.
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
        return max(accepted, key=lambda m: len(m.host.cpu_features))
    return Rejected(tuple(reasons) or ("there is no artifact for this key",))


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
        if target.arch not in facts.cuda_archs:
            found = ", ".join(facts.cuda_archs) or "no CUDA device"
            yield f"built for {target}, this host has {found}"
        yield from _version_reasons("CUDA driver", manifest.host.driver, facts.driver)
    missing = sorted(set(manifest.host.cpu_features) - facts.cpu_features)
    if missing:
        yield f"needs CPU features that this host lacks: {', '.join(missing)}"


def _library_reasons(manifest: Manifest, facts: HostFacts) -> Iterator[str]:
    yield from _version_reasons("glibc", manifest.host.glibc, facts.glibc)
    yield from _version_reasons("libstdc++ GLIBCXX", manifest.host.libstdcxx, facts.libstdcxx)


def _version_reasons(what: str, needed: str | None, found: str | None) -> Iterator[str]:
    if needed is None:
        return
    if found is None or _version(found) < _version(needed):
        yield f"needs {what} {needed} or later, this host has {found or 'none that is known'}"


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else 0 for part in text.split("."))


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
