"""What a network file system refuses for a moment is tried again, counted, and never waited for in vain."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aotcache import passing
from aotcache.errors import StoreError
from aotcache.passing import again, late, new_folder, remove_tree, retried, scratch


def failing(times: int, number: int) -> Callable[[], str]:
    left = [times]

    def act() -> str:
        if left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        return "done"

    return act


def counted(name: str) -> int:
    return retried().get(name, 0)


def test_a_stale_handle_is_tried_again_and_counted() -> None:
    before = counted("ESTALE")
    assert again(failing(3, errno.ESTALE), "file") == "done"
    assert counted("ESTALE") == before + 3


@pytest.mark.parametrize(("times", "number"), [(7, errno.ESTALE), (1, errno.EIO)])
def test_what_does_not_pass_is_raised(times: int, number: int) -> None:
    with pytest.raises(OSError) as caught:
        again(failing(times, number), "file")
    assert caught.value.errno == number


def test_a_name_that_is_late_is_found_and_one_that_is_not_there_is_no_retry() -> None:
    before, answers = counted("ENOENT"), iter([None, "there"])
    assert late(lambda: next(answers), "file") == "there"
    assert counted("ENOENT") == before + 1
    assert late(lambda: None, "file") is None
    assert counted("ENOENT") == before + 1


def test_a_busy_folder_goes_however_deep_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    (folder / "a" / "b" / "c" / "d" / "e").mkdir(parents=True)
    (folder / "a" / "file").write_bytes(b"x")
    refused: dict[str, int] = {}
    rmdir = os.rmdir

    def busy(path: Any, **named: Any) -> None:
        name = os.path.basename(path)
        refused[name] = refused.get(name, 0) + 1
        if refused[name] == 1:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        rmdir(path, **named)

    before = counted("EBUSY")
    monkeypatch.setattr(os, "rmdir", busy)
    remove_tree(folder)
    assert list(tmp_path.iterdir()) == []
    assert counted("EBUSY") == before + len(refused) == before + 6


def test_a_folder_that_stays_busy_is_out_of_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()

    def busy(path: Any, **named: Any) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", busy)
        remove_tree(folder)
    assert not folder.exists()
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(passing.REMOVING)


def test_a_folder_that_is_not_there_costs_no_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def waited(seconds: float) -> None:
        raise AssertionError("nothing is waited for")

    monkeypatch.setattr(time, "sleep", waited)
    remove_tree(tmp_path / "nothing")


def test_a_scratch_folder_ends_with_its_block_and_names_where_it_cannot_be_made(tmp_path: Path) -> None:
    with scratch("work-", tmp_path) as folder:
        (folder / "file").write_bytes(b"x")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StoreError, match="AOTCACHE_HOME"):
        new_folder("work-", tmp_path / "nowhere")
