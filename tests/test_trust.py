"""Who may have made what is opened: keys, signatures over manifests, and the answers to both."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ed448
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from aotcache.config import Settings
from aotcache.envelope import Envelope, Signature
from aotcache.errors import ConfigError, ManifestError
from aotcache.manifest import Manifest
from aotcache.store import open_store
from aotcache.trust import (
    PublicKey,
    SigningKey,
    TrustedKeys,
    sign,
    signed_by,
    signing_key_path,
    standing,
    trust_problem,
    trusted_keys,
)
from tests.manifests import make_manifest, write_archive


@pytest.fixture(scope="module")
def key() -> SigningKey:
    return SigningKey.generate()


@pytest.fixture
def config(tmp_path: Path, key: SigningKey) -> Settings:
    """Settings under which `key`, and it alone, is trusted."""
    made = Settings(home=tmp_path / "home", config_home=tmp_path / "config")
    assert trusted_keys(made).add(key.public, "builder")
    return made


def problem(manifest: Manifest, config: Settings, *, own: bool = False) -> str | None:
    return trust_problem(manifest, own=own, config=config)


# keys


def test_a_signature_is_that_of_ed25519_as_it_is_published() -> None:
    """RFC 8032, section 7.1, test 2."""
    private = Ed25519PrivateKey.from_private_bytes(
        bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
    )
    key = SigningKey(private)
    signature = bytes.fromhex(
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )
    assert key.public.raw.hex() == "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c"
    assert key.sign(b"\x72") == signature
    assert key.public.verifies(b"\x72", signature)


def test_a_key_is_saved_for_this_user_alone_and_read_again(key: SigningKey, tmp_path: Path) -> None:
    path = tmp_path / "made" / "for" / "signing.pem"
    before = os.umask(0o002)
    try:
        key.save(path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    assert {p.stat().st_mode & 0o777 for p in (path.parent, path.parent.parent)} == {0o700}
    assert os.listdir(path.parent) == ["signing.pem"]
    assert SigningKey.load(path).public == key.public


def test_a_key_is_never_written_over(key: SigningKey, tmp_path: Path) -> None:
    key.save(tmp_path / "signing.pem")
    with pytest.raises(ConfigError, match="is there already"):
        SigningKey.generate().save(tmp_path / "signing.pem")
    assert SigningKey.load(tmp_path / "signing.pem").public == key.public


def test_a_key_that_others_may_read_is_refused(key: SigningKey, tmp_path: Path) -> None:
    path = tmp_path / "signing.pem"
    key.save(path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="mode 0640, expected 0600"):
        SigningKey.load(path)


def test_a_missing_key_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="aotcache keygen"):
        SigningKey.load(tmp_path / "signing.pem")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"text", "is not a PEM private key"),
        (
            ed448.Ed448PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
            "of another kind than Ed25519",
        ),
        (
            Ed25519PrivateKey.generate().private_bytes(
                Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"password")
            ),
            "without a password",
        ),
    ],
    ids=["text", "ed448", "password"],
)
def test_what_is_no_such_key_is_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "signing.pem"
    path.touch(0o600)
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=complaint):
        SigningKey.load(path)


def test_a_key_is_not_in_its_repr(key: SigningKey, tmp_path: Path) -> None:
    key.save(tmp_path / "pem")
    secret = key._private.private_bytes_raw()
    assert key.public.fingerprint in repr(key)
    assert not any(text in repr(key) for text in (secret.hex(), repr(secret), str(secret)))


@pytest.mark.parametrize("text", ["", "AAAA", "not base64!", "A" * 43, "A" * 44 + "="])
def test_what_is_no_public_key_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected the base64 text of 32 bytes"):
        PublicKey.from_text(text)


# trusted keys


def test_trusted_keys_are_listed_by_name_and_can_be_removed(tmp_path: Path) -> None:
    trusted = TrustedKeys(tmp_path / "trusted")
    assert trusted.list() == []
    one, two = SigningKey.generate().public, SigningKey.generate().public
    assert trusted.add(two, "b", "https://cache")
    assert trusted.add(one, "a")
    assert not trusted.add(one, "again")
    assert [(k.name, k.key, k.origin) for k in trusted.list()] == [
        ("a", one, None),
        ("b", two, "https://cache"),
    ]
    assert trusted.remove("a").key == one
    assert trusted.remove(two.fingerprint).key == two
    assert trusted.list() == []


def test_a_name_of_two_keys_removes_neither(tmp_path: Path) -> None:
    trusted = TrustedKeys(tmp_path / "trusted")
    for _ in range(2):
        trusted.add(SigningKey.generate().public, "same")
    for which in ("same", "nobody"):
        with pytest.raises(ConfigError, match="expected one"):
            trusted.remove(which)
    assert len(trusted.list()) == 2


def test_a_trusted_key_under_another_ones_name_is_an_error(config: Settings, key: SigningKey) -> None:
    (path,) = (config.config_home / "trusted").iterdir()
    document = json.loads(path.read_bytes()) | {"public": SigningKey.generate().public.to_text()}
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="filed under another key's name"):
        problem(sign(make_manifest(), key), config)


@pytest.mark.parametrize("which", ["folder", "file"])
def test_trusted_keys_that_others_could_have_put_there_do_not_count(
    config: Settings, key: SigningKey, which: str
) -> None:
    folder = config.config_home / "trusted"
    (folder if which == "folder" else next(folder.iterdir())).chmod(0o777)
    with pytest.raises(ConfigError, match="mode 0777, expected one that others cannot write to"):
        problem(sign(make_manifest(), key), config)


# signatures


def test_a_manifest_signed_by_a_trusted_key_is_trusted(config: Settings, key: SigningKey) -> None:
    manifest = sign(make_manifest(), key)
    assert problem(manifest, config) is None
    assert problem(Manifest.from_json(manifest.document(), where="here"), config) is None
    assert manifest == make_manifest()


def test_no_signature_counts_where_nobody_is_trusted(config: Settings, key: SigningKey) -> None:
    manifest = sign(make_manifest(), key)
    trusted_keys(config).remove(key.public.fingerprint)
    found = problem(manifest, config)
    assert found is not None
    assert key.public.fingerprint in found
    assert "aotcache trust add" in found


def test_an_unsigned_manifest_is_taken_from_an_own_store_alone(config: Settings) -> None:
    assert problem(make_manifest(), config, own=True) is None
    assert "nobody signed it" in (problem(make_manifest(), config) or "")


def test_a_signature_is_verified_in_an_own_store_as_well(config: Settings) -> None:
    found = problem(sign(make_manifest(), SigningKey.generate()), config, own=True)
    assert "no trusted key signed it" in (found or "")


def test_an_envelope_without_signatures_is_not_signed(config: Settings) -> None:
    bare = make_manifest().with_envelope(Envelope(make_manifest().to_json(), ()))
    for own in (False, True):
        assert "nobody signed it" in (problem(bare, config, own=own) or "")


def test_one_trusted_signature_among_others_is_enough(config: Settings, key: SigningKey) -> None:
    assert problem(sign(sign(make_manifest(), SigningKey.generate()), key), config) is None
    assert problem(sign(sign(make_manifest(), key), SigningKey.generate()), config) is None


def test_signing_again_replaces_the_keys_own_signature(key: SigningKey) -> None:
    once = sign(make_manifest(), key)
    assert once.envelope is not None
    assert sign(once, key).envelope == once.envelope


def test_another_manifest_in_an_envelope_is_not_signed(key: SigningKey) -> None:
    signed = sign(make_manifest(), key)
    assert signed.envelope is not None
    with pytest.raises(ManifestError, match="another one"):
        sign(make_manifest(region="layers.1").with_envelope(signed.envelope), key)


@pytest.mark.parametrize(
    "changes",
    [
        {"digest": "f" * 64},
        {"members": {"forward.so": "f" * 64}},
        {"region": "layers.1"},
        {"size": 8},
        {"pair": None},
        {"schema": 1},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_manifest_in_use_must_be_the_one_that_was_signed(
    config: Settings, key: SigningKey, changes: dict[str, object]
) -> None:
    signed = sign(make_manifest(), key)
    assert signed.envelope is not None
    other = replace(make_manifest(), **changes).with_envelope(signed.envelope)  # type: ignore[arg-type]
    assert "another manifest than the one in use" in (problem(other, config) or "")


def test_values_that_python_takes_for_equal_are_still_another_manifest(
    config: Settings, key: SigningKey
) -> None:
    signed = sign(make_manifest(output_tree=[1]), key)
    assert signed.envelope is not None
    other = make_manifest(output_tree=[True]).with_envelope(signed.envelope)
    assert other == signed
    assert "another manifest" in (problem(other, config) or "")


def test_a_signed_key_that_its_components_do_not_have_is_no_manifest(
    config: Settings, key: SigningKey
) -> None:
    """Even a trusted builder cannot have one artifact taken for another's."""
    rekeyed = replace(make_manifest(), key="f" * 64)  # type: ignore[arg-type]
    signed = sign(rekeyed, key)
    with pytest.raises(ManifestError, match="its components hash to"):
        Manifest.from_json(signed.document(), where="here")
    assert "another manifest" in (problem(signed, config) or "")


