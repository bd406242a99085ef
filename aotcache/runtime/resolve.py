"""From a described call to an opened artifact, or the reason why there is none.

Key -> stored manifests -> lock file -> trust -> recalls -> verdict -> registry. Each answer is kept
per key, so a miss costs one look at the store, not one a call. A store that cannot be
reached is a miss as well: what to do about it is `on_miss`'s to say.
"""

from __future__ import annotations

import re
import shlex
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aotcache import compat
from aotcache.config import Settings
from aotcache.errors import ConfigError, NotStored, RecalledArtifact, ServiceUnavailable, StoreError
from aotcache.graph.region import Call, contiguous_parts
from aotcache.key import KeyParts
from aotcache.recall import Recalls
from aotcache.runtime import registry
from aotcache.runtime.openings import deaths_of
from aotcache.runtime.stats import Stats
from aotcache.store.circuit import circuit_for
from aotcache.trust import trust_problem
from aotcache.types import CacheKey, Digest, Miss

if TYPE_CHECKING:
    from pathlib import Path

    from aotcache.manifest import Manifest
    from aotcache.runtime.function import Executable
    from aotcache.spec import Spec
    from aotcache.store.base import Store

_STRIDES = re.compile(r"strides \([^)]*\)")
_FUNCTIONS = "aotcache.graph.functions."
"""Where the modules of drop-in functions are."""

RECORD_LINE = "aotcache record -- <this program>, then aotcache warm on what that writes"
"""What builds what is missing where a spec has neither batches nor recorded calls."""

_ASK_SECONDS = 2.0
"""How long a step waits for a store that is asked what was recalled."""

_NEAREST = 3
"""How many differing items of the nearest stored entry an error lists."""

_CHANGES = re.compile(r"\brequest [\w.-]+|\bfor \d+\.\d s\b")
"""What differs each time that a store's one trouble is told: a request's id, seconds left to wait."""


def lasting(reason: str) -> str:
    """What a reason has in common with itself at the next call, so that it is said once."""
    return _CHANGES.sub("", reason)


@dataclass(frozen=True, slots=True)
class Resolved:
    """An opened artifact for a key."""

    executable: Executable


class _Asking(threading.Thread):
    """Asks a store what was recalled, while the steps of a run go on."""

    def __init__(self, recalls: Recalls, store: Store) -> None:
        super().__init__(name="aotcache-recalls", daemon=True)
        self._recalls, self._store = recalls, store
        self.failure: Exception | None = None

    def run(self) -> None:
        try:
            self._recalls.check(self._store)
        except Exception as failure:  # noqa: BLE001 - raised by who started it
            self.failure = failure


