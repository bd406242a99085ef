from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from aotcache.errors import RejectedArtifact, StoreError
from aotcache.ownership import private_problem
from aotcache.store.local import locked, make_dirs, once, require_private


def _hold(locks: str, held: Any, may_end: Any) -> None:
    with locked(Path(locks), "thing", 10):
        held.set()
        may_end.wait()


def test_a_lock_excludes_other_processes_and_names_itself_when_it_gives_up(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    held, may_end = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(str(tmp_path), held, may_end))
    holder.start()
    assert held.wait(60)
    with pytest.raises(StoreError, match=r"thing.*not free within 0\.2 s"), locked(tmp_path, "thing", 0.2):
        pass
    with locked(tmp_path, "another thing", 0.2):
        pass
    may_end.set()
    holder.join(60)
    with locked(tmp_path, "thing", 10):
        pass


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    held, may_end = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(str(tmp_path), held, may_end))
    holder.start()
    assert held.wait(60)
    assert holder.pid is not None
    os.kill(holder.pid, signal.SIGKILL)
    holder.join(60)
    with locked(tmp_path, "thing", 10):
        pass


def test_a_lock_excludes_other_threads(tmp_path: Path) -> None:
    inside, most = [0], [0]

    def enter() -> None:
        for _ in range(20):
            with locked(tmp_path, "thing", 60):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


def test_once_makes_a_thing_once_among_threads(tmp_path: Path) -> None:
    thing, made = tmp_path / "thing", []
    start = threading.Barrier(8)
    got: list[str] = []

    def ready() -> str | None:
        return thing.read_text() if thing.exists() else None

    def make() -> str:
        made.append(1)
        draft = tmp_path / "draft"
        draft.write_text("made")
        draft.rename(thing)
        return "made"

    def run() -> None:
        start.wait()
        got.append(once(tmp_path / "locks", "thing", 60, ready=ready, make=make))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == ["made"] * 8
    assert made == [1]


def test_once_lets_the_next_one_try_after_a_failure(tmp_path: Path) -> None:
    def fail() -> str:
        raise ValueError("no luck")

    with pytest.raises(ValueError, match="no luck"):
        once(tmp_path, "thing", 5, ready=lambda: None, make=fail)
    assert once(tmp_path, "thing", 5, ready=lambda: None, make=lambda: "made") == "made"


def test_directories_are_made_with_the_mode_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        make_dirs(tmp_path / "a" / "b", 0o700)
    finally:
        os.umask(before)
    assert [(tmp_path / p).stat().st_mode & 0o777 for p in ("a", "a/b")] == [0o700, 0o700]
    make_dirs(tmp_path / "a" / "b", 0o700)


def test_a_file_in_the_way_of_a_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(StoreError, match=str(tmp_path / "a")):
        make_dirs(tmp_path / "a")


def test_every_folder_up_to_the_root_counts_for_privacy(tmp_path: Path) -> None:
    make_dirs(tmp_path / "root" / "folder")
    file = tmp_path / "root" / "folder" / "file"
    file.write_text("x")
    file.chmod(0o644)
    require_private(file, tmp_path / "root")
    (tmp_path / "root" / "folder").chmod(0o775)
    assert private_problem(file) is None
    with pytest.raises(RejectedArtifact, match="0775"):
        require_private(file, tmp_path / "root")
    require_private(file, file)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_not_private(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    os.chown(file, 12345, -1)
    assert "12345" in (private_problem(file) or "")
