"""The kinds of corruption: what each of them does to a stored entry."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import random
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aotcache.envelope import Envelope, Signature
from aotcache.manifest import Manifest
from aotcache.store import layout
from aotcache.trust import SigningKey, sign
from aotcache.types import Digest
from tests.faults import mutations


@dataclass(frozen=True)
class Entry:
    """An entry as it was published.

    Attributes:
        manifest: Bare.
        archive: Its bytes.
    """

    manifest: Manifest
    archive: bytes

    @property
    def ref(self) -> str:
        """Its ref's path in a store."""
        return layout.ref(self.manifest.key, str(self.manifest.variant))

    @property
    def blob(self) -> str:
        """Its archive's path in a store."""
        return layout.blob(self.manifest.digest)


@dataclass
class Scene:
    """One round, while it is damaged.

    Attributes:
        chance: The round's random numbers.
        victim, other: What is damaged, and the other entry.
        signed: Whether documents are in envelopes, in a store of copies; else bare, in an own store.
        key: The key that is trusted.
        files: The store's files by path; None for one that is removed. Changing it is the damage.
        acts: What is done to the store's folder once the files lie there.
        unpacked: What is done to the victim's unpacked folder, which must be there then.
        allowed: Payloads that may be opened, beside those that were published.
        hashed: The victim's archive, where the damage came before its digest was taken.
    """

    chance: random.Random
    victim: Entry
    other: Entry
    signed: bool
    key: SigningKey
    files: dict[str, bytes | None]
    acts: list[Callable[[Path], None]] = field(default_factory=list)
    unpacked: Callable[[Path], None] | None = None
    allowed: set[bytes] = field(default_factory=set)
    hashed: bytes | None = None

    def document(self, manifest: Manifest, key: SigningKey | None = None) -> bytes:
        """What a store of this kind holds for a manifest."""
        return (sign(manifest, key or self.key) if self.signed else manifest).document()

    @property
    def ref(self) -> bytes:
        """The victim's document."""
        data = self.files[self.victim.ref]
        assert data is not None
        return data

    @ref.setter
    def ref(self, data: bytes) -> None:
        self.files[self.victim.ref] = data

    def envelope(self) -> dict[str, Any]:
        """The victim's document as JSON."""
        found: dict[str, Any] = json.loads(self.ref)
        return found


Kind = Callable[[Scene], None]
KINDS: dict[str, Kind] = {}

CONTROL = "nothing"
"""The kind that does no harm."""


def _kind(name: str) -> Callable[[Kind], Kind]:
    def add(kind: Kind) -> Kind:
        KINDS[name] = kind
        return kind

    return add


def _archive_damage(damage: mutations.Damage) -> Kind:
    def kind(scene: Scene) -> None:
        scene.files[scene.victim.blob] = damage(scene.chance, scene.victim.archive)

    return kind


def _signed_archive_damage(damage: mutations.Damage) -> Kind:
    """Damage from before the archive was hashed: its digest is right, so its members must tell."""

    def kind(scene: Scene) -> None:
        data = damage(scene.chance, scene.victim.archive)
        made = replace(scene.victim.manifest, digest=Digest(hashlib.sha256(data).hexdigest()), size=len(data))
        scene.files[layout.blob(made.digest)] = data
        scene.ref = scene.document(made)
        scene.allowed.add(made.to_json())
        scene.hashed = data

    return kind


def _payload_damage(damage: mutations.Damage) -> Kind:
    """The manifest itself, under a signature that was made before."""

    def kind(scene: Scene) -> None:
        if not scene.signed:
            scene.ref = damage(scene.chance, scene.ref)
            return
        document = scene.envelope()
        payload = damage(scene.chance, base64.b64decode(document["payload"]))
        scene.ref = json.dumps({**document, "payload": base64.b64encode(payload).decode()}).encode()

    return kind


def _document_damage(damage: mutations.Damage) -> Kind:
    def kind(scene: Scene) -> None:
        scene.ref = damage(scene.chance, scene.ref)

    return kind


def _name(damage: mutations.Damage) -> str:
    return damage.__name__.replace("_", " ")


for _damage in mutations.BYTES:
    KINDS[f"archive: {_name(_damage)}"] = _archive_damage(_damage)
    KINDS[f"archive, hashed afterwards: {_name(_damage)}"] = _signed_archive_damage(_damage)
    KINDS[f"manifest: {_name(_damage)}"] = _payload_damage(_damage)
    KINDS[f"envelope: {_name(_damage)}"] = _document_damage(_damage)
