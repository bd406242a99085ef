"""Whose artifacts are opened: signing keys, trusted keys, and the check of a manifest.

Opening an artifact runs its code, so the question is never only whether bytes are whole, but
who made them. Keys are Ed25519. A manifest says which archive and members it is for, by digest,
and is what is signed; so one signature covers everything that is ever opened.

Two ways lead to trust, and no other: a valid signature of a trusted key, or no signature
at all on what this user built on this host into a store of their own (`Store.own`).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import shlex
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, TypeAdapter, with_config

from aotcache.config import Settings
from aotcache.drafts import clear, draft, name_new
from aotcache.envelope import Envelope, Signature
from aotcache.errors import ConfigError, ManifestError
from aotcache.manifest import Manifest
from aotcache.ownership import private_problem
from aotcache.types import printable

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_PREFIX = "ed25519:"
_SHOWN = 8
"""How many of an envelope's keys a message names."""
_LONGEST = 80
"""Characters of a key's name that a message shows."""


@dataclass(frozen=True, slots=True)
class PublicKey:
    """An Ed25519 public key.

    Attributes:
        raw: Its 32 bytes.
    """

    raw: bytes

    @property
    def fingerprint(self) -> str:
        """`ed25519:` and the hex sha256 of the raw key. Names the key in envelopes and commands."""
        return _PREFIX + hashlib.sha256(self.raw).hexdigest()

    def to_text(self) -> str:
        """Base64 of the raw key."""
        return base64.b64encode(self.raw).decode()

    @classmethod
    def from_text(cls, text: str) -> PublicKey:
        """Read what `to_text` writes. Raises ConfigError."""
        try:
            raw = base64.b64decode(text.strip(), validate=True)
        except (binascii.Error, ValueError):
            raw = b""
        if len(raw) != 32:
            # What was given is not shown: it may be the other half of a key.
            raise ConfigError(
                f"not a public key: expected the base64 text of 32 bytes, which aotcache keygen prints, found "
                f"{len(text.strip())} characters that are none"
            )
        return cls(raw)

    def verifies(self, data: bytes, signature: bytes) -> bool:
        """Whether this key's owner signed `data`."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        try:
            Ed25519PublicKey.from_public_bytes(self.raw).verify(signature, data)
        except (InvalidSignature, ValueError):
            return False
        return True


class SigningKey:
    """An Ed25519 private key. Its text never appears in a `repr`."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.public = PublicKey(private.public_key().public_bytes_raw())

    def __repr__(self) -> str:
        return f"SigningKey({self.public.fingerprint})"

    @classmethod
    def generate(cls) -> SigningKey:
        """A new key."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: Path) -> SigningKey:
        """Read a key file.

        Raises:
            ConfigError: it is not there, cannot be read, is no such key, or others may read it.
        """
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            mode, problem = path.stat().st_mode, private_problem(path)
            data = path.read_bytes()
        except FileNotFoundError:
            raise ConfigError(
                f"there is no signing key at {path}; what leaves this host is signed: make one with aotcache keygen",
                path=str(path),
            ) from None
        except OSError as error:
            raise ConfigError(
                f"cannot read the signing key {path}: {error.strerror}", path=str(path)
            ) from error
        if problem is not None:
            raise ConfigError(f"the signing key is not this user's alone: {problem}", path=str(path))
        if mode & 0o077:
            raise ConfigError(
                f"the signing key {path} has mode {mode & 0o777:04o}, expected 0600; others may have read it: make a "
                "new one, or chmod 600 it if you are sure",
                path=str(path),
            )
        try:
            private = load_pem_private_key(data, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ConfigError(
                f"{path} is not a PEM private key without a password", path=str(path)
            ) from error
        if not isinstance(private, Ed25519PrivateKey):
            raise ConfigError(f"{path} is a private key of another kind than Ed25519", path=str(path))
        return cls(private)

    def save(self, path: Path) -> None:
        """Write the key, readable by this user alone; never over a file that is there.

        Raises:
            ConfigError: there is one, or it cannot be written.
        """
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

        data = self._private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        write_private(path, data)

    def sign(self, data: bytes) -> bytes:
        """The signature over `data`, 64 bytes."""
        return self._private.sign(data)


def make_signing_key(path: Path, trusted: TrustedKeys, name: str) -> SigningKey:
    """A new signing key, which is trusted here: both, or neither.

    Killed in between, the next one goes on with the same key: one that is there and not trusted
    would have everything refused that it signs.

    Args:
        path: Where the key is to be; never over a file that is there.
        trusted: Where it is trusted.
        name: What to call it there.

    Raises:
        ConfigError: there is a key already, or it cannot be written.
    """
    pending = unfinished_key(path)
    if os.path.lexists(path):
        pending.unlink(missing_ok=True)
        raise ConfigError(
            f"{path} is there already, and is left as it is; aotcache keygen --rotate replaces it step by step, and "
            "one that has leaked is deleted by hand",
            path=str(path),
        )
    if os.path.exists(pending):
        clear(pending)
        key = SigningKey.load(pending)
    else:
        key = SigningKey.generate()
        key.save(pending)
    trusted.add(key.public, name)
    try:
        name_new(pending, path)
        pending.unlink(missing_ok=True)
    except FileExistsError:
        raise ConfigError(f"{path} is there already, and is left as it is", path=str(path)) from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", path=str(path)) from error
    return key


def unfinished_key(path: Path) -> Path:
    """Where the key lies of a `make_signing_key` that was killed."""
    return path.with_name(path.name + ".new")


def write_private(path: Path, data: bytes) -> None:
    """Write a secret for this user alone, whole or not at all, never over a file that is there.

    Raises:
        ConfigError: there is one, or it cannot be written.
    """
    try:
        _make_private(path.parent)
        with draft(path, 0o600) as (place, file):
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            name_new(place, path)
    except FileExistsError:
        raise ConfigError(f"{path} is there already, and is left as it is", path=str(path)) from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", path=str(path)) from error


def _make_private(folder: Path) -> None:
    """A folder, and those above it that are missing, for this user alone; `mkdir` gives these the umask's mode."""
    if not folder.is_dir():
        _make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


