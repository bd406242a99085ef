"""Archives, run by torch's own loader, against eager float64; and what must not be in them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import codecache
from torch._inductor.package import load_package

from aotcache.compat import CPU_LEVELS
from aotcache.compile import aoti
from aotcache.compile.aoti import _with_whole_headers, compiler_version, inductor_options
from aotcache.errors import ConfigError
from aotcache.host import cpu_features
from aotcache.types import Target, sha256
from tests.compile.conftest import Made, pattern
from tests.compile.flat import assert_close, block, block_examples, reference, run_contract, tangents_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def _instructions(made: Made) -> str:
    return "".join(
        subprocess.run(
            ["objdump", "-d", "--no-show-raw-insn", str(library)], capture_output=True, text=True, check=True
        ).stdout
        for library in made.libraries()
    )


def test_a_pair_equals_eager_in_torchs_own_loader(trained: Made) -> None:
    contract = trained.prepared.pair
    assert contract is not None
    forward = load_package(str(trained.archive), "forward")
    backward = load_package(str(trained.archive), "backward")
    for seed in (1, 2):
        inputs = block_examples(train=True, seed=seed)
        tangents = tangents_for(contract, trained.prepared.outputs, seed)
        outputs, grads = run_contract(
            contract,
            len(trained.prepared.outputs),
            lambda ts: forward(*ts),
            lambda ts: backward(*ts),
            inputs,
            tangents,
        )
        want_outputs, want_grads = reference(block, inputs, tangents)
        for i, (got, want, slot) in enumerate(
            zip(outputs, want_outputs, trained.prepared.outputs, strict=True)
        ):
            assert_close(got, want, f"output {i}")
            assert got.stride() == slot.stride
        for i, (grad, ref) in enumerate(zip(grads, want_grads, strict=True)):
            assert_close(grad, ref, f"gradient {i}", bound=1e-4)


def test_no_result_shares_memory_with_another_or_with_an_input(trained: Made) -> None:
    contract = trained.prepared.pair
    assert contract is not None
    inputs = [t.detach() for t in trained.examples]
    with torch.no_grad():
        results = load_package(str(trained.archive), "forward")(*inputs)
        taken: list[Any] = [
            *(inputs[i] for i in contract.saved_inputs),
            *(results[i] for i in contract.saved_outputs),
            *results[len(trained.prepared.outputs) :],
            *tangents_for(contract, trained.prepared.outputs),
        ]
        grads = load_package(str(trained.archive), "backward")(*taken)
    for made, given in ((results, inputs), (grads, taken)):
        storages = [t.untyped_storage().data_ptr() for t in made]
        assert len(set(storages)) == len(storages)
        assert not set(storages) & {t.untyped_storage().data_ptr() for t in given}


def test_an_avx2_archive_has_no_wider_instruction_and_uses_avx2(trained: Made) -> None:
    code = _instructions(trained)
    assert "%ymm" in code
    assert not re.search(r"%zmm|%k[1-7]\b|%[xy]mm(1[6-9]|2\d|3[01])|\btile|vdpbf16|vpdpb", code)


def test_an_avx512_archive_has_nothing_beyond_its_level(wide: tuple[Made, Made]) -> None:
    code = _instructions(wide[0])
    assert "%zmm" in code
    assert not re.search(r"%tmm|\bt(dp|ile)|vdpbf16ps|vcvtne2?ps2?bf16|vpdpbusd", code)


def test_an_avx512_archive_runs_where_it_can(wide: tuple[Made, Made]) -> None:
    if not set(CPU_LEVELS["x86_64-avx512"]) <= cpu_features():
        pytest.skip("this host has no AVX512")
    x = wide[0].examples[0]
    (got,) = load_package(str(wide[0].archive), "forward")(x)
    want = (x.bfloat16() @ x.t().bfloat16()).double().tanh().cumsum(0)
    assert_close(got, want, "output", bound=2e-2)


@pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < (2, 12), reason="torch 2.11 draws names at random"
)
def test_the_same_graph_gives_the_same_bytes(wide: tuple[Made, Made]) -> None:
    assert wide[0].prepared.content == wide[1].prepared.content
    assert wide[0].built.members == wide[1].built.members
    assert wide[0].built.digest == wide[1].built.digest


def test_a_builder_of_one_thread_makes_parallel_kernels(trained: Made) -> None:
    text = "".join(
        subprocess.run(["objdump", "-T", str(library)], capture_output=True, text=True, check=True).stdout
        for library in trained.libraries()
    )
    assert "GOMP_parallel" in text


def test_an_archive_holds_libraries_and_metadata_and_nothing_else(trained: Made) -> None:
    names = {name.partition("/")[2] for name in trained.built.members}
    assert {n for n in names if n.startswith("data/")} == {
        f"data/aotinductor/{g}/{g}.wrapper{end}"
        for g in ("forward", "backward")
        for end in (".so", ".cpp", "_metadata.json")
    }
    assert not any(path.read_bytes() for path in trained.unpacked.rglob("*.cpp"))
    for name, digest in trained.built.members.items():
        assert sha256((trained.unpacked / name).read_bytes()) == digest
    data = trained.archive.read_bytes()
    assert (trained.built.digest, trained.built.size) == (sha256(data), len(data))
    # The same pair packed by torch alone, with its sources and symbols, takes several megabytes.
    assert len(data) < 400_000


def test_a_library_has_nothing_of_the_command_that_made_it(tmp_path: Path) -> None:
    """Inductor calls its source by a digest of all flags, and thus of this host's folders."""
    kept = []
    for name in ("caaaaaaa", "cbbbbbbb"):
        made = tmp_path / name / f"{name}.wrapper.so"
        made.parent.mkdir()
        made.write_bytes(b"code " + str(made.with_suffix(".cpp")).encode() + b": it failed")
        [library, _], proxied = aoti._keep("forward", [str(made)], tmp_path / name)
        kept.append(library.read_bytes())
        assert not proxied
    assert kept[0] == kept[1]
    assert kept[0].endswith(b"/xxxxxxxx.wrapper.cpp: it failed")