class Resolver:
    """Finds and opens artifacts for the calls of one attached drafter. Thread-safe.

    Args:
        store: Where to look.
        home: Local state: unpacked artifacts.
        facts: What this host offers, for the verdict.
        allowed: Digests of the lock file, or None to accept any verified entry.
        stats: Counters.
    """

    def __init__(
        self,
        store: Store,
        home: Path,
        facts: compat.HostFacts,
        allowed: frozenset[Digest] | None,
        stats: Stats,
    ) -> None:
        self.store = store
        self.home = home
        self.facts = facts
        self.allowed = allowed
        self.stats = stats
        self._recalls = Recalls(home)
        self._answers: dict[CacheKey, Resolved | Miss] = {}
        self._known: dict[str, Manifest] = {}
        self._denied: dict[CacheKey, str] = {}
        self._held = False
        self._asking: _Asking | None = None
        self._lock = threading.Lock()

    def resolve(self, call: Call) -> Resolved | Miss:
        """The artifact for a call, opened, or why there is none.

        Where no entry has the call's exact strides, one that differs from it in
        strides alone serves: the dispatcher copies into the compiled layout.

        Raises:
            CorruptArtifact, StoreError: bytes that are there but cannot be used.
            RejectedArtifact: what was trusted a moment ago no longer is.
            ConfigError: a trusted key's file cannot be understood.
        """
        answer = self._answers.get(call.parts.key)
        if answer is None:
            found = self._look(call)
            answer = self._answers.setdefault(
                call.parts.key, found
            )  # what `swap` put there meanwhile is newer
        return answer

    def _look(self, call: Call) -> Resolved | Miss:
        first = self.by_key(call.parts.key)
        if isinstance(first, Resolved):
            return first
        parts = contiguous_parts(call)
        if parts.key != call.parts.key:
            other = self.by_key(parts.key)
            if isinstance(other, Resolved):
                return other
        known = self._known.get(_strides_aside(call.parts))
        if known is not None and known.key not in self._denied:
            other = self.open(known)
            return first if isinstance(other, Miss) else other
        return first

    def by_key(self, key: CacheKey) -> Resolved | Miss:
        """The best artifact stored under a key."""
        denied = self._denied.get(key)
        if denied is not None:
            return Miss(denied)
        if self._held:
            answer = self._answers.get(key)
            return answer if isinstance(answer, Resolved) else Miss("the ranks have not agreed on it yet")
        try:
            manifests = self.store.lookup(key)
        except StoreError as error:
            return Miss(f"the store cannot be read: {error}")
        return self.best(manifests)

    def best(self, manifests: Iterable[Manifest]) -> Resolved | Miss:
        """Open the best of several variants that this host accepts."""
        chosen = self.choose(manifests)
        return chosen if isinstance(chosen, Miss) else self.open(chosen)

    def ask_for_recalls(self) -> Miss | None:
        """Learn what was recalled in the store; a miss for all that is there if that is not certain enough.

        Raises:
            ConfigError: a trusted key's file cannot be understood.
        """
        problem = self._recalls.check(self.store)
        return None if problem is None else Miss(problem)

    def choose(self, manifests: Iterable[Manifest], *, asked: bool = False) -> Manifest | Miss:
        """The best of several variants that the lock file, trust, recalls and this host allow.

        Fetches nothing but recall lists.

        Args:
            manifests: As the store gave them.
            asked: The caller has called `ask_for_recalls` since then.
        """
        manifests = list(manifests)
        if not manifests:
            return Miss(self._nothing())
        unsure = None if asked else self.ask_for_recalls()
        if unsure is not None:
            return unsure
        if self.allowed is not None:
            locked = [m for m in manifests if m.digest in self.allowed]
            if not locked:
                found = ", ".join(m.digest[:12] for m in manifests)
                return Miss(f"the store has {found} under this key, but the lock file names none of them")
            manifests = locked
        trusted, problems = self._trusted(manifests)
        if trusted:
            chosen = compat.best(trusted, self.facts)
            if not isinstance(chosen, compat.Rejected):
                return chosen
            problems.insert(0, str(chosen))
        return Miss("; ".join(problems))

    def _nothing(self) -> str:
        outage = circuit_for(self.store.url).unreached
        if outage is None:
            return "the store has no entry under this key"
        return f"the store could not be reached, and this host has no copy: {outage}"

    def _trusted(self, manifests: Iterable[Manifest]) -> tuple[list[Manifest], list[str]]:
        """Those that may be opened as far as trust and recalls go, and why each of the others may not."""
        own = self.store.own
        manifests = list(manifests)
        trusted: list[Manifest] = []
        problems: list[str] = []
        if own and all(manifest.envelope is None for manifest in manifests):
            trusted = manifests  # the usual case, which need not read the settings
        else:
            config = Settings()
            for manifest in manifests:
                problem = trust_problem(manifest, own=own, config=config, url=self.store.url)
                if problem is None:
                    trusted.append(manifest)
                else:
                    problems.append(f"archive {manifest.digest[:12]} is not trusted: {problem}")
        recalled = list(zip(trusted, self._recalls.problems(trusted), strict=True))
        problems += [problem for _, problem in recalled if problem is not None]
        return [manifest for manifest, problem in recalled if problem is None], problems

    def open(self, manifest: Manifest, *, ahead: bool = False) -> Resolved | Miss:
        """Open one artifact, or find it open; a miss where its archive is out of reach.

        Args:
            manifest: As the store gave it.
            ahead: No call is to be served by it before `swap`.
        """
        started = time.perf_counter()
        try:
            executable, loaded = registry.open_artifact(manifest, self.store, self.home)
        except RecalledArtifact as error:
            return Miss(str(error))
        except ServiceUnavailable as error:
            return Miss(f"archive {manifest.digest} cannot be fetched: {error}")
        except NotStored as error:
            return Miss(f"archive {manifest.digest} is gone from there: {error}")
        if loaded:
            self.stats.loaded(manifest.region, time.perf_counter() - started, manifest.size, manifest.runner)
        deaths = deaths_of(self.home, manifest.digest)
        if deaths is not None:
            self.stats.died(manifest.digest, deaths.count)
        if not ahead:
            self.know([manifest])
        return Resolved(executable)

    def know(self, manifests: Iterable[Manifest]) -> None:
        """Remember manifests as candidates for calls that differ in strides alone."""
        with self._lock:
            for manifest in manifests:
                self._known.setdefault(_strides_aside(manifest.parts), manifest)

    def settle(
        self, opened: Mapping[CacheKey, Resolved], denied: Mapping[CacheKey, str] | None = None
    ) -> None:
        """Serve what was opened without asking the store again, and leave what is denied.

        Args:
            opened: Answers from now on.
            denied: Keys that are from now on as good as not stored, with the reason, also after
                `forget_misses`. They take the place of those denied before; None leaves those.
        """
        if denied is not None:
            self._denied = dict(denied)
            self._answers = {}
        with self._lock:
            self._known = {text: m for text, m in self._known.items() if m.key not in self._denied}
        self._answers = {**self._answers, **{k: a for k, a in opened.items() if k not in self._denied}}

    def hold(self) -> None:
        """From now on look into the store for nothing by itself: only what `settle` and `swap` bring is served."""
        self._held = True

    @property
    def served(self) -> dict[CacheKey, Digest]:
        """Digest of the archive that answers each key."""
        found = list(self._answers.items())
        return {key: a.executable.manifest.digest for key, a in found if isinstance(a, Resolved)}

    def swap(self, opened: Mapping[CacheKey, Resolved]) -> None:
        """Serve from now on what was opened ahead, in the place of misses, also of those that were denied."""
        if opened:
            self._denied = {key: why for key, why in self._denied.items() if key not in opened}
            self.know(answer.executable.manifest for answer in opened.values())
            self._answers = {**self._answers, **opened}

    def recalled(self) -> dict[CacheKey, str]:
        """Ask the store what was recalled; why, by key, of what is served it must not be any more.

        What a store that stalls says in the end, the next time tells.

        Raises:
            ConfigError: a trusted key's file cannot be understood.
        """
        asking = self._asking
        if asking is None or not asking.is_alive():
            asking = self._asking = _Asking(self._recalls, self.store)
            asking.start()
            asking.join(_ASK_SECONDS)
        if asking.failure is not None:
            raise asking.failure
        found = list(self._answers.items())
        served = {key: a.executable.manifest for key, a in found if isinstance(a, Resolved)}
        problems = zip(served, self._recalls.problems(served.values()), strict=True)
        return {key: problem for key, problem in problems if problem is not None}

    def may_run(self, answer: Resolved) -> bool:
        """Whether it is certain that what was opened some time ago was not recalled since; raises nothing."""
        try:
            return self._recalls.problem(answer.executable.manifest) is None
        except ConfigError:
            return False

    def drop(self, keys: Iterable[CacheKey]) -> None:
        """Serve these no more: their next calls are looked up again."""
        gone = set(keys)
        with self._lock:
            self._known = {text: m for text, m in self._known.items() if m.key not in gone}
        self._answers = {k: a for k, a in list(self._answers.items()) if k not in gone}

    def forget_misses(self) -> None:
        """Look at the store again for what was missing."""
        # A list first: other threads may be adding answers meanwhile.
        self._answers = {k: a for k, a in list(self._answers.items()) if isinstance(a, Resolved)}