@dataclass(frozen=True, slots=True)
class TrustedKey:
    """A key whose artifacts are opened here.

    Attributes:
        name: For people.
        public: The key, as `PublicKey.to_text` writes it.
        added: When, in seconds since the epoch.
        origin: URL of the service that showed it, or None.
    """

    name: str
    public: str
    added: float
    origin: str | None

    @property
    def key(self) -> PublicKey:
        """The key itself."""
        return PublicKey.from_text(self.public)


class TrustedKeys:
    """The keys that this user trusts: one file each in a folder. Reads it anew at every question.

    Args:
        folder: Need not be there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def list(self) -> list[TrustedKey]:
        """All of them, in the order of names.

        Raises:
            ConfigError: a file there is none, or another user could have put it there.
        """
        found = []
        for path in sorted(self._folder.glob("*.json")):
            try:
                problem = private_problem(self._folder) or private_problem(path)
                key = _TRUSTED.validate_json(path.read_bytes())
                if path.name != _file_name(key.key.fingerprint):
                    problem = "it is filed under another key's name"
            except FileNotFoundError:
                continue  # somebody stopped trusting it meanwhile
            except (OSError, ValueError, ConfigError) as error:
                problem = str(error)
            if problem is not None:
                raise ConfigError(
                    f"{path} is not a trusted key: {problem}; remove it, then aotcache trust add",
                    path=str(path),
                )
            found.append(key)
        return sorted(found, key=lambda key: (key.name, key.public))

    def add(self, public: PublicKey, name: str, origin: str | None = None) -> bool:
        """Trust a key; whether it was not trusted before. Raises ConfigError."""
        path = self._folder / _file_name(public.fingerprint)
        if os.path.exists(path):
            clear(path)
            return False
        trusted = TrustedKey(name, public.to_text(), time.time(), origin)
        write_private(path, json.dumps(asdict(trusted), indent=2).encode())
        return True

    def remove(self, which: str) -> TrustedKey:
        """Stop trusting the key with this fingerprint, or the only one with this name. Raises ConfigError."""
        found = [key for key in self.list() if which in (key.key.fingerprint, key.name)]
        if len(found) != 1:
            raise ConfigError(
                f"{len(found)} trusted keys are called {which!r}, expected one; aotcache trust list shows them"
            )
        (self._folder / _file_name(found[0].key.fingerprint)).unlink(missing_ok=True)
        return found[0]

    def signer(self, manifest: Manifest) -> TrustedKey | None:
        """The trusted key with a valid signature over exactly this manifest, or None."""
        envelope = manifest.envelope
        if envelope is None or not _says(envelope, manifest):
            return None
        return next((key for key in self.list() if signed_by(envelope, key.key)), None)

    def problem(self, manifest: Manifest) -> str | None:
        """Why no trusted key vouches for a manifest, in one sentence; None if one does."""
        envelope = manifest.envelope
        if envelope is None or not envelope.signatures:
            return "nobody signed it, and it was not built here"
        if not _says(envelope, manifest):
            return "what was signed is another manifest than the one in use"
        trusted = self.list()
        if any(signed_by(envelope, key.key) for key in trusted):
            return None
        named = {key.key.fingerprint for key in trusted}
        claimed = claimed_keys(manifest)
        forged = [keyid for keyid in claimed if keyid in named]
        if forged:
            return f"its signature is wrong: it names the trusted key {forged[0]}, which did not sign this"
        return f"no trusted key signed it; it says that it is signed by {', '.join(claimed)}"


def claimed_keys(manifest: Manifest) -> list[str]:
    """The keys that a manifest says it is signed by. Says nothing about whether it is."""
    signatures = () if manifest.envelope is None else manifest.envelope.signatures
    return [printable(signature.keyid, _LONGEST) for signature in signatures[:_SHOWN]]


def signed_by(envelope: Envelope, key: PublicKey) -> bool:
    """Whether the envelope has a signature under this key's name that is this key's."""
    return any(
        signature.keyid == key.fingerprint and key.verifies(envelope.signed_bytes, signature.sig)
        for signature in envelope.signatures
    )


def sign(manifest: Manifest, key: SigningKey) -> Manifest:
    """The manifest in an envelope with this key's signature, beside those that it has already."""
    old = manifest.envelope
    if old is not None and not _says(old, manifest):
        raise ManifestError(f"manifest {manifest.key} is in an envelope around another one; it is not signed")
    payload = manifest.to_json() if old is None else old.payload
    bare = Envelope(payload, ())
    new = Signature(key.public.fingerprint, key.sign(bare.signed_bytes))
    kept: Iterable[Signature] = () if old is None else (s for s in old.signatures if s.keyid != new.keyid)
    return manifest.with_envelope(Envelope(payload, (*kept, new)))


