"""Opening artifacts before step 1, and the ranks of a group agreeing on what they run.

A rank that lacks a cell fails, or runs another path, where the others wait for it in a
collective. So every rank opens what it wants first, keeps whatever fails to itself, and
sends one report; from the same reports all come to the same end: go on with the same
archives, run the same cells eagerly, or raise the same error.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist

from aotcache import errors
from aotcache.errors import AotcacheError, ArtifactMiss, ConfigError, RejectedArtifact, StoreError
from aotcache.lockfile import LockedCell
from aotcache.runtime.resolve import Resolved, Resolver
from aotcache.types import CacheKey, Digest, Miss, sha256

if TYPE_CHECKING:
    from aotcache.graph.region import Region
    from aotcache.manifest import Manifest

    Group = dist.ProcessGroup | Literal["world"]

logger = logging.getLogger(__name__)

_THREADS = 8
_SHOWN = 8
"""How many cells or failures a message lists."""


@dataclass(slots=True)
class _Report:
    """What one rank found; crosses to the other ranks as JSON.

    Attributes:
        on_miss, warm_line, store: The rank's own.
        have: Digest of what was opened, by key.
        need: Keys that the lock file names.
        lacks: Why a key cannot be run here, where more is known than that nothing is there.
        unread: Why the store could not be read; None if it could.
        cells: Region and cell of the keys above, for people.
        code: Digest of each region's code; None where a lock file says what is wanted.
        failures: Type and text of everything else that went wrong.
    """

    on_miss: str
    warm_line: str
    store: str
    have: dict[CacheKey, Digest] = field(default_factory=dict)
    need: list[CacheKey] = field(default_factory=list)
    lacks: dict[CacheKey, str] = field(default_factory=dict)
    unread: str | None = None
    cells: dict[CacheKey, tuple[str, str]] = field(default_factory=dict)
    code: dict[str, str] | None = None
    failures: list[tuple[str, str]] = field(default_factory=list)


def prefetch(
    resolver: Resolver,
    regions: Sequence[Region],
    locked: Sequence[LockedCell] | None,
    *,
    on_miss: str,
    warm_line: str,
    group: Group | None = None,
) -> frozenset[str]:
    """Open what the lock file names, or without one what was made from the regions' code.

    Args:
        resolver: Opens, and from then on serves what was opened without asking the store.
        regions: What is attached.
        locked: Cells of the lock file, or None where there is none.
        on_miss: Where it is not "raise", what a rank lacks runs eagerly, on every rank.
        warm_line: The command that builds what is missing.
        group: Ranks that have to agree; all of them must call this. None: this process alone.

    Returns:
        The reasons that `resolver` gives for keys that it may not run although they may be there.

    Raises:
        ConfigError: `group` is none that this rank belongs to.
        ArtifactMiss: a cell is lacking here; in a group: on any rank, and then all raise it.
        AotcacheError: in a group, on all ranks: one of them failed, or they would not run alike.
    """
    ranks = None if group is None else _ranks(group, "prefetch")
    report = _Report(on_miss, warm_line, resolver.store.url)
    opened, failures = _open_wanted(report, resolver, regions, locked)
    denied: dict[CacheKey, str] | None = None
    if group is None or ranks is None:
        if failures:
            raise failures[0]
        if on_miss == "raise":
            _require_all(report, locked or ())
    else:
        denied = _agree(_exchange(report, group), ranks, failures)
    resolver.settle(opened, denied)
    return frozenset(denied.values()) if denied else frozenset()


def agree_on_ready(
    group: Group,
    on_miss: str,
    store: str,
    have: Mapping[CacheKey, Digest],
    wanted: Mapping[CacheKey, tuple[str, str]],
    recalled: Mapping[CacheKey, str],
) -> tuple[set[CacheKey], dict[CacheKey, tuple[str, str]], dict[CacheKey, str]]:
    """Tell the other ranks what is ready here, and learn what all have.

    Args:
        group: The ranks; all of them must call this.
        on_miss, store: This rank's own.
        have: Digest of what runs or could run here, by key.
        wanted: Region and device type of each key that was missed here.
        recalled: What ran here and must not any more, with the reason.

    Returns:
        The keys that every rank has with the same digest, all that any rank misses, and what was
        recalled on any rank.

    Raises:
        ConfigError: on all ranks: not all of them request, or this one is not in the group.
    """
    ranks = _ranks(group, "refresh")
    own = _Report(
        on_miss, "", store, have=dict(have), need=sorted(wanted), cells=dict(wanted), lacks=dict(recalled)
    )
    reports = _exchange(own, group)
    _require_one_reaction(reports, ranks)
    if on_miss != "request":
        raise ConfigError(
            f'refresh(group=...) is for on_miss="request", found {on_miss!r}: with it ranks agree on artifacts that '
            "come in the middle of a run; what is there before goes through prefetch(group=...)"
        )
    first = reports[0].have
    agreed = {key for key, digest in first.items() if all(r.have.get(key) == digest for r in reports)}
    missed = {key: report.cells[key] for report in reports for key in report.need}
    gone = {key: reason for report in reports for key, reason in report.lacks.items()}
    return agreed, {key: (region, device) for key, (region, device) in missed.items()}, gone


def agree_to_record(group: Group, store: str) -> None:
    """What a rank that records does where the others prefetch: nobody waits for it, and all must record.

    Raises:
        ConfigError: not all of the group's ranks record, or this one is not in it.
        AotcacheError: another rank failed.
    """
    ranks = _ranks(group, "prefetch")
    _agree(_exchange(_Report("record", "", store), group), ranks, ())


def _ranks(group: Group, what: str) -> list[int]:
    """The global ranks of a group's members, by their place in it; `what` was called with it."""
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            f"{what}(group={group!r}): this process is in no process group; call "
            "torch.distributed.init_process_group first, or leave group out"
        )
    found = _member(group)
    if not isinstance(found, dist.ProcessGroup) or dist.get_rank(found) < 0:
        raise ConfigError(
            f"{what}(group={group!r}): expected 'world' or a torch.distributed.ProcessGroup that rank "
            f"{dist.get_rank()}, which this is, belongs to"
        )
    return dist.get_process_group_ranks(found)


