"""Step three: graphs become one archive of stripped libraries, through AOTInductor.

The archive is torch's own format and torch's own loader runs it. It holds libraries
and their metadata, and nothing else: no sources, weights, pickles or absolute paths.
The same graphs give the same bytes on the same toolchain, as far as the compiler does.
"""

from __future__ import annotations

import json
import logging
import platform
import re
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import fx
from torch.utils import _pytree as pytree

from aotcache.compile.graphs import clean_trace, output_nodes, replaced
from aotcache.compile.headers import without_regex
from aotcache.compile.host_contract import cpu_level
from aotcache.compile.pair import example_inputs
from aotcache.compile.rewrite import own_constants, pad_booleans_as_integers
from aotcache.errors import CompileFailed, ConfigError
from aotcache.types import Digest, Target, sha256

# private torch names, tried on 2.13.0


def _aot_compile(
    module: fx.GraphModule, inputs: Sequence[torch.Tensor], options: Mapping[str, Any]
) -> list[str]:
    import torch._inductor

    files = torch._inductor.aot_compile(module, tuple(inputs), options=dict(options))
    if not isinstance(files, list) or not all(isinstance(f, str) for f in files):
        raise CompileFailed(f"AOTInductor returned {files!r}, expected a list of files without weights")
    return [str(f) for f in files]


def _package(archive: Path, files: Mapping[str, list[str]]) -> None:
    from torch.export.pt2_archive._package import package_pt2

    package_pt2(str(archive), aoti_files={name: list(paths) for name, paths in files.items()})


def _has_option(name: str) -> bool:
    """Whether this torch's Inductor knows an option; some came after 2.11."""
    import torch._inductor.config as config

    group, _, option = name.rpartition(".")
    return hasattr(getattr(config, group) if group else config, option)


def _vector_isa(level: str) -> Any:
    """Inductor's description of a level's vector unit, and of nothing beyond it.

    Left alone, Inductor picks by width among all that the building host has: 512 bits
    may mean AMX, and AVX512 itself may bring bfloat16 instructions along.
    """
    from torch._inductor.cpu_vec_isa import VecAVX2, VecAVX512, VecISA

    base: type[Any] = {"x86_64-avx2": VecAVX2, "x86_64-avx512": VecAVX512}[level]

    class _Exactly(base):  # type: ignore[misc]
        def __bool__(self) -> bool:
            return True

        def build_arch_flags(self) -> str:
            return str(self._arch_flags)

        __hash__ = VecISA.__hash__

    return _Exactly()


@contextmanager
def _only(level: str, flags: Sequence[str]) -> Iterator[None]:
    """Inductor sees a level's vector unit alone, and its compiler gets `flags` at the end."""
    from torch._inductor import cpp_builder, cpu_vec_isa

    units = [_vector_isa(level)] if _LEVELS[level].bits else []
    original: Callable[..., tuple[list[str], list[str]]] = cpp_builder._get_optimization_cflags

    def with_flags(*args: Any, **kwargs: Any) -> tuple[list[str], list[str]]:
        compile_flags, link_flags = original(*args, **kwargs)
        return [*compile_flags, *flags], [*link_flags, *_LINK_FLAGS]

    with ExitStack() as stack:
        stack.enter_context(replaced(cpu_vec_isa, "valid_vec_isa_list", lambda: units))
        stack.enter_context(replaced(cpp_builder, "_get_optimization_cflags", with_flags))
        yield


def _header_folder() -> Path:
    """Where this process's compiler looks for precompiled headers."""
    from torch._inductor.codecache import _HEADER_DIR

    return Path(_HEADER_DIR)


def _include_folder() -> Path:
    return Path(torch.__file__).parent / "include"


def compiler_version() -> str:
    """First line of what the C++ compiler says about itself; empty where there is none."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        asked = subprocess.run(
            [get_cpp_compiler(), "--version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (InvalidCxxCompiler, OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout.partition("\n")[0].strip()


# end of private torch names


@dataclass(frozen=True, slots=True)
class _Level:
    march: str
    bits: int


_LEVELS = {
    "x86_64-baseline": _Level("x86-64-v2", 0),
    "x86_64-avx2": _Level("x86-64-v3", 256),
    "x86_64-avx512": _Level("x86-64-v4", 512),
}

_TORCH_ROOT = "torch/include"
"""What torch's include folder is called in messages of the compiled code."""