def test_a_signed_entry_under_another_key_is_a_miss(tmp_path: Path, key: SigningKey) -> None:
    store, manifest = open_store(tmp_path / "store"), sign(make_manifest(b"bytes"), key)
    store.publish(manifest, write_archive(tmp_path, b"bytes"))
    other = make_manifest(call="y").key
    ref = tmp_path / "store" / "refs" / manifest.key[:2] / manifest.key / f"{manifest.variant}.json"
    moved = tmp_path / "store" / "refs" / other[:2] / other / ref.name
    moved.parent.mkdir(parents=True)
    moved.write_bytes(ref.read_bytes())
    assert [m.envelope for m in store.lookup(manifest.key)] == [manifest.envelope]
    assert store.lookup(other) == []


def test_a_name_on_a_signature_is_no_proof(config: Settings, key: SigningKey) -> None:
    stranger = sign(make_manifest(), SigningKey.generate())
    assert stranger.envelope is not None
    (made,) = stranger.envelope.signatures
    renamed = replace(stranger.envelope, signatures=(Signature(key.public.fingerprint, made.sig),))
    found = problem(stranger.with_envelope(renamed), config)
    assert found is not None
    assert f"names the trusted key {key.public.fingerprint}, which did not sign this" in found


def test_a_strangers_text_in_a_message_is_short_and_moves_no_cursor(config: Settings) -> None:
    nasty = Signature("\x1b[2J\n" + "x" * 10_000, bytes(64))
    manifest = make_manifest().with_envelope(Envelope(make_manifest().to_json(), (nasty,) * 1000))
    found = problem(manifest, config)
    assert found is not None
    assert len(found) < 2000
    assert found.isprintable()


