"""What this host knows of recalls: the lists that trusted keys signed, and which store showed them last.

`<home>/recalls/<signer>/<number>-<sha256>.json` are the lists, from whichever store they came. They hold
for every store, and for what lies on this host already. A list stays until a later one by the same key
covers it; so two that were made without knowing of each other both count. Files are written whole
under names of their own: any number of processes may do this at once, without a lock.
`<home>/recalls/asked/` notes when each store was last asked, and what it showed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import random
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from aotcache.config import Settings
from aotcache.errors import ManifestError, RecallConflict, ServiceUnavailable, StoreError
from aotcache.manifest import Manifest
from aotcache.recall_list import (
    RECALL_TYPE,
    Recalled,
    RecallList,
    SignedList,
    merged,
    next_list,
    parsed,
    signer_of,
    verified,
)
from aotcache.recall_signers import InForce, Signer, signers
from aotcache.trust import PublicKey, SigningKey
from aotcache.types import is_digest

logger = logging.getLogger(__name__)

_ASKED = "asked"
_NOTED_SECONDS = 60.0
"""How old the note may be that a store was asked, before it is written again."""
_AHEAD_SECONDS = 24 * 3600.0
"""A note from further in the future is not believed: the clock was wrong."""
_TRIES = 20
"""Of publishing a list, where others by the same key come first."""
_LONGEST_PAUSE = 0.5
"""Seconds between two of them."""
_UNSAVED: dict[Path, SignedList] = {}
"""Lists that this process could not write to where they belong."""
_LOOKS = 5
"""At a folder in which another process replaces what was just listed."""


class Lists(Protocol):
    """What is asked of a store here; see `store/base.py`."""

    @property
    def url(self) -> str:
        """Where it is."""

    @property
    def own(self) -> bool:
        """Whether it is this user's own, on this host."""

    def recalls(self, of: Callable[[str], bool] | None = None) -> Sequence[bytes]:
        """Its recall lists."""

    def put_recall(self, document: bytes, signer: str) -> None:
        """Take one more."""


@dataclass(frozen=True, slots=True)
class _Note:
    """When a store was asked last, and the number of each signer's newest list there."""

    asked: float
    shown: dict[str, int]


