"""Recorded calls on disk: what a run called, so that `aotcache warm` can call it again.

`drafter.recorded.toml` is the spec; `drafter.recorded.calls/` beside it holds `index.json` and, for
each example of a call, its tensors in a safetensors file. Tensors are written first, then the
index, then the spec, each whole or not at all. Any number of processes may add to one record.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import tomli_w
from filelock import FileLock, Timeout
from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from aotcache.errors import ConfigError, ManifestError, SpecError, StoreError
from aotcache.key import KeyParts
from aotcache.spec import CALL, Spec, load_spec
from aotcache.types import CacheKey, Digest, Mode, sha256

FORMAT = 1
EXAMPLES = 3
"""Examples kept of each call: the numerics check takes several batches."""

INDEX = "index.json"
_ENDING = ".recorded"
_RULES = ConfigDict(extra="forbid", strict=True)


@with_config(_RULES)
@dataclass(frozen=True, slots=True)
class Example:
    """One call of the drafter.

    Attributes:
        file: Name of the safetensors file that holds its tensors.
        args, kwargs: Its arguments, as `aotcache.graph.examples` writes them.
        grad: Whether gradients were on.
        training: Whether the drafter was in training mode.
        others: Submodules that were not in the drafter's own mode.
    """

    file: str
    args: list[Any]
    kwargs: dict[str, Any]
    grad: bool
    training: bool
    others: list[str]


@with_config(_RULES)
@dataclass(frozen=True, slots=True)
class RecordedCall:
    """Calls of the drafter that lead to the same calls of its regions.

    Attributes:
        mode: `train` where gradients were on.
        keys: What they lead to, sorted.
        count: How often the run made them.
        examples: Some of them; none where the arguments cannot be kept.
        problem: Why there are none.
    """

    mode: Mode
    keys: list[CacheKey]
    count: int
    examples: list[Example]
    problem: str | None = None


@with_config(_RULES)
@dataclass(frozen=True, slots=True)
class RecordedKey:
    """One key that the run called.

    Attributes:
        mode: Of the region's call.
        regions: How often each region was called so.
        components: Digests of the key's components, in order.
    """

    mode: Mode
    regions: dict[str, int]
    components: list[Digest]


@with_config(_RULES)
@dataclass(frozen=True, slots=True)
class Index:
    """A record.

    Attributes:
        source: The spec that was attached, as far as it matters; see `source_of`.
        run: What tells one recorded run from another; None where nobody says.
        calls: In the order of their numbers, which count from 1 and never change.
        keys: Everything that was called.
        components: Items of every component that a key names, by digest.
        outside: Calls of regions outside of the drafter's own forward, by key.
        left_out: Calls that no artifact can take, by reason.
    """

    source: str
    run: str | None
    calls: list[RecordedCall] = field(default_factory=list)
    keys: dict[CacheKey, RecordedKey] = field(default_factory=dict)
    components: dict[Digest, dict[str, Any]] = field(default_factory=dict)
    outside: dict[CacheKey, int] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    format: int = FORMAT

    def parts(self, key: CacheKey) -> KeyParts:
        """The components of a recorded key."""
        return KeyParts.from_json([self.components[digest] for digest in self.keys[key].components])

    def numbers(self) -> list[int]:
        """The numbers of the calls that can be made again."""
        return [number for number, call in enumerate(self.calls, 1) if call.examples]

    def covered(self) -> frozenset[CacheKey]:
        """The keys to which the calls that can be made again lead."""
        return frozenset(key for call in self.calls if call.examples for key in call.keys)

    def problems(self) -> list[str]:
        """What the run called and no call in here leads to, in words."""
        covered = self.covered()
        found = [
            f"{call.problem} ({_times(call.count)})"
            for call in self.calls
            if not call.examples and not covered.issuperset(call.keys)
        ]
        for key, count in self.outside.items():
            if key not in covered:
                recorded = self.keys[key]
                names = ", ".join(repr(name) for name in recorded.regions)
                found.append(
                    f"{names} in mode {recorded.mode} (key {key[:12]}) was called outside of the drafter's own "
                    f"forward ({_times(count)}): only calls of the attached model itself can be made again. Call it "
                    "from the forward, or build it from a spec with a batch function"
                )
        return [*found, *(f"{reason} ({_times(count)})" for reason, count in self.left_out.items())]

    def merged(self, newer: Index) -> Index:
        """Both; of each call the first examples are kept."""
        calls = {frozenset(call.keys): call for call in self.calls}
        for call in newer.calls:
            known = calls.get(frozenset(call.keys))
            if known is not None:
                examples = (known.examples + call.examples)[:EXAMPLES]
                call = replace(
                    known,
                    count=known.count + call.count,
                    examples=examples,
                    problem=None if examples else known.problem or call.problem,
                )
            calls[frozenset(call.keys)] = call
        keys = dict(self.keys)
        for key, recorded in newer.keys.items():
            regions = _sum(keys[key].regions, recorded.regions) if key in keys else recorded.regions
            keys[key] = replace(recorded, regions=regions)
        return Index(
            self.source,
            self.run,
            list(calls.values()),
            keys,
            {**self.components, **newer.components},
            _sum(self.outside, newer.outside),
            _sum(self.left_out, newer.left_out),
        )

    def files(self) -> set[str]:
        """Names of the tensor files that belong to it."""
        return {example.file for call in self.calls for example in call.examples}


def _sum(one: dict[Any, int], other: dict[Any, int]) -> dict[Any, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def source_of(spec: Spec) -> str:
    """What two attached specs must share for their records to be one."""
    drafter = spec.drafter
    wanted = [drafter.factory, drafter.kwargs, drafter.regions, drafter.dtype, drafter.context]
    text = json.dumps([*wanted, spec.compile_options(), str(spec.module_folder)], sort_keys=True, default=str)
    return sha256(text.encode())


def output_path(spec: Spec, wanted: Path | None) -> Path:
    """Where the spec of a record goes.

    Args:
        spec: What is attached.
        wanted: A `.toml` file, a folder, or None for beside the spec.

    Raises:
        ConfigError: a spec is there that no record has written.
    """
    name = f"{spec.path.stem.removesuffix(_ENDING)}{_ENDING}.toml"
    output = spec.path.with_name(name) if wanted is None else wanted
    if output.suffix != ".toml":
        output = output / name
    if output.exists():
        try:
            written = load_spec(output).drafter.calls is not None
        except SpecError:
            written = False
        if not written:
            raise ConfigError(
                f"{output} is there and no record has written it, so it is not overwritten; name another file: "
                "AOTCACHE_RECORD, or aotcache record --output"
            )
    return output


def calls_folder(output: Path) -> Path:
    """The folder of calls of the spec at `output`."""
    return output.with_name(f"{output.stem}.calls")


def read_index(folder: Path) -> Index:
    """Read and check the index of a folder of calls.

    Raises:
        ManifestError: it is not there, damaged, or of another format.
    """
    path = folder / INDEX
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ManifestError(
            f"cannot read the recorded calls in {path}: {error.strerror}; record them again, or copy the "
            "folder along with its spec",
            path=str(path),
        ) from error
    try:
        document = json.loads(data)
        found = document.get("format") if isinstance(document, dict) else None
        if found != FORMAT:
            raise ManifestError(
                f"{path}: format {found!r} of recorded calls, expected {FORMAT}; upgrade aotcache or record again",
                path=str(path),
            )
        index = _INDEX.validate_json(data)
        for key in index.keys:
            if index.parts(key).key != key:
                raise ManifestError(f"{path}: key {key} is not that of its components; record again")
        if missing := {key for call in index.calls for key in call.keys} - set(index.keys):
            raise ManifestError(
                f"{path}: a call leads to {sorted(missing)[0]}, which is not there; record again"
            )
    except (ValueError, ValidationError, RecursionError, KeyError) as error:
        raise ManifestError(
            f"{path}: not an index of recorded calls: {error}; record them again", path=str(path)
        ) from error
    return index


def add(spec: Spec, output: Path, newer: Index, *, seconds: float) -> Index:
    """Add what one process called to a record. Safe among any number of threads and processes.

    A record of another run, or of a spec that has changed since, is begun anew.

    Args:
        spec: The attached spec, which the written one repeats.
        output: The spec that is written.
        newer: What was called since the last time; its tensor files are in the folder already.
        seconds: How long to wait for other processes.

    Returns:
        The whole record.

    Raises:
        ConfigError: this run has recorded another spec to the same file.
        StoreError: it cannot be written, or not in time.
    """
    folder = calls_folder(output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Beside the record, not among this host's locks: the ranks of other hosts write it, too.
        with FileLock(folder / ".lock", timeout=seconds, thread_local=False):
            old = _index_if_any(folder)
            if (
                old is not None
                and old.source != newer.source
                and newer.run is not None
                and old.run == newer.run
            ):
                raise ConfigError(
                    f"{output} holds the calls of another spec than {spec.path}; give each a file of its own: name "
                    "a folder with aotcache record --output, or leave it out",
                    path=str(output),
                )
            if old is None or old.source != newer.source or newer.run not in (None, old.run):
                index = Index(newer.source, newer.run).merged(newer)
            else:
                index = old.merged(newer)
            write_whole(folder / INDEX, json.dumps(asdict(index)).encode())
            write_whole(output, spec_text(spec, output, index).encode())
            given_up = newer.files() | (old.files() if old is not None else set())
            for name in given_up - index.files():
                (folder / name).unlink(missing_ok=True)
            return index
    except Timeout as error:
        raise StoreError(
            f"{folder / '.lock'} was not free within {seconds:g} s; another process holds it: wait for it, end "
            "it, or raise AOTCACHE_LOCK_SECONDS",
            path=str(output),
        ) from error
    except OSError as error:
        raise StoreError(
            f"cannot write the record {output}: {error}; name another place: aotcache record --output",
            path=str(output),
        ) from error


def _index_if_any(folder: Path) -> Index | None:
    try:
        return read_index(folder)
    except ManifestError:
        return None  # none yet, or of a format that is no use: begun anew


def write_whole(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def spec_text(spec: Spec, output: Path, index: Index) -> str:
    """The spec of a record: the attached one, with its calls in place of batches."""
    drafter = spec.drafter
    table: dict[str, Any] = {
        "name": drafter.name,
        "factory": drafter.factory,
        "calls": calls_folder(output).name,
        "regions": drafter.regions,
        "modes": sorted({call.mode for call in index.calls if call.examples}, reverse=True) or drafter.modes,
        "dtype": drafter.dtype,
    }
    if drafter.context is not None:
        table["context"] = drafter.context
    if drafter.kwargs:
        table["kwargs"] = drafter.kwargs
    folder = os.path.relpath(spec.module_folder, output.parent)
    if folder != ".":
        table["folder"] = folder
    document = {
        "drafter": table,
        # A record without calls has no bucket that anything could be built for.
        "buckets": {CALL: index.numbers() or [1]},
        "compile": spec.compile_options(),
        "targets": {"archs": list(spec.archs)},
    }
    return "".join(f"{line}\n" for line in _header(spec, output, index)) + "\n" + tomli_w.dumps(document)


def _header(spec: Spec, output: Path, index: Index) -> Iterator[str]:
    numbers = index.numbers()
    times = sum(index.calls[number - 1].count for number in numbers)
    what = "different call" if len(numbers) == 1 else "different calls"
    yield f"# Recorded: {len(numbers)} {what} of the drafter, made {_times(times)}."
    yield f"# To build what they need: aotcache warm {output.name}"
    yield f"# Record again instead of changing this file; what it repeats of [drafter] comes from {spec.path.name}."
    problems = index.problems()
    if problems:
        yield "#"
        yield "# What the run called as well, and cannot be built from here:"
        yield from (f"#   {' '.join(line.split())}" for line in problems)


_INDEX = TypeAdapter(Index)