for _damage in mutations.FIELDS:
    KINDS[f"manifest: {_name(_damage)}"] = _payload_damage(_damage)
    KINDS[f"envelope: {_name(_damage)}"] = _document_damage(_damage)


@_kind("archive: another entry's")
def _swapped_archive(scene: Scene) -> None:
    scene.files[scene.victim.blob] = scene.other.archive


@_kind("archive: empty")
def _empty_archive(scene: Scene) -> None:
    scene.files[scene.victim.blob] = b""


@_kind("archive, hashed afterwards: table of contents")
def _table(scene: Scene) -> None:
    def damage(chance: random.Random, data: bytes) -> bytes:
        start = data.index(b"PK\1\2")
        return data[:start] + mutations.flip_bits(chance, data[start:])

    _signed_archive_damage(damage)(scene)


@_kind("archive, hashed afterwards: members")
def _members(scene: Scene) -> None:
    """Members are renamed, doubled, missing, links, encrypted by their flag, or have other bytes."""

    def damage(chance: random.Random, data: bytes) -> bytes:
        made = io.BytesIO()
        names = zipfile.ZipFile(io.BytesIO(data)).namelist()
        chosen, how = chance.choice(names), chance.randrange(7)
        with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(made, "w") as sink:
            for name in names:
                info, content = zipfile.ZipInfo(name), source.read(name)
                if name == chosen and how == 0:
                    continue
                if name == chosen and how == 1:
                    info = zipfile.ZipInfo(f"../{name}")
                if name == chosen and how == 2:
                    info.external_attr = 0o120777 << 16
                if name == chosen and how == 3:
                    content = mutations.flip_bits(chance, content) if content else b"x"
                if name == chosen and how == 4:
                    content += b"\0"
                sink.writestr(info, content, chance.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]))
                if name == chosen and how == 5:
                    sink.writestr(f"{name}.so", content)
                if name == chosen and how == 6:
                    info = zipfile.ZipInfo("x" * len(name))
                    sink.writestr(info, b"other")
        doubled = "x" * len(chosen)
        return made.getvalue().replace(doubled.encode(), chosen.encode()) if how == 6 else made.getvalue()

    _signed_archive_damage(damage)(scene)


@_kind("manifest: another entry's bytes and members")
def _crossed(scene: Scene) -> None:
    """Both are whole and trusted, but one manifest leads to the other's archive, under its own signature."""
    other = scene.other.manifest
    made = replace(
        scene.victim.manifest,
        **scene.chance.choice(
            [
                {"digest": other.digest, "size": other.size},
                {"members": other.members},
                {"digest": other.digest, "size": other.size, "members": other.members},
            ]
        ),
    )
    scene.ref = _kept_signature(scene, made.to_json())


def _kept_signature(scene: Scene, payload: bytes) -> bytes:
    """A payload under what was written for another: the signature, or the digest at its end."""
    if scene.signed:
        document = scene.envelope()
        return json.dumps({**document, "payload": base64.b64encode(payload).decode()}).encode()
    return payload[:-1] + scene.ref[scene.ref.rindex(b',"unsigned_sha256":') :]


@_kind("envelope: signed by a stranger")
def _stranger(scene: Scene) -> None:
    made = scene.victim.manifest
    if scene.chance.random() < 0.5:
        made = replace(made, region="another")
    scene.ref = sign(made, SigningKey.generate()).document()


@_kind("envelope: a stranger under the trusted key's name")
def _forged(scene: Scene) -> None:
    envelope = sign(scene.victim.manifest, SigningKey.generate()).envelope
    assert envelope is not None
    name = scene.key.public.fingerprint
    scene.ref = replace(envelope, signatures=(Signature(name, envelope.signatures[0].sig),)).to_json()


@_kind("envelope: a stranger's signature beside the trusted one")
def _beside(scene: Scene) -> None:
    signed = sign(sign(scene.victim.manifest, scene.key), SigningKey.generate())
    envelope = signed.envelope
    assert envelope is not None
    signatures = list(envelope.signatures)
    scene.chance.shuffle(signatures)
    scene.ref = replace(envelope, signatures=tuple(signatures)).to_json()


@_kind("envelope: without signatures")
def _unsigned(scene: Scene) -> None:
    scene.ref = Envelope(scene.victim.manifest.to_json(), ()).to_json()


