"""Nothing that was recalled is opened, wherever it lies; what is open already is dropped by `refresh`."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from aotcache import host
from aotcache.config import settings
from aotcache.errors import ArtifactMiss, RecalledArtifact, ServiceUnavailable
from aotcache.graph.functions import function_regions
from aotcache.manifest import Manifest
from aotcache.recall import Recalls, publish_list
from aotcache.recall_list import SignedList, next_list
from aotcache.runtime import attachment, registry, resolve
from aotcache.runtime.prefetch import prefetch
from aotcache.runtime.resolve import Resolved, Resolver
from aotcache.runtime.stats import Stats
from aotcache.spec import CompileOptions
from aotcache.store import ObjectStore, open_store
from aotcache.trust import SigningKey, TrustedKeys, sign
from aotcache.types import Digest, Miss
from tests.loops.ranks import run
from tests.runtime.artifacts import Artifact, inputs
from tests.runtime.conftest import Probe, agree, outcome
from tests.runtime.test_trust import (
    Place,
    _watch_dlopen,
    bucket_server,
    key,
    manifest,
    nobody,
    pair,
    place,
    service,
)
from tests.services.serving import Serving, serving

__all__ = ["_watch_dlopen", "bucket_server", "key", "manifest", "nobody", "pair", "place", "service"]

DAY = 86400.0


@pytest.fixture(autouse=True)
def _the_service_trusts_the_key(request: pytest.FixtureRequest) -> None:
    if any(name in request.node.name for name in ("service", "origin up")):
        server: Serving = request.getfixturevalue("service")
        TrustedKeys(server.config_home / "trusted").add(request.getfixturevalue("key").public, "builder")


def recall(place: Place, key: SigningKey, *what: str, lift: bool = False) -> None:
    """As an operator does on another host; where the origin is away, this one has heard of it by another store."""
    operator = Recalls(place.home.parent / "operator")
    operator.learn(place.worker)
    reasons = None if lift else dict.fromkeys(what, "wrong gradients on odd batches")
    lifted = what if lift else ()
    try:
        publish_list(place.worker, key, operator, recall=reasons, lift=lifted, seconds=DAY)
    except ServiceUnavailable:
        other = open_store(f"memory:///{place.home.parent.name}")
        publish_list(other, key, operator, recall=reasons, lift=lifted, seconds=DAY)
        Recalls(place.home).learn(other)


def enter(place: Place, pair: Artifact, manifest: Manifest, key: SigningKey) -> Manifest:
    signed = sign(manifest, key)
    place.put(manifest.key, signed.document(), manifest, pair.archive.read_bytes())
    return signed


@pytest.mark.parametrize("by", ["digest", "key"])
def test_what_is_recalled_is_a_miss_and_not_one_byte_of_it_is_fetched(
    place: Place, pair: Artifact, manifest: Manifest, key: SigningKey, by: str
) -> None:
    signed = enter(place, pair, manifest, key)
    recall(place, key, getattr(manifest, by))
    answer = place.resolver().by_key(manifest.key)
    assert isinstance(answer, Miss)
    assert "is recalled: wrong gradients on odd batches (recalled by builder (ed25519:" in answer.reason
    with pytest.raises(RecalledArtifact, match="is recalled: wrong gradients on odd batches"):
        registry.open_artifact(signed, place.worker, place.home)
    assert place.opened() == []
    assert place.fetched() == []


def test_what_lies_unpacked_and_is_open_in_the_process_is_not_opened_again(
    place: Place, pair: Artifact, manifest: Manifest, key: SigningKey, request: pytest.FixtureRequest
) -> None:
    enter(place, pair, manifest, key)
    other = enter(place, pair, pair.renamed(f"{request.node.name} again"), key)
    first = place.resolver()
    assert isinstance(first.by_key(manifest.key), Resolved)
    opened = place.opened()
    assert len(opened) == 2
    recall(place, key, manifest.digest)
    for one in (manifest, other):
        answer = place.resolver().by_key(one.key)
        assert isinstance(answer, Miss)
        assert "is recalled" in answer.reason
        # A resolver that has it from before looks again, too, where it is asked for a manifest that it has.
        assert isinstance(first.open(one), Miss)
    assert place.opened() == opened


def test_what_was_lifted_is_opened(place: Place, pair: Artifact, manifest: Manifest, key: SigningKey) -> None:
    enter(place, pair, manifest, key)
    recall(place, key, manifest.digest)
    resolver = place.resolver()
    assert isinstance(resolver.by_key(manifest.key), Miss)
    recall(place, key, manifest.digest, lift=True)
    answer = resolver.by_key(manifest.key)
    assert isinstance(answer, Resolved)
    assert len(answer.executable.train(inputs(1))) == 3


class Recalling:
    """The store, in which the operator recalls an archive while it comes."""

    def __init__(self, place: Place, key: SigningKey) -> None:
        self._place, self._key = place, key

    def blob_path(self, digest: Digest) -> Path | None:
        recall(self._place, self._key, digest)
        Recalls(self._place.home).learn(self._place.worker)  # as another process of this host
        return self._place.worker.blob_path(digest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._place.worker, name)


def test_a_recall_while_the_archive_comes_opens_nothing(
    place: Place, pair: Artifact, manifest: Manifest, key: SigningKey
) -> None:
    signed = enter(place, pair, manifest, key)
    store: Any = Recalling(place, key)
    with pytest.raises(RecalledArtifact):
        registry.open_artifact(signed, store, place.home)
    assert place.opened() == []


def test_of_two_variants_the_one_that_was_not_recalled_is_opened(
    place: Place, pair: Artifact, manifest: Manifest, key: SigningKey, tmp_path: Path
) -> None:
    """The other one asks more of the CPU, and would be taken for that."""
    enter(place, pair, manifest, key)
    better = replace(
        manifest,
        target=replace(manifest.target, arch="x86_64-avx512"),
        host=replace(manifest.host, cpu_features=(*manifest.host.cpu_features, "sse2", "avx")),
        digest=Digest("d" * 64),
        size=1,
    )
    place.behind._client.put(f"blobs/dd/{better.digest}", b"x", create=False)
    document = sign(better, key).document()
    place.behind._client.put(
        f"refs/{better.key[:2]}/{better.key}/{better.variant}.json", document, create=False
    )
    place.entered()
    recall(place, key, better.digest)
    answer = place.resolver().by_key(manifest.key)
    assert isinstance(answer, Resolved)
    assert answer.executable.manifest == manifest


def test_an_artifact_of_this_hosts_own_store_is_blocked_by_a_recall_from_elsewhere(
    pair: Artifact, manifest: Manifest, key: SigningKey, tmp_path: Path
) -> None:
    own = open_store(tmp_path / "own")
    assert own.publish(manifest, pair.archive)
    home = settings().home
    resolver = Resolver(own, home, host.host_facts(), None, Stats())
    elsewhere = open_store(f"memory:///{tmp_path.name}")
    publish_list(elsewhere, key, Recalls(home), recall={manifest.digest: "bad"}, seconds=DAY)
    answer = resolver.by_key(manifest.key)
    assert isinstance(answer, Miss)
    with pytest.raises(RecalledArtifact):
        registry.open_artifact(manifest, own, home)
    # And by one in the store itself, on a host that knows of nothing else.
    publish_list(own, key, Recalls(tmp_path / "operator"), recall={manifest.digest: "bad"}, seconds=DAY)
    other = Resolver(own, tmp_path / "another home", host.host_facts(), None, Stats())
    assert isinstance(other.by_key(manifest.key), Miss)


def test_copies_of_a_service_that_is_away_are_blocked_as_well(
    pair: Artifact, manifest: Manifest, key: SigningKey, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two entries were used here; of one this host has heard that it is recalled, then the service goes."""
    with serving(tmp_path / "service") as server:
        TrustedKeys(server.config_home / "trusted").add(key.public, "builder")
        store = open_store(server.url)
        good, bad = sign(manifest, key), sign(pair.renamed("recalled before the outage"), key)
        for one in (good, bad):
            assert store.publish(one, pair.archive)
        place = Place(store, store.local, settings().home)  # type: ignore[attr-defined]
        for one in (good, bad):
            assert isinstance(place.resolver().by_key(one.key), Resolved)
        recall(place, key, bad.key)
        assert isinstance(place.resolver().by_key(bad.key), Miss)
        opened = place.opened()
        server.kill()
        store.remote.session.close()  # type: ignore[attr-defined]
        again = open_store(server.url)
        away = Resolver(again, place.home, host.host_facts(), None, Stats())
        answer = away.by_key(bad.key)
        assert isinstance(answer, Miss)
        assert "is recalled" in answer.reason
        assert isinstance(away.by_key(good.key), Resolved)
        assert place.opened() == opened
        again.remote.session.close()  # type: ignore[attr-defined]


