"""The DSSE envelope: a document and the signatures over its bytes. Pure; verifying is `trust.py`'s.

Dead Simple Signing Envelope, version 1: what is signed is not the document alone but its
"pre-authentication encoding" with the type, so that a signature for a document of one type
is none for a document of another.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass

from pydantic import ConfigDict, TypeAdapter, with_config

from aotcache.errors import ManifestError

MANIFEST_TYPE = "application/vnd.aotcache.manifest+json"

_MOST = 32
"""Signatures of one document: each costs whoever verifies it some time."""

_STRICT = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, slots=True)
class Signature:
    """One signature.

    Attributes:
        keyid: Fingerprint of the key that is said to have made it; a hint, never a proof.
        sig: The signature's bytes.
    """

    keyid: str
    sig: bytes


@dataclass(frozen=True, slots=True)
class Envelope:
    """A signed document.

    Attributes:
        payload: The document's bytes, exactly as they were signed.
        signatures: None at all for a document that came from elsewhere unsigned.
        kind: The document's media type.
    """

    payload: bytes
    signatures: tuple[Signature, ...]
    kind: str = MANIFEST_TYPE

    @property
    def signed_bytes(self) -> bytes:
        """What the signatures are over: DSSE's PAE(type, payload)."""
        kind = self.kind.encode()
        return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(self.payload), self.payload)

    def to_json(self) -> bytes:
        """Canonical JSON: sorted keys, no spaces."""
        return json.dumps(
            {
                "payloadType": self.kind,
                "payload": base64.b64encode(self.payload).decode(),
                "signatures": [
                    {"keyid": s.keyid, "sig": base64.b64encode(s.sig).decode()} for s in self.signatures
                ],
            },
            sort_keys=True,
            separators=(",", ":"),
        ).encode()

    @classmethod
    def from_json(cls, data: bytes, *, where: str) -> Envelope:
        """Read an envelope; nothing is verified.

        Args:
            data: The bytes.
            where: What to call them in an error.

        Raises:
            ManifestError: for anything that is not an envelope.
        """
        try:
            found = _DOCUMENT.validate_json(data)
            if len(found.signatures) > _MOST:
                raise ValueError(f"{len(found.signatures)} signatures, expected at most {_MOST}")
            return cls(
                _bytes(found.payload),
                tuple(Signature(s.keyid, _bytes(s.sig)) for s in found.signatures),
                found.payloadType,
            )
        except ValueError as error:
            raise ManifestError(f"{where}: not a signed document: {error}") from error


def _bytes(text: str) -> bytes:
    """What a base64 text stands for; one text for one value, so that no bit of it is without meaning."""
    data = base64.b64decode(text, validate=True)
    if base64.b64encode(data).decode() != text:
        raise ValueError("a base64 text with bits beyond its last byte")
    return data


@with_config(_STRICT)
@dataclass(frozen=True, slots=True)
class _SignatureDocument:
    keyid: str
    sig: str


@with_config(_STRICT)
@dataclass(frozen=True, slots=True)
class _Document:
    payloadType: str
    payload: str
    signatures: list[_SignatureDocument]


_DOCUMENT = TypeAdapter(_Document)