_LINK_FLAGS = ("s", "Wl,--build-id=none")
"""No symbols, and no build id, which would differ with the folder that a library was built in."""

_BROKEN_HEADER = re.compile(r"PCH file|precompiled header")
"""What compilers say of a precompiled header that they cannot read."""

_EPOCH = (1980, 1, 1, 0, 0, 0)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CompiledArchive:
    """A finished archive.

    Attributes:
        path: The archive, `.pt2`.
        digest, size: Of the archive, in bytes.
        members: sha256 of every member by its name in the archive.
        libraries: The unpacked libraries, next to the archive.
        runner: `native` unless a graph calls operators through torch's proxy executor.
    """

    path: Path
    digest: Digest
    size: int
    members: dict[str, Digest]
    libraries: tuple[Path, ...]
    runner: Literal["native", "torch"]


def inductor_options(target: Target, options: Mapping[str, Any]) -> dict[str, Any]:
    """AOTInductor's options for a target.

    Args:
        target: Where the code is to run.
        options: `max_autotune` is read; others are of no concern to AOTInductor.

    Raises:
        ConfigError: for a CPU level that cannot be built here.
    """
    level = _LEVELS.get(cpu_level(target))
    if level is None or platform.machine() != "x86_64":
        raise ConfigError(
            f"cannot build for {target} on {platform.machine()}; buildable on x86_64 are "
            f"{', '.join('cpu:' + name for name in _LEVELS)}"
        )
    wanted: dict[str, Any] = {
        "aot_inductor.package": True,
        # Otherwise kernels are written for as many threads as the builder has.
        "cpp.dynamic_threads": True,
        "cpp.simdlen": level.bits,
        # The vector unit is the target's, not what a trial on this host finds.
        "cpp.vec_isa_ok": True,
        "max_autotune": bool(options.get("max_autotune", False)),
    }
    optional = {
        "cpp.march": level.march,
        "aot_inductor.embed_kernel_binary": True if target.device == "cuda" else None,
        "aot_inductor.enable_frame_pointer": False,
        "aot_inductor.enable_line_tables": False,
    }
    return wanted | {name: value for name, value in optional.items() if _has_option(name)}


def compile_pair(
    forward: fx.GraphModule,
    backward: fx.GraphModule | None,
    target: Target,
    options: Mapping[str, Any],
    workdir: Path,
    *,
    progress: Callable[[str], None] = log.debug,
) -> CompiledArchive:
    """Compiles the graphs and packs them.

    Not thread-safe: Inductor is not, and for the time of the call it is patched to
    see the target's vector unit alone.

    Args:
        forward, backward: The graphs; the members are called the same.
        target: Where the code is to run.
        options: Compile options of the spec.
        workdir: An existing folder of this build's own. Left in it are the archive
            and the libraries.
        progress: Told what is being done.

    Raises:
        ConfigError: for a target that cannot be built here.
        CompileFailed: if AOTInductor or the C++ compiler fails, or makes what an
            archive must not hold.
    """
    wanted = inductor_options(target, options)
    flags = [
        f"march={_LEVELS[cpu_level(target)].march}",
        f"ffile-prefix-map={_include_folder()}={_TORCH_ROOT}",
    ]
    # Builders share the folder of precompiled headers, which torch keys by all flags: it is theirs by its own name.
    lighter = without_regex(_include_folder(), _header_folder().resolve().parent, called=_TORCH_ROOT)
    if lighter is not None:
        flags.append(f"I{lighter}")
    packed: dict[str, list[str]] = {}
    libraries: list[Path] = []
    runner: Literal["native", "torch"] = "native"
    for name, module in (("forward", forward), ("backward", backward)):
        if module is None:
            continue
        progress(f"compiling the {name} graph, {len(module.graph.nodes)} nodes")
        out = workdir / "aoti" / name
        out.mkdir(parents=True, exist_ok=True)
        try:
            inputs = example_inputs(module)
            pad_booleans_as_integers(module)
            with torch.no_grad(), clean_trace(), _only(cpu_level(target), flags):
                files = _with_whole_headers(
                    partial(
                        _aot_compile,
                        _with_call_spec(own_constants(module, inputs), inputs),
                        inputs,
                        wanted | {"aot_inductor.output_path": str(out)},
                    )
                )
        except CompileFailed:
            raise
        except Exception as error:
            raise CompileFailed(
                f"AOTInductor failed on the {name} graph for {target}: {type(error).__name__}: {error}"
            ) from error
        kept, proxied = _keep(name, files, workdir)
        if proxied:
            runner = "torch"
        libraries += [f for f in kept if f.suffix == ".so"]
        packed[name] = [str(f) for f in kept]
    shutil.rmtree(workdir / "aoti")
    archive, members = _pack(packed, workdir)
    data = archive.read_bytes()
    return CompiledArchive(archive, sha256(data), len(data), members, tuple(libraries), runner)