def test_a_lock_file_opens_nothing_that_was_recalled(
    place: Place, pair: Artifact, manifest: Manifest, key: SigningKey
) -> None:
    enter(place, pair, manifest, key)
    recall(place, key, manifest.digest)
    allowed = frozenset({manifest.digest})
    answer = Resolver(place.worker, place.home, host.host_facts(), allowed, Stats()).by_key(manifest.key)
    assert isinstance(answer, Miss)
    assert "is recalled" in answer.reason
    region = function_regions(CompileOptions().for_key())["flex_attention"]
    assert prefetch(place.resolver(), [region], None, on_miss="raise", warm_line="") == frozenset()
    assert place.opened() == []


@pytest.mark.parametrize("policy", ["warn", "refuse"])
def test_a_store_that_shows_no_lists_any_more_is_told_or_refused(
    pair: Artifact,
    manifest: Manifest,
    key: SigningKey,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    policy: str,
) -> None:
    monkeypatch.setenv("AOTCACHE_RECALL_STALE", policy)
    monkeypatch.setenv("AOTCACHE_RECALL_HOURS", "0.0000001")
    store = open_store(tmp_path / "copies")
    assert isinstance(store, ObjectStore)
    store.mark_origin("https://cache.example.org")
    place = Place(store, store, settings().home)
    enter(place, pair, manifest, key)
    recall(place, key, "e" * 64)
    Recalls(place.home).learn(store)
    shutil.rmtree(tmp_path / "copies" / "recalls")
    resolver = place.resolver()
    with caplog.at_level(logging.WARNING):
        answers = [resolver.by_key(manifest.key) for _ in range(2)]
    if policy == "warn":
        assert all(isinstance(answer, Resolved) for answer in answers)
        assert sum("AOTCACHE_RECALL_HOURS" in record.getMessage() for record in caplog.records) == 1
    else:
        assert all(isinstance(answer, Miss) for answer in answers)
        assert "AOTCACHE_RECALL_STALE=refuse" in str(answers[0])
        assert place.opened() == []