# any changed bit


def flipped(data: bytes) -> Iterator[bytes]:
    for place in range(len(data)):
        for bit in range(8):
            yield data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]


def test_no_bit_of_payload_or_signature_can_change(key: SigningKey) -> None:
    envelope = sign(make_manifest(), key).envelope
    assert envelope is not None
    assert signed_by(envelope, key.public)
    (made,) = envelope.signatures
    for place in range(len(envelope.payload)):
        payload = bytearray(envelope.payload)
        payload[place] ^= 1 << place % 8
        assert not signed_by(replace(envelope, payload=bytes(payload)), key.public)
    for sig in flipped(made.sig):
        assert not signed_by(replace(envelope, signatures=(Signature(made.keyid, sig),)), key.public)


def test_no_letter_of_type_or_key_name_can_change(key: SigningKey) -> None:
    envelope = sign(make_manifest(), key).envelope
    assert envelope is not None
    (made,) = envelope.signatures
    for kind in flipped(envelope.kind.encode()):
        assert not signed_by(replace(envelope, kind=kind.decode("latin-1")), key.public)
    for name in flipped(made.keyid.encode()):
        renamed = Signature(name.decode("latin-1"), made.sig)
        assert not signed_by(replace(envelope, signatures=(renamed,)), key.public)


def test_no_byte_of_the_stored_document_can_change(config: Settings, key: SigningKey) -> None:
    document = sign(make_manifest(), key).document()
    taken = []
    for place in range(len(document)):
        changed = bytearray(document)
        changed[place] ^= 1 << place % 8
        try:
            manifest = Manifest.from_json(bytes(changed), where="here")
        except ManifestError:
            continue
        if problem(manifest, config) is None:
            taken.append(place)
    assert taken == []


# what the user lets through, and what they are told


def test_trust_in_unsigned_artifacts_lifts_every_refusal(config: Settings) -> None:
    lifted = Settings(config_home=config.config_home, trust_unsigned=True)
    for manifest in (make_manifest(), sign(make_manifest(), SigningKey.generate())):
        assert problem(manifest, config) is not None
        assert problem(manifest, lifted) is None
        assert standing(manifest, own=False, config=lifted).problem is not None


def test_a_services_address_is_in_the_command_that_trusts_its_key(config: Settings) -> None:
    stranger = SigningKey.generate()
    found = trust_problem(sign(make_manifest(), stranger), own=False, config=config, url="https://cache")
    assert f"aotcache trust add https://cache --fingerprint {stranger.public.fingerprint}" in (found or "")


def test_a_standing_tells_who_signed(config: Settings, key: SigningKey) -> None:
    signed = standing(sign(make_manifest(), key), own=False, config=config)
    assert str(signed) == f"signed by builder ({key.public.fingerprint}), trusted"
    assert signed.to_json() == {
        "signed_by": [key.public.fingerprint],
        "signer": "builder",
        "trusted": True,
        "problem": None,
    }
    assert "own" in str(standing(make_manifest(), own=True, config=config))
    assert str(standing(make_manifest(), own=False, config=config)).startswith(
        "not trusted: nobody signed it"
    )


def test_keys_lie_in_the_config_home(config: Settings) -> None:
    assert signing_key_path(config) == config.config_home / "signing.pem"
    assert not signing_key_path(config).is_relative_to(config.home)


def test_the_command_that_a_refusal_names_runs_nothing_of_what_the_artifact_says(config: Settings) -> None:
    manifest = make_manifest()
    keyid = "ed25519:00; touch /tmp/x $(id)"
    forged = manifest.with_envelope(Envelope(manifest.to_json(), (Signature(keyid, b"x" * 64),)))
    found = trust_problem(forged, own=False, config=config, url="https://cache")
    assert found is not None
    command = found.partition("whose key that is: ")[2]
    assert shlex.split(command) == ["aotcache", "trust", "add", "https://cache", "--fingerprint", keyid]
