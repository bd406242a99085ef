from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import event, func, select

from aotcache.db.engine import Database
from aotcache.db.models import ArtifactRow, BlobRow, KeyComponentRow, UsageRow
from aotcache.errors import BadCursor, ManifestError
from aotcache.service.index import Index
from aotcache.service.usage import Usage
from aotcache.store import open_store
from aotcache.types import CacheKey, Target, Toolchain, sha256
from tests.manifests import make_manifest, write_archive
from tests.service.entries import KEY, enter


def rows(database: Database, model: type) -> int:
    with database.session() as session:
        return session.execute(select(func.count()).select_from(model)).scalar_one()


def test_what_was_added_is_resolved_by_variant(index: Index) -> None:
    first = enter(index)
    second = enter(index, b"other", target="cuda:sm_90")
    found = index.resolve([first.key, KEY])
    assert found[KEY] == []
    assert [(r.variant, r.digest, r.size) for r in found[first.key]] == [
        (str(m.variant), m.digest, m.size) for m in (first, second)
    ]
    assert found[first.key][0].document == sha256(first.document())


def test_a_thousand_keys_are_one_statement(index: Index, database: Database) -> None:
    manifests = [enter(index, call=f"x[{n}]") for n in range(20)]
    keys = [m.key for m in manifests] + [CacheKey(f"{n:064x}") for n in range(980)]
    seen = []
    event.listen(database._engine, "before_cursor_execute", lambda *a: seen.append(a[2]))
    found = index.resolve(keys)
    assert len(found) == 1000
    assert sum(len(references) for references in found.values()) == 20
    assert len([statement for statement in seen if not statement.startswith(("BEGIN", "PRAGMA"))]) == 1


def test_resolving_nothing_is_nothing(index: Index) -> None:
    assert index.resolve([]) == {}


def test_adding_again_brings_the_row_up_to_date_and_keeps_its_usage(index: Index, database: Database) -> None:
    manifest = enter(index)
    usage = Usage(database)
    usage.hit(manifest.key, str(manifest.variant))
    usage.flush()
    before = index.page().artifacts[0]
    changed = replace(manifest, digest=sha256(b"new"), size=3, region="layers.1")
    index.add(changed, changed.document(), modified=9.0)
    [after] = index.page().artifacts
    assert (after.digest, after.size, after.region, after.hits) == (sha256(b"new"), 3, "layers.1", 1)
    assert after.created == before.created
    assert after.document == sha256(changed.document())


def test_pages_hold_every_entry_once_in_order(index: Index) -> None:
    manifests = [enter(index, call=f"x[{n}]") for n in range(7)]
    manifests += [enter(index, call=f"x[{n}]", target="cuda:sm_90") for n in range(3)]
    found, cursor, pages = [], None, 0
    while True:
        page = index.page(cursor=cursor, limit=3)
        assert len(page.artifacts) <= 3
        found += [(a.key, a.variant) for a in page.artifacts]
        pages, cursor = pages + 1, page.next
        if cursor is None:
            break
    assert found == sorted((m.key, str(m.variant)) for m in manifests)
    assert pages == 4


def test_a_page_that_just_fits_is_the_last(index: Index) -> None:
    for n in range(3):
        enter(index, call=f"x[{n}]")
    assert index.page(limit=3).next is None


def test_an_entry_that_goes_between_pages_takes_no_other_along(index: Index) -> None:
    for n in range(6):
        enter(index, call=f"x[{n}]")
    every = [a.key for a in index.page().artifacts]
    first = index.page(limit=3)
    index.remove(first.artifacts[-1].key)
    assert [a.key for a in index.page(limit=3, cursor=first.next).artifacts] == every[3:]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"region": "layers.0"}, {"a", "b", "d"}),
        ({"region": ""}, {"c"}),
        ({"mode": "infer"}, {"b"}),
        ({"target": "cuda:sm_90"}, {"d"}),
        ({"torch": "2.14.1"}, {"d"}),
        ({"region": "layers.0", "mode": "train"}, {"a", "d"}),
        ({"region": "layers.0", "mode": "train", "torch": "2.13.0", "target": "cpu:x86_64-avx2"}, {"a"}),
        ({"region": "nul\0"}, set()),
        ({"region": "\ud800"}, set()),
        ({"torch": "2.11.0"}, set()),
    ],
)
def test_filters(index: Index, filters: dict[str, str], expected: set[str]) -> None:
    made = {
        "a": enter(index, call="a"),
        "b": enter(index, call="b", mode="infer"),
        "c": enter(index, call="c", region=""),
        "d": enter(index, call="d", target="cuda:sm_90", toolchain=Toolchain("2.14.1", "d" * 40, "12.8")),
    }
    found = {a.key for a in index.page(**filters).artifacts}
    assert found == {made[name].key for name in expected}


