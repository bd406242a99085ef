"""The spec: what to compile, for which shapes and targets, read from TOML.

Reading a spec runs none of the user's code. `factory`, `batch` and `context` are
names until one of the `resolve` methods imports them.
"""

from __future__ import annotations

import difflib
import importlib
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import ConfigDict, Field, Strict, TypeAdapter, ValidationError, with_config

from aotcache.errors import ConfigError, SpecError
from aotcache.types import Mode, Target

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

DEFAULT_NAME = "aotcache.toml"
CALL = "call"
"""The one ladder of a spec of recorded calls: their numbers, from 1."""

DType = Literal["float32", "bfloat16", "float16", "float64"]
Pad = bool | int | float

_RULES = ConfigDict(extra="forbid")

# Strict by field: a strict dataclass would not be made from a table.
_Text = Annotated[str, Strict()]
_Switch = Annotated[bool, Strict()]
_Name = Annotated[str, Strict(), Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")]
_Size = Annotated[int, Strict(), Field(gt=0)]
_Some = Field(min_length=1)


@with_config(_RULES)
@dataclass(frozen=True, slots=True)
class Drafter:
    """The `[drafter]` table.

    Attributes:
        name: For people.
        factory: `module:name` of a callable that takes `kwargs` and returns the module.
        batch: `module:name` of a callable `(bucket, device) -> (args, kwargs)`; None where
            recorded calls stand in its place, or nothing is to be built.
        calls: The folder of recorded calls, from the spec's own, or None. Each bucket of the
            ladder `call` is one of them.
        kwargs: Keyword arguments of the factory.
        regions: fnmatch patterns of submodule names; `""` is the whole drafter. Drop-in
            functions (`aotcache.flex`) are found by themselves: none may be named for them alone.
        modes: What to build.
        dtype: The drafter's parameters are cast to it.
        context: `module:name` of a callable that returns a context manager under
            which the steps run, or None.
        folder: Where modules are looked for first, from the spec's own folder.
    """

    name: Annotated[_Text, _Some]
    factory: _Name
    batch: _Name | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    regions: list[_Text] = field(default_factory=lambda: [""])
    modes: Annotated[list[Mode], _Some] = field(default_factory=lambda: list(get_args(Mode)))
    dtype: DType = "float32"
    context: _Name | None = None
    calls: Annotated[_Text, _Some] | None = None
    folder: Annotated[_Text, _Some] = "."


@with_config(_RULES)
@dataclass(frozen=True, slots=True)
class CompileOptions:
    """The `[compile]` table. All of it is in the key.

    Attributes:
        max_autotune: Let the compiler measure kernel choices; slower to build.
        memory_budget: Share of the intermediates that a forward may keep for its
            backward, 0 to 1; below 1 the backward computes some of them again.
    """

    max_autotune: _Switch = False
    memory_budget: Annotated[float, Strict(), Field(ge=0, le=1)] = 1.0

    def for_key(self) -> dict[str, Any]:
        """All options with their defaults."""
        return {"max_autotune": self.max_autotune, "memory_budget": self.memory_budget}


@with_config(_RULES)
@dataclass(frozen=True, slots=True)
class _Targets:
    archs: Annotated[list[_Text], _Some] = field(default_factory=lambda: ["native"])


@with_config(_RULES)
@dataclass(frozen=True, slots=True)
class _File:
    """The whole file as it is written."""

    drafter: Drafter
    buckets: dict[str, Annotated[list[_Size], _Some]] = field(default_factory=dict)
    axes: dict[str, dict[str, Any]] = field(default_factory=dict)
    compile: CompileOptions = field(default_factory=CompileOptions)
    targets: _Targets = field(default_factory=_Targets)


@dataclass(frozen=True, slots=True)
class InputAxes:
    """One entry of `[axes]`: how one batch input follows the named dimensions.

    Attributes:
        name: The input's name; dots lead into nested entries.
        axes: `(axis, dimension)` pairs; negative axes count from the end.
        pad: What the padding is filled with.
    """

    name: str
    axes: tuple[tuple[int, str], ...]
    pad: Pad = 0


@dataclass(frozen=True, slots=True)
class Spec:
    """A spec that has been read and checked.

    Attributes:
        path: The file, absolute.
        drafter, compile: Its tables of these names.
        buckets: Ladder of each named dimension, ascending.
        axes: One entry per batch input that follows a dimension.
        archs: `native` or `<device>:<arch>`.
    """

    path: Path
    drafter: Drafter
    buckets: dict[str, tuple[int, ...]]
    axes: tuple[InputAxes, ...]
    compile: CompileOptions
    archs: tuple[str, ...]

    def cells(self) -> list[dict[str, int]]:
        """Every bucket: the product of the ladders. One empty bucket without any."""
        return cells(self.buckets)

    def compile_options(self) -> dict[str, Any]:
        """The `[compile]` table with its defaults, for the key."""
        return self.compile.for_key()

    def targets(self, native: Callable[[], Target]) -> tuple[Target, ...]:
        """The targets to build for, each once.

        Args:
            native: Probes this machine's target; called only where the spec says `native`.
        """
        found = (native() if arch == "native" else Target.parse(arch) for arch in self.archs)
        return tuple(dict.fromkeys(found))

    def resolve_factory(self) -> Callable[..., Any]:
        """Import the factory. Raises SpecError; runs the user's module."""
        return self._import("factory", self.drafter.factory)

    def resolve_batch(self) -> Callable[..., Any]:
        """Import the batch function. Raises SpecError; runs the user's module."""
        if self.drafter.batch is None:
            raise SpecError(
                f"{self.path}: drafter.batch is missing: "
                + (
                    "the spec is of recorded calls, which only warming makes again"
                    if self.drafter.calls is not None
                    else "name a function that makes a batch, or record a run that attaches this spec (aotcache "
                    "record) and build from what that writes"
                )
            )
        return self._import("batch", self.drafter.batch)

    def resolve_argument(self, dotted: str) -> Any:
        """Import a function or class that a recorded call was given. Raises SpecError; runs its module."""
        return self._import("calls", dotted)

    @property
    def module_folder(self) -> Path:
        """Where modules are looked for first, absolute."""
        return Path(os.path.normpath(self.path.parent / self.drafter.folder))

    @property
    def calls_folder(self) -> Path | None:
        """The folder of recorded calls, absolute; None for a spec with a batch function."""
        return None if self.drafter.calls is None else self.path.parent / self.drafter.calls

    def resolve_context(self) -> Callable[[], AbstractContextManager[Any]]:
        """Import the context function; one that does nothing if the spec has none.

        Raises SpecError; runs the user's module.
        """
        if self.drafter.context is None:
            return nullcontext
        return self._import("context", self.drafter.context)

    def _import(self, key: str, dotted: str) -> Callable[..., Any]:
        """Import `module:name`, the spec's own directory (`folder`) first.

        The directory stays on `sys.path`, because the user's functions may import
        their neighbours only when they are called.
        """
        where = f"{self.path}: drafter.{key} = {dotted!r}"
        module_name, _, attribute = dotted.partition(":")
        directory = str(self.module_folder)
        if directory not in sys.path:
            sys.path.insert(0, directory)
            importlib.invalidate_caches()
        try:
            value: Any = importlib.import_module(module_name)
        except Exception as error:
            raise SpecError(
                f"{where}: importing {module_name} failed: {type(error).__name__}: {error}; "
                f"it is looked for in {directory} and in the installed packages"
            ) from error
        self._check_origin(where, module_name, value)
        for part in attribute.split("."):
            if not hasattr(value, part):
                raise SpecError(f"{where}: {module_name} has no {attribute}{did_you_mean(part, dir(value))}")
            value = getattr(value, part)
        if not callable(value):
            raise SpecError(f"{where}: found {type(value).__name__}, expected a callable")
        return cast("Callable[..., Any]", value)

    def _check_origin(self, where: str, module_name: str, module: Any) -> None:
        """Two specs in one process may each have a `drafter.py`: never use the wrong one."""
        base = self.module_folder.joinpath(*module_name.split("."))
        beside = next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)
        found = getattr(module, "__file__", None)
        if beside is not None and (found is None or not beside.samefile(found)):
            raise SpecError(
                f"{where}: {module_name} is loaded from {found}, expected {beside}; another module "
                "of that name was imported before in this process: rename one, or use a process for each spec"
            )