class Recalls:
    """The recalls that hold on this host. Reads the files anew at every question; threads may share it.

    Args:
        home: AOTCACHE_HOME.
    """

    def __init__(self, home: Path) -> None:
        self._folder = home / "recalls"
        self._notes: dict[str, _Note] = {}
        self._told: set[str] = set()

    def check(self, store: Lists) -> str | None:
        """Ask a store for its lists and keep them; why nothing of it may be opened now, or None.

        Raises:
            ConfigError: a trusted key's file, or a setting, cannot be understood.
        """
        try:
            self.learn(store)
        except StoreError as error:
            return f"what is recalled in {store.url} cannot be read, so nothing of it is opened: {error}"
        stale = self.stale(store)
        if stale is None:
            return None
        if Settings().recall_stale == "refuse":
            return f"{stale}; AOTCACHE_RECALL_STALE=refuse"
        self._tell(
            f"{stale}; what is not known to be recalled is opened all the same (AOTCACHE_RECALL_STALE)"
        )
        return None

    def learn(self, store: Lists) -> None:
        """Ask a store for its lists, and keep those that trusted keys signed.

        A store that is away is no error: how long that may go on, `stale` says.

        Raises:
            StoreError: it could not be asked although it can be reached, or a list there cannot be read.
            ConfigError: a trusted key's file cannot be understood.
        """
        known: dict[str, Signer] | None = None

        def ours(signer: str) -> bool:
            nonlocal known
            known = signers(Settings()) if known is None else known
            return signer in known

        try:
            documents = store.recalls(ours)
        except ServiceUnavailable:
            return
        shown: dict[str, int] = {}
        for document in documents:
            try:
                found = parsed(document)
            except ManifestError as error:
                self._tell(f"{store.url}: {error}; it counts for nothing")
                continue
            if not ours(found.signer):
                continue
            assert known is not None
            if verified(document, known[found.signer].key) is None:
                self._tell(
                    f"{store.url} shows a recall list under the name of {known[found.signer]} whose signature is "
                    "wrong; it counts for nothing"
                )
                continue
            self.keep(found)
            shown[found.signer] = max(found.listed.number, shown.get(found.signer, 0))
        if store.own:
            self._notes[store.url] = _Note(time.time(), shown)
        else:
            self._note(store.url, shown, ours)

    def keep(self, found: SignedList) -> None:
        """Keep a list that a trusted key signed, unless a later one that covers it is there."""
        for path, other in self._lists(found.signer):
            if other is not None and other.document != found.document and other.listed.covers(found.listed):
                return
            if other is None and path == self._path(found):
                break  # it has gone bad, and is written anew
            if other is not None and other.document == found.document and path not in _UNSAVED:
                return
        path = self._path(found)
        try:
            _write(path, found.document)
            _UNSAVED.pop(path, None)
        except OSError as error:
            _UNSAVED[path] = found
            self._tell(
                f"recall lists cannot be kept in {path.parent} ({error.strerror}): they hold for this process alone"
            )
        # Looked at once more: whoever was faster with a later list has not seen this one.
        lists = self._lists(found.signer)
        for path, other in lists:
            if other is None:
                # What followed it has all that it had; of several that knew nothing of each other, nobody can tell.
                gone = _number(path) <= found.listed.number and len(lists) == 2
            elif other.document == found.document:
                gone = False
            else:
                gone = found.listed.covers(other.listed)
                if other.listed.covers(found.listed):
                    path, gone = self._path(found), True
            if gone:
                _UNSAVED.pop(path, None)
                with suppress(OSError):
                    path.unlink(missing_ok=True)

    def problem(self, manifest: Manifest) -> str | None:
        """Why an artifact must not be opened, as far as recalls go; None if it may.

        Raises:
            ConfigError: a trusted key's file cannot be understood.
        """
        return self.problems([manifest])[0]

    def problems(self, manifests: Iterable[Manifest]) -> list[str | None]:
        """`problem` of each of them; reads the lists once."""
        return self._words([(("archive", m.digest), ("key", m.key)) for m in manifests])

    def word(self, *things: tuple[str, str]) -> str | None:
        """Why none of these is to be opened, or None.

        Args:
            things: What each is, "archive" or "key", and its digest or key.

        Raises:
            ConfigError: a trusted key's file cannot be understood.
        """
        return self._words([things])[0]

    def _words(self, asked: Sequence[Sequence[tuple[str, str]]]) -> list[str | None]:
        having = self._signers()
        known = signers(Settings()) if having else {}
        found: list[str | None] = [None] * len(asked)
        for signer in having:
            if signer not in known:
                continue
            lists = self._lists(signer)
            broken = next((path for path, one in lists if not _is_by(one, known[signer])), None)
            if broken is not None:
                unknown = (
                    f"what is recalled is not known: {broken} is not the recall list by {known[signer]} that it was; "
                    "it is healed when a store that shows it is reached, or delete it"
                )
                return [text or unknown for text in found]
            words = merged(one.listed for _, one in lists if one is not None)
            for place, things in enumerate(asked):
                for what, name in things:
                    entry = words.get(name)
                    if found[place] is None and isinstance(entry, Recalled):
                        found[place] = f"{what} {name} is recalled: {InForce(entry, known[signer])}"
        return found

    def in_force(self) -> list[InForce]:
        """Everything that is recalled on this host, the latest first."""
        known, found = signers(Settings()), list[InForce]()
        for signer in self._signers():
            if signer in known:
                lists = [listed for _, listed in self._lists(signer) if _is_by(listed, known[signer])]
                words = merged(listed.listed for listed in lists if listed is not None)
                found += [InForce(e, known[signer]) for e in words.values() if isinstance(e, Recalled)]
        return sorted(found, key=lambda one: (-one.entry.at, one.entry.what))

    def newest(self) -> list[tuple[Signer, RecallList]]:
        """The newest list by each trusted key."""
        known = signers(Settings())
        found = [(known[signer], self._newest(signer)) for signer in self._signers() if signer in known]
        return [(signer, listed) for signer, listed in found if listed is not None]

    def uncounted(self) -> list[str]:
        """Fingerprints of keys whose lists are here and do not count, because they are not trusted any more."""
        known = signers(Settings())
        return [f"ed25519:{signer}" for signer in self._signers() if signer not in known]

    def by(self, key: PublicKey) -> list[SignedList]:
        """All lists by a key that are here."""
        lists = [found for _, found in self._lists(signer_of(key))]
        return [found for found in lists if found is not None and found.by(key)]

    def stale(self, store: Lists) -> str | None:
        """Why it is not certain that all is known that was recalled in a store; None if it is, or nearly."""
        having = self._signers()
        if store.own and not having:
            return None  # nothing that could have expired
        now, note, config = time.time(), self._noted(store.url), Settings()
        known = signers(config)
        if not known:
            return None  # nobody could have recalled anything
        if not store.own:
            hours = config.recall_hours
            if note is None or note.asked > now + _AHEAD_SECONDS:
                return f"{store.url} was never asked for its recall lists, and cannot be now"
            if now - note.asked > hours * 3600:
                return (
                    f"{store.url} has shown no recall lists that are certain to be the newest for "
                    f"{(now - note.asked) / 3600:.0f} hours, expected {hours:g} at most (AOTCACHE_RECALL_HOURS)"
                )
        for signer in sorted(set({} if note is None else note.shown) & set(known)):
            listed = self._newest(signer)
            if listed is not None and listed.expires < now:
                when = time.strftime("%Y-%m-%d", time.localtime(listed.expires))
                return (
                    f"recall list {listed.number} by {known[signer]} has expired on {when}: what it recalls stays "
                    "blocked, and whether anything else was recalled is not certain; its signer runs aotcache recall "
                    "--renew"
                )
        return None

    def _newest(self, signer: str) -> RecallList | None:
        lists = [found.listed for _, found in self._lists(signer) if found is not None]
        return max(lists, key=lambda listed: listed.number, default=None)

    def _signers(self) -> list[str]:
        try:
            names = os.listdir(self._folder)
        except OSError:
            names = []
        unsaved = {path.parent.name for path in list(_UNSAVED) if path.parent.parent == self._folder}
        return sorted({name for name in names if is_digest(name)} | unsaved)

    def _lists(self, signer: str) -> list[tuple[Path, SignedList | None]]:
        """The lists by a key; None for a file that is not what its name says."""
        folder = self._folder / signer
        for _ in range(_LOOKS):
            try:
                names = sorted(name for name in os.listdir(folder) if name.endswith(".json"))
                found = {folder / name: _read(folder / name, signer) for name in names}
            except (FileNotFoundError, NotADirectoryError):
                continue  # there is none, or one was replaced while they were read
            except OSError:
                found = {folder: None}
            break
        else:
            found = {}
        unsaved = {path: listed for path, listed in list(_UNSAVED.items()) if path.parent == folder}
        return list({**found, **unsaved}.items())

    def _path(self, found: SignedList) -> Path:
        name = f"{found.listed.number:016d}-{hashlib.sha256(found.document).hexdigest()[:16]}.json"
        return self._folder / found.signer / name

    def _note(self, url: str, shown: dict[str, int], ours: Callable[[str], bool]) -> None:
        """Remember that a store was asked, unless it shows less than before."""
        now, before = time.time(), self._noted(url)
        if before is not None:
            for signer, number in before.shown.items():
                if shown.get(signer, 0) < number and ours(signer):
                    now_it_is = f"list {shown[signer]}" if signer in shown else "none"
                    self._tell(
                        f"{url} has shown recall list {number} by ed25519:{signer} before, and {now_it_is} now: "
                        "it was set back, or somebody withholds the newer one, which stays in force here; its signer "
                        "runs aotcache recall --renew"
                    )
                    return
            if before.shown == shown and 0 <= now - before.asked < _NOTED_SECONDS:
                return
        self._notes[url] = _Note(now, shown)
        with suppress(OSError):
            text = json.dumps({"url": url, "asked": now, "shown": shown}, sort_keys=True)
            _write(self._note_path(url), text.encode(), durable=False)

    def _noted(self, url: str) -> _Note | None:
        try:
            data = json.loads(self._note_path(url).read_bytes())
            note = _Note(float(data["asked"]), {str(k): int(v) for k, v in data["shown"].items()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
            return self._notes.get(url)
        if not math.isfinite(note.asked):
            return self._notes.get(url)  # no clock says that, and no list would ever be too old
        own = self._notes.get(url)
        return note if own is None or note.asked >= own.asked else own

    def _note_path(self, url: str) -> Path:
        return self._folder / _ASKED / f"{hashlib.sha256(url.encode()).hexdigest()[:16]}.json"

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            logger.warning("%s", text)


def recall_problem(manifest: Manifest, *, home: Path) -> str | None:
    """Why an artifact must not be opened on this host, as far as recalls go; None if it may.

    Asks no store: `Recalls.check` does.

    Args:
        manifest: Its digest and its key are looked for.
        home: AOTCACHE_HOME.

    Raises:
        ConfigError: a trusted key's file cannot be understood.
    """
    return Recalls(home).problem(manifest)


def publish_list(
    store: Lists,
    key: SigningKey,
    known: Recalls,
    *,
    recall: dict[str, str] | None = None,
    lift: Sequence[str] = (),
    seconds: float,
) -> RecallList:
    """Recall or lift, in the name of one key: a list that follows all that are known, there and here.

    Where somebody else with the same key is faster, theirs is followed.

    Args:
        store: Where it is put.
        key: Signs it.
        known: This host's, where it holds from then on.
        recall: Reasons, by key or digest.
        lift: Keys and digests that may be opened again.
        seconds: Until it expires.

    Raises:
        StoreError: it could not be put there; then nothing has changed.
    """
    number = 0
    for tried in range(_TRIES):
        if tried:
            # Those who meet once would meet again and again: each waits for a time of its own.
            time.sleep(random.uniform(0, min(_LONGEST_PAUSE, 0.01 * 2**tried)))
        before = _by(store, key.public)
        lists = [found.listed for found in (*before, *known.by(key.public))]
        made = next_list(lists, recall=recall, lift=lift, now=time.time(), seconds=seconds, after=number)
        signed = SignedList.make(made, key)
        try:
            store.put_recall(signed.document, signed.signer)
        except RecallConflict:
            # What is there under that number may be nobody's list: it must not be in the way for ever.
            number = max([made.number, *(found.listed.number for found in _by(store, key.public))])
            continue
        known.keep(signed)
        if all(made.covers(found.listed) for found in _by(store, key.public)):
            return made
        recall, lift, number = None, (), made.number  # one that came meanwhile is joined with it
    raise RecallConflict(
        f"{store.url}: recall lists by {key.public.fingerprint} come faster from somewhere else than this one; try "
        "again"
    )


def _by(store: Lists, key: PublicKey) -> list[SignedList]:
    documents = store.recalls(lambda signer: signer == signer_of(key))
    return [found for document in documents if (found := verified(document, key)) is not None]


def _is_by(found: SignedList | None, signer: Signer) -> bool:
    return found is not None and verified(found.document, signer.key) is not None


def _read(path: Path, signer: str) -> SignedList | None:
    """A kept list; None if it is not what its name says. Raises FileNotFoundError."""
    try:
        document = path.read_bytes()
        found = parsed(document)
    except FileNotFoundError:
        raise
    except (OSError, ManifestError):
        return None
    same = path.stem.endswith(hashlib.sha256(document).hexdigest()[:16])
    return found if same and found.signer == signer else None


def _number(path: Path) -> int:
    number = path.name.partition("-")[0]
    return int(number) if number.isascii() and number.isdigit() else 0


def _write(path: Path, data: bytes, *, durable: bool = True) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{uuid.uuid4().hex}")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


__all__ = [
    "RECALL_TYPE",
    "InForce",
    "Lists",
    "RecallList",
    "Recalled",
    "Recalls",
    "SignedList",
    "Signer",
    "publish_list",
    "recall_problem",
    "signers",
]
