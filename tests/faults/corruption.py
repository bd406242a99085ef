"""Random corruptions of stored entries: what is opened afterwards is what was published, or nothing is.

`run` puts two real entries into a store on disk, damages one of them in a way that is drawn anew each
round, and asks for both as a worker does. An audit hook sees every library that the process opens.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import random
import shutil
import sys
import tempfile
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

from aotcache import archive as archives
from aotcache import host
from aotcache.config import settings
from aotcache.envelope import Envelope, Signature
from aotcache.errors import AotcacheError
from aotcache.manifest import Manifest
from aotcache.runtime import registry
from aotcache.runtime.resolve import Resolved, Resolver
from aotcache.runtime.stats import Stats
from aotcache.store import open_store
from aotcache.store.layout import ORIGIN
from aotcache.trust import SigningKey, sign, standing, trusted_keys
from aotcache.types import Digest
from tests.faults import mutations
from tests.runtime import artifacts

OUTCOMES = ("opened", "missed", "refused", "wrong", "unhandled")
"""Opened with the published payload and member bytes; a miss with its reason; a typed error; anything
else that was opened; an error that is no AotcacheError. The last two must be 0."""

_AFRESH = 0.3
"""Share of the rounds in which nothing is unpacked yet."""
_BOTH = 0.1
"""Share of the rounds in which the other entry is asked for as well, where it was left alone."""

_LOOKED = 0.25
"""Share of the rounds in which commands look at the store."""

_dlopened: list[str] = []
_watching = False


def _watch() -> None:
    """See every library that this process opens from now on; hooks of this kind stay for good."""
    global _watching
    if _watching:
        return
    _watching = True

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "ctypes.dlopen":
            _dlopened.append(str(arguments[0]))

    sys.addaudithook(hook)


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
        key = self.manifest.key
        return f"refs/{key[:2]}/{key}/{self.manifest.variant}.json"

    @property
    def blob(self) -> str:
        """Its archive's path in a store."""
        return f"blobs/{self.manifest.digest[:2]}/{self.manifest.digest}"


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
        scene.files[f"blobs/{made.digest[:2]}/{made.digest}"] = data
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
        elif how == 3:
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


@_kind("nothing")
def _nothing(scene: Scene) -> None:
    """The control: both are opened, or the other kinds show nothing."""


