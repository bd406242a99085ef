"""`recall`, and what the other commands say of what is recalled."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aotcache.config import settings
from aotcache.recall import Recalls, publish_list
from aotcache.recall_list import Recalled, RecallList, SignedList, signer_of
from aotcache.store import Store, open_store
from aotcache.trust import SigningKey, TrustedKeys, sign, trusted_keys
from tests.cli.conftest import publish
from tests.manifests import make_manifest
from tests.services.serving import Serving, serving

A = "a" * 64


def test_what_is_recalled_is_listed_and_lifted(
    run: Any, key: SigningKey, store: Store, tmp_path: Path
) -> None:
    manifest = publish(store, tmp_path)
    at = ["--store", store.url]
    assert run("recall", *at).out.startswith("nothing is recalled")
    done = run("recall", manifest.digest[:10], "--reason", "wrong gradients", *at)
    assert done.code == 0, done.err
    assert "recalled: recall list 1" in done.out
    listed = run("recall", *at)
    assert listed.code == 0
    assert all(text in listed.out for text in (manifest.digest, "wrong gradients", "me", "expires"))
    (row,) = run("recall", "--json", *at).json["recalled"]
    assert (row["what"], row["reason"], row["signer"]) == (manifest.digest, "wrong gradients", "me")
    empty = run("recall", "--lift", "", *at)
    assert empty.code == 2
    assert "is empty" in empty.err
    assert run("recall", "--lift", manifest.digest[:6], *at).code == 0
    assert run("recall", "--json", *at).json["recalled"] == []


def test_a_beginning_of_a_key_recalls_the_key(
    run: Any, key: SigningKey, store: Store, tmp_path: Path
) -> None:
    manifest = publish(store, tmp_path)
    run("recall", manifest.key[:12], "--reason", "bad", "--store", store.url)
    (row,) = run("recall", "--json", "--store", store.url).json["recalled"]
    assert row["what"] == manifest.key


def test_what_this_store_does_not_have_is_recalled_by_all_of_its_digest(
    run: Any, key: SigningKey, store: Store
) -> None:
    assert run("recall", A[:20], "--reason", "bad", "--store", store.url).code == 1
    done = run("recall", A, "b" * 64, "--reason", "bad", "--store", store.url, "--json")
    assert [row["what"] for row in done.json["list"]["recalled"]] == [A, "b" * 64]


@pytest.mark.parametrize(
    "arguments",
    [
        [A],
        [A, "--reason", ""],
        [A, "--reason", "two\nlines"],
        ["--reason", "bad"],
        ["--lift"],
        ["--renew", A],
        [A, "--reason", "bad", "--expires", "soon"],
        [A, "--reason", "bad", "--expires", "0s"],
    ],
)
def test_a_wrong_use_changes_nothing(run: Any, key: SigningKey, store: Store, arguments: list[str]) -> None:
    assert run("recall", *arguments, "--store", store.url).code == 2
    assert list(store.recalls()) == []


def test_without_a_key_nothing_is_recalled_and_the_error_says_how_to_make_one(run: Any, store: Store) -> None:
    done = run("recall", A, "--reason", "bad", "--store", store.url)
    assert done.code == 2
    assert "aotcache keygen" in done.err


def test_a_lift_that_leaves_anothers_recall_says_so(
    run: Any, key: SigningKey, store: Store, tmp_path: Path
) -> None:
    other = SigningKey.generate()
    trusted_keys(settings()).add(other.public, "colleague")
    publish_list(store, other, Recalls(tmp_path / "colleague"), recall={A: "bad"}, seconds=86400.0)
    done = run("recall", A, "--reason", "bad", "--store", store.url)
    assert done.code == 0
    assert f"recalled: {A}" in done.out
    assert f"aotcache recall --renew --store {store.url}" in done.out
    lifted = run("recall", "--lift", A, "--store", store.url)
    assert lifted.code == 1
    assert f"not lifted: {A} was recalled by " in lifted.err
    assert "colleague" in lifted.err


def test_only_who_recalled_lifts(run: Any, key: SigningKey, store: Store) -> None:
    other = SigningKey.generate()
    trusted_keys(settings()).add(other.public, "colleague")
    publish_list(store, other, Recalls(settings().home), recall={A: "bad"}, seconds=86400.0)
    done = run("recall", "--lift", A, "--store", store.url)
    assert done.code == 1
    assert "was recalled by colleague" in done.err
    assert "1 recall of its own" in run("trust", "remove", "colleague").out
    assert "not counted: lists by " + other.public.fingerprint in run("recall", "--store", store.url).out


def test_a_list_is_renewed_before_it_expires(run: Any, key: SigningKey, store: Store) -> None:
    at = ["--store", store.url]
    assert run("recall", "--renew", *at).code == 1
    run("recall", A, "--reason", "bad", "--expires", "1s", *at)
    (before,) = run("recall", "--json", *at).json["lists"]
    done = run("recall", "--renew", "--expires", "4w", *at, "--json")
    after = done.json["list"]
    assert after["number"] == before["number"] + 1
    assert after["expires"] > before["expires"] + 20 * 86400
    assert [row["what"] for row in after["recalled"]] == [A]


def test_an_expired_list_is_told_with_exit_code_1(run: Any, key: SigningKey, store: Store) -> None:
    old = RecallList(1, 1.0, 2.0, (Recalled(A, "bad", 1.0),))
    store.put_recall(SignedList.make(old, key).document, signer_of(key.public))
    done = run("recall", "--store", store.url)
    assert done.code == 1
    assert "has expired on" in done.out
    assert A in done.out


def _doctor(run: Any, store: Store) -> list[tuple[str, str]]:
    found = run("doctor", "--json", "--store", store.url).json["findings"]
    return [(row["state"], row["detail"]) for row in found if row["what"] == "recalls"]


def test_doctor_tells_of_lists_that_end_soon_or_do_not_count(run: Any, key: SigningKey, store: Store) -> None:
    assert _doctor(run, store) == []
    run("recall", A, "--reason", "bad", "--store", store.url)
    assert _doctor(run, store) == [("ok", "1 recall in force: aotcache recall")]
    run("recall", "--renew", "--expires", "3d", "--store", store.url)
    (_, (state, detail)) = _doctor(run, store)
    assert state == "note"
    assert "aotcache recall --renew" in detail
    other = SigningKey.generate()
    trusted_keys(settings()).add(other.public, "colleague")
    publish_list(store, other, Recalls(settings().home), recall={A: "bad"}, seconds=86400.0 * 90)
    run("trust", "remove", "colleague")
    state, detail = _doctor(run, store)[-1]
    assert state == "note"
    assert f"lists by {other.public.fingerprint} do not count" in detail


def test_a_store_that_is_away_is_told_and_nothing_is_recalled(run: Any, key: SigningKey) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        done = run("recall", A, "--reason", "bad", "--store", url)
        assert done.code == 1
        assert "ServiceUnavailable" in done.err
        shown = run("recall", "--json", "--store", url)
    assert shown.code == 1
    assert shown.json["recalled"] == []
    assert "was never asked for its recall lists" in shown.json["problem"]


def test_every_command_says_of_what_is_recalled(
    run: Any, key: SigningKey, store: Store, tmp_path: Path
) -> None:
    manifest, other = publish(store, tmp_path), publish(store, tmp_path, "other", call="other")
    at = ["--store", store.url]
    assert run("verify", *at).code == 0
    run("recall", manifest.digest, "--reason", "wrong gradients", *at)
    said = f"archive {manifest.digest} is recalled: wrong gradients"
    assert said in run("ls", *at).out
    rows = {row["key"]: row["recalled"] for row in run("ls", "--json", *at).json["entries"]}
    assert said in rows[manifest.key]
    assert rows[other.key] is None
    assert said in run("show", manifest.key, *at).out
    assert run("show", manifest.key, "--json", *at).json[0]["recalled"].startswith(said)
    why = run("why", manifest.key, *at)
    assert why.code == 1
    assert said in why.out
    assert said in run("doctor", *at).out
    verified = run("verify", *at)
    assert verified.code == 1
    assert said in verified.out
    assert "1 of 2 entries" in verified.out
    fetched = run("fetch", manifest.key, "--out", tmp_path / "out", *at)
    assert fetched.code == 1
    assert "RecalledArtifact" in fetched.err
    assert said in fetched.err
    assert not (tmp_path / "out").exists()
    assert run("fetch", other.key, "--out", tmp_path / "out", *at).code == 0


def test_another_archive_takes_the_place_of_a_recalled_one(
    run: Any, key: SigningKey, store: Store, tmp_path: Path
) -> None:
    old = publish(store, tmp_path, "old")
    source = open_store(tmp_path / "source")
    new = publish(source, tmp_path, "new")
    assert old.key == new.key
    copy = ["fetch", new.key, "--store", source.url, "--to", store.url, "--json"]
    assert run(*copy).json["artifacts"][0]["copied"] is False
    run("recall", old.digest, "--reason", "bad", "--store", store.url)
    assert run(*copy).json["artifacts"][0]["copied"] is True
    assert [m.digest for m in store.lookup(old.key)] == [new.digest]
    assert run(*copy).json["artifacts"][0]["copied"] is False


# at a service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("service")) as server:
        yield server


def test_a_recall_at_a_service_needs_its_trust_and_then_holds(
    run: Any, key: SigningKey, service: Serving, tmp_path: Path
) -> None:
    trusted_keys(settings()).add(service.signing_key.public, "service")
    store = open_store(service.url)
    manifest = sign(make_manifest(b"served"), service.signing_key)
    archive = tmp_path / "served.pt2"
    archive.write_bytes(b"served")
    assert store.publish(manifest, archive)
    at = ["--store", service.url]
    refused = run("recall", manifest.digest, "--reason", "bad", *at)
    assert refused.code == 1
    assert "aotcache trust add" in refused.err
    assert run("recall", "--json", *at).json["recalled"] == []
    TrustedKeys(service.config_home / "trusted").add(key.public, "me")
    assert run("recall", manifest.digest, "--reason", "bad", *at).code == 0
    assert f"archive {manifest.digest} is recalled: bad" in run("ls", *at).out
    better = sign(make_manifest(b"better"), service.signing_key)
    archive.write_bytes(b"better")
    assert store.publish(better, archive)
    assert [m.digest for m in store.lookup(manifest.key)] == [better.digest]
    store.remote.session.close()  # type: ignore[attr-defined]


def test_in_a_rotation_a_service_that_trusts_one_of_the_two_keys_is_told_by_that_one(
    run: Any, key: SigningKey, service: Serving
) -> None:
    trusted_keys(settings()).add(service.signing_key.public, "service")
    TrustedKeys(service.config_home / "trusted").add(key.public, "me")
    run("keygen", "--rotate")
    at = ["--store", service.url]
    done = run("recall", A, "--reason", "bad", *at)
    assert done.code == 0, done.err
    assert "no key that this service trusts has signed it" in done.err
    assert run("recall", "--renew", *at).code == 0
    (row,) = run("recall", "--json", *at).json["recalled"]
    assert (row["what"], row["signer"]) == (A, "me")
    assert run("recall", "--lift", A, *at).code == 0
    assert run("recall", "--json", *at).json["recalled"] == []
    open_store(service.url).remote.session.close()  # type: ignore[attr-defined]