@dataclass(frozen=True, slots=True)
class Nearest:
    """The stored entry that is most like a key that is missing.

    Attributes:
        manifest: The entry.
        differences: Items in which it differs from the key, the key's own value first.
    """

    manifest: Manifest
    differences: list[str]

    def lines(self, ours: str, *, most: int | None = None) -> list[str]:
        """What an error or a command says of it.

        Args:
            ours: What the key is of, e.g. "this call".
            most: How many differences are listed; all, if None.
        """
        m = self.manifest
        sizes = " ".join(f"{name}={size}" for name, size in sorted(m.bucket.items())) or "none"
        shown = self.differences[:most]
        more = len(self.differences) - len(shown)
        return [
            f"nearest stored entry: {m.key} (region {m.region!r}, bucket {sizes}); {ours} / that entry:",
            *(f"  {difference}" for difference in shown),
            *([f"  and {more} more"] if more else []),
        ]


def nearest(parts: KeyParts, mode: str, manifests: Iterable[Manifest]) -> Nearest | None:
    """The stored entry of the same mode that differs from `parts` in the fewest items.

    A drop-in function is compared with itself alone: another one, or a module, differs in everything.
    """
    best: Nearest | None = None
    ours = _root(parts)
    for manifest in manifests:
        theirs = _root(manifest.parts)
        alike = ours == theirs or not any(root.startswith(_FUNCTIONS) for root in (ours, theirs))
        if manifest.mode == mode and alike:
            differences = [str(d) for d in parts.diff(manifest.parts)]
            if best is None or len(differences) < len(best.differences):
                best = Nearest(manifest, differences)
    return best