def test_a_filter_by_code(index: Index) -> None:
    first, other = enter(index, call="a"), enter(index, call="b")
    assert first.component("code") != other.component("code")
    code = first.component("code")
    assert code is not None
    assert [a.key for a in index.page(code=code.digest).artifacts] == [first.key]
    assert index.page(code="0" * 64).artifacts == []


def test_a_filter_by_key(index: Index) -> None:
    first, _ = enter(index, call="a"), enter(index, call="b")
    assert [a.key for a in index.page(key=first.key).artifacts] == [first.key]


@pytest.mark.parametrize(
    "cursor", ["", "x", "%%%", "bnVsbA", "WzFd", "WyJhIl0", "WyJhIiwgMV0", "é", "W1tbW1tb"]
)
def test_a_cursor_from_elsewhere_is_refused(index: Index, cursor: str) -> None:
    with pytest.raises(BadCursor, match="begin again"):
        index.page(cursor=cursor)


def test_a_row_says_what_the_manifest_says(index: Index) -> None:
    manifest = enter(index)
    [row] = index.page().artifacts
    assert (row.region, row.mode, row.bucket) == ("layers.0", "train", {"seq": 256})
    assert (row.target, row.torch) == ("cpu:x86_64-avx2", "2.13.0")
    assert (row.digest, row.size) == (manifest.digest, manifest.size)
    assert (row.hits, row.last_used) == (0, None)


def test_a_variant_that_no_store_can_name_is_refused(index: Index, database: Database) -> None:
    manifest = make_manifest(toolchain=Toolchain("2" * 300, "c" * 40, None))
    with pytest.raises(ManifestError, match="variant"):
        index.add(manifest, manifest.document(), modified=1.0)
    assert rows(database, ArtifactRow) == 0


def test_texts_that_a_database_cannot_hold_are_made_so_that_it_can(index: Index) -> None:
    enter(index, region="lay\0ers" + "x" * 600)
    [row] = index.page().artifacts
    assert row.region.startswith("lay\ufffders")
    assert len(row.region) == 512


def test_removing_one_variant_leaves_the_other(index: Index, database: Database) -> None:
    first = enter(index)
    second = enter(index, b"other", target="cuda:sm_90")
    assert index.remove(first.key, str(first.variant)) == 1
    assert [r.variant for r in index.resolve([first.key])[first.key]] == [str(second.variant)]
    assert rows(database, KeyComponentRow) == 6
    assert index.remove(first.key, str(first.variant)) == 0


def test_removing_a_key_leaves_nothing_of_it(index: Index, database: Database) -> None:
    manifest = enter(index)
    enter(index, b"other", target="cuda:sm_90")
    assert index.remove(manifest.key) == 2
    assert [rows(database, model) for model in (ArtifactRow, UsageRow, KeyComponentRow, BlobRow)] == [0] * 4


def test_a_blob_goes_with_its_last_entry(index: Index, database: Database) -> None:
    first, second = enter(index, call="a"), enter(index, call="b")
    assert first.digest == second.digest
    index.remove(first.key)
    assert rows(database, BlobRow) == 1
    index.remove(second.key)
    assert rows(database, BlobRow) == 0