def _with_whole_headers(compiled: Callable[[], list[str]]) -> list[str]:
    """Compile; once more without the precompiled headers, where one of them cannot be read.

    Builders of a host share them, and torch takes a header that is there for whole: what a killed
    compiler has left of one would fail every build from then on.
    """
    try:
        return compiled()
    except Exception as error:
        if _BROKEN_HEADER.search(str(error)) is None:
            raise
        log.warning(
            "a precompiled header in %s cannot be read, and is made anew: %s", _header_folder(), error
        )
        for header in _header_folder().glob("*.[gp]ch"):  # g++ and clang++
            header.unlink(missing_ok=True)  # those who read it go on doing so
        return compiled()


def _with_call_spec(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """Tells AOTInductor that a graph takes and returns flat tuples, which torch's loader asks for."""
    if type(module.graph._codegen) is fx.graph.CodeGen:
        module._in_spec = pytree.tree_structure((tuple(inputs), {}))
        module._out_spec = pytree.tree_structure(tuple(output_nodes(module.graph)))
    return module


def _keep(name: str, files: Sequence[str], workdir: Path) -> tuple[list[Path], bool]:
    """Moves what belongs in the archive out of AOTInductor's output, under stable names.

    Returns:
        The files kept, and whether the graph calls operators through the proxy executor.
    """
    library = next((Path(f) for f in files if f.endswith(".wrapper.so")), None)
    if library is None:
        raise CompileFailed(f"AOTInductor made no library for the {name} graph, only {sorted(files)}")
    if pickled := [f for f in files if "custom_obj" in Path(f).name]:
        raise CompileFailed(
            f"the {name} graph holds script objects ({', '.join(pickled)}), which could only be pickled"
        )
    out = workdir / name
    out.mkdir(exist_ok=True)
    # An empty source: the loader of torch 2.11 finds the metadata by its name.
    kept = [out / f"{name}.wrapper.so", out / f"{name}.wrapper.cpp"]
    kept[1].touch()
    data = library.read_bytes()
    # The generated source's own path is in its messages, and its name is a digest of the command line, which has
    # this host's folders. Same length, so nothing moves.
    folder, source = str(library.parent).encode() + b"/", library.name.partition(".")[0].encode()
    data = data.replace(folder, (b"./" * len(folder))[: len(folder) - 1] + b"/")
    data = data.replace(source + b".wrapper.cpp", b"x" * len(source) + b".wrapper.cpp")
    kept[0].write_bytes(data)
    proxied = False
    stem = library.name.removesuffix(".so")
    for path in (library.with_name(f"{stem}_metadata.json"), library.with_name(f"{stem}.json")):
        if not path.exists():
            continue
        content = json.loads(path.read_text())
        proxied |= bool(content.get("nodes")) and path.name == f"{stem}.json"
        copy = out / f"{name}.wrapper{path.name.removeprefix(stem)}"
        copy.write_text(json.dumps(content, sort_keys=True))
        kept.append(copy)
    return kept, proxied


def _pack(packed: Mapping[str, list[str]], workdir: Path) -> tuple[Path, dict[str, Digest]]:
    """Lets torch write its format, then writes it again: compressed, sorted, undated."""
    loose = workdir / "aotcache.pt2"
    _package(loose, packed)
    final = workdir / "artifact.pt2"
    members: dict[str, Digest] = {}
    with zipfile.ZipFile(loose) as source, zipfile.ZipFile(final, "w", zipfile.ZIP_DEFLATED) as sink:
        for name in sorted(source.namelist()):
            data = source.read(name)
            info = zipfile.ZipInfo(name, _EPOCH)
            info.external_attr = 0o644 << 16
            sink.writestr(info, data, zipfile.ZIP_DEFLATED, 9)
            members[name] = sha256(data)
    loose.unlink()
    return final, members
