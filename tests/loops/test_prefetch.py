"""All ranks agree before step 1: what they run, what they leave, or the error that they raise."""

from __future__ import annotations

import json
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import aotcache
from aotcache.errors import ArtifactMiss, ConfigError
from aotcache.lockfile import lock_path, read_lock
from aotcache.manifest import Manifest
from aotcache.types import sha256
from tests.cases.support import copy_store
from tests.loops import drafter, ranks
from tests.loops.conftest import Warm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RAISE, EAGER = ["raise", "raise"], ["eager", "eager"]
CALLS = 12
"""Of regions in three steps, each with an eval behind it."""


def _is_left_out(manifest: Manifest) -> bool:
    return manifest.mode == "train" and manifest.bucket == {"seq": 16}


class Stores:
    """Stores and specs that differ from the warmed ones in one thing each."""

    def __init__(self, warm: Warm, folder: Path) -> None:
        self.folder = folder
        keys = sorted({cell.key for cell in read_lock(lock_path(warm.spec.path)).cells})
        full = [m for key in keys for m in aotcache.open_store(warm.store).lookup(key)]
        (self.left_out,) = [m for m in full if _is_left_out(m)]
        self.full = copy_store(warm.store, folder / "full", full)
        self.lacking = copy_store(warm.store, folder / "lacking", (m for m in full if not _is_left_out(m)))
        # A store drops bytes that it found to be wrong: one for each case.
        self.broken = [self._broken(copy_store(warm.store, folder / f"broken-{i}", full)) for i in range(2)]
        self.other = copy_store(warm.store, folder / "other", (m for m in full if not _is_left_out(m)))
        self._publish_again(warm.store)
        self.spec = str(warm.spec.path)
        self.unlocked = str(shutil.copy(warm.spec.path, folder / "unlocked.toml"))
        self.narrow = str(shutil.copy(warm.spec.path, folder / "narrow.toml"))
        lock = json.loads(Path(f"{warm.spec.path}.lock").read_text())
        lock["cells"] = [c for c in lock["cells"] if c["key"] != self.left_out.key]
        Path(f"{self.narrow}.lock").write_text(json.dumps(lock))

    def _broken(self, url: str) -> str:
        blob = aotcache.open_store(url).blob_path(self.left_out.digest)
        assert blob is not None
        blob.write_bytes(blob.read_bytes()[:-1] + b"?")
        return url

    def _publish_again(self, source: str) -> None:
        """The same libraries in an archive of other bytes."""
        archive = self.folder / "again.pt2"
        blob = aotcache.open_store(source).blob_path(self.left_out.digest)
        assert blob is not None
        with zipfile.ZipFile(blob) as old, zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as new:
            for name in old.namelist():
                new.writestr(name, old.read(name))
        data = archive.read_bytes()
        again = replace(self.left_out, digest=sha256(data), size=len(data))
        assert aotcache.open_store(self.other).publish(again, archive)

    def cases(self) -> dict[str, dict[str, Any]]:
        locked, unlocked = [self.spec] * 2, [self.unlocked] * 2
        return {
            "covered": {"specs": locked, "stores": [self.full] * 2, "on_miss": RAISE},
            "covered, no lock file": {
                "specs": unlocked,
                "stores": [self.full] * 2,
                "on_miss": RAISE,
                "group": "WORLD",
            },
            "lacking": {"specs": locked, "stores": [self.full, self.lacking], "on_miss": RAISE},
            "lacking, no lock file": {
                "specs": unlocked,
                "stores": [self.lacking, self.full],
                "on_miss": RAISE,
                "group": "new",
            },
            "lacking, eager": {
                "specs": locked,
                "stores": [self.full, self.lacking],
                "on_miss": EAGER,
                "warmed_up": True,
            },
            "broken": {"specs": locked, "stores": [self.broken[0], self.full], "on_miss": RAISE},
            "broken, eager": {"specs": locked, "stores": [self.broken[1], self.full], "on_miss": EAGER},
            "another archive": {"specs": unlocked, "stores": [self.full, self.other], "on_miss": RAISE},
            "not alike": {"specs": locked, "stores": [self.full] * 2, "on_miss": ["raise", "eager"]},
            "one records": {
                "specs": unlocked,
                "stores": [self.full] * 2,
                "on_miss": ["raise", "record"],
            },
            "another lock file": {
                "specs": [self.spec, self.narrow],
                "stores": [self.full] * 2,
                "on_miss": RAISE,
            },
            "another code": {
                "specs": unlocked,
                "stores": [self.full] * 2,
                "on_miss": RAISE,
                "patched": 1,
            },
            "covered after all": {"specs": locked, "stores": [self.full] * 2, "on_miss": RAISE},
        }