def _root(parts: KeyParts) -> str:
    """The class of the region that a key is of."""
    structure = (part.items for part in parts.components if part.name == "structure")
    return next((value for items in structure for name, value in items if name == "(root)"), "")


def nothing_near(mode: str) -> str:
    """What an error or a command says where there is no entry of a mode."""
    return f"the store holds no {mode} artifact to compare it with"


def explain(call: Call, reason: str, store: Store, warm_line: str) -> str:
    """The text of a miss: key, reason, nearest entry and what differs, and the way out.

    Args:
        call: What was called.
        reason: Why nothing serves it.
        store: Where it was looked for.
        warm_line: The command that builds what the spec asks for.
    """
    where = f"region {call.region.name!r} ({call.mode}), key {call.parts.key}"
    lines = [f"no artifact for {where}: {reason} (store {store.url})"]
    try:
        lines += [
            f"what lies there for {entry.variant} cannot be used: {entry.problem}"
            for entry in store.variants(call.parts.key)
            if entry.problem is not None
        ]
        found = nearest(call.parts, call.mode, store.near(call.parts, call.mode))
    except StoreError as error:
        return "\n".join([*lines, f"what is nearest to it cannot be told: {error}", _way_out([], warm_line)])
    if found is None:
        lines.append(nothing_near(call.mode))
    elif found.differences:
        lines += found.lines("this call", most=_NEAREST)
    if (
        found is not None
        and not found.differences
        and trust_problem(found.manifest, own=store.own, config=Settings()) is not None
    ):
        return "\n".join(lines)  # it is built; the reason says whom to trust for it
    lines.append(_way_out([] if found is None else found.differences, warm_line))
    return "\n".join(lines)


def warm_line(spec: Spec, url: str | None) -> str:
    """The command that builds what is missing of a spec in the store at `url`."""
    if spec.drafter.batch is None and spec.drafter.calls is None:
        return RECORD_LINE
    return shlex.join(["aotcache", "warm", str(spec.path), *([] if url is None else ["--store", url])])


def _way_out(differences: list[str], warm_line: str) -> str:
    """What to do about a miss: `aotcache warm` builds what the spec describes, which may be another call."""
    parts = {difference.partition(".")[0] for difference in differences}
    if parts == {"call"} and warm_line == RECORD_LINE:
        return f"pad batches with aotcache.Buckets, or build it: {warm_line}"
    if parts == {"call"}:
        return (
            f"if the spec's batch() makes such calls, build them: {warm_line}\n"
            "if not, pad batches with aotcache.Buckets, change [buckets] or batch() in the spec first, or record "
            "what the program calls: aotcache record"
        )
    if parts == {"ambient"}:
        return (
            f"if the spec's context sets these, build it: {warm_line}\n"
            "if not, train under what that entry was built under, or give the spec a context that sets them first"
        )
    return f"to build it: {warm_line}"


def _strides_aside(parts: KeyParts) -> str:
    items = (
        f"{c.name}\0{name}\0{_STRIDES.sub('strides *', value)}"
        for c in parts.components
        for name, value in c.items
    )
    return "\1".join(items)