# a worker that has it open


@pytest.fixture
def operated(probe: Probe, key: SigningKey) -> Iterator[Place]:
    """The probe's store, as an operator of this test's own sees it."""
    store = open_store(probe.store)
    assert isinstance(store, ObjectStore)
    yield Place(store, store, settings().home)
    shutil.rmtree(Path(probe.store.removeprefix("file://")) / "recalls", ignore_errors=True)


def _step(model: torch.nn.Module, probe: Probe) -> Any:
    batch = probe.batch()
    return outcome(lambda: model(**batch), [*model.parameters(), batch["x"]])


@pytest.mark.slow
def test_a_worker_goes_on_with_what_it_has_open_until_it_refreshes(
    probe: Probe, operated: Place, key: SigningKey, caplog: pytest.LogCaptureFixture
) -> None:
    model = probe.module.build()
    with probe.attach(model, on_miss="eager") as handle:
        before = _step(model, probe)
        hits = handle.stats()["hits"]
        assert (hits, handle.stats()["eager_calls"]) == (3, 0)
        digests = set(handle.resolver.served.values())
        recall(operated, key, *digests)
        agree(_step(model, probe), before)
        assert (handle.stats()["hits"], handle.stats()["eager_calls"]) == (2 * hits, 0)
        with caplog.at_level(logging.WARNING):
            handle.refresh()
        assert any("not run any more" in r.getMessage() for r in caplog.records)
        agree(_step(model, probe), before)
        assert (handle.stats()["hits"], handle.stats()["eager_calls"]) == (2 * hits, hits)
        assert any(
            "runs eagerly" in r.getMessage() and "is recalled" in r.getMessage() for r in caplog.records
        )
        recall(operated, key, *digests, lift=True)
        handle.refresh()
        agree(_step(model, probe), before)
        assert (handle.stats()["hits"], handle.stats()["eager_calls"]) == (3 * hits, hits)


