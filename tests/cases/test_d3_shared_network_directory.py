"""D3: many processes publish into one directory of a network file system, and read from it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from tests.faults import entries
from tests.faults.hatchery import Ended, hatchery

PROCESSES, KEYS, ROUNDS, SIZE = 16, 8, 20, 20_000
LIMIT = 240.0
"""Seconds."""

_MOODS: dict[str, Any] = {"stale": 0.05, "late": 3, "busy": 1}


def counted(answers: list[dict[str, Any]], what: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for answer in answers:
        total.update(answer[what])
    return total


def answers_of(ended: list[Ended]) -> list[dict[str, Any]]:
    assert [one.late for one in ended] == [False] * len(ended)
    found = [one.answer for one in ended]
    assert [answer["problems"] for answer in found] == [[]] * len(found)
    return found


def test_every_process_ends_with_the_right_bytes_whatever_the_file_system_says(tmp_path: Path) -> None:
    root = tmp_path / "shared"
    for seed in range(KEYS * ROUNDS):
        entries.written(tmp_path / "archives", seed, SIZE)
    arguments = {
        "url": root.as_uri(),
        "folder": str(tmp_path / "archives"),
        "rounds": ROUNDS,
        "keys": KEYS,
        "size": SIZE,
    }
    stop = tmp_path / "stop"
    with hatchery(tmp_path / "logs", environment={"AOTCACHE_HOME": str(tmp_path / "home")}) as hatched:
        # Who publishes nothing, and so may meet an entry at any moment, sees it whole or not at all.
        reader = hatched.begin(
            "tests.faults.acts:watch",
            {"url": root.as_uri(), "stop": str(stop), "replaced": False},
            before={"tests.faults.shim:network": {"root": str(root), "seed": PROCESSES, **_MOODS}},
            limit=LIMIT,
            counted=False,
        )
        children = [
            hatched.begin(
                "tests.faults.acts:share",
                {**arguments, "own": own},
                before={"tests.faults.shim:network": {"root": str(root), "seed": own, **_MOODS}},
                limit=LIMIT,
                counted=False,
            )
            for own in range(PROCESSES)
        ]
        answers = answers_of([child.wait() for child in children])
        stop.touch()
        read = reader.wait().answer
        assert read["problems"] == []
        assert read["reads"] > KEYS * ROUNDS
        # Nothing that was injected was raised; what had to be tried again was, and users can see how often.
        injected, retried = counted(answers, "injected"), counted(answers, "retried")
        assert injected["ESTALE"] > 100
        assert injected["ENOENT"] > 100
        assert retried["ESTALE"] > 0.5 * injected["ESTALE"]
        assert retried["ENOENT"] > 0
        # A process without moods sees every entry whole, and no draft of anybody.
        seen = hatched.run("tests.faults.acts:examine", {"url": root.as_uri(), "acknowledged": {}})
        assert seen.answer == []
        found = hatched.run("tests.faults.acts:drafts", {"root": str(root)})
        assert found.answer == []
    assert len(list(root.glob("refs/*/*/*.json"))) == KEYS * ROUNDS
    assert len(list(root.glob("blobs/*/*"))) == KEYS * ROUNDS


def test_unpacking_in_a_home_on_such_a_file_system_leaves_no_temporary_folder(tmp_path: Path) -> None:
    """Whether a folder is busy while it is removed, and one that was changed is made anew."""
    root, home = tmp_path / "shared" / "store", tmp_path / "shared" / "home"
    with hatchery(tmp_path / "logs", environment={"AOTCACHE_HOME": str(home)}) as hatched:
        for seed in range(KEYS):
            archive = entries.written(tmp_path / "archives", seed, SIZE)
            arguments = {"url": root.as_uri(), "archive": str(archive), "seed": seed, "size": SIZE}
            hatched.run("tests.faults.acts:publish", arguments)
        assert (
            hatched.run("tests.faults.acts:unpack_all", {"url": root.as_uri(), "own": 0}).answer["problems"]
            == []
        )
        for folder in (home / "unpacked").iterdir():
            next(folder.rglob("*.so")).write_bytes(b"somebody changed it")
            (folder.parent / f".unpacking-{folder.name}" / "left" / "by").mkdir(parents=True)
        children = [
            hatched.begin(
                "tests.faults.acts:unpack_all",
                {"url": root.as_uri(), "own": own},
                before={
                    "tests.faults.shim:network": {"root": str(tmp_path / "shared"), "seed": own, **_MOODS}
                },
                limit=LIMIT,
                counted=False,
            )
            for own in range(4)
        ]
        answers = answers_of([child.wait() for child in children])
        injected, retried = counted(answers, "injected"), counted(answers, "retried")
        assert injected["EBUSY"] > KEYS
        assert retried["EBUSY"] == injected["EBUSY"]
        assert retried["ESTALE"] > 0
    assert len(list((home / "unpacked").iterdir())) == KEYS
    assert [path.name for path in (home / "unpacked").iterdir() if path.name.startswith(".")] == []
