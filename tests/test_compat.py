from __future__ import annotations

from dataclasses import replace

import pytest

from aotcache.compat import (
    CPU_LEVELS,
    Accepted,
    HostFacts,
    Rejected,
    best,
    cpu_level_features,
    runs_on,
    verdict,
)
from aotcache.errors import ConfigError
from aotcache.manifest import HostContract, Manifest
from aotcache.types import Target
from tests.manifests import HOST, TOOLCHAIN, make_manifest

AVX2 = frozenset(CPU_LEVELS["x86_64-avx2"])
AVX512 = frozenset(CPU_LEVELS["x86_64-avx512"])
FACTS = HostFacts("x86_64", TOOLCHAIN, AVX512, glibc="2.36", libstdcxx="3.4.30", cuda_archs=(), driver=None)
GPU = replace(FACTS, cuda_archs=("sm_90",), driver="12.4", toolchain=replace(TOOLCHAIN, cuda="12.8"))


def built_for(level: str) -> Manifest:
    features = CPU_LEVELS[f"x86_64-{level}"]
    return make_manifest(
        level.encode(), target=f"cpu:x86_64-{level}", host=replace(HOST, cpu_features=features)
    )


def reasons(manifest: Manifest, facts: HostFacts = FACTS) -> str:
    answer = verdict(manifest, facts)
    assert isinstance(answer, Rejected)
    return str(answer)


def test_a_host_that_offers_everything_accepts() -> None:
    manifest = built_for("avx512")
    assert verdict(manifest, FACTS) == Accepted(manifest)