@dataclass(frozen=True, slots=True)
class Standing:
    """Who vouches for an artifact.

    Attributes:
        signed_by: Fingerprints of the keys that it says it is signed by.
        signer: The trusted key that did sign it; None if none did.
        problem: Why it must not be opened; None if it may.
    """

    signed_by: tuple[str, ...]
    signer: TrustedKey | None
    problem: str | None

    def __str__(self) -> str:
        if self.signer is not None:
            return f"signed by {self.signer.name} ({self.signer.key.fingerprint}), trusted"
        if self.problem is None:
            return "not signed; it lies in a store of this user's own"
        return f"not trusted: {self.problem}"

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "signed_by": list(self.signed_by),
            "signer": None if self.signer is None else self.signer.name,
            "trusted": self.problem is None,
            "problem": self.problem,
        }


def standing(manifest: Manifest, *, own: bool, config: Settings) -> Standing:
    """Who vouches for a manifest, whatever `AOTCACHE_TRUST_UNSIGNED` lets through.

    Args:
        manifest: As it was read, its envelope with it.
        own: Whether it lies in a store of this user's on this host, see `Store.own`.
        config: Where trusted keys are.

    Raises:
        ConfigError: a trusted key's file cannot be understood.
    """
    trusted = trusted_keys(config)
    if own and manifest.envelope is None:
        return Standing((), None, None)
    claimed = tuple(claimed_keys(manifest))
    signer = trusted.signer(manifest)
    return Standing(claimed, signer, None if signer is not None else trusted.problem(manifest))


def trust_problem(manifest: Manifest, *, own: bool, config: Settings, url: str | None = None) -> str | None:
    """Why an artifact must not be opened, and what to do; None if it may, as far as trust goes.

    Args:
        manifest: As it was read, its envelope with it.
        own: Whether it lies in a store of this user's on this host, see `Store.own`.
        config: Where trusted keys are, and whether unsigned artifacts are let through.
        url: The store's address, for the command that the text names.

    Raises:
        ConfigError: a trusted key's file cannot be understood.
    """
    if own and manifest.envelope is None:
        return None
    problem = trusted_keys(config).problem(manifest)
    if problem is None or config.trust_unsigned:
        return None
    claimed = claimed_keys(manifest)
    if not claimed:
        return (
            f"{problem}; have whoever built it sign it (aotcache keygen, then publish it again), or set "
            "AOTCACHE_TRUST_UNSIGNED=1 if you trust everyone who can write there"
        )
    return f"{problem}; if you know whose key that is: {trust_command(claimed[0], url)}"


def trust_command(fingerprint: str, url: str | None) -> str:
    """The command that makes a key trusted: a service shows its key itself, other stores have none to show."""
    of_service = url is not None and url.startswith(("http://", "https://"))
    # Quoted: the fingerprint is whatever an artifact says, and the line is there to be copied into a shell.
    return shlex.join(
        [
            "aotcache",
            "trust",
            "add",
            url if url and of_service else "PUBLIC_KEY",
            "--fingerprint",
            fingerprint,
        ]
    )


def signing_key_path(config: Settings) -> Path:
    """Where this user's signing key is, if there is one."""
    return config.config_home / "signing.pem"


def trusted_keys(config: Settings) -> TrustedKeys:
    """The keys that this user trusts."""
    return TrustedKeys(config.config_home / "trusted")


def _says(envelope: Envelope, manifest: Manifest) -> bool:
    """Whether the signed payload, read anew and its key recomputed, is the manifest in use."""
    try:
        # Compared as text: to Python 1, 1.0 and True are one value, and a NaN is not even itself.
        return Manifest.from_json(envelope.payload, where="signed payload").to_json() == manifest.to_json()
    except ManifestError:
        return False


def _file_name(fingerprint: str) -> str:
    return fingerprint.removeprefix(_PREFIX) + ".json"


_TRUSTED = TypeAdapter(with_config(ConfigDict(extra="forbid"))(TrustedKey))

__all__ = [
    "PublicKey",
    "SigningKey",
    "Standing",
    "TrustedKey",
    "TrustedKeys",
    "claimed_keys",
    "make_signing_key",
    "sign",
    "signed_by",
    "signing_key_path",
    "standing",
    "trust_command",
    "trust_problem",
    "trusted_keys",
    "unfinished_key",
    "write_private",
]