def _member(group: Group) -> Any:
    return dist.group.WORLD if isinstance(group, str) and group == "world" else group


def _open_wanted(
    report: _Report, resolver: Resolver, regions: Sequence[Region], locked: Sequence[LockedCell] | None
) -> tuple[dict[CacheKey, Resolved], list[BaseException]]:
    """What could be opened, and whatever went wrong: nothing may keep a rank from the exchange."""
    opened: dict[CacheKey, Resolved] = {}
    failures: list[BaseException] = []
    manifests: list[Manifest] = []
    try:
        manifests = (
            _of_lock(report, resolver, locked) if locked is not None else _of_code(report, resolver, regions)
        )
    except Exception as failure:  # noqa: BLE001 - raised by the caller, once every rank knows of it
        failures.append(failure)
    resolver.know(manifests)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="aotcache-prefetch") as pool:
        opening = [(manifest, pool.submit(resolver.open, manifest)) for manifest in manifests]
    for manifest, future in opening:
        problem = future.exception()
        if problem is not None:
            failures.append(problem)
            continue
        answer = future.result()
        if isinstance(answer, Miss):
            report.lacks[manifest.key] = answer.reason
        else:
            opened[manifest.key] = answer
            report.have[manifest.key] = manifest.digest
    report.failures = [(type(problem).__name__, str(problem)) for problem in failures]
    return opened, failures