@pytest.mark.slow
def test_a_worker_that_must_not_run_eagerly_is_told_why(
    probe: Probe, operated: Place, key: SigningKey
) -> None:
    model = probe.module.build()
    with probe.attach(model) as handle:
        _step(model, probe)
        recall(operated, key, *handle.resolver.served.values())
        handle.refresh()
        with pytest.raises(ArtifactMiss, match="is recalled: wrong gradients on odd batches"):
            model(**probe.batch())


@pytest.mark.slow
def test_a_call_beside_a_refresh_leaves_nothing_of_what_was_recalled(
    probe: Probe, operated: Place, key: SigningKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread refreshes between the look-up of the call and its record."""
    model = probe.module.build()
    with probe.attach(model) as handle:
        _step(model, probe)
        digests = handle.resolver.served.values()
    make, refreshed = attachment.make_record, list[bool]()

    with probe.attach(model, on_miss="eager") as handle:

        def beside_a_refresh(*arguments: Any) -> Any:
            if not refreshed:
                refreshed.append(True)
                recall(operated, key, *digests)
                handle.refresh()
            return make(*arguments)

        monkeypatch.setattr(attachment, "make_record", beside_a_refresh)
        _step(model, probe)
        hits = handle.stats()["hits"]
        assert hits == 1
        _step(model, probe)
        assert handle.stats()["hits"] == hits


class Stalling:
    """A store that says what is recalled there when it is let."""

    url, own = "https://cache.example.org", False

    def __init__(self, *documents: bytes) -> None:
        self._documents, self.asked, self.let = documents, 0, threading.Event()

    def recalls(self, of: Any = None) -> Sequence[bytes]:
        self.asked += 1
        assert self.let.wait(60)
        return self._documents


def test_a_step_waits_for_no_store_that_stalls_and_hears_what_it_says_in_the_end(
    pair: Artifact, manifest: Manifest, key: SigningKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "_ASK_SECONDS", 0.05)
    own = open_store(tmp_path / "own")
    assert own.publish(manifest, pair.archive)
    resolver = Resolver(own, settings().home, host.host_facts(), None, Stats())
    answer = resolver.by_key(manifest.key)
    assert isinstance(answer, Resolved)
    resolver.settle({manifest.key: answer})
    listed = next_list([], recall={manifest.digest: "bad"}, now=time.time(), seconds=DAY)
    store = Stalling(SignedList.make(listed, key).document)
    resolver.store = store  # type: ignore[assignment]
    for _ in range(3):
        assert resolver.recalled() == {}
    assert store.asked == 1
    store.let.set()
    deadline = time.monotonic() + 60
    while not (found := resolver.recalled()) and time.monotonic() < deadline:
        pass
    assert list(found) == [manifest.key]


def test_what_is_open_does_not_come_into_use_while_nobody_can_tell_what_is_recalled(
    pair: Artifact, manifest: Manifest, key: SigningKey, tmp_path: Path
) -> None:
    own = open_store(tmp_path / "own")
    assert own.publish(manifest, pair.archive)
    home = settings().home
    resolver = Resolver(own, home, host.host_facts(), None, Stats())
    answer = resolver.by_key(manifest.key)
    assert isinstance(answer, Resolved)
    publish_list(own, key, Recalls(home), recall={"e" * 64: "bad"}, seconds=DAY)
    assert resolver.may_run(answer)
    (settings().config_home / "trusted" / "spoilt.json").write_text("spoilt")
    assert not resolver.may_run(answer)


def test_ranks_drop_together_what_was_recalled_on_one_of_them() -> None:
    first, second = run("tests.runtime.recalling:ranks", seconds=120)
    assert first == second
    assert first == {"agreed": ["1" * 64], "missed": {}, "gone": {"2" * 64: "bad"}}
