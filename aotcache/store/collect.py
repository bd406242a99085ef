"""Collecting: what `store/evict.py` decides, carried out on a directory or a bucket that no service keeps.

Any number of publishers, readers and collections run beside each other, on several hosts and without
locks, and any of them may be killed at any moment. Refs go first, archives when nothing names them:

1. A marker `collecting/<digest>` is put for every archive that is to go. It holds who put it.
2. Refs are put aside, compared with what was decided on, and removed; another one is put back.
3. All refs are looked at once more. What one of them names by now stays.
4. If the marker still is this collection's, the archive is put aside; if it is even then, the archive is
   removed, otherwise put back. Then the marker goes.

A publisher looks for the marker after its ref is put. If there is one, it removes it, and then looks whether
the archive is there. Either it has put its ref before (3), which then sees it; or it has seen the marker.
Then either its removal came before the second look of (4), and the archive is put back; or after it, and the
publisher sees that the archive is gone, and puts it again. No clock and no pause is part of this.

What a killed collection leaves behind is a marker, or something put aside. The next one puts back what was
put aside, and what is marked and named by nothing goes whatever its age.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Collection as Some
from pathlib import Path

from aotcache.config import Settings
from aotcache.errors import ManifestError, ServiceUnavailable, StoreError
from aotcache.manifest import Manifest
from aotcache.ownership import private_problem
from aotcache.store import layout
from aotcache.store.base import Store
from aotcache.store.clients import Info
from aotcache.store.collect_service import collect_service
from aotcache.store.evict import DAY, Candidate, Collected, Decision, Limits, Protected, plan
from aotcache.store.files import sweep
from aotcache.store.http import HttpStore
from aotcache.store.objects import LARGEST_DOCUMENT, ObjectStore
from aotcache.store.survey import Survey, still_named, survey
from aotcache.store.tiered import TieredStore
from aotcache.types import Digest, sha256

_ABANDONED_SECONDS = 3600.0
"""How old a marker may be of an archive that is named all the same."""

_CLOCKS = 2.0
"""Seconds by which two answers of a bucket for one time may differ."""


def collect(
    store: Store,
    *,
    max_bytes: int | None = None,
    max_age: float | None = None,
    locked: Some[str] = frozenset(),
    dry_run: bool = False,
    told: Callable[[str], None] = lambda _: None,
) -> Collected:
    """Remove from a store what its limits do not allow, and what nothing names.

    Entries that are pinned, and at a service those that are being built, stay in any case.

    Args:
        store: A directory, a bucket or a service; of one with copies on this host the store itself.
        max_bytes: Of all archives; the least recently used entries go until it is kept.
        max_age: Seconds that an entry may go unused.
        locked: Digests that lock files name: their entries stay.
        dry_run: Only tell.
        told: Told now and then what is being done.

    Raises:
        StoreError: if the store cannot be read or written at all, or is a directory that others can write to.
        ServiceError: if the service refuses; it asks for the scope admin.
    """
    if isinstance(store, TieredStore):
        store = store.remote
    if isinstance(store, HttpStore):
        return collect_service(store, Limits(max_bytes, max_age), locked, dry_run=dry_run, told=told)
    assert isinstance(store, ObjectStore)
    run = Collection(store, store.url, dry_run=dry_run)
    pins = frozenset(pin.what for pin in store.pins())
    return carry_out(
        store.url,
        [run],
        [],
        Limits(max_bytes, max_age),
        Protected(pins, frozenset(locked)),
        dry_run=dry_run,
        told=told,
    )


def carry_out(
    where: str,
    runs: Sequence[Collection],
    others: Sequence[Candidate],
    limits: Limits,
    protected: Protected,
    *,
    dry_run: bool,
    told: Callable[[str], None],
    remove: Callable[[Candidate], bool] | None = None,
    problems: Sequence[str] = (),
) -> Collected:
    """Decide over several places together, and do it in each.

    Args:
        where: What to call them all.
        runs: One for each store.
        others: Candidates that lie in none of them.
        limits, protected: The rules.
        dry_run: Only tell.
        told: See `collect`.
        remove: Removes one of the others; whether it is gone.
        problems: What `remove` adds to when it fails.
    """
    candidates = [*others]
    for run in runs:
        told(f"looking at {run.place}")
        candidates += run.look()
    made = plan(
        candidates,
        max_bytes=limits.max_bytes,
        max_age=limits.max_age,
        pins=protected.pins,
        locked=protected.locked,
        leased=protected.leased,
        now=time.time(),
    )
    decisions, after = made.decisions, made.after
    if not dry_run:
        gone = set[int]()
        told(f"{len(made.removed)} of {len(candidates)} go")
        # Folders first: on a full disk they make the room that a store needs for its markers.
        for candidate in made.removed:
            if candidate.kind == "unpacked" and remove is not None and remove(candidate):
                gone.add(id(candidate))
        for run in runs:
            gone |= run.carry_out([d for d in made.decisions if d.candidate.place == run.place])
        decisions = tuple(
            d if not d.remove or id(d.candidate) in gone else Decision(d.candidate, False, "busy")
            for d in made.decisions
        )
        # Of what was to go, something may have stayed.
        stays = plan([d.candidate for d in decisions if not d.remove], now=time.time()).before
        after = stays + sum(run.left for run in runs)
    return Collected(
        where,
        dry_run,
        decisions,
        made.before,
        after,
        0 if limits.max_bytes is None else max(0, after - limits.max_bytes),
        (*problems, *(problem for run in runs for problem in run.problems)),
        tuple(note for run in runs for note in run.notes),
    )


class Collection:
    """One run over one store. Not to be used twice.

    Attributes:
        problems: What could not be removed.
        notes: What cannot be read.
        left: Bytes of archives whose entries are gone, and that somebody has named anew meanwhile.

    Args:
        store: A directory, a bucket or memory.
        place: What to call it in candidates.
        dry_run: Nothing is written, not even what makes the next run's work.
    """

    def __init__(self, store: ObjectStore, place: str, *, dry_run: bool) -> None:
        self.store = store
        self.place = place
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.left = 0
        self._dry_run = dry_run
        self._id = uuid.uuid4().hex
        self._aside_before = 0
        self._found = Survey([], {}, frozenset(), {}, {})

    def look(self) -> list[Candidate]:
        """All that could be removed, once what killed runs have left is in its place again.

        Raises:
            StoreError: as `collect`.
        """
        drafts = self.store.drafts
        if drafts is not None:
            require_private_store(drafts.parent)
        if not self._dry_run:
            if drafts is not None:
                sweep(drafts)
            self._put_back()
        self._found = survey(self.store.client, self.place)
        self.notes += [
            f"{path} cannot be read: {why.removeprefix(f'{path}: ')}"
            for path, why in self._found.unreadable.items()
        ]
        return self._found.candidates

    def carry_out(self, decisions: Sequence[Decision]) -> set[int]:
        """Do what was decided on the candidates; the `id` of each that is gone.

        Of an entry that is gone the archive may still be there: somebody has named it meanwhile.
        """
        client, found = self.store.client, self._found
        going = [decision.candidate for decision in decisions if decision.remove]
        kept = {decision.candidate.digest for decision in decisions if not decision.remove}
        doomed = frozenset(
            c.digest
            for c in going
            if c.digest is not None and c.digest in found.archives and c.digest not in kept
        )
        unmarked = self._mark(sorted(doomed))
        gone = {id(c) for c in going if c.kind == "entry" and self._remove_ref(c)}
        # A full disk may have no room for a marker; every ref that went has made room for one.
        unmarked = self._mark(unmarked)
        for error in unmarked.values():
            if len(unmarked) == len(doomed) and not gone:
                raise error
            self._failed(error)
        named = still_named(client, doomed) if doomed else set()
        removed = {digest for digest in sorted(doomed - named) if self._remove_archive(digest)}
        for digest in doomed - removed:
            if self._marked(digest):
                client.delete(layout.mark(digest))
        self._unmark_abandoned()
        gone |= {id(c) for c in going if c.kind == "archive" and c.digest in removed}
        stay = {c.digest for c in going if id(c) not in gone}
        self.left = sum(
            {c.digest: c.size or 0 for c in going if c.digest in doomed - removed - stay}.values()
        )
        return gone

    def _mark(self, digests: Iterable[Digest]) -> dict[Digest, StoreError]:
        """Put markers; those that could not be put, and why."""
        left = dict[Digest, StoreError]()
        for digest in digests:
            try:
                self.store.client.put(layout.mark(digest), self._id.encode(), create=False)
            except ServiceUnavailable:
                raise
            except StoreError as error:
                left[digest] = error
        return left

    def _remove_ref(self, candidate: Candidate) -> bool:
        """Remove a ref unless it was used, pinned or published anew since; whether it is gone."""
        assert candidate.key is not None
        path = layout.ref(candidate.key, candidate.variant)
        client, aside = self.store.client, self._aside(None)
        try:
            pinned = self.store.is_pinned(candidate.key, candidate.digest)
            if pinned or self._used(candidate) or self._changed(candidate, path):
                return False
            if not client.move(path, aside):
                return True
            if self._changed(candidate, aside):
                # Published a moment ago, between the look and the move.
                client.move(aside, path, create=True)
                return False
            client.delete(aside)
        except StoreError as error:
            self._failed(error)
            return False
        return True

    def _used(self, candidate: Candidate) -> bool:
        """Whether an entry's archive was opened, or stored, since all were looked at."""
        archive = None if candidate.digest is None else self.store.client.head(layout.blob(candidate.digest))
        return archive is not None and self._later(archive, candidate)

    def _changed(self, candidate: Candidate, path: str) -> bool:
        """Whether a ref is another than was decided on, or was written since: it may have been the same once more."""
        assert candidate.key is not None
        info = self.store.client.head(path)
        # What is put aside in a bucket is a copy, and as young as that.
        dated = self.store.drafts is not None or path.startswith(layout.REFS)
        if info is None or (dated and self._later(info, candidate)):
            return True
        data = b"" if info.size > LARGEST_DOCUMENT else self.store.client.get(path)
        return data is None or sha256(data) != self._found.documents[candidate.key, candidate.variant]

    def _later(self, info: Info, candidate: Candidate) -> bool:
        return info.modified > candidate.used + (_CLOCKS if self.store.drafts is None else 0.0)

    def _remove_archive(self, digest: Digest) -> bool:
        """Steps (4); whether it is gone."""
        client, path, aside = self.store.client, layout.blob(digest), self._aside(digest)
        try:
            if not self._marked(digest) or self.store.is_pinned(digest):
                return False
            if client.move(path, aside):
                if not self._marked(digest):
                    client.move(aside, path, create=True)
                    return False
                client.delete(aside)
            client.delete(layout.mark(digest))
        except StoreError as error:
            self._failed(error)
            return False
        return True

    def _marked(self, digest: Digest) -> bool:
        """Whether the marker is this collection's still."""
        return self.store.client.get(layout.mark(digest)) == self._id.encode()

    def _unmark_abandoned(self) -> None:
        """Remove what collections that were killed have left. One that still runs leaves its archive alone then."""
        for digest, when in self._found.marked.items():
            if digest not in self._found.archives or abs(time.time() - when) > _ABANDONED_SECONDS:
                self.store.client.delete(layout.mark(digest))

    def _put_back(self) -> None:
        """Put back what other collections have put aside. One that still runs finds it where it was."""
        client = self.store.client
        for info in list(client.list(layout.COLLECTING)):
            digest = layout.aside_of(info.path)
            if digest is not None:
                client.move(info.path, layout.blob(digest), create=True)
            elif layout.is_ref_aside(info.path):
                self._put_back_ref(info)

    def _put_back_ref(self, info: Info) -> None:
        client = self.store.client
        try:
            manifest = Manifest.from_json(client.get(info.path) or b"", where=info.path)
        except ManifestError:
            # Nothing says where it was; and it was to go, since nobody could read it.
            if time.time() - info.modified > DAY:
                client.delete(info.path)
            return
        client.move(info.path, layout.ref(manifest.key, str(manifest.variant)), create=True)

    def _aside(self, digest: Digest | None) -> str:
        self._aside_before += 1
        return layout.aside(digest, f"{self._id}.{self._aside_before}")

    def _failed(self, error: StoreError) -> None:
        if isinstance(error, ServiceUnavailable):
            raise error
        self.problems.append(str(error))


def require_private_store(root: Path) -> None:
    """Check that nobody else can have put into a directory what a collection would follow or remove.

    Raises:
        StoreError: if others can write there and AOTCACHE_TRUST_SHARED_STORE does not say that this is meant.
    """
    if Settings().trust_shared_store:
        return
    for folder in (root, *(root / name for name in (layout.REFS, layout.BLOBS, layout.COLLECTING))):
        problem = private_problem(folder) if folder.exists() else None
        if problem is not None:
            raise StoreError(
                f"{root} is not collected, because others share it and what is removed there is theirs too: "
                f"{problem}; use a store of your own, or set AOTCACHE_TRUST_SHARED_STORE=1 if you may decide "
                "for all of them",
                path=str(folder),
            )


__all__ = ["Collected", "Collection", "carry_out", "collect", "require_private_store"]
