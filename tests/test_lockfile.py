from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotcache.errors import ManifestError
from aotcache.lockfile import Lock, LockedCell, compare, lock_path, read_lock, write_lock
from aotcache.types import CacheKey, Digest

hexes = st.text("0123456789abcdef", min_size=64, max_size=64)
locked_cells = st.builds(
    LockedCell,
    region=st.text(max_size=8),
    mode=st.sampled_from(["train", "infer"]),
    bucket=st.dictionaries(st.text(min_size=1, max_size=4), st.integers(1, 1 << 40), max_size=3),
    target=st.sampled_from(["cpu:x86_64-avx2", "cuda:sm_90"]),
    toolchain=st.sampled_from(["torch2.13.0-aaaaaaaa-cpu", "torch2.14.0-bbbbbbbb-cu12.8"]),
    key=hexes.map(CacheKey),
    digest=hexes.map(Digest),
)
locks = st.builds(Lock, drafter=st.text(max_size=8), cells=st.lists(locked_cells, max_size=6))


def cell(
    key: str = "a", digest: str = "b", target: str = "cpu:x86_64-avx2", region: str = "layers.0"
) -> LockedCell:
    toolchain = "torch2.13.0-cccccccc-cpu"
    bucket = {"seq": 256}
    return LockedCell(region, "train", bucket, target, toolchain, CacheKey(key * 64), Digest(digest * 64))


@given(locks)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, lock: Lock) -> None:
    path = tmp_path_factory.mktemp("lock") / "x.lock"
    write_lock(path, lock)
    assert read_lock(path) == lock


@given(st.lists(locked_cells, max_size=6), st.randoms())
def test_the_order_of_cells_does_not_show(cells: list[LockedCell], random) -> None:  # type: ignore[no-untyped-def]
    unique = list({(c.place, c.key): c for c in cells}.values())
    shuffled = random.sample(unique, len(unique))
    assert Lock("d", shuffled).to_json() == Lock("d", unique).to_json()


@given(locks, locks)
def test_comparing_finds_every_change_and_nothing_else(one: Lock, other: Lock) -> None:
    assert compare(one, one) == []
    changes = compare(one, other)
    rebuilt = [c for c in one.cells if all(change.before != c for change in changes)]
    rebuilt += [change.after for change in changes if change.after is not None]
    assert Lock(other.drafter, rebuilt) == other


def test_merging_replaces_a_targets_cells_and_keeps_other_targets() -> None:
    gpu, old, gone = cell(target="cuda:sm_90"), cell("a", "1"), cell("d", "2", region="layers.9")
    merged = Lock("d", [gpu, old, gone]).merged([cell("a", "3")])
    assert merged == Lock("d", [gpu, cell("a", "3")])


def test_one_cell_may_have_two_keys() -> None:
    lock = Lock("d", [cell("a", "1"), cell("c", "2")])
    assert lock.digests() == {"1" * 64, "2" * 64}


def test_a_changed_digest_reads_well() -> None:
    [change] = compare(Lock("d", [cell("a", "1")]), Lock("d", [cell("a", "2")]))
    expected = "layers.0 train seq=256 cpu:x86_64-avx2 torch2.13.0-cccccccc-cpu: 111111111111 -> 222222222222"
    assert str(change) == expected


def test_an_equal_file_is_left_untouched(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    assert write_lock(path, Lock("d", [cell()]))
    before = path.stat()
    assert not write_lock(path, Lock("d", [cell()]))
    assert path.stat().st_ino == before.st_ino
    assert [p.name for p in tmp_path.iterdir()] == ["x.lock"]


def test_the_file_is_sorted_json_that_ends_in_a_newline(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    write_lock(path, Lock("d", [cell("c"), cell("a")]))
    text = path.read_text()
    document = json.loads(text)
    assert text.endswith("}\n")
    assert [c["key"][0] for c in document["cells"]] == ["a", "c"]
    assert list(document) == sorted(document)


def test_the_lock_lies_beside_its_spec() -> None:
    assert lock_path(Path("/x/drafter.toml")) == Path("/x/drafter.toml.lock")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not a lock file"),
        ("[]", "format None"),
        ('{"format": 2, "drafter": "d", "cells": []}', "format 2, expected 1"),
        ('{"format": 1, "drafter": "d", "cells": [], "extra": 1}', "extra"),
        ('{"format": 1, "drafter": "d", "cells": [{"region": "r"}]}', "mode"),
        ("[" * 100_000, "not a lock file"),
    ],
)
def test_what_is_no_lock_file_is_a_typed_error(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "x.lock"
    path.write_text(text)
    with pytest.raises(ManifestError, match=said) as caught:
        read_lock(path)
    assert str(path) in str(caught.value)


def test_a_digest_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    path.write_text(Lock("d", [cell()]).to_json().replace("b" * 64, "../x"))
    with pytest.raises(ManifestError, match="digest"):
        read_lock(path)


def test_a_lock_file_that_is_not_there_says_what_writes_it(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="aotcache warm"):
        read_lock(tmp_path / "x.lock")


def test_a_place_that_cannot_be_written_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="cannot write"):
        write_lock(tmp_path / "no" / "x.lock", Lock("d", []))