def _of_lock(report: _Report, resolver: Resolver, locked: Sequence[LockedCell]) -> list[Manifest]:
    """The best artifact for each key of a lock file. It may name several targets for one key."""
    digests = {cell.digest for cell in locked}
    for cell in locked:
        report.cells.setdefault(cell.key, (cell.region, str(cell)))
    report.need = sorted(report.cells)
    try:
        stored = resolver.store.resolve(report.need)
    except StoreError as error:
        report.unread = f"the store cannot be read: {error}"
        report.lacks = dict.fromkeys(report.need, report.unread)
        return []
    return _best(report, resolver, {k: [m for m in stored[k] if m.digest in digests] for k in report.need})


def _of_code(report: _Report, resolver: Resolver, regions: Sequence[Region]) -> list[Manifest]:
    """The best artifact for each key that the store has of these regions' code."""
    report.code = {region.name: region.static().code.digest for region in regions}
    stored: dict[CacheKey, list[Manifest]] = {}
    try:
        for code in sorted({region.static().code.digest for region in regions}):
            for manifest in resolver.store.list(code=code):
                stored.setdefault(manifest.key, []).append(manifest)
    except StoreError as error:
        if report.on_miss == "raise":
            raise
        report.unread = f"the store cannot be read: {error}"
        logger.warning("prefetch opens nothing of %s: %s", report.store, report.unread)
        return []
    for key, (first, *_) in stored.items():
        cell = LockedCell(
            first.region, first.mode, first.bucket, str(first.target), str(first.toolchain), key, first.digest
        )
        report.cells[key] = (cell.region, str(cell))
    return _best(report, resolver, stored)


def _best(report: _Report, resolver: Resolver, stored: Mapping[CacheKey, list[Manifest]]) -> list[Manifest]:
    found = []
    unsure = resolver.ask_for_recalls() if any(stored.values()) else None
    for key in sorted(stored):
        answer = unsure or resolver.choose(stored[key], asked=True)
        if isinstance(answer, Miss):
            report.lacks[key] = answer.reason
        else:
            found.append(answer)
    return found


def _require_all(report: _Report, locked: Iterable[LockedCell]) -> None:
    for cell in locked:
        if cell.key not in report.have:
            raise ArtifactMiss(
                f"the lock file names {cell}, and the store has nothing for its key {cell.key} that this "
                f"host can run: {report.lacks[cell.key]}; run: {report.warm_line}",
                key=cell.key,
            )


def _exchange(report: _Report, group: Group) -> list[_Report]:
    """Every rank's report, in the order of the group. Takes as long as the slowest rank's own opening.

    Reports are as long as the lock file, and mostly all the same: their digests go round first.
    """
    text = json.dumps(asdict(report), sort_keys=True)
    texts: list[Any] = _gather(sha256(text.encode()), group)
    texts = [text] * len(texts) if len(set(texts)) == 1 else _gather(text, group)
    return [_Report(**json.loads(each)) for each in texts]


def _gather(text: str, group: Group) -> list[Any]:
    member = _member(group)
    found: list[Any] = [None] * dist.get_world_size(member)
    dist.all_gather_object(found, text, group=member)
    return found


def _agree(
    reports: Sequence[_Report], ranks: Sequence[int], own: Sequence[BaseException]
) -> dict[CacheKey, str]:
    """What all ranks have to leave, with the reason. Made from `reports` alone, so the same on every rank.

    Args:
        reports, ranks: One for each rank of the group.
        own: What went wrong on this rank, to be seen as the cause.
    """
    _raise_failures(reports, ranks, own)
    _require_alike(reports, ranks)
    wanted = sorted({key for report in reports for key in (*report.have, *report.need)})
    lines: dict[CacheKey, list[str]] = {}
    lacking: list[dict[str, Any]] = []
    for key in wanted:
        region, cell = next(report.cells[key] for report in reports if key in report.cells)
        for report, rank in zip(reports, ranks, strict=True):
            if key not in report.have:
                reason = _why(key, region, report, reports, ranks)
                line = f"rank {rank} lacks {cell} (region {region!r}, key {key}): {reason}"
                lines.setdefault(key, []).append(line)
                lacking.append({"rank": rank, "region": region, "cell": cell, "key": key, "reason": reason})
    if not lacking:
        return {}
    text = _listed([line for some in lines.values() for line in some])
    if reports[0].on_miss == "raise":
        first = lacking[0]
        behind = next(r for r, rank in zip(reports, ranks, strict=True) if rank == first["rank"])
        raise ArtifactMiss(
            f"not every rank has what one of them would run:\n{text}\n"
            "all ranks raise this, so that none waits for another. To build it, there: "
            f"{behind.warm_line}; or copy it with aotcache fetch. If the run does not need it, give every rank one "
            "lock file, attach(lock=...), that does not name it",
            key=first["key"],
            region=first["region"],
            rank=first["rank"],
            lacking=lacking,
        )
    logger.warning("all ranks run these cells eagerly, because one lacks them:\n%s", text)
    return {key: f"all ranks run it eagerly: {'; '.join(some)}" for key, some in lines.items()}