@pytest.fixture(scope="module")
def stores(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Stores:
    return Stores(warm, tmp_path_factory.mktemp("stores"))


@pytest.fixture(scope="module")
def found(stores: Stores, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks met, case after case in one pair of processes."""
    return ranks.run(
        "tests.loops.agreement:run", str(tmp_path_factory.mktemp("homes")), stores.cases(), seconds=240
    )


@pytest.mark.parametrize("case", ["covered", "covered, no lock file", "covered after all"])
def test_full_coverage_loads_all_and_asks_for_nothing_later(found: list[dict[str, Any]], case: str) -> None:
    for of_rank in found:
        result = of_rank[case]
        assert result["error"] is None, result
        assert result["log"] == []
        assert {k: result[k] for k in ("loads", "later", "hits", "eager", "traces")} == {
            "loads": 4,
            "later": 0,
            "hits": CALLS,
            "eager": 0,
            "traces": 0,
        }


def _same_error(found: list[dict[str, Any]], case: str, kind: str) -> tuple[str, dict[str, Any]]:
    one, other = (of_rank[case] for of_rank in found)
    assert (one["error"], other["error"]) == (kind, kind), (one, other)
    assert one["text"] == other["text"]
    assert one["details"] == other["details"]
    return one["text"], one["details"]


@pytest.mark.parametrize(("case", "rank"), [("lacking", 1), ("lacking, no lock file", 0)])
def test_one_rank_without_a_cell_fails_all_alike(
    found: list[dict[str, Any]], stores: Stores, case: str, rank: int
) -> None:
    text, details = _same_error(found, case, "ArtifactMiss")
    assert f"rank {rank} lacks layers.0 train seq=16 " in text
    assert "region 'layers.0'" in text
    assert stores.lacking in text
    assert f"aotcache warm {stores.unlocked if 'no lock' in case else stores.spec} --store" in text
    assert (details["rank"], details["region"], details["key"]) == (rank, "layers.0", stores.left_out.key)
    assert [entry["rank"] for entry in details["lacking"]] == [rank]


def test_asked_to_all_ranks_run_eagerly_what_one_lacks(found: list[dict[str, Any]], stores: Stores) -> None:
    for rank, of_rank in enumerate(found):
        result = of_rank["lacking, eager"]
        assert result["error"] is None, result
        # The rank that has it had run it before, and leaves it now: two layers in two of three steps.
        assert (result["eager before"], result["eager"]) == ((0, 2)[rank], 4)
        assert result["hits"] == CALLS - 4
        assert (result["later"], result["traces"]) == (0, 0)
        (text,) = [line for line in result["log"] if "all ranks run" in line]
        assert "rank 1 lacks layers.0 train seq=16 " in text
        assert stores.left_out.key in text


@pytest.mark.parametrize("case", ["broken", "broken, eager"])
def test_a_store_that_fails_on_one_rank_fails_all_alike(
    found: list[dict[str, Any]], stores: Stores, case: str
) -> None:
    text, details = _same_error(found, case, "CorruptArtifact")
    assert "rank 0: CorruptArtifact: " in text
    assert stores.left_out.digest in text
    assert details["ranks"] == [0]
    assert [of_rank[case]["cause"] for of_rank in found] == ["CorruptArtifact", None]


def test_two_archives_for_one_key_are_refused(found: list[dict[str, Any]], stores: Stores) -> None:
    text, details = _same_error(found, "another archive", "RejectedArtifact")
    assert details["key"] == stores.left_out.key
    assert details["expected"] == stores.left_out.digest
    assert details["found"] in text


def test_two_reactions_to_a_miss_are_refused(found: list[dict[str, Any]]) -> None:
    text, _ = _same_error(found, "not alike", "ConfigError")
    assert "'eager' on rank 1" in text
    assert "'raise' on rank 0" in text


def test_a_rank_that_records_among_others_is_refused_and_keeps_none_waiting(
    found: list[dict[str, Any]],
) -> None:
    text, _ = _same_error(found, "one records", "ConfigError")
    assert "'record' on rank 1" in text


def test_a_cell_that_one_lock_file_does_not_name_is_lacking(found: list[dict[str, Any]]) -> None:
    text, details = _same_error(found, "another lock file", "ArtifactMiss")
    assert "its lock file does not name it" in text
    assert details["rank"] == 1


def test_other_code_on_one_rank_is_said(found: list[dict[str, Any]]) -> None:
    text, details = _same_error(found, "another code", "ArtifactMiss")
    assert "its code of that region is not rank 0's" in text
    assert {entry["rank"] for entry in details["lacking"]} == {1}
    assert len(details["lacking"]) == 4


def test_a_group_that_is_none_is_refused(warm: Warm) -> None:
    with aotcache.attach(drafter.build(), warm.spec, store=warm.store) as handle:
        with pytest.raises(ConfigError, match="init_process_group"):
            handle.prefetch(group="world")
        assert handle.stats()["loads"] == 0


def test_alone_a_missing_cell_raises_unless_eager_is_asked_for(warm: Warm, stores: Stores) -> None:
    with aotcache.attach(drafter.build(), warm.spec, store=stores.lacking) as handle:
        with pytest.raises(ArtifactMiss, match=r"names layers\.0 train seq=16 .*run: aotcache warm"):
            handle.prefetch()
    with aotcache.attach(drafter.build(), warm.spec, store=stores.lacking, on_miss="eager") as handle:
        handle.prefetch()
