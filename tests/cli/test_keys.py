"""`keygen` and `trust`, the question at first contact, and what the other commands say of signatures."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aotcache.cli.entries import _explain
from aotcache.config import Settings, settings
from aotcache.envelope import Envelope
from aotcache.manifest import Manifest
from aotcache.store import Store, open_store
from aotcache.trust import SigningKey, sign, signing_key_path, trusted_keys
from tests.cli.conftest import publish
from tests.manifests import copies
from tests.services.serving import Serving, serving
from tests.store.faulty import faulty

_SECONDS = 60.0


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("service")) as server:
        yield server


def trusted(config: Settings) -> list[str]:
    return [key.key.fingerprint for key in trusted_keys(config).list()]


# keygen


def test_keygen_makes_a_key_that_is_trusted_here_and_tells_its_names(run: Any, tmp_path: Path) -> None:
    done = run("keygen", "--name", "me", "--json")
    assert done.code == 0
    key = SigningKey.load(tmp_path / "config" / "signing.pem")
    assert done.json["fingerprint"] == key.public.fingerprint
    assert done.json["public"] == key.public.to_text()
    assert done.json["path"] == str(tmp_path / "config" / "signing.pem")
    assert [(k.name, k.key) for k in trusted_keys(settings()).list()] == [("me", key.public)]


def test_keygen_prints_the_public_key_and_never_the_other(run: Any, tmp_path: Path) -> None:
    done = run("keygen")
    key = SigningKey.load(tmp_path / "config" / "signing.pem")
    assert key.public.fingerprint in done.out
    assert key.public.to_text() in done.out
    secret = (tmp_path / "config" / "signing.pem").read_text().splitlines()[1]
    assert secret not in done.out + done.err


def test_keygen_leaves_a_key_that_is_there(run: Any, key: SigningKey) -> None:
    done = run("keygen")
    assert done.code == 2
    assert "is there already" in done.err
    assert SigningKey.load(signing_key_path(settings())).public == key.public
    assert trusted(settings()) == [key.public.fingerprint]


def test_keygen_writes_where_it_is_told(run: Any, tmp_path: Path) -> None:
    assert run("keygen", "--out", tmp_path / "elsewhere" / "key.pem").code == 0
    assert SigningKey.load(tmp_path / "elsewhere" / "key.pem")
    assert not signing_key_path(settings()).exists()


# trust


def test_a_public_key_is_trusted_listed_and_removed(run: Any) -> None:
    public = SigningKey.generate().public
    assert "no key is trusted" in run("trust", "list").out
    assert run("trust", "add", public.to_text(), "--name", "colleague").code == 0
    (listed,) = run("trust", "list", "--json").json["trusted"]
    assert (listed["name"], listed["fingerprint"], listed["origin"]) == (
        "colleague",
        public.fingerprint,
        None,
    )
    text = run("trust", "list").out
    assert public.fingerprint in text
    assert public.to_text() in text
    assert run("trust", "remove", "colleague").code == 0
    assert run("trust", "list", "--json").json["trusted"] == []


def test_a_public_key_in_a_file_is_called_after_it(run: Any, tmp_path: Path) -> None:
    public = SigningKey.generate().public
    (tmp_path / "colleague.pub").write_text(public.to_text() + "\n")
    assert run("trust", "add", tmp_path / "colleague.pub").code == 0
    assert [(k.name, k.key) for k in trusted_keys(settings()).list()] == [("colleague", public)]


def test_a_key_that_is_trusted_already_is_no_fault(run: Any, key: SigningKey) -> None:
    done = run("trust", "add", key.public.to_text())
    assert done.code == 0
    assert "trusted already" in done.out
    assert trusted(settings()) == [key.public.fingerprint]


def test_another_key_than_the_named_one_is_not_added(run: Any) -> None:
    given, meant = SigningKey.generate().public, SigningKey.generate().public
    done = run("trust", "add", given.to_text(), "--fingerprint", meant.fingerprint)
    assert done.code == 2
    assert given.fingerprint in done.err
    assert meant.fingerprint in done.err
    assert trusted(settings()) == []


@pytest.mark.parametrize("text", ["no such file", "AAAA", "x" * 5000])
def test_what_is_no_key_is_wrong_usage(run: Any, text: str) -> None:
    assert run("trust", "add", text).code == 2


def test_a_private_key_is_not_taken_for_a_public_one_nor_shown(run: Any, key: SigningKey) -> None:
    done = run("trust", "add", signing_key_path(settings()))
    assert done.code == 2
    assert signing_key_path(settings()).read_text().splitlines()[1][:20] not in done.err


def test_removing_what_is_not_trusted_is_wrong_usage(run: Any) -> None:
    assert run("trust", "remove", "nobody").code == 2


# a service


def test_without_a_terminal_a_services_key_needs_its_fingerprint(run: Any, service: Serving) -> None:
    fingerprint = service.signing_key.public.fingerprint
    refused = run("trust", "add", service.url)
    assert refused.code == 2
    assert f"aotcache trust add {service.url} --fingerprint {fingerprint}" in refused.err
    assert trusted(settings()) == []
    done = run("trust", "add", service.url, "--fingerprint", fingerprint, "--json")
    assert done.code == 0
    (listed,) = done.json["trusted"]
    assert (listed["fingerprint"], listed["origin"]) == (fingerprint, service.url)


def test_a_service_that_shows_another_key_than_the_named_one_is_not_trusted(
    run: Any, service: Serving
) -> None:
    done = run("trust", "add", service.url, "--fingerprint", SigningKey.generate().public.fingerprint)
    assert done.code == 2
    assert service.signing_key.public.fingerprint in done.err
    assert trusted(settings()) == []


def test_a_service_that_is_not_there_is_an_error(run: Any) -> None:
    done = run("trust", "add", "http://127.0.0.1:9")
    assert done.code == 1
    assert "ServiceUnavailable" in done.err


def on_a_terminal(answer: str, *arguments: str) -> tuple[int, str]:
    """A command in a process of its own on a terminal; `answer` is typed when it asks."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "aotcache", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    seen, asked, until = "", False, time.monotonic() + _SECONDS
    try:
        while time.monotonic() < until:
            if not select.select([ours], [], [], 0.2)[0]:
                continue
            try:
                data = os.read(ours, 4096)
            except OSError:  # the other side is closed
                break
            if not data:
                break
            seen += data.decode(errors="replace")
            if not asked and "Trust it?" in seen:
                asked = True
                os.write(ours, f"{answer}\n".encode())
        return process.wait(_SECONDS), seen
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("n", 1), ("", 1)])
def test_on_a_terminal_a_services_key_is_shown_and_asked_about(
    run: Any, service: Serving, answer: str, code: int
) -> None:
    fingerprint = service.signing_key.public.fingerprint
    found, seen = on_a_terminal(answer, "trust", "add", service.url)
    assert fingerprint in seen
    assert "can run code on this machine" in seen
    assert found == code
    assert trusted(settings()) == ([fingerprint] if answer == "y" else [])