def cells(ladders: Mapping[str, Iterable[int]]) -> list[dict[str, int]]:
    """The product of ladders, the last dimension varying fastest."""
    return [dict(zip(ladders, point, strict=True)) for point in itertools.product(*ladders.values())]


def load_spec(path: str | Path | None = None) -> Spec:
    """Read a spec.

    Args:
        path: The file, a directory that holds an `aotcache.toml`, or a file's name
            without `.toml`. Default: `aotcache.toml` in the working directory.

    Raises:
        SpecError: naming file, table, key, what was expected and what was found.
    """
    file = _find(Path(DEFAULT_NAME if path is None else path))
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"cannot read spec {file}: {error.strerror}") from error
    except ValueError as error:
        raise SpecError(f"{file}: not TOML: {error}") from error
    try:
        parsed = _FILE.validate_python(document)
    except ValidationError as error:
        raise SpecError("\n".join(f"{file}: {line}" for line in _complaints(error))) from error
    _require_calls(file, parsed)
    return Spec(
        path=file,
        drafter=parsed.drafter,
        buckets={dim: _ladder(f"{file}: buckets.{dim}", rungs) for dim, rungs in parsed.buckets.items()},
        axes=tuple(_axes(f"{file}: axes", parsed.axes, parsed.buckets)),
        compile=parsed.compile,
        archs=tuple(_archs(f"{file}: targets.archs", parsed.targets.archs)),
    )


