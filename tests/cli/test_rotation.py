"""`keygen --rotate` and `--retire`: both keys sign in between, and one step is taken at a time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from aotcache import rotation
from aotcache.config import settings
from aotcache.errors import ConfigError
from aotcache.store import open_store
from aotcache.trust import SigningKey, sign, signing_key_path, trusted_keys
from tests.cli.conftest import publish
from tests.manifests import copies, make_manifest

A = "a" * 64


def test_a_rotation_signs_with_both_keys_until_the_old_one_is_retired(
    run: Any, key: SigningKey, tmp_path: Path
) -> None:
    own = open_store(tmp_path / "own")
    elsewhere = copies(tmp_path / "elsewhere")
    first = publish(own, tmp_path, "first", call="first")
    assert run("fetch", first.key, "--store", own.url, "--to", elsewhere.url).code == 0
    run("recall", A, "--reason", "bad", "--store", elsewhere.url)

    done = run("keygen", "--rotate", "--name", "me, again", "--json")
    assert done.code == 0, done.err
    new = SigningKey.load(signing_key_path(settings()))
    assert new.public.fingerprint == done.json["fingerprint"] != key.public.fingerprint
    assert [k.name for k in trusted_keys(settings()).list()] == ["me", "me, again"]
    again = run("keygen", "--rotate")
    assert again.code == 2
    assert "aotcache keygen --retire" in again.err

    def told() -> bool:
        return "a rotation is open" in run("doctor").out

    assert told()
    second = publish(own, tmp_path, "second", call="second")
    run("fetch", second.key, "--store", own.url, "--to", elsewhere.url)
    both = {key.public.fingerprint, new.public.fingerprint}

    def signers(of: Any) -> set[str]:
        (found,) = elsewhere.lookup(of.key)
        assert found.envelope is not None
        return {signature.keyid for signature in found.envelope.signatures}

    assert signers(second) == both
    assert signers(first) == {key.public.fingerprint}
    signed = run("sign", "--store", elsewhere.url, "--json")
    assert signed.code == 0, signed.err
    assert [row["digest"] for row in signed.json["signed"]] == [first.digest]
    assert signers(first) == both
    assert run("sign", "--store", elsewhere.url, "--json").json["signed"] == []

    assert run("keygen", "--retire").code == 0
    assert run("keygen", "--retire").code == 2
    assert not told()
    assert [path.name for path in (tmp_path / "config").glob("*.pem*")] == ["signing.pem"]
    run("trust", "remove", "me")
    # Whoever trusts the new key alone opens both, and refuses what the old one had recalled.
    assert run("verify", "--store", elsewhere.url).code == 0
    (row,) = run("recall", "--json", "--store", elsewhere.url).json["recalled"]
    assert (row["what"], row["signer"]) == (A, "me, again")


def test_what_nobody_trusted_signed_is_not_signed_here(run: Any, key: SigningKey, tmp_path: Path) -> None:
    elsewhere = copies(tmp_path / "elsewhere")
    for manifest in (make_manifest(b"bare"), sign(make_manifest(b"two", call="2"), SigningKey.generate())):
        archive = tmp_path / "archive"
        archive.write_bytes(b"bare" if manifest.envelope is None else b"two")
        assert elsewhere.publish(manifest, archive)
    done = run("sign", "--store", elsewhere.url, "--json")
    assert done.code == 1
    assert done.json["signed"] == []
    assert len(done.json["left"]) == 2


def test_a_rotation_that_was_killed_goes_on_with_the_same_key(
    run: Any, key: SigningKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("aotcache.rotation.os.replace", killed)
        run("keygen", "--rotate", "--name", "new")
    assert SigningKey.load(signing_key_path(settings())).public == key.public
    early = run("keygen", "--retire")
    assert early.code == 2
    assert "is still the key in use" in early.err
    done = run("keygen", "--rotate", "--name", "new", "--json")
    assert done.code == 0, done.err
    assert [k.name for k in trusted_keys(settings()).list()] == ["me", "new"]
    assert SigningKey.load(signing_key_path(settings())).public.fingerprint == done.json["fingerprint"]
    assert SigningKey.load(tmp_path / "config" / "signing.previous.pem").public == key.public


def test_a_key_that_is_not_there_is_not_rotated(run: Any, tmp_path: Path) -> None:
    for option in ("--rotate", "--retire"):
        done = run("keygen", option)
        assert done.code == 2
        assert "there is no signing key" in done.err
    assert run("keygen", "--rotate", "--retire").code == 2
    assert not (tmp_path / "config").exists()


def test_of_two_rotations_at_once_one_is_refused(run: Any, key: SigningKey) -> None:
    together = Barrier(2)

    def rotated(name: str) -> SigningKey | ConfigError:
        together.wait(60)
        try:
            return rotation.rotate(settings(), name)
        except ConfigError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(rotated, ("one", "two")))
    (made,) = [one for one in found if isinstance(one, SigningKey)]
    (refused,) = [one for one in found if isinstance(one, ConfigError)]
    assert "the last rotation is not over" in str(refused)
    assert [one.public for one in rotation.signing_keys(settings())] == [made.public, key.public]
    assert [one.public for one in trusted_keys(settings()).list()] == [
        k.to_text() for k in (key.public, made.public)
    ]


def test_a_key_that_is_not_trusted_any_more_is_not_kept_by_a_rotation(run: Any, key: SigningKey) -> None:
    """It may have leaked, and would sign beside the new one."""
    assert run("trust", "remove", "me").code == 0
    done = run("keygen", "--rotate")
    assert done.code == 2
    assert f"delete {signing_key_path(settings())} and run aotcache keygen" in done.err
    assert [one.public for one in rotation.signing_keys(settings())] == [key.public]
    assert "--rotate replaces it" in run("keygen").err
    signing_key_path(settings()).unlink()
    assert run("keygen", "--name", "new").code == 0
