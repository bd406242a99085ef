"""`ls`, `show` and `why` over a real store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from aotcache.host import host_facts, host_toolchain
from aotcache.manifest import HostContract
from aotcache.store import Store
from tests.cli.conftest import publish


def test_ls_lists_every_entry(run: Any, store: Store, tmp_path: Path) -> None:
    first = publish(store, tmp_path, "one", call="a")
    second = publish(store, tmp_path, "two", call="b", region="layers.1", mode="infer", pair=None)
    lines = run("ls", "--store", store.url).out.splitlines()
    assert lines[0].split()[:4] == ["key", "region", "mode", "bucket"]
    rows = {line.split()[0]: line for line in lines[1:-1]}
    assert set(rows) == {first.key[:12], second.key[:12]}
    assert "seq=256" in rows[first.key[:12]]
    assert "infer" in rows[second.key[:12]]
    assert lines[-1].startswith("2 entries, 2 archives, ")


def test_ls_json_has_whole_keys_and_bytes(run: Any, store: Store, tmp_path: Path) -> None:
    manifest = publish(store, tmp_path)
    found = run("ls", "--store", store.url, "--json").json
    assert found["refs"] == found["blobs"] == 1
    assert found["bytes"] == manifest.size
    (entry,) = found["entries"]
    assert (entry["key"], entry["digest"], entry["size"]) == (manifest.key, manifest.digest, manifest.size)
    assert entry["problem"] is None


def test_ls_picks_regions_by_pattern(run: Any, store: Store, tmp_path: Path) -> None:
    publish(store, tmp_path, "one", call="a", region="layers.0")
    publish(store, tmp_path, "two", call="b", region="head")
    found = run("ls", "--store", store.url, "--region", "layers.*", "--json").json
    assert [e["region"] for e in found["entries"]] == ["layers.0"]


def test_ls_shows_an_entry_that_cannot_be_read(run: Any, store: Store, tmp_path: Path) -> None:
    manifest = publish(store, tmp_path)
    ref = tmp_path / "store" / "refs" / manifest.key[:2] / manifest.key / f"{manifest.variant}.json"
    ref.write_text("{}")
    (entry,) = run("ls", "--store", store.url, "--json").json["entries"]
    assert entry["key"] == manifest.key
    assert "schema" in entry["problem"]
    assert "unreadable" in run("ls", "--store", store.url).out


def test_show_takes_the_beginning_of_a_key_or_digest(run: Any, store: Store, tmp_path: Path) -> None:
    manifest = publish(store, tmp_path)
    for beginning in (manifest.key, manifest.key[:9], manifest.digest[:9], manifest.digest[:9].upper()):
        (shown,) = run("show", beginning, "--store", store.url, "--json").json
        assert shown["digest"] == manifest.digest
    text = run("show", manifest.key[:9], "--store", store.url).out
    assert manifest.key in text
    assert "input     x  float32 2x3 strides 3x1  gradient" in text
    assert "native: threads run it at once" in text


def test_show_says_that_torchs_own_loader_holds_the_gil(run: Any, store: Store, tmp_path: Path) -> None:
    manifest = publish(store, tmp_path, runner="torch")
    assert "holds the GIL" in run("show", manifest.key, "--store", store.url).out


def test_show_refuses_a_beginning_that_two_keys_share(run: Any, store: Store, tmp_path: Path) -> None:
    keys = {publish(store, tmp_path, f"{i}", call=f"{i}").key for i in range(17)}
    # Seventeen keys of sixteen possible first digits: two of them share one.
    shared = next(d for d in "0123456789abcdef" if sum(k.startswith(d) for k in keys) > 1)
    done = run("show", shared, "--store", store.url)
    assert done.code == 1
    assert "give more of it" in done.err


def test_show_shows_all_variants_of_a_key(run: Any, store: Store, tmp_path: Path) -> None:
    first = publish(store, tmp_path, "one")
    publish(store, tmp_path, "two", target="cpu:x86_64-avx512")
    shown = run("show", first.key, "--store", store.url, "--json").json
    assert {m["target"]["arch"] for m in shown} == {"x86_64-avx2", "x86_64-avx512"}


def test_why_against_names_the_items_that_differ(run: Any, store: Store, tmp_path: Path) -> None:
    first = publish(store, tmp_path, "one", call="total_seq_len 256")
    second = publish(store, tmp_path, "two", call="total_seq_len 300")
    done = run("why", first.key, "--against", second.key, "--store", store.url)
    assert done.code == 0
    assert "call.item differs: total_seq_len 256 / total_seq_len 300" in done.out


def test_why_accepts_what_this_host_can_run(run: Any, store: Store, tmp_path: Path) -> None:
    facts = host_facts()
    manifest = publish(
        store, tmp_path, toolchain=host_toolchain(), target=f"cpu:{facts.machine}-baseline",
        host=HostContract((), None, None, (), {}),
    )  # fmt: skip
    done = run("why", manifest.key, "--store", store.url)
    assert done.code == 0
    assert "accepted" in done.out


def test_why_names_the_reason_of_a_rejection(run: Any, store: Store, tmp_path: Path) -> None:
    contract = HostContract(("avx1024",), None, None, (), {})
    toolchain = replace(host_toolchain(), torch="1.0.0")
    manifest = publish(store, tmp_path, toolchain=toolchain, host=contract)
    done = run("why", manifest.key[:8], "--store", store.url, "--json")
    assert done.code == 1
    (variant,) = done.json["variants"]
    assert variant["accepted"] is False
    assert any("avx1024" in reason for reason in variant["reasons"])
    assert any("1.0.0" in reason for reason in variant["reasons"])


def test_an_empty_store_is_told_and_a_file_is_none(run: Any, tmp_path: Path) -> None:
    for command in ("ls", "verify"):
        assert run(command, "--store", tmp_path / "none").out.startswith("nothing is stored in file://")
    (tmp_path / "file").write_text("text")
    done = run("ls", "--store", tmp_path / "file")
    assert done.code == 1
    assert "is a file, expected a directory" in done.err