def _require_calls(file: Path, parsed: _File) -> None:
    """Recorded calls stand in the place of a batch function, and on one ladder."""
    drafter = parsed.drafter
    if drafter.calls is None:
        return
    if drafter.batch is not None:
        raise SpecError(f"{file}: drafter has both batch and calls, expected one of them")
    if parsed.axes:
        raise SpecError(f"{file}: axes: recorded calls are not padded; expected none beside drafter.calls")
    if list(parsed.buckets) != [CALL]:
        raise SpecError(
            f"{file}: buckets has {', '.join(parsed.buckets) or 'nothing'}, expected {CALL} alone beside "
            f"drafter.calls: the numbers of the recorded calls, as `aotcache record` writes them"
        )


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` if something close to `wrong` is known, else an empty text."""
    close = difflib.get_close_matches(wrong, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _find(path: Path) -> Path:
    if path.is_dir():
        candidates = [path / DEFAULT_NAME]
    elif path.suffix == ".toml":
        candidates = [path]
    else:
        candidates = [path, path.with_name(path.name + ".toml")]
    for candidate in candidates:
        if candidate.is_file():
            return candidate.absolute()
    raise SpecError(
        f"there is no spec {path} (looked for {', '.join(str(c.absolute()) for c in candidates)}); "
        f"name the file, or write {DEFAULT_NAME}"
    )


_FILE = TypeAdapter(_File)


_KNOWN: dict[str, type[Drafter | CompileOptions | _Targets]] = {
    "drafter": Drafter,
    "compile": CompileOptions,
    "targets": _Targets,
}


def _complaints(error: ValidationError) -> Iterator[str]:
    for entry in error.errors():
        place = ".".join(str(part) for part in entry["loc"])
        table, key = str(entry["loc"][0]), str(entry["loc"][-1])
        if entry["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
            owner: type[Any] = _File if len(entry["loc"]) == 1 else _KNOWN.get(table, _File)
            known = [f.name for f in fields(owner)]
            yield f"{place} is not known{did_you_mean(key, known)}; known are {', '.join(known)}"
        elif entry["type"] in ("missing", "missing_argument"):
            yield f"{place} is missing"
        elif entry["type"] == "string_pattern_mismatch":
            yield f"{place} = {entry['input']!r}: expected 'package.module:name'"
        else:
            message = entry["msg"][0].lower() + entry["msg"][1:]
            yield f"{place}: {message}, found {entry['input']!r} ({type(entry['input']).__name__})"


def _ladder(where: str, rungs: list[int]) -> tuple[int, ...]:
    if len(set(rungs)) != len(rungs):
        raise SpecError(f"{where} = {rungs}: expected each size once")
    return tuple(sorted(rungs))


def _archs(where: str, archs: list[str]) -> Iterator[str]:
    for arch in archs:
        if arch != "native":
            try:
                Target.parse(arch)
            except ConfigError as error:
                raise SpecError(f"{where}: {error}, or native for the building machine's own") from error
        yield arch


def _axes(where: str, table: Mapping[str, Any], dims: Iterable[str]) -> Iterator[InputAxes]:
    """Entries of `[axes]`; a table of tables is a nested input, as TOML's dotted keys make it."""
    for name, entry in table.items():
        place = f"{where}.{name}"
        if entry and isinstance(entry, dict) and all(isinstance(value, dict) for value in entry.values()):
            for nested in _axes(place, entry, dims):
                yield InputAxes(f"{name}.{nested.name}", nested.axes, nested.pad)
        else:
            yield _input_axes(place, name, entry, dims)


def _input_axes(where: str, name: str, entry: Any, dims: Iterable[str]) -> InputAxes:
    form = 'expected a table such as { 1 = "seq", pad = 0 }'
    if not isinstance(entry, dict):
        raise SpecError(f"{where} = {entry!r}: {form}")
    axes: list[tuple[int, str]] = []
    pad: Pad = 0
    for key, value in entry.items():
        if key == "pad":
            if not isinstance(value, bool | int | float):
                raise SpecError(f"{where}.pad = {value!r}: expected a number or a boolean")
            pad = value
            continue
        try:
            axis = int(key)
        except ValueError:
            raise SpecError(
                f"{where}.{key}: expected an axis number or pad{did_you_mean(key, ['pad'])}; {form}"
            ) from None
        if value not in dims:
            raise SpecError(
                f"{where}.{key} = {value!r}: there is no such dimension in [buckets]"
                f"{did_you_mean(str(value), dims)}; there are {', '.join(dims) or 'none'}"
            )
        axes.append((axis, value))
    if not axes:
        raise SpecError(f"{where}: no axis is named; {form}")
    return InputAxes(name, tuple(axes), pad)
