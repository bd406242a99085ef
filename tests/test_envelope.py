"""The envelope: what is signed, and what is no envelope at all."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from aotcache.envelope import MANIFEST_TYPE, Envelope, Signature
from aotcache.errors import ManifestError
from aotcache.manifest import Manifest
from tests.manifests import make_manifest


def test_what_is_signed_is_the_published_vector_of_dsse() -> None:
    envelope = Envelope(b"hello world", (), "http://example.com/HelloWorld")
    assert envelope.signed_bytes == b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"


def test_lengths_are_of_bytes_not_of_letters() -> None:
    assert Envelope("grün".encode(), (), "größe").signed_bytes == "DSSEv1 7 größe 5 grün".encode()


def test_bytes_cannot_move_between_type_and_document() -> None:
    assert Envelope(b"b 1 c", (), "a").signed_bytes != Envelope(b"c", (), "a 5 b").signed_bytes


def test_an_envelope_comes_back_as_it_was() -> None:
    envelope = Envelope(
        b"\x00\xff any bytes", (Signature("one", bytes(64)), Signature("two", b"\xff" * 64)), "t"
    )
    text = envelope.to_json()
    assert Envelope.from_json(text, where="here") == envelope
    assert Envelope.from_json(text, where="here").to_json() == text


def document(**changes: Any) -> bytes:
    made = {
        "payloadType": "t",
        "payload": base64.b64encode(b"payload").decode(),
        "signatures": [{"keyid": "k", "sig": base64.b64encode(bytes(64)).decode()}],
    } | changes
    return json.dumps({name: value for name, value in made.items() if value is not ...}).encode()


def test_the_form_of_the_refused_ones_is_read_when_nothing_is_wrong_with_it() -> None:
    assert Envelope.from_json(document(), where="here").payload == b"payload"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        document(payload=...),
        document(payloadType=...),
        document(signatures=...),
        document(more=1),
        document(payload=1),
        document(payloadType=None),
        document(signatures={}),
        document(signatures=[{"keyid": "k"}]),
        document(signatures=[{"sig": ""}]),
        document(signatures=[{"keyid": "k", "sig": "", "cert": ""}]),
        document(signatures=[{"keyid": "k", "sig": ""}] * 33),
        document(payload="a"),
        document(payload="cGF5bG9hZA=="[:-1]),
        document(payload="cGF5 bG9hZA=="),
        document(payload="cGF5bG9hZB=="),
        document(payload="grün"),
    ],
)
def test_anything_else_is_an_error_that_says_where(data: bytes) -> None:
    with pytest.raises(ManifestError, match=r"^there: not a signed document"):
        Envelope.from_json(data, where="there")


def test_two_texts_never_stand_for_one_signature() -> None:
    """Four bits of base64's last letter but two are no part of the value: any but zero is refused."""
    sig = base64.b64encode(bytes(64)).decode()
    assert sig.endswith("AA==")
    for letter in "BCDEFGHIJKLMNOP":
        with pytest.raises(ManifestError, match="beyond its last byte"):
            Envelope.from_json(
                document(signatures=[{"keyid": "k", "sig": f"{sig[:-3]}{letter}=="}]), where="here"
            )


def test_a_manifest_is_read_out_of_its_envelope_which_is_written_again() -> None:
    manifest = make_manifest()
    envelope = Envelope(manifest.to_json(), (Signature("k", bytes(64)),))
    read = Manifest.from_json(envelope.to_json(), where="here")
    assert read == manifest
    assert read.envelope == envelope
    assert read.document() == envelope.to_json()
    assert Manifest.from_json(manifest.to_json(), where="here").document() == manifest.document()


def test_a_signed_document_of_another_type_is_no_manifest() -> None:
    envelope = Envelope(make_manifest().to_json(), (), MANIFEST_TYPE + "2")
    with pytest.raises(ManifestError, match=r"expected 'application/vnd\.aotcache"):
        Manifest.from_json(envelope.to_json(), where="here")


def test_an_envelope_around_an_envelope_is_no_manifest() -> None:
    inner = Envelope(make_manifest().to_json(), ()).to_json()
    with pytest.raises(ManifestError):
        Manifest.from_json(Envelope(inner, ()).to_json(), where="here")