def test_entries_of_one_blob_that_come_and_go_at_once_leave_it_right(
    index: Index, database: Database
) -> None:
    manifests = [make_manifest(call=f"x[{n}]") for n in range(4)]

    def come_and_go(which: int) -> None:
        for _ in range(15):
            manifest = manifests[which]
            index.add(manifest, manifest.document(), modified=1.0)
            if which:
                index.remove(manifest.key)

    threads = [threading.Thread(target=come_and_go, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [a.key for a in index.page().artifacts] == [manifests[0].key]
    assert rows(database, BlobRow) == 1


def test_totals(index: Index, database: Database) -> None:
    first = enter(index, b"12345", call="a")
    enter(index, b"12345", call="b")
    enter(index, b"123", call="c")
    usage = Usage(database)
    usage.hit(first.key, str(first.variant))
    usage.hit(first.key, str(first.variant))
    usage.miss(KEY)
    usage.flush()
    totals = index.totals()
    assert (totals.artifacts, totals.blobs, totals.bytes) == (3, 2, 8)
    assert (totals.hits, totals.misses) == (2, 1)
    assert totals.saved_seconds == 1.0  # a test manifest's build took half a second


def test_the_oldest_are_those_used_longest_ago(index: Index, database: Database) -> None:
    manifests = [enter(index, call=f"x[{n}]") for n in range(4)]
    usage = Usage(database)
    for which in (1, 0):
        usage.hit(manifests[which].key, str(manifests[which].variant))
        usage.flush()
    found = index.oldest(10)
    assert [c.key for c in found] == [manifests[n].key for n in (2, 3, 1, 0)]
    assert [c.hits for c in found] == [0, 0, 1, 1]
    assert index.oldest(1) == found[:1]


class TestWhy:
    def test_a_stored_key_tells_its_variants(self, index: Index) -> None:
        manifest = enter(index)
        assert index.why(manifest.key).stored == [str(manifest.variant)]

    def test_an_unknown_key_without_components_can_be_compared_with_nothing(self, index: Index) -> None:
        enter(index)
        found = index.why(KEY)
        assert (found.stored, found.nearest) == ([], [])

    def test_the_nearest_differs_in_the_fewest_items(self, index: Index) -> None:
        near = self.varied(index, call="changed")
        self.varied(index, call="changed", structure="changed")
        asked = make_manifest()
        found = index.why(asked.key, components=asked.components)
        assert [n.differing for n in found.nearest] == [1, 2]
        assert found.nearest[0].key == near.key
        assert found.nearest[0].variants == [str(near.variant)]
        assert found.nearest[0].differences == ["call.item differs: x float32[2, 3] / changed"]

    def test_other_modes_are_not_compared(self, index: Index) -> None:
        self.varied(index, call="changed")
        asked = make_manifest()
        assert index.why(asked.key, mode="infer", components=asked.components).nearest == []
        assert len(index.why(asked.key, mode="train", components=asked.components).nearest) == 1

    def test_what_shares_only_the_format_is_not_near(self, index: Index) -> None:
        changed = dict.fromkeys(("code", "structure", "call", "ambient", "compile"), "changed")
        self.varied(index, **changed)
        asked = make_manifest()
        assert index.why(asked.key, components=asked.components).nearest == []

    def varied(self, index: Index, **items: str):
        base = make_manifest()
        components = tuple(
            {"name": c["name"], "items": [["item", items.get(c["name"], c["items"][0][1])]]}
            for c in base.components
        )
        manifest = replace(base, components=components)
        manifest = replace(manifest, key=manifest.parts.key)
        index.add(manifest, manifest.document(), modified=1.0)
        return manifest


class TestReindex:
    def test_a_lost_index_comes_back(self, index: Index, tmp_path: Path) -> None:
        store = open_store(tmp_path / "store")
        manifests = [self.publish(store, tmp_path, f"x[{n}]") for n in range(5)]
        counts = index.reindex(store)
        assert (counts.added, counts.removed, counts.kept, counts.unusable) == (5, 0, 0, 0)
        assert {a.key for a in index.page().artifacts} == {m.key for m in manifests}
        assert index.reindex(store).kept == 5

    def test_what_the_store_has_not_goes(self, index: Index, tmp_path: Path) -> None:
        store = open_store(tmp_path / "store")
        kept = self.publish(store, tmp_path, "kept")
        for n in range(3):
            enter(index, call=f"gone {n}")
        counts = index.reindex(store)
        assert (counts.added, counts.removed) == (1, 3)
        assert [a.key for a in index.page().artifacts] == [kept.key]

    def test_a_row_that_tells_something_else_is_corrected(self, index: Index, tmp_path: Path) -> None:
        store = open_store(tmp_path / "store")
        manifest = self.publish(store, tmp_path, "x")
        stale = replace(manifest, size=1, region="stale")
        index.add(stale, stale.document(), modified=1.0)
        assert index.reindex(store).added == 1
        [row] = index.page().artifacts
        assert (row.region, row.size) == ("layers.0", manifest.size)

    def test_a_ref_without_its_blob_is_not_indexed(self, index: Index, tmp_path: Path) -> None:
        store = open_store(tmp_path / "store")
        manifest = self.publish(store, tmp_path, "x")
        path = store.blob_path(manifest.digest)
        assert path is not None
        path.unlink()
        counts = index.reindex(store)
        assert (counts.unusable, counts.added) == (1, 0)
        assert index.page().artifacts == []

    def test_what_is_published_and_deleted_meanwhile_is_as_the_store_has_it(
        self, index: Index, database: Database, tmp_path: Path
    ) -> None:
        store = open_store(tmp_path / "store")
        before = [self.publish(store, tmp_path, f"x[{n}]") for n in range(4)]
        index.reindex(store)
        late = make_manifest(b"late", call="late")
        archive = write_archive(tmp_path, b"late")

        class Changing:
            """The store, in which an entry comes and one goes once the listing has been read."""

            url = store.url
            lookup = staticmethod(store.lookup)

            def entries(self):
                listed = list(store.entries())
                store.publish(late, archive)
                index.add(late, late.document(), modified=1.0)
                with database.exclusive(before[0].key, str(before[0].variant)):
                    store.delete(before[0].key, before[0].variant)
                    index.remove(before[0].key, str(before[0].variant))
                return iter(listed)

        index.reindex(Changing())
        expected = {m.key for m in before[1:]} | {late.key}
        assert {a.key for a in index.page().artifacts} == expected

    def publish(self, store, folder: Path, call: str):
        manifest = make_manifest(call.encode(), call=call)
        assert store.publish(manifest, write_archive(folder, call.encode()))
        return manifest


def test_target_is_the_target_and_not_the_variant(index: Index) -> None:
    enter(index, target="cuda:sm_90")
    assert index.page(target=str(Target("cuda", "sm_90"))).artifacts[0].target == "cuda:sm_90"