def _raise_failures(reports: Sequence[_Report], ranks: Sequence[int], own: Sequence[BaseException]) -> None:
    failed = [
        (rank, *failure) for report, rank in zip(reports, ranks, strict=True) for failure in report.failures
    ]
    if not failed:
        return
    kind = getattr(errors, failed[0][1], None)
    if not (isinstance(kind, type) and issubclass(kind, AotcacheError)):
        kind = AotcacheError
    raise kind(
        "prefetch failed, and all ranks raise this, so that none waits for another:\n"
        + _listed([f"rank {rank}: {name}: {text}" for rank, name, text in failed]),
        ranks=sorted({rank for rank, _, _ in failed}),
    ) from (own[0] if own else None)


def _require_alike(reports: Sequence[_Report], ranks: Sequence[int]) -> None:
    """One reaction to a miss, and one archive for each key."""
    _require_one_reaction(reports, ranks)
    _require_one_archive(reports, ranks)


def _require_one_reaction(reports: Sequence[_Report], ranks: Sequence[int]) -> None:
    settings = {report.on_miss: rank for report, rank in zip(reports, ranks, strict=True)}
    if len(settings) > 1:
        found = ", ".join(f"{mode!r} on rank {rank}" for mode, rank in sorted(settings.items()))
        raise ConfigError(f"on_miss is {found}, expected the same on every rank of the group")


def _require_one_archive(reports: Sequence[_Report], ranks: Sequence[int]) -> None:
    first: dict[CacheKey, tuple[int, Digest]] = {}
    for report, rank in zip(reports, ranks, strict=True):
        for key, digest in sorted(report.have.items()):
            known, expected = first.setdefault(key, (rank, digest))
            if digest != expected:
                region, cell = report.cells[key]
                raise RejectedArtifact(
                    f"{cell} (region {region!r}, key {key}) is archive {expected} on rank {known} and {digest} on "
                    f"rank {rank}: their results would differ. Give all ranks one store or one lock file "
                    "(attach(lock=...)); where their processors differ, one that names a target that all have",
                    key=key,
                    region=region,
                    rank=rank,
                    expected=expected,
                    found=digest,
                )


def _why(
    key: CacheKey, region: str, report: _Report, reports: Sequence[_Report], ranks: Sequence[int]
) -> str:
    """Why a rank lacks a key, as far as its report tells."""
    if key in report.lacks:
        return f"{report.lacks[key]} (store {report.store})"
    if report.unread is not None:
        return f"{report.unread} (store {report.store})"
    if report.code is None:
        return "its lock file does not name it"
    for other, rank in zip(reports, ranks, strict=True):
        if key in other.have and other.code is not None and other.code.get(region) != report.code.get(region):
            return f"its code of that region is not rank {rank}'s"
    return f"its store {report.store} has nothing under that key"


def _listed(lines: Sequence[str]) -> str:
    more = len(lines) - _SHOWN
    return "\n".join([*lines[:_SHOWN], *([f"and {more} more"] if more > 0 else [])])
