"""The loader hook: `attach` puts compiled artifacts behind a drafter's regions.

What is attached opens artifacts as they are called, or ahead of that by `prefetch`; how a
call is run is `attachment.py`'s.
"""

from __future__ import annotations

import logging
import os
import threading
import types
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import nn

from aotcache import host
from aotcache.config import Settings
from aotcache.errors import ConfigError
from aotcache.graph.capture import find_regions
from aotcache.graph.functions import function_regions
from aotcache.graph.region import Region
from aotcache.graph.structure import ATTACHED
from aotcache.lockfile import LockedCell, lock_path, read_lock
from aotcache.recorded import output_path
from aotcache.runtime import prefetch as prefetching
from aotcache.runtime import request as requesting
from aotcache.runtime import tripwire
from aotcache.runtime.attachment import Attachment, forward
from aotcache.runtime.dispatch import Records
from aotcache.runtime.flex import add_handle, remove_handle
from aotcache.runtime.openings import look_back
from aotcache.runtime.resolve import Resolver, lasting, warm_line
from aotcache.runtime.stats import Stats
from aotcache.spec import CompileOptions, Spec, load_spec
from aotcache.store import open_store

if TYPE_CHECKING:
    from aotcache.runtime.prefetch import Group
    from aotcache.runtime.record import Recorder
    from aotcache.runtime.request import Requests
    from aotcache.store.base import Store

logger = logging.getLogger(__name__)

OnMiss = Literal["raise", "eager", "record", "request"]


