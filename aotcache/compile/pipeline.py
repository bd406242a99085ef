"""The compile half from end to end, in two parts.

`prepare` is cheap and ends with the content key, by which the caller may find that an
identical graph was compiled before; `compile_prepared` is what takes the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import fx

from aotcache.compile.aoti import compile_pair, compiler_version, log
from aotcache.compile.content import content_key
from aotcache.compile.effects import Exported, export_call
from aotcache.compile.export import FlatCall
from aotcache.compile.host_contract import host_contract
from aotcache.compile.pair import infer_graph, make_pair
from aotcache.errors import CompileFailed
from aotcache.manifest import (
    Alias,
    HostContract,
    InputSlot,
    Manifest,
    Mutation,
    OutputSlot,
    PairContract,
)
from aotcache.types import Digest, Mode, Target, Toolchain

SlotKind = Literal["parameter", "buffer", "input", "lifted"]

export = export_call


@dataclass(frozen=True, slots=True)
class Prepared:
    """Graphs that are ready to be compiled, and all that is known of them before.

    Attributes:
        content: Equal for graphs of which one archive serves all.
    """

    region: str
    mode: Mode
    target: Target
    toolchain: Toolchain
    options: Mapping[str, Any]
    forward: fx.GraphModule
    backward: fx.GraphModule | None
    inputs: tuple[InputSlot, ...]
    outputs: tuple[OutputSlot, ...]
    pair: PairContract | None
    mutations: tuple[Mutation, ...]
    aliases: tuple[Alias, ...]
    content: Digest


@dataclass(frozen=True, slots=True)
class Built:
    """An archive and what a manifest says about it.

    Attributes:
        archive: The archive; None where another build's is used again.
        digest, size: Of the archive, in bytes.
        members: sha256 of every member by its name in the archive.
        seconds: Time per stage of this build.
    """

    archive: Path | None
    digest: Digest
    size: int
    members: dict[str, Digest]
    host: HostContract
    runner: Literal["native", "torch"]
    seconds: dict[str, float]


def prepare(
    exported: Exported,
    examples: Sequence[torch.Tensor],
    *,
    names: Sequence[str],
    kinds: Sequence[SlotKind],
    region: str,
    mode: Mode,
    target: Target,
    toolchain: Toolchain,
    options: Mapping[str, Any],
) -> Prepared:
    """From an exported program to graphs with a content key.

    Args:
        exported: From `export`.
        examples, names: As given to `export`.
        kinds: Where a worker finds each tensor.
        region: The region's name, for messages.
        mode: `train` makes a pair.
        target, toolchain: What the code is for, and what makes it.
        options: The spec's compile options: `memory_budget` and `max_autotune`.

    Raises:
        UnsupportedGraph: if the graph cannot be served faithfully.
        CompileFailed: if tracing the backward fails.
    """
    effects = exported.effects
    if mode == "train":
        made = make_pair(
            exported.program,
            [*examples, *exported.noise],
            region=region,
            memory_budget=float(options.get("memory_budget", 1.0)),
            mutated=effects.mutated,
        )
    else:
        made = infer_graph(exported.program)
    slots = (
        InputSlot(
            kind=kind,
            name=name,
            dtype=str(example.dtype).removeprefix("torch."),
            shape=tuple(example.shape),
            stride=tuple(example.stride()),
            requires_grad=mode == "train" and example.requires_grad,
        )
        for kind, name, example in zip(kinds, names, examples, strict=True)
    )
    inputs = (*slots, *effects.draws)
    results = len(made.outputs) - len(effects.mutated)
    mutations = tuple(
        Mutation(slot, results + i, slot in effects.late) for i, slot in enumerate(effects.mutated)
    )
    graphs = [made.forward] if made.backward is None else [made.forward, made.backward]
    content = content_key(
        graphs,
        mode=mode,
        inputs=inputs,
        outputs=made.outputs,
        pair=made.contract,
        mutations=mutations,
        aliases=effects.aliases,
        target=target,
        toolchain=toolchain,
        options=options,
    )
    return Prepared(
        region=region,
        mode=mode,
        target=target,
        toolchain=toolchain,
        options=dict(options),
        forward=made.forward,
        backward=made.backward,
        inputs=inputs,
        outputs=made.outputs,
        pair=made.contract,
        mutations=mutations,
        aliases=effects.aliases,
        content=content,
    )


def compile_prepared(
    prepared: Prepared, workdir: Path, *, progress: Callable[[str], None] = log.debug
) -> Built:
    """Compiles prepared graphs into `workdir`, an existing folder of this build's own.

    Raises:
        ConfigError: for a target that cannot be built here.
        CompileFailed: if AOTInductor or the C++ compiler fails.
    """
    started = time.perf_counter()
    made = compile_pair(
        prepared.forward, prepared.backward, prepared.target, prepared.options, workdir, progress=progress
    )
    graphs = [g for g in (prepared.forward, prepared.backward) if g is not None]
    host = host_contract(made.libraries, graphs, prepared.target, prepared.toolchain)
    return Built(
        archive=made.path,
        digest=made.digest,
        size=made.size,
        members=made.members,
        host=host,
        runner=made.runner,
        seconds={"compile": time.perf_counter() - started},
    )


def reuse(prepared: Prepared, other: Manifest) -> Built:
    """What `compile_prepared` would say, where an identical graph's archive is at hand.

    Raises:
        CompileFailed: if the other artifact is not of identical graphs.
    """
    if other.content != prepared.content or other.pair != prepared.pair:
        raise CompileFailed(
            f"region {prepared.region!r}: the artifact of {other.region!r} has content {other.content}, "
            f"expected {prepared.content}; it was compiled from other graphs"
        )
    return Built(None, other.digest, other.size, dict(other.members), other.host, other.runner, {})


__all__ = [
    "Built",
    "Exported",
    "FlatCall",
    "Prepared",
    "SlotKind",
    "compile_prepared",
    "compiler_version",
    "export",
    "prepare",
    "reuse",
]