def test_missing_cpu_features_are_named() -> None:
    """Case C6 (a)."""
    text = reasons(built_for("avx512"), replace(FACTS, cpu_features=AVX2))
    assert all(name in text for name in ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"))
    assert "avx2," not in text


def test_without_avx512_the_avx2_variant_is_picked() -> None:
    """Case C6 (b)."""
    both = [built_for("avx512"), built_for("avx2")]
    assert best(both, replace(FACTS, cpu_features=AVX2)) == both[1]
    answer = best(both[:1], replace(FACTS, cpu_features=AVX2))
    assert isinstance(answer, Rejected)
    assert "cpu-x86_64-avx512" in str(answer)
    assert "avx512f" in str(answer)


def test_the_variant_that_uses_most_of_the_host_is_picked_in_any_order() -> None:
    variants = [built_for(level) for level in ("avx2", "avx512", "baseline")]
    for turn in range(3):
        assert best(variants[turn:] + variants[:turn], FACTS) == variants[1]


def test_of_no_variants_none_is_picked() -> None:
    assert isinstance(best([], FACTS), Rejected)


def test_every_candidate_gives_its_reasons() -> None:
    facts = replace(FACTS, cpu_features=frozenset())
    answer = best([built_for("avx512"), built_for("avx2")], facts)
    assert isinstance(answer, Rejected)
    assert len(answer.reasons) == 2


@pytest.mark.parametrize(
    ("toolchain", "said"),
    [
        (replace(TOOLCHAIN, torch="2.12.0"), ["2.12.0", "2.13.0"]),
        (replace(TOOLCHAIN, git="d" * 40), ["d" * 40, "c" * 40]),
        (replace(TOOLCHAIN, cuda="12.8"), ["CUDA 12.8", "CPU only"]),
    ],
)
def test_another_toolchain_is_rejected_with_both_sides(toolchain, said) -> None:  # type: ignore[no-untyped-def]
    """Case D7: a key that matches does not excuse another torch."""
    text = reasons(make_manifest(toolchain=toolchain))
    assert all(part in text for part in said)


@pytest.mark.parametrize(
    ("host", "facts", "said"),
    [
        (replace(HOST, glibc="2.38"), FACTS, "glibc 2.38"),
        (replace(HOST, glibc="2.17"), replace(FACTS, glibc=None), "none that is known"),
        (replace(HOST, libstdcxx="3.4.32"), FACTS, "3.4.30"),
        (replace(HOST, libstdcxx="3.4.21"), replace(FACTS, libstdcxx="3.4.9"), "3.4.9"),
    ],
)
def test_older_libraries_are_rejected(host: HostContract, facts: HostFacts, said: str) -> None:
    assert said in reasons(make_manifest(host=host), facts)


def test_versions_are_numbers_not_texts() -> None:
    assert isinstance(verdict(make_manifest(host=replace(HOST, glibc="2.9")), FACTS), Accepted)


def test_another_processor_family_is_rejected() -> None:
    assert "aarch64" in reasons(make_manifest(), replace(FACTS, machine="aarch64"))


@pytest.mark.parametrize(
    ("arch", "driver", "facts", "said"),
    [
        ("sm_80", None, GPU, "sm_90"),
        ("sm_90", None, replace(GPU, cuda_archs=()), "no CUDA device"),
        ("sm_90", "12.8", GPU, "12.4"),
    ],
)
def test_another_gpu_or_an_older_driver_is_rejected(
    arch: str, driver: str | None, facts: HostFacts, said: str
) -> None:
    manifest = make_manifest(
        target=f"cuda:{arch}", toolchain=facts.toolchain, host=replace(HOST, driver=driver)
    )
    assert said in reasons(manifest, facts)


def test_the_same_gpu_is_accepted() -> None:
    manifest = make_manifest(target="cuda:sm_90", toolchain=GPU.toolchain, host=replace(HOST, driver="12.4"))
    assert verdict(manifest, GPU) == Accepted(manifest)


@pytest.mark.parametrize(
    ("arch", "device", "runs"),
    [
        ("sm_80", "sm_80", True),
        ("sm_80", "sm_86", True),  # same major, higher minor
        ("sm_80", "sm_89", True),
        ("sm_86", "sm_80", False),  # lower minor
        ("sm_80", "sm_90", False),  # another major
        ("sm_90", "sm_90", True),
        ("sm_90a", "sm_90", True),  # what the GPU of capability 9.0 runs
        ("sm_90a", "sm_100", False),
        ("sm_100a", "sm_103", False),  # `a`: exactly that capability
        ("sm_100", "sm_103", False),  # compiled for `a`, whatever the target is called
        ("sm_100f", "sm_100", True),
        ("sm_100f", "sm_103", True),  # `f`: its family, from its own minor on
        ("sm_103f", "sm_100", False),
        ("sm_100f", "sm_120", False),
        ("sm_120f", "sm_121", True),
        ("sm_9", "sm_90", False),
        ("sm_90b", "sm_90", False),
        ("native", "sm_90", False),
    ],
)
def test_gpu_code_runs_by_the_rules_of_binary_compatibility(arch: str, device: str, runs: bool) -> None:
    assert runs_on(arch, device) == runs
    facts = replace(GPU, cuda_archs=(device,))
    manifest = make_manifest(target=f"cuda:{arch}", toolchain=GPU.toolchain)
    answer = verdict(manifest, facts)
    assert isinstance(answer, Accepted if runs else Rejected)
    if not runs:
        assert arch in str(answer)
        assert device in str(answer)


def test_a_host_with_several_gpus_accepts_what_one_of_them_runs() -> None:
    facts = replace(GPU, cuda_archs=("sm_80", "sm_90"))
    assert isinstance(verdict(make_manifest(target="cuda:sm_90", toolchain=GPU.toolchain), facts), Accepted)


def test_code_for_the_very_gpu_is_picked_over_code_for_its_family() -> None:
    facts = replace(GPU, cuda_archs=("sm_103",))
    variants = [make_manifest(arch.encode(), target=f"cuda:{arch}", toolchain=GPU.toolchain) for arch in
                ("sm_100f", "sm_103a", "sm_103f")]  # fmt: skip
    for turn in range(3):
        assert best(variants[turn:] + variants[:turn], facts) == variants[1]
    assert best(variants[::2], facts) == variants[2]


def test_missing_shared_libraries_are_named() -> None:
    host = replace(HOST, libraries=("libtorch.so", "libcuda.so.1", "libgomp.so.1"))
    text = reasons(make_manifest(host=host), replace(FACTS, library={"libtorch.so": True}.__contains__))
    assert "libcuda.so.1, libgomp.so.1" in text
    assert "libtorch.so" not in text
    assert "LD_LIBRARY_PATH" in text


def test_a_version_may_be_shorter_and_may_have_a_distributors_ending() -> None:
    for needed, found in (("3.4", "3.4.0"), ("3.4.0", "3.4"), ("2.36", "2.36-9deb12"), ("2.9", "2.36-9")):
        facts = replace(FACTS, glibc=found)
        assert isinstance(verdict(make_manifest(host=replace(HOST, glibc=needed)), facts), Accepted)
    assert "2.36-9" in reasons(
        make_manifest(host=replace(HOST, glibc="2.37")), replace(FACTS, glibc="2.36-9")
    )


SCHEMA = "mylib::scale(Tensor x, float by) -> Tensor"
WITH_OPERATOR = make_manifest(
    host=replace(HOST, operators={"mylib::scale": {"schema": SCHEMA, "module": "mytrainer.ops"}})
)


def test_an_unregistered_operator_is_named_with_its_module() -> None:
    """Case C8 (a)."""
    text = reasons(WITH_OPERATOR)
    assert "mylib::scale" in text
    assert "import mytrainer.ops" in text


def test_a_registered_operator_is_accepted() -> None:
    """Case C8 (b)."""
    facts = replace(FACTS, operator={"mylib::scale": SCHEMA}.get)
    assert isinstance(verdict(WITH_OPERATOR, facts), Accepted)


def test_an_operator_with_another_signature_is_rejected_with_both() -> None:
    """Case C8 (c)."""
    other = "mylib::scale(Tensor x) -> Tensor"
    text = reasons(WITH_OPERATOR, replace(FACTS, operator={"mylib::scale": other}.get))
    assert SCHEMA in text
    assert other in text


def test_all_reasons_are_given_at_once() -> None:
    """One of every kind: nobody mends one thing to hear of the next."""
    operators = {"mylib::scale": {"schema": SCHEMA, "module": "mytrainer.ops"}}
    needs = HostContract(("avx9",), "9.0", "9.0", ("libnone.so",), operators, "99.0")
    manifest = make_manifest(
        toolchain=replace(TOOLCHAIN, torch="2.12.0", cuda="12.8"), target="cuda:sm_80", host=needs
    )
    answer = verdict(manifest, replace(FACTS, library=lambda name: False))
    assert isinstance(answer, Rejected)
    said = ("torch 2.12.0", "CUDA 12.8", "sm_80", "driver 99.0", "avx9", "glibc 9.0", "GLIBCXX 9.0", "libnone.so",
            "mylib::scale")  # fmt: skip
    assert len(answer.reasons) == len(said)
    assert all(text in reason for text, reason in zip(said, answer.reasons, strict=True))


def test_levels_grow() -> None:
    base, avx2, avx512 = (set(cpu_level_features(f"x86_64-{n}")) for n in ("baseline", "avx2", "avx512"))
    assert base < avx2 < avx512


def test_an_unknown_level_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="cpu:x86_64-avx2"):
        cpu_level_features(Target.parse("cpu:x86_64-avx9").arch)
