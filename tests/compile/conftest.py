"""Archives that the tests of the compile half share; each costs tens of seconds to make."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from aotcache.compile import pipeline
from aotcache.host import host_toolchain
from aotcache.types import Target
from tests.compile import custom_op
from tests.compile.flat import BLOCK_NAMES, block, block_examples

AVX2 = Target("cpu", "x86_64-avx2")
OPTIONS = {"max_autotune": False, "memory_budget": 1.0}


@dataclass(frozen=True)
class Made:
    """A compiled flat call and the tensors it was compiled with."""

    prepared: pipeline.Prepared
    built: pipeline.Built
    examples: list[torch.Tensor]
    archive: Path
    unpacked: Path

    def libraries(self) -> list[Path]:
        return sorted(self.unpacked.rglob("*.so"))


def _make(
    folder: Path,
    fn: Callable[..., tuple[torch.Tensor, ...]],
    examples: list[torch.Tensor],
    names: tuple[str, ...],
    *,
    train: bool,
    target: Target = AVX2,
) -> Made:
    program = pipeline.export(fn, examples, names, region="layers.0", train=train)
    prepared = pipeline.prepare(
        program,
        examples,
        names=names,
        kinds=["input"] * len(names),
        region="layers.0",
        mode="train" if train else "infer",
        target=target,
        toolchain=host_toolchain(),
        options=OPTIONS,
    )
    built = pipeline.compile_prepared(prepared, folder)
    assert built.archive is not None
    with zipfile.ZipFile(built.archive) as archive:
        archive.extractall(folder / "unpacked")
    return Made(prepared, built, examples, built.archive, folder / "unpacked")


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """`block` as a pair, built by a process of one thread, with a pattern in its weights."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler here")
    examples = block_examples(train=True)
    with torch.no_grad():
        examples[1].copy_(pattern(examples[1].shape))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _make(tmp_path_factory.mktemp("train"), block, examples, BLOCK_NAMES, train=True)
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def operators(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A call of a custom operator, for inference."""
    return _make(
        tmp_path_factory.mktemp("operator"),
        lambda x: (custom_op.squash(x * 2).to(torch.float64) + 1,),
        [torch.randn(3, 4)],
        ("x",),
        train=False,
    )


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Made, Made]:
    """One small call for AVX512, compiled twice, in folders of equally long names."""
    x = torch.randn(64, 64)
    first, second = (
        _make(
            tmp_path_factory.mktemp(f"wide-{which}-", numbered=False),
            lambda x: ((x.bfloat16() @ x.t().bfloat16()).float().tanh().cumsum(0),),
            [x],
            ("x",),
            train=False,
            target=Target("cpu", "x86_64-avx512"),
        )
        for which in "ab"
    )
    return first, second


def pattern(shape: tuple[int, ...]) -> torch.Tensor:
    """Small recognisable weights: one period is longer than 4 KB of bytes."""
    count = int(torch.tensor(shape).prod())
    return (torch.arange(count, dtype=torch.float32) * 0.000123456 - 0.1).sin().mul(0.2).view(shape)