def test_an_archive_holds_no_weights_and_no_paths(trained: Made) -> None:
    weights = pattern(trained.examples[1].shape).numpy().tobytes()
    home = str(trained.archive.parent).encode()
    for path in trained.unpacked.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert weights[:256] not in data
            assert home not in data
            assert b"regex" not in data  # see compile/headers.py
            for text in re.findall(rb"[\x20-\x7e]{6,}", data):
                assert not re.match(rb"/(?!(lib|usr|proc|sys)\b)[\w.-]+/[\w.-]+/", text), text
    for library in trained.libraries():
        sections = subprocess.run(
            ["objdump", "-h", str(library)], capture_output=True, text=True, check=True
        ).stdout
        assert ".symtab" not in sections
        assert ".debug" not in sections


def test_the_native_runner_is_chosen_unless_an_operator_needs_torchs(trained: Made, operators: Made) -> None:
    assert trained.built.runner == "native"
    assert operators.built.runner == "torch"


def test_a_custom_operator_runs_in_torchs_own_loader(operators: Made) -> None:
    x = torch.randn(3, 4)
    (got,) = load_package(str(operators.archive), "forward")(x)
    want = (2 * x.double()) / (1 + (2 * x.double()).abs()) + 1
    assert got.dtype == torch.float64
    assert_close(got, want, "output")


def test_an_unknown_level_is_refused_with_those_that_can_be_built() -> None:
    with pytest.raises(ConfigError, match=r"cpu:riscv64-v .*cpu:x86_64-avx2"):
        inductor_options(Target("cpu", "riscv64-v"), {})


def test_the_compiler_says_what_it_is() -> None:
    assert re.search(r"\d+\.\d+", compiler_version())


def test_a_precompiled_header_that_a_killed_compiler_left_half_fails_no_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codecache, "_HEADER_DIR", str(tmp_path))
    header, source = tmp_path / "common.h", tmp_path / "kernel.cpp"
    half = header.with_suffix(".h.gch")
    header.write_text("#include <vector>\n")
    source.write_text("std::vector<int> three{1, 2, 3};\n")
    told: list[str] = []

    def compiled() -> list[str]:
        done = subprocess.run(
            ["g++", "-c", "-include", str(header), str(source), "-o", str(tmp_path / "kernel.o")],
            capture_output=True,
            text=True,
        )
        told.append(done.stderr)
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        return ["kernel.o"]

    subprocess.run(["g++", "-x", "c++-header", str(header), "-o", str(half)], check=True)
    data = half.read_bytes()
    half.write_bytes(data[: len(data) // 2])
    assert _with_whole_headers(compiled) == ["kernel.o"]
    assert told[0] != ""
    assert told[1:] == [""]
    assert not half.exists()


def test_any_other_failure_of_a_compiler_is_told_at_once() -> None:
    calls: list[int] = []

    def compiled() -> list[str]:
        calls.append(1)
        raise RuntimeError("error: expected ';' before '}' token")

    with pytest.raises(RuntimeError, match="expected"):
        _with_whole_headers(compiled)
    assert len(calls) == 1