class Handle:
    """An attached drafter. Made by `attach`.

    Thread-safe: any number of threads may run the drafter, its deep copies and further
    replicas attached on their own. Artifacts are opened once per process.
    """

    def __init__(
        self,
        regions: Iterable[Region],
        resolver: Resolver,
        *,
        options: dict[str, Any],
        on_miss: OnMiss,
        warm_line: str,
        warms_infer: bool = True,
        lock_cells: list[LockedCell] | None,
        counters: Stats,
        wire: tripwire.Tripwire | None,
        recorder: Recorder | None = None,
        requests: Requests | None = None,
        verifies: bool = False,
    ) -> None:
        self.resolver = resolver
        self.verifies = verifies
        self.recorder = recorder
        self.requests = requests
        self.options = options
        self.on_miss = on_miss
        self.runs_eagerly = on_miss in ("eager", "request")
        self.warm_line = warm_line
        self._warms_infer = warms_infer
        self.counters = counters
        self._lock_cells = lock_cells
        self._wire = wire
        self._told: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        self._attachments: weakref.WeakSet[Attachment] = weakref.WeakSet()
        self._attached: list[nn.Module] = []
        for region in regions:
            self._put(region.module, Attachment(region.name, region.module, region.forward, self))
        self.functions = {
            name: Attachment(name, region.module, region.forward, self)
            for name, region in function_regions(options).items()
        }
        self.attached = False
        look_back(resolver.home, resolver.store)

    def enter(self) -> Handle:
        """From now on, the calling thread's calls of `aotcache.flex` are this handle's."""
        self.attached = True
        add_handle(self)
        return self

    def _put(self, module: nn.Module, attachment: Attachment) -> None:
        module.__dict__[ATTACHED] = attachment
        module.__dict__["forward"] = types.MethodType(forward, module)
        self._attached.append(module)

    def remember(self, attachment: Attachment) -> None:
        """Attachments of modules and of their copies, as long as these live."""
        with self._lock:
            self._attachments.add(attachment)

    def first_time(self, region: str, reason: str) -> bool:
        """Whether a region was not yet reported for this reason."""
        with self._lock:
            told = (region, lasting(reason))
            new = told not in self._told
            self._told.add(told)
            return new

    def way_out(self) -> str:
        """What builds a call that the calling thread makes now."""
        if self._warms_infer or torch.is_grad_enabled():
            return self.warm_line
        return f'add "infer" to the spec\'s modes, then {self.warm_line}'

    def stats(self) -> dict[str, Any]:
        """Counters since `attach`: hits, misses, loads, load seconds, eager calls, bytes, per region
        and in total, the traces that the tripwire saw, and the deaths of processes of this host that
        opened or first ran one of the archives in use. A copy."""
        return self.counters.snapshot(traces=self._wire.receipt.total if self._wire is not None else 0)

    def prefetch(self, *, group: Group | None = None) -> dict[str, Any]:
        """Open everything the lock file names, in parallel; without a lock file, every
        stored artifact made from its regions' code and, in a group, all of the drop-in functions'. Returns `stats()`.

        With a group, all its ranks must call this before their first step, for one drafter
        after another, as with any collective. They exchange what each of them has and run
        the same archives from then on. What any rank lacks is an error on all of them, the
        same one, or with `on_miss="eager"` and "request" runs eagerly on all of them.

        Args:
            group: A `torch.distributed.ProcessGroup`, or "world"; its timeout counts.

        Raises:
            ArtifactMiss: the lock file names a cell for which the store has nothing that this
                host can run (`on_miss="raise"`); in a group: any rank lacks what another has.
            ConfigError: this rank is not in the group.
            AotcacheError: in a group, what failed on any rank.
        """
        look_back(self.resolver.home, self.resolver.store)
        if self.recorder is not None:
            if group is not None:
                prefetching.agree_to_record(group, self.resolver.store.url)
            return self.stats()  # it runs nothing that could be opened
        # Which of the functions' artifacts a drafter calls is not known; ranks that differ in one would wait.
        functions = [] if group is None else [function.region for function in self.functions.values()]
        reasons = prefetching.prefetch(
            self.resolver,
            [*(m.__dict__[ATTACHED].region for m in self._attached), *functions],
            self._lock_cells,
            on_miss=self.on_miss,
            warm_line=self.warm_line,
            group=group,
        )
        if group is not None and self.requests is not None:
            self.resolver.hold()  # what comes later goes through `refresh`
        with self._lock:
            everywhere = list(self._attachments)
        for attachment in everywhere:
            if group is not None:
                attachment.records = Records()  # what ran before may be what nobody is to run now
            for reason in reasons:
                self.first_time(attachment.name, reason)  # all of them were logged as one
        return self.stats()

    def refresh(self, *, group: Group | None = None) -> None:
        """Look at the store again for what was missing so far; with `on_miss="request"`, run from
        now on what has come from the service. Call it between two steps.

        What was recalled since it was opened is not run any more: its calls are misses from now on.

        With a group all its ranks must call this at the same step, as with any collective: they
        swap in exactly what every one of them has ready, and ask for what any of them misses. What
        was recalled on one of them none of them runs any more.

        Args:
            group: A `torch.distributed.ProcessGroup`, or "world"; with `on_miss="request"` alone.

        Raises:
            ConfigError: in a group, on all ranks: not all of them request, or this rank is not in it.
        """
        try:
            recalled = self.resolver.recalled()
        except ConfigError as error:
            if group is None:
                raise
            logger.warning("%s", error)  # nothing may keep a rank from where the others wait for it
            recalled = {}
        if group is None and self.requests is None:
            self.resolver.drop(recalled)
            self.resolver.forget_misses()
        else:
            recalled = requesting.refresh(self.resolver, self.requests, self.on_miss, group, recalled)
        for reason in dict.fromkeys(recalled.values()):
            logger.warning("not run any more: %s", reason)
        if recalled:
            with self._lock:
                everywhere = list(self._attachments)
            for attachment in everywhere:
                attachment.records = Records()

    def detach(self) -> None:
        """Give every module its own forward back. Calls that run meanwhile end as they began.

        With `on_miss="record"` the record is written.
        """
        if self.recorder is not None:
            self.recorder.close()
        if self.requests is not None:
            self.requests.close()
        if self.attached:
            self.attached = False
            remove_handle(self)
        for module in self._attached:
            attachment = module.__dict__.pop(ATTACHED, None)
            if attachment is None:
                continue
            placed = module.__dict__.get("forward")
            if getattr(placed, "__func__", None) is not forward:
                continue  # somebody put another forward in its place, which stays
            del module.__dict__["forward"]
            if module.forward != attachment.original:
                module.__dict__["forward"] = attachment.original
        self._attached.clear()
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        return self