@pytest.fixture
def shared(service: Serving, run: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Manifest:
    """An entry of the service that its own key signed."""
    store = open_store(service.url, tier=False)
    data_of = open_store(tmp_path / "made")
    manifest = publish(data_of, tmp_path, request.node.name, call=request.node.name)
    path = data_of.blob_path(manifest.digest)
    assert path is not None
    signed = sign(manifest, service.signing_key)
    assert store.publish(signed, path)
    store.session.close()  # type: ignore[attr-defined]
    return signed


def test_fetch_from_a_service_of_no_trusted_key_fails_with_the_command(
    run: Any, service: Serving, shared: Manifest, tmp_path: Path
) -> None:
    done = run("fetch", shared.key, "--store", service.url, "--to", tmp_path / "mine")
    assert done.code == 2
    assert f"--fingerprint {service.signing_key.public.fingerprint}" in done.err
    assert not (tmp_path / "mine").exists()
    assert not list((tmp_path / "home").rglob("blobs/*/*"))


def test_a_service_that_is_not_trusted_is_not_shown_the_token(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AOTCACHE_TOKEN", "aot_secret")
    stranger = SigningKey.generate().public
    shown = {"fingerprint": stranger.fingerprint, "public": stranger.to_text(), "name": "s"}
    with faulty(lambda answer, asked: answer.send(200, json.dumps({"keys": [shown]}).encode())) as server:
        assert run("trust", "add", server.url).code == 2
        assert run("fetch", "a" * 64, "--store", server.url, "--to", tmp_path / "mine").code == 2
    assert [asked.path for asked in server.asked] == ["/v1/trust"] * 2
    assert not any("authorization" in asked.headers for asked in server.asked)


def test_fetch_on_a_terminal_asks_and_then_copies_with_the_signature(
    run: Any, service: Serving, shared: Manifest, tmp_path: Path
) -> None:
    mine = str(tmp_path / "mine")
    code, seen = on_a_terminal("y", "fetch", shared.key, "--store", service.url, "--to", mine)
    assert code == 0, seen
    assert service.signing_key.public.fingerprint in seen
    (copy,) = open_store(mine).lookup(shared.key)
    assert copy.envelope == shared.envelope


def test_a_refused_question_copies_nothing(
    run: Any, service: Serving, shared: Manifest, tmp_path: Path
) -> None:
    code, seen = on_a_terminal(
        "n", "fetch", shared.key, "--store", service.url, "--to", str(tmp_path / "mine")
    )
    assert code == 1
    assert "nothing was read from it" in seen
    assert not (tmp_path / "mine").exists()


def test_warm_asks_before_it_reads_from_a_service(run: Any, service: Serving, tmp_path: Path) -> None:
    done = run("warm", tmp_path / "none.toml", "--store", service.url)
    assert done.code == 2
    assert f"trust add {service.url}" in done.err


# signing at the way out


def test_what_leaves_this_host_is_signed(run: Any, store: Store, tmp_path: Path, key: SigningKey) -> None:
    manifest = publish(store, tmp_path)
    other = copies(tmp_path / "other")
    assert run("fetch", manifest.key, "--store", store.url, "--to", other.url).code == 0
    (copied,) = other.lookup(manifest.key)
    assert trusted_keys(settings()).problem(copied) is None
    assert [m.envelope for m in store.lookup(manifest.key)] == [None]


@pytest.mark.parametrize("part", ["refs", "its folder", "itself"])
def test_what_others_could_have_written_is_neither_signed_nor_called_good(
    run: Any, store: Store, tmp_path: Path, key: SigningKey, part: str
) -> None:
    """A worker does not open it here; a signature would have it opened everywhere."""
    manifest = publish(store, tmp_path)
    (ref,) = (tmp_path / "store").glob("refs/*/*/*.json")
    {"refs": tmp_path / "store" / "refs", "its folder": ref.parent, "itself": ref}[part].chmod(0o777)
    before, elsewhere = ref.read_bytes(), copies(tmp_path / "elsewhere")
    signed = run("sign", "--store", store.url)
    fetched = run("fetch", manifest.key, "--store", store.url, "--to", elsewhere.url)
    verified = run("verify", "--store", store.url)
    for done, text in ((signed, signed.out), (fetched, fetched.err), (verified, verified.out)):
        assert done.code == 1
        assert "other users could have changed it" in text
    assert ref.read_bytes() == before
    assert elsewhere.lookup(manifest.key) == []
    for command in ("doctor", "why"):
        arguments = (manifest.key,) if command == "why" else ()
        found = run(command, *arguments, "--store", store.url, "--json").json
        (judged,) = found["variants" if command == "why" else "artifacts"]
        assert not judged["accepted"]
        assert any("other users could have changed it" in reason for reason in judged["reasons"])


def test_without_a_key_nothing_leaves_this_host(run: Any, store: Store, tmp_path: Path) -> None:
    manifest = publish(store, tmp_path)
    other = copies(tmp_path / "other")
    done = run("fetch", manifest.key, "--store", store.url, "--to", other.url)
    assert done.code == 2
    assert "aotcache keygen" in done.err
    assert other.usage().refs == 0


def test_warm_wants_a_key_before_it_builds_anything(run: Any, tmp_path: Path) -> None:
    (tmp_path / "drafter.toml").write_text(
        '[drafter]\nname = "d"\nfactory = "no_such_module:build"\nbatch = "no_such_module:batch"\n'
        'regions = ["*"]\nmodes = ["infer"]\n'
    )
    other = copies(tmp_path / "other")
    done = run("warm", tmp_path / "drafter.toml", "--store", other.url)
    assert done.code == 2
    assert "aotcache keygen" in done.err


def test_what_is_signed_stays_as_it_was(run: Any, tmp_path: Path, key: SigningKey) -> None:
    source, other = copies(tmp_path / "source"), copies(tmp_path / "other")
    colleague = SigningKey.generate()
    trusted_keys(settings()).add(colleague.public, "colleague")
    manifest = sign(publish(open_store(tmp_path / "made"), tmp_path), colleague)
    path = open_store(tmp_path / "made").blob_path(manifest.digest)
    assert path is not None
    source.publish(manifest, path)
    for target in (other.url, str(tmp_path / "mine")):
        assert run("fetch", manifest.key, "--store", source.url, "--to", target).code == 0
        (copied,) = open_store(target).lookup(manifest.key)
        assert copied.envelope == manifest.envelope


@pytest.mark.parametrize("how", ["unsigned", "stranger"])
@pytest.mark.parametrize("to", ["--to", "--out"])
def test_fetch_refuses_what_nobody_trusted_signed(
    run: Any, tmp_path: Path, key: SigningKey, how: str, to: str
) -> None:
    source = copies(tmp_path / "source")
    manifest = publish(open_store(tmp_path / "made"), tmp_path)
    path = open_store(tmp_path / "made").blob_path(manifest.digest)
    assert path is not None
    source.publish(manifest if how == "unsigned" else sign(manifest, SigningKey.generate()), path)
    done = run("fetch", manifest.key, "--store", source.url, to, tmp_path / "mine")
    assert done.code == 1
    assert "RejectedArtifact" in done.err
    assert not (tmp_path / "mine").exists()


def test_unsigned_artifacts_are_copied_on_request_and_never_signed(
    run: Any,
    tmp_path: Path,
    key: SigningKey,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = copies(tmp_path / "source")
    manifest = publish(open_store(tmp_path / "made"), tmp_path)
    path = open_store(tmp_path / "made").blob_path(manifest.digest)
    assert path is not None
    source.publish(manifest, path)
    monkeypatch.setenv("AOTCACHE_TRUST_UNSIGNED", "1")
    assert run("fetch", manifest.key, "--store", source.url, "--to", tmp_path / "mine").code == 0
    assert manifest.digest in caplog.text
    assert [m.envelope for m in open_store(tmp_path / "mine").lookup(manifest.key)] == [None]
    other = copies(tmp_path / "other")
    done = run("fetch", manifest.key, "--store", source.url, "--to", other.url)
    assert done.code == 1
    assert "was not built here, so this host does not sign it" in done.err


# what other commands say


def test_commands_tell_who_signed(run: Any, store: Store, tmp_path: Path, key: SigningKey) -> None:
    publish(store, tmp_path, "bare", call="bare")
    other = copies(tmp_path / "other")
    assert (
        run("fetch", publish(store, tmp_path, "signed").key, "--store", store.url, "--to", other.url).code
        == 0
    )
    stranger = sign(publish(open_store(tmp_path / "made"), tmp_path, "s", call="s"), SigningKey.generate())
    path = open_store(tmp_path / "made").blob_path(stranger.digest)
    assert path is not None
    other.publish(stranger, path)

    assert run("verify", "--store", store.url).code == 0
    done = run("verify", "--store", other.url, "--json")
    assert done.code == 1
    found = {entry["key"]: entry for entry in done.json["entries"]}
    refused = found.pop(stranger.key)
    assert refused["signature"]["trusted"] is False
    assert "no trusted key signed it" in refused["problems"][0]
    (good,) = found.values()
    assert good["problems"] == []
    assert good["signature"]["signer"] == "me"
    assert f"signed by me ({key.public.fingerprint}), trusted" in run("verify", "--store", other.url).out

    listed = run("ls", "--store", other.url, "--json").json["entries"]
    assert sorted(entry["signature"]["trusted"] for entry in listed) == [False, True]
    assert "not trusted: no trusted key signed it" in run("show", stranger.key, "--store", other.url).out
    (shown,) = run("show", good["key"], "--store", other.url, "--json").json
    assert shown["signature"]["signed_by"] == [key.public.fingerprint]
    judged = {a["key"]: a for a in run("doctor", "--store", other.url, "--json").json["artifacts"]}
    assert any("no trusted key signed it" in reason for reason in judged[stranger.key]["reasons"])


def test_doctor_tells_of_keys(run: Any, store: Store, tmp_path: Path) -> None:
    def findings(what: str) -> list[tuple[str, str]]:
        report = run("doctor", "--store", store.url, "--json").json
        return [(f["state"], f["detail"]) for f in report["findings"] if f["what"] == what]

    assert [state for state, _ in findings("signing key")] == ["note"]
    assert "aotcache keygen" in findings("signing key")[0][1]
    assert run("keygen").code == 0
    ((state, detail),) = findings("signing key")
    assert (state, detail.endswith("trusted here")) == ("ok", True)
    assert run("trust", "remove", trusted(settings())[0]).code == 0
    assert "is not trusted here" in findings("signing key")[0][1]
    signing_key_path(settings()).chmod(0o644)
    assert findings("signing key")[0][0] == "fail"


def test_verify_names_a_document_that_was_tampered_with(
    run: Any, store: Store, tmp_path: Path, key: SigningKey
) -> None:
    other = copies(tmp_path / "other")
    manifest = publish(store, tmp_path)
    assert run("fetch", manifest.key, "--store", store.url, "--to", other.url).code == 0
    ref = tmp_path / "other" / "refs" / manifest.key[:2] / manifest.key / f"{manifest.variant}.json"
    envelope = Envelope.from_json(ref.read_bytes(), where="here")
    payload = json.loads(envelope.payload) | {"region": "layers.7"}
    ref.write_bytes(Envelope(json.dumps(payload).encode(), envelope.signatures).to_json())
    done = run("verify", "--store", other.url)
    assert done.code == 1
    assert f"names the trusted key {key.public.fingerprint}, which did not sign this" in done.out


def test_a_service_that_is_away_is_neither_empty_nor_in_order(run: Any) -> None:
    url = "http://127.0.0.1:1"
    listed = run("ls", "--store", url)
    assert (listed.code, listed.out) == (0, f"nothing is stored in this host's copies of {url}\n")
    done = run("doctor", "--store", url, "--json")
    (found,) = [f for f in done.json["findings"] if f["what"] == "store"]
    assert (done.code, found["state"]) == (1, "fail")
    assert "was not reached" in found["detail"]


def test_why_says_of_what_covers_a_cell_that_this_host_does_not_open_it() -> None:
    cell = {
        "region": "a",
        "mode": "train",
        "bucket": {},
        "target": "t",
        "state": "covered",
        "digest": "d" * 64,
    }
    (line,) = _explain({"cells": [cell | {"untrusted": None}]})
    assert line.endswith("covered by dddddddddddd")
    first, second = _explain({"cells": [cell | {"untrusted": "no trusted key signed it"}]})
    assert first.endswith("which this host does not open")
    assert second == "  no trusted key signed it"