@_kind("envelope: signed as something else")
def _of_another_type(scene: Scene) -> None:
    kind = scene.chance.choice(["text/plain", "application/vnd.aotcache.recall+json", ""])
    bare = Envelope(scene.victim.manifest.to_json(), (), kind)
    made = Envelope(
        bare.payload, (Signature(scene.key.public.fingerprint, scene.key.sign(bare.signed_bytes)),)
    )
    scene.ref = (made if scene.chance.random() < 0.5 else replace(made, kind=kind)).to_json()


@_kind("envelope: the signature's own bytes")
def _signature(scene: Scene) -> None:
    envelope = sign(scene.victim.manifest, scene.key).envelope
    assert envelope is not None
    (made,) = envelope.signatures
    sig = scene.chance.choice(mutations.BYTES)(scene.chance, made.sig)
    scene.ref = replace(envelope, signatures=(Signature(made.keyid, sig),)).to_json()


@_kind("key: validly signed for another key")
def _rekeyed(scene: Scene) -> None:
    """The other entry's manifest, which says this one's key, is signed so, and lies under it."""
    scene.ref = sign(replace(scene.other.manifest, key=scene.victim.manifest.key), scene.key).document()


@_kind("key: another entry's document")
def _other_document(scene: Scene) -> None:
    other = scene.files[scene.other.ref]
    if scene.chance.random() < 0.5:
        scene.files[scene.other.ref] = scene.ref
    assert other is not None
    scene.ref = other


@_kind("ref: under another name")
def _moved(scene: Scene) -> None:
    key = scene.victim.manifest.key
    folder, name = os.path.split(scene.victim.ref)
    wrong = scene.chance.choice(
        [
            f"refs/{key[:2]}/{scene.other.manifest.key}/{name}",
            f"{folder}/cpu-x86_64-none+{name.partition('+')[2]}",
            f"{folder}/{name}.json",
            f"{folder}/.json",
            f"{folder}/x/{name}",
            f"refs/{name}",
        ]
    )
    scene.files[wrong] = scene.ref
    if scene.chance.random() < 0.5:
        scene.files[scene.victim.ref] = None


@_kind("ref: a folder, a link or nothing in its place")
def _no_file(scene: Scene) -> None:
    which = scene.chance.choice([scene.victim.ref, scene.victim.blob])
    scene.files[which] = None
    how = scene.chance.randrange(5)
    target = scene.chance.choice(
        ["/dev/null", "/nowhere", ".", f"../{'../' * 3}{scene.other.ref}", f"../../{scene.other.blob}"]
    )

    def act(root: Path) -> None:
        path = root / which
        if how == 0:
            path.mkdir()
        elif how == 1:
            path.symlink_to(target)
        elif how == 2:
            path.symlink_to(path.name)
        elif how == 3 and not any(path.parent.iterdir()):  # one archive in 256 lies beside the other
            path.parent.rmdir()
            path.parent.symlink_to(scene.chance.choice([".", "..", "/tmp"]))

    scene.acts.append(act)


@_kind("ref: vast")
def _vast(scene: Scene) -> None:
    """A sparse file that says it has gibibytes."""
    which = scene.chance.choice([scene.victim.ref, f"{os.path.dirname(scene.victim.ref)}/other.json"])
    scene.files[which] = b"{"
    scene.acts.append(lambda root: os.truncate(root / which, 8 << 30))


@_kind("ref: nested without end")
def _deep(scene: Scene) -> None:
    depth = scene.chance.choice([500, 20_000])
    opening, closing = scene.chance.choice([(b"[", b"]"), (b'{"payloadType":', b"}"), (b'{"a":', b"}")])
    scene.ref = opening * depth + b"1" + closing * depth


@_kind("unpacked: changed since")
def _unpacked(scene: Scene) -> None:
    def act(folder: Path) -> None:
        files = [path for path in folder.rglob("*") if path.is_file()]
        path = scene.chance.choice(files)
        data = path.read_bytes()
        path.unlink()
        how = scene.chance.randrange(4)
        if how == 0:
            path.write_bytes(scene.chance.choice(mutations.BYTES)(scene.chance, data))
        elif how == 1:
            elsewhere = folder.parents[1] / "elsewhere"
            elsewhere.write_bytes(data)
            path.symlink_to(elsewhere)
        elif how == 2:
            path.mkdir()

    scene.unpacked = act


@_kind(CONTROL)
def _nothing(scene: Scene) -> None:
    """The control: both are opened, or the other kinds show nothing."""