def attach(
    model: nn.Module,
    spec: Spec | str | Path | None = None,
    *,
    store: Store | str | None = None,
    on_miss: OnMiss = "raise",
    lock: str | Path | None = None,
    forbid_tracing: Literal["process", "thread"] | None = "process",
    verify: Literal["first-use"] | None = None,
) -> Handle:
    """Run a drafter's regions from compiled artifacts. Nothing is traced, ever.

    Args:
        model: The drafter, or a replica of it.
        spec: A spec, its path, or None for `aotcache.toml` in the working directory.
        store: A store or its URL; default is the configured one.
        on_miss: What a call does that nothing in the store covers: "raise"
            ArtifactMiss, or "eager": run without an artifact, and without tracing.
            "record" runs every call so, and writes `<spec>.recorded.toml`, from which
            `aotcache warm` builds what the run called. "request" runs it so too, and asks the
            service to build it; `refresh` swaps in what has come.
        lock: A lock file whose digests alone are accepted. `<spec>.lock` is used by
            `prefetch` when it lies beside the spec; it restricts only when named here.
        forbid_tracing: Where an attempt to trace raises TracingForbidden until
            `detach`: in the whole "process", in the calling "thread", or nowhere (None).
        verify: "first-use": compare the first call of each artifact, gradients included, with the
            region's own code run eagerly on the same values; see `runtime/first_use.py`.

    Returns:
        The handle; also a context manager that detaches.

    Raises:
        SpecError: the spec is wrong, or a region pattern matches nothing.
        ManifestError: the lock file cannot be read.
    """
    if on_miss not in get_args(OnMiss):
        raise ConfigError(f"on_miss is {on_miss!r}, expected 'raise', 'eager', 'record' or 'request'")
    if forbid_tracing not in ("process", "thread", None):
        raise ConfigError(f"forbid_tracing is {forbid_tracing!r}, expected 'process', 'thread' or None")
    if verify not in ("first-use", None):
        raise ConfigError(f"verify is {verify!r}, expected 'first-use' or None")
    spec = spec if isinstance(spec, Spec) else load_spec(spec)
    settings = Settings()
    on_miss = "record" if settings.recording else on_miss
    options = spec.compile_options()
    regions = find_regions(model, spec.drafter.regions, options)
    _require_detached(regions)
    opened = open_store(store) if isinstance(store, str) or store is None else store
    cells = _lock_cells(spec, lock) if on_miss != "record" else None
    counters = Stats()
    resolver = Resolver(
        opened,
        settings.home,
        host.host_facts(),
        frozenset(c.digest for c in cells) if lock is not None and cells is not None else None,
        counters,
    )
    recorder = _recorder(spec, settings) if on_miss == "record" else None
    requests = requesting.requests_for(spec, resolver, counters) if on_miss == "request" else None
    # Last: what is refused above must leave no wire behind, which nobody could close.
    wire = tripwire.install(forbid_tracing) if forbid_tracing is not None else None
    if recorder is not None:
        recorder.start(model)
    return Handle(
        regions,
        resolver,
        options=options,
        on_miss=on_miss,
        counters=counters,
        lock_cells=cells,
        wire=wire,
        recorder=recorder,
        requests=requests,
        verifies=verify is not None,
        warm_line=warm_line(spec, None if store is None else opened.url),
        warms_infer=spec.drafter.batch is None or "infer" in spec.drafter.modes,
    ).enter()


def unattached() -> Handle:
    """What runs drop-in functions in a program that attaches nothing: the configured store, default options."""
    settings, counters = Settings(), Stats()
    return Handle(
        (),
        Resolver(open_store(None), settings.home, host.host_facts(), None, counters),
        options=CompileOptions().for_key(),
        on_miss="eager" if settings.recording else "raise",
        counters=counters,
        lock_cells=None,
        wire=None,
        warm_line="aotcache warm <spec>",
    )


def _recorder(spec: Spec, settings: Settings) -> Recorder:
    from aotcache.runtime.record import Recorder  # most runs record nothing

    return Recorder(spec, output_path(spec, settings.record), settings)


def _require_detached(regions: Iterable[Region]) -> None:
    for region in regions:
        if isinstance(region.module.__dict__.get(ATTACHED), Attachment):
            raise ConfigError(
                f"region {region.name!r} is attached already; call detach() on the first handle first",
                region=region.name,
            )


def _lock_cells(spec: Spec, lock: str | Path | None) -> list[LockedCell] | None:
    path = Path(lock) if lock is not None else lock_path(spec.path)
    if lock is None and not os.path.lexists(path):
        return None
    return read_lock(path).cells


__all__ = ["Attachment", "Handle", "attach"]
