"""Random corruptions of stored entries: what is opened afterwards is what was published, or nothing is.

`run` puts two real entries into a store on disk, damages one of them in a way that is drawn anew each
round, and asks for both as a worker does. An audit hook sees every library that the process opens.
"""

from __future__ import annotations

import hashlib
import io
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
from aotcache.errors import AotcacheError
from aotcache.runtime import registry
from aotcache.runtime.resolve import Resolved, Resolver
from aotcache.runtime.stats import Stats
from aotcache.store import open_store
from aotcache.store.layout import ORIGIN
from aotcache.trust import SigningKey, standing, trusted_keys
from aotcache.types import Digest
from tests.faults.corruption_kinds import CONTROL, KINDS, Entry, Scene
from tests.faults.tally import Tally
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
class Problem:
    """What must not be.

    Attributes:
        kind: Of corruption.
        where: The round, to make it again.
        text: What was seen; "wrong:" is how it begins where other bytes were opened.
    """

    kind: str
    where: str
    text: str


@dataclass
class Counts:
    """What a run found.

    Attributes:
        kinds: For each kind of corruption how often it had each of `OUTCOMES`, of the entry that it hit.
        problems: What must not be: of that entry, of the other one, and of what only looks.
    """

    kinds: dict[str, Counter[str]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

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

    def tallies(self) -> list[Tally]:
        """For the report: a tally for each kind, in which every problem counts."""
        made = []
        for name, outcomes in sorted(self.kinds.items()):
            rounds = sum(outcomes.values())
            tally = Tally("bytes", name, rounds=rounds, hit=0 if name == CONTROL else rounds)
            for problem in self.problems:
                if problem.kind == name:
                    tally.note([problem.text], f"{problem.where}: ")
            tally.notes = {what: outcomes[what] for what in ("opened", "missed", "refused")}
            made.append(tally)
        return made


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
        counts.problems += [Problem(name, where, text) for text in said]

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