@dataclass
class Counts:
    """What a run found.

    Attributes:
        kinds: For each kind of corruption how often it had each of `OUTCOMES`, of the entry that it hit.
        problems: What must not be, a text for each, with the round's number to make it again.
    """

    kinds: dict[str, Counter[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        """How many corruptions were made."""
        return sum(sum(found.values()) for found in self.kinds.values())

    def total(self, outcome: str) -> int:
        """How often there was an outcome, whatever the kind."""
        return sum(found[outcome] for found in self.kinds.values())

    def table(self) -> list[tuple[str, ...]]:
        """A line for each kind and one for all: name, rounds, outcomes."""
        lines = [
            (name, str(sum(found.values())), *(str(found[outcome]) for outcome in OUTCOMES))
            for name, found in sorted(self.kinds.items())
        ]
        return [*lines, ("all", str(self.rounds), *(str(self.total(outcome)) for outcome in OUTCOMES))]


class _Folder:
    """Makes folders, as `tests.runtime.artifacts` wants one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def mktemp(self, name: str) -> Path:
        path = self._folder / name
        path.mkdir(parents=True)
        return path


def entries(made: artifacts.Artifact) -> tuple[Entry, Entry]:
    """Two entries that share nothing but the code: the artifact, and its like with longer libraries."""
    first, second = made.renamed("corruption"), made.renamed("corruption, the other")
    data, packed, members = made.archive.read_bytes(), io.BytesIO(), dict(first.members)
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(packed, "w") as sink:
        for name in source.namelist():
            content = source.read(name) + (b"\0other" if name.endswith(".so") else b"")
            members[name] = Digest(hashlib.sha256(content).hexdigest())
            sink.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    other = packed.getvalue()
    digest = Digest(hashlib.sha256(other).hexdigest())
    second = replace(second, digest=digest, size=len(other), members=members)
    return Entry(first, data), Entry(second, other)


class _World:
    """The stores, the home and what is to be found in them."""

    def __init__(self, folder: Path, made: artifacts.Artifact) -> None:
        self.folder, self.home = folder, folder / "home"
        self.key = SigningKey.generate()
        trusted_keys(settings()).add(self.key.public, "builder")
        self.entries = entries(made)
        self.facts = host.host_facts()

    def round(self, number: int, seed: int, counts: Counts) -> None:
        chance = random.Random(f"{seed} {number}")
        name = chance.choice(list(KINDS))
        victim, other = self.entries if chance.random() < 0.5 else self.entries[::-1]
        signed = chance.random() < 0.6
        scene = Scene(chance, victim, other, signed, self.key, {})
        for entry in self.entries:
            scene.files[entry.ref] = scene.document(entry.manifest)
            scene.files[entry.blob] = entry.archive
        before = dict(scene.files)
        KINDS[name](scene)
        said: list[str] = []
        found = self._found(scene, before, said, chance)
        counts.kinds.setdefault(name, Counter())[found] += 1
        where = f"round {number} of seed {seed}, {name}, {'signed' if signed else 'own'}"
        counts.problems += [f"{where}: {problem}" for problem in said]

    def _found(
        self, scene: Scene, before: dict[str, bytes | None], said: list[str], chance: random.Random
    ) -> str:
        root = self.folder / "store"
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(mode=0o700)
        if scene.signed:
            (root / ORIGIN).write_text("https://cache.example.org\n")
        self._forget(afresh=chance.random() < _AFRESH and scene.unpacked is None)
        if scene.unpacked is not None:
            folder = self.home / "unpacked" / scene.victim.manifest.digest
            if not folder.exists():
                _lay(root, before)
                self._ask(scene, root, scene.victim, said)
                self._forget()
            if folder.exists():
                scene.unpacked(folder)
        _lay(root, {**before, **scene.files})
        for act in scene.acts:
            act(root)
        found = self._ask(scene, root, scene.victim, said)
        touched = any(scene.files.get(p) != before[p] for p in (scene.other.ref, scene.other.blob))
        if touched or chance.random() < _BOTH:
            self._forget()
            answer = self._ask(scene, root, scene.other, said)
            if not touched and answer != "opened":
                said.append(f"the entry that was left alone was {answer}")
        if not scene.acts and chance.random() < _LOOKED:
            self._look(root, said)
        return found

    def _forget(self, *, afresh: bool = False) -> None:
        """What another process would not know."""
        registry._opened.clear()
        registry._libraries.clear()
        if afresh:
            shutil.rmtree(self.home / "unpacked", ignore_errors=True)

    def _ask(self, scene: Scene, root: Path, entry: Entry, said: list[str]) -> str:
        """What a worker gets for the entry's key, and whether it is right."""
        _dlopened.clear()
        allowed = {entry.manifest.to_json(), *scene.allowed}
        try:
            resolver = Resolver(open_store(root), self.home, self.facts, None, Stats())
            answer = resolver.by_key(entry.manifest.key)
        except AotcacheError:
            found = "refused"
        except Exception:
            said.append(f"unhandled: {traceback.format_exc(limit=-4)}")
            found = "unhandled"
        else:
            found = "opened" if isinstance(answer, Resolved) else "missed"
            if isinstance(answer, Resolved) and answer.executable.manifest.to_json() not in allowed:
                said.append("wrong: another payload was opened")
                found = "wrong"
        wrong = [path for path in _dlopened if not self._is_right(Path(path), entry)]
        if wrong:
            said.append(f"wrong: {wrong[0]} was opened")
            return "wrong"
        if found in ("missed", "refused") and _dlopened:
            said.append(f"wrong: {found}, but {_dlopened[0]} was opened")
            return "wrong"
        if found == "opened" and entry is scene.victim and not _whole(scene):
            said.append("wrong: an archive with other members was opened")
            return "wrong"
        if found == "opened" and not _dlopened:
            said.append("wrong: the audit hook saw nothing of what was opened")
            return "wrong"
        return found

    def _is_right(self, path: Path, entry: Entry) -> bool:
        """Whether a library that was opened is one of the entry's, byte for byte."""
        if not path.is_relative_to(self.home / "unpacked"):
            return False
        name = path.relative_to(self.home / "unpacked").as_posix().partition("/")[2]
        expected = entry.manifest.members.get(name)
        return hashlib.sha256(path.read_bytes()).hexdigest() == expected

    def _look(self, root: Path, said: list[str]) -> None:
        """What commands that only look at a store do with it: nothing but typed errors, either."""
        store = open_store(root)
        try:
            for entry in store.entries():
                if entry.manifest is not None:
                    str(standing(entry.manifest, own=store.own, config=settings()))
                    path = root / "blobs" / entry.manifest.digest[:2] / entry.manifest.digest
                    try:
                        with archives.readable(path, what="it") as package:
                            archives.flaws(package, path.stat().st_size) or archives.contents(package)
                    except FileNotFoundError:
                        pass
        except AotcacheError:
            pass
        except Exception:
            said.append(f"unhandled, by what only looks: {traceback.format_exc(limit=-4)}")


def _whole(scene: Scene) -> bool:
    """Whether an archive whose digest is right has the members that were published."""
    if scene.hashed is None:
        return True
    with zipfile.ZipFile(io.BytesIO(scene.hashed)) as package:
        return archives.contents(package) == scene.victim.manifest.members


def _lay(root: Path, files: dict[str, bytes | None]) -> None:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if data is None:
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(data)


@contextmanager
def _settings(folder: Path) -> Iterator[None]:
    ours = {"AOTCACHE_HOME": str(folder / "home"), "AOTCACHE_CONFIG_HOME": str(folder / "config")}
    kept = {k: v for k, v in os.environ.items() if not k.startswith("AOTCACHE_")}
    with mock.patch.dict(os.environ, kept | ours, clear=True):
        yield


def run(
    count: int,
    seed: int,
    *,
    made: artifacts.Artifact | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Counts:
    """Make so many corruptions, and look what becomes of each.

    Args:
        count: How many.
        seed: The same seed and number make the same corruption.
        made: A compiled pair; without one it is compiled, which takes half a minute.
        progress: Told how many are done.
    """
    _watch()
    counts = Counts()
    with tempfile.TemporaryDirectory(prefix="aotcache-corruption-") as name:
        folder = Path(name)
        made = made or artifacts.pair(_Folder(folder / "made"))  # type: ignore[arg-type]
        with _settings(folder):
            world = _World(folder, made)
            umask = os.umask(0o077)
            try:
                for number in range(count):
                    world.round(number, seed, counts)
                    progress(number + 1)
            finally:
                os.umask(umask)
                world._forget()
    return counts


__all__ = ["KINDS", "OUTCOMES", "Counts", "entries", "run"]
