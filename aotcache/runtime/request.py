"""`on_miss="request"`: what is missing is asked of the service, and lies open when a step boundary comes.

One thread for each handle asks, waits and opens. Calls go on eagerly meanwhile: nothing that
it brings runs before `Handle.refresh`.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aotcache import host
from aotcache.compat import cpu_level_features
from aotcache.errors import AotcacheError, ConfigError, ServiceError, ServiceUnavailable
from aotcache.runtime.prefetch import agree_on_ready
from aotcache.runtime.resolve import Resolved
from aotcache.store.builds import service_of
from aotcache.types import CacheKey, Miss, Target

if TYPE_CHECKING:
    from aotcache.graph.region import Call
    from aotcache.runtime.prefetch import Group
    from aotcache.runtime.resolve import Resolver
    from aotcache.runtime.stats import Stats
    from aotcache.spec import Spec
    from aotcache.store.builds import Build, BuildService

logger = logging.getLogger(__name__)

_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 10.0
"""Seconds between looks at a build that is not ready."""
_LONGEST_OUTAGE_PAUSE = 60.0
"""Seconds between tries of a service that is away or refuses."""
_FOUND_TRIES = 10
"""Looks at the store for what the service says is there."""
_CLOSE_SECONDS = 2.0


@dataclass(slots=True)
class _Wanted:
    """A key that was asked for and is not there.

    Attributes:
        region, device: Of the call.
        build: What the service said last.
        due: When to look again, of the monotonic clock.
        pause: Seconds between the last two looks.
        looks: Looks at the store since the service said that it is there.
    """

    region: str
    device: str
    build: Build | None = None
    due: float = 0.0
    pause: float = _FIRST_PAUSE
    looks: int = 0


class Requests:
    """The keys that one attached drafter misses, on their way. Thread-safe.

    Args:
        service: Asked to build.
        spec: Names the spec and its targets.
        resolver: Opens what was built.
        stats: Is told how many keys are where.
    """

    def __init__(self, service: BuildService, spec: Spec, resolver: Resolver, stats: Stats) -> None:
        self._service = service
        self._spec = spec
        self._resolver = resolver
        self._stats = stats
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._pending: dict[CacheKey, _Wanted] = {}
        self._ready: dict[CacheKey, Resolved] = {}
        self._asked: dict[CacheKey, tuple[str, str]] = {}
        self._failed: set[CacheKey] = set()
        self._unreached = False

    def want(self, call: Call) -> None:
        """A call was missed: ask for its artifact, if that was not done yet."""
        if call.parts.key not in self._asked:
            self.want_all({call.parts.key: (call.region.name, call.device)})

    def want_all(self, keys: Mapping[CacheKey, tuple[str, str]]) -> None:
        """Ask for keys, each with the region and device type that it is of."""
        with self._lock:
            new = {key: of for key, of in keys.items() if key not in self._asked}
            if not new or self._closed.is_set():
                return
            self._asked.update(new)
            self._pending.update({key: _Wanted(*of) for key, of in new.items()})
            self._count()
            self._wake.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="aotcache-request", daemon=True)
                self._thread.start()

    @property
    def asked(self) -> dict[CacheKey, tuple[str, str]]:
        """Every key asked for so far, with its region and device type."""
        with self._lock:
            return dict(self._asked)

    def ready(self) -> dict[CacheKey, Resolved]:
        """What lies open and does not run yet."""
        with self._lock:
            return dict(self._ready)

    def taken(self, keys: Mapping[CacheKey, Resolved]) -> None:
        """These run from now on."""
        with self._lock:
            for key in keys:
                self._ready.pop(key, None)
            self._count()

    def forget(self, keys: Iterable[CacheKey]) -> None:
        """Ask for these again when they are missed again: what came of them is not to be run any more."""
        with self._lock:
            for key in keys:
                self._asked.pop(key, None)
                self._pending.pop(key, None)
                self._ready.pop(key, None)
                self._failed.discard(key)
            self._count()

    def close(self) -> None:
        """Ask no more. A request on its way ends by its own limits, in a thread that nobody waits for."""
        with self._lock:
            self._closed.set()
            thread = self._thread
        self._wake.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_SECONDS)

    def _count(self) -> None:
        pending = len(self._pending) + len(self._ready)
        self._stats.requests(len(self._asked), pending, len(self._failed))

    def _run(self) -> None:
        """Look at what is due until nothing is pending; the next miss starts a new thread."""
        while True:
            with self._lock:
                if self._closed.is_set() or not self._pending:
                    self._thread = None
                    return
                now = time.monotonic()
                due = [(key, wanted) for key, wanted in self._pending.items() if wanted.due <= now]
                wait = min(wanted.due for wanted in self._pending.values()) - now
                self._wake.clear()
            for key, wanted in due:
                if self._closed.is_set():
                    break
                self._look(key, wanted)
            if not due:
                self._wake.wait(wait)

    def _look(self, key: CacheKey, wanted: _Wanted) -> None:
        try:
            answer = self._advance(key, wanted)
        except ServiceUnavailable as error:
            if not self._unreached:
                self._unreached = True
                logger.warning("missing artifacts are not asked for now, and run eagerly: %s", error)
            self._later(wanted, _LONGEST_OUTAGE_PAUSE)
            return
        except ServiceError as error:
            # No token, no such spec yet: somebody may put that right while this run goes on.
            if wanted.build is None and wanted.pause == _FIRST_PAUSE:
                logger.warning(
                    "region %r stays eager, its artifact was asked for in vain: %s", wanted.region, error
                )
            wanted.build = None
            self._later(wanted, _LONGEST_OUTAGE_PAUSE)
            return
        except AotcacheError as error:
            answer = Miss(f"{type(error).__name__}: {error}")
        except Exception as error:
            logger.exception("asking for key %s failed", key)
            answer = Miss(f"{type(error).__name__}: {error}")
        if self._unreached:
            self._unreached = False
            logger.warning("%s is back", self._service.url)
        if answer is None:
            self._later(wanted, _LONGEST_PAUSE)
            return
        with self._lock:
            if self._pending.pop(key, None) is None:
                return  # forgotten meanwhile
            if isinstance(answer, Resolved):
                self._ready[key] = answer
            else:
                self._failed.add(key)
            self._count()
        if isinstance(answer, Miss):
            logger.warning("region %r stays eager (key %s): %s", wanted.region, key, answer.reason)

    def _advance(self, key: CacheKey, wanted: _Wanted) -> Resolved | Miss | None:
        """One step: the opened artifact, why there will be none, or None for not yet."""
        build = wanted.build
        if build is None or build.id is None:
            target, toolchain = self._target(wanted.device), host.host_toolchain()
            build = self._service.request(self._spec.drafter.name, key, target, toolchain)
        elif not build.ended:
            build = self._service.get(build.id)
        wanted.build = build
        if build.state in ("failed", "cancelled"):
            failure = build.failure()
            return Miss(f"its build failed: {type(failure).__name__}: {failure}")
        if build.state != "done":
            return None
        found = self._resolver.choose(self._resolver.store.lookup(key))
        answer = found if isinstance(found, Miss) else self._resolver.open(found, ahead=True)
        wanted.looks += 1
        # A copy of the store's answers may be some moments old, and an archive out of reach for a while.
        return None if isinstance(answer, Miss) and wanted.looks < _FOUND_TRIES else answer

    def _later(self, wanted: _Wanted, longest: float) -> None:
        wanted.due = time.monotonic() + wanted.pause * random.uniform(0.8, 1.2)
        wanted.pause = min(longest, wanted.pause * 1.5)

    def _target(self, device: str) -> Target:
        """What to ask for: this host's own target, or else the best of the spec's that runs here."""
        native = host.host_target(device)
        named = [t for t in self._spec.targets(lambda: native) if t.device == device]
        if native in named:
            return native
        features = host.cpu_features()
        usable = [t for t in named if device == "cpu" and features >= _features(t)]
        return max(usable, key=lambda t: len(_features(t)), default=native)


def requests_for(spec: Spec, resolver: Resolver, stats: Stats) -> Requests:
    """What asks for the misses of a drafter.

    Raises:
        ConfigError: the store is no service.
    """
    service = service_of(resolver.store)
    if service is None:
        raise ConfigError(
            f'on_miss="request" asks a service to build, and store {resolver.store.url} is none: give '
            "store='http(s)://...', or set AOTCACHE_STORE"
        )
    return Requests(service, spec, resolver, stats)


def refresh(
    resolver: Resolver,
    requests: Requests | None,
    on_miss: str,
    group: Group | None,
    recalled: Mapping[CacheKey, str],
) -> dict[CacheKey, str]:
    """`Handle.refresh`, where something is requested or ranks agree.

    Args:
        resolver, requests, on_miss, group: The handle's.
        recalled: What this rank serves and must not any more, with the reason.

    Returns:
        What is not served any more: in a group, what was recalled on any rank.
    """
    ready = {} if requests is None else requests.ready()
    stale = [key for key, answer in ready.items() if not resolver.may_run(answer)]
    ready = {key: answer for key, answer in ready.items() if key not in stale}
    dropped, missed = dict(recalled), dict[CacheKey, tuple[str, str]]()
    if group is not None:
        have = {key: answer.executable.manifest.digest for key, answer in ready.items()}
        served = {key: digest for key, digest in resolver.served.items() if key not in recalled}
        agreed, missed, dropped = agree_on_ready(
            group,
            on_miss,
            resolver.store.url,
            {**have, **served},
            {} if requests is None else requests.asked,
            recalled,
        )
        resolver.hold()
        ready = {key: answer for key, answer in ready.items() if key in agreed and key not in dropped}
    resolver.drop(dropped)
    if requests is not None:
        requests.forget([*dropped, *stale])
        left = resolver.served
        requests.want_all({key: of for key, of in missed.items() if key not in left})
    resolver.swap(ready)
    if requests is not None:
        requests.taken(ready)
    return dropped


def _features(target: Target) -> frozenset[str]:
    try:
        return frozenset(cpu_level_features(target.arch))
    except ConfigError:
        return frozenset({target.arch})  # a level that nobody has


__all__ = ["Requests", "refresh", "requests_for"]
