"""The GIL-free runner: right results on many threads, and failures that stay where they are."""

from __future__ import annotations

import gc
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from aotcache.errors import CallRefused, RejectedArtifact
from aotcache.runtime import registry, runner
from aotcache.runtime.runner import Library, PackageRunner
from tests.faults.disks import mounted
from tests.runtime import artifacts
from tests.runtime.artifacts import Artifact, close, inputs


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return artifacts.pair(tmp_path_factory)


@pytest.fixture(scope="session")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return artifacts.proxied(tmp_path_factory)


@pytest.fixture(scope="module")
def forward(pair: Artifact, tmp_path_factory: pytest.TempPathFactory) -> Library:
    """The forward library of the pair, opened on its own."""
    found = _unpacked(pair, tmp_path_factory.mktemp("home"))
    assert pair.manifest.pair is not None
    return Library(found, inputs=4, outputs=3 + pair.manifest.pair.intermediates)


def _unpacked(artifact: Artifact, home: Path) -> Path:
    folder = registry.unpack(artifact.manifest, registry._AtHand(artifact.archive), home)
    (path,) = (folder / name for name in artifact.manifest.members if name.endswith("forward.wrapper.so"))
    return path


def _right(library: Library, seed: int) -> bool:
    tensors = inputs(seed, grad=False)
    wanted = artifacts.region(*(t.double() for t in tensors))
    found = library.run(tensors)
    return all(close(t, w) for t, w in zip(found, wanted, strict=False))


def _wrong_shape() -> list[torch.Tensor]:
    return [torch.ones(8, 3), *inputs(grad=False)[1:]]


def _containers() -> int:
    gc.collect()
    return sum(type(thing) is runner._Container for thing in gc.get_objects())


def test_results_of_four_threads_are_right_in_every_call(forward: Library) -> None:
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda seed: _right(forward, seed), range(800)))


def test_results_do_not_depend_on_how_capsules_are_read(
    forward: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Containers are made per thread: a new thread finds an interpreter whose capsules cannot be read.
    monkeypatch.setattr(runner, "_slots_readable", lambda: False)
    with ThreadPoolExecutor(1) as pool:
        assert all(pool.map(lambda seed: _right(forward, seed), range(20)))


def test_capsules_of_this_interpreter_are_read_in_place() -> None:
    assert runner._slots_readable()


def test_outputs_of_one_call_outlive_the_next(forward: Library) -> None:
    first = forward.run(inputs(1, grad=False))
    kept = [t.clone() for t in first if t is not None]
    forward.run(inputs(2, grad=False))
    assert all(torch.equal(a, b) for a, b in zip((t for t in first if t is not None), kept, strict=True))


def test_a_failing_call_says_what_the_library_said(forward: Library) -> None:
    with pytest.raises(CallRefused, match=r"forward\.wrapper\.so failed: .+"):
        forward.run(_wrong_shape())
    assert _right(forward, 3)


def test_a_thread_whose_calls_fail_leaves_all_others_running(forward: Library) -> None:
    rounds = 200
    start = threading.Barrier(4)

    def failing() -> int:
        start.wait()
        failures = 0
        for _ in range(rounds):
            try:
                forward.run(_wrong_shape())
            except CallRefused:
                failures += 1
        return failures

    def working(first: int) -> bool:
        start.wait()
        return all(_right(forward, first + i) for i in range(rounds))

    with ThreadPoolExecutor(4) as pool:
        failed = pool.submit(failing)
        worked = [pool.submit(working, 1000 * i) for i in range(3)]
        assert failed.result(timeout=120) == rounds
        assert all(future.result(timeout=120) for future in worked)


def test_containers_go_with_their_threads(forward: Library) -> None:
    before = _containers()
    reached, leave = threading.Barrier(4), threading.Event()

    def work() -> None:
        _right(forward, 0)
        reached.wait()
        leave.wait()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    reached.wait()
    assert _containers() == before + 3
    leave.set()
    for thread in threads:
        thread.join()
    assert _containers() == before


def test_thirty_thousand_calls_leak_nothing(forward: Library) -> None:
    tensors = inputs(grad=False)

    def megabytes() -> float:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20

    def grown() -> float:
        before = megabytes()
        for _ in range(10_000):
            forward.run(tensors)
        return megabytes() - before

    # One leaked output of each call would be 7.5 MB in every round; the allocator's own growth ends.
    assert min(grown() for _ in range(3)) < 2


def test_a_failing_call_keeps_none_of_its_inputs(forward: Library) -> None:
    bad = _wrong_shape()
    with pytest.raises(CallRefused):
        forward.run(bad)
    assert [t._use_count() for t in bad] == [1] * 4  # type: ignore[attr-defined]


def test_another_number_of_tensors_is_refused(forward: Library) -> None:
    with pytest.raises(CallRefused, match=r"takes 4 tensors, found 3") as refused:
        forward.run(inputs(grad=False)[:3])
    assert refused.value.details == {"expected": 4, "found": 3}


def test_a_library_that_is_not_what_the_manifest_says_is_rejected(forward: Library) -> None:
    with pytest.raises(RejectedArtifact, match=r"takes 4 tensors and returns \d+; its manifest says 5 and"):
        Library(forward.path, inputs=5, outputs=forward.outputs)


def test_what_is_no_library_is_rejected_with_path_and_reason(tmp_path: Path) -> None:
    path = tmp_path / "forward.so"
    path.write_bytes(b"text")
    with pytest.raises(RejectedArtifact, match=r"forward\.so cannot be opened: .*(too short|invalid ELF)"):
        Library(path, inputs=1, outputs=1)


def test_a_library_without_the_interface_is_rejected() -> None:
    libm = next(
        Path(line.split()[-1]) for line in Path("/proc/self/maps").read_text().splitlines() if "libm" in line
    )
    with pytest.raises(RejectedArtifact, match="AOTInductorModelContainerCreateWithDevice"):
        Library(libm, inputs=1, outputs=1)


def test_gradients_recorded_on_inputs_do_not_reach_the_outputs(forward: Library) -> None:
    found = forward.run(inputs(5))
    assert not any(t.requires_grad for t in found if t is not None)


def test_what_needs_torchs_loader_goes_on_after_an_error(proxied: Artifact) -> None:
    assert proxied.manifest.runner == "torch"
    loaded = PackageRunner(proxied.archive, "forward", inputs=1, outputs=1)

    def call(value: float) -> list[float]:
        (out,) = loaded.run([torch.full((3, 4), value)])
        assert out is not None
        return out.unique().tolist()

    assert call(2.0) == [5.0]
    for _ in range(3):
        # torch 2.11 prints the operator's own message and raises another.
        with pytest.raises(CallRefused, match=r"the first entry is negative|run_func_"):
            call(-1.0)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(call, [1.0] * 40)) == [[3.0]] * 40
    with pytest.raises(CallRefused, match="takes 1 tensors, found 2"):
        loaded.run([torch.ones(3, 4)] * 2)


def test_torchs_loader_in_a_temporary_directory_without_execution_names_the_way_out(
    proxied: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mounted(tmp_path / "disk", "size=64m,mode=700,noexec") as disk:
        monkeypatch.setenv("TMPDIR", str(disk))
        with pytest.raises(RejectedArtifact, match="noexec: set TMPDIR"):
            PackageRunner(proxied.archive, "forward", inputs=1, outputs=1)


def test_an_archive_that_torchs_loader_cannot_read_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "archive.pt2"
    path.write_bytes(b"no zip")
    with pytest.raises(RejectedArtifact, match=r"archive\.pt2 cannot be opened by torch's loader"):
        PackageRunner(path, "forward", inputs=1, outputs=1)
