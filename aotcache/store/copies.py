"""Collecting what this host keeps of stores elsewhere: their copies (`tiers/`), and what was unpacked of them.

All of it can be fetched and unpacked again, so no pin keeps it, and whether its store can be reached is not
asked. A process that runs what is removed goes on: its libraries stay open. One that is about to open it
unpacks it anew.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterable
from collections.abc import Collection as Some
from pathlib import Path

from aotcache.config import Settings
from aotcache.errors import StoreError
from aotcache.ownership import private_problem
from aotcache.store.collect import Collection, carry_out
from aotcache.store.evict import Candidate, Collected, Limits, Protected
from aotcache.store.local import UNPACKED
from aotcache.store.local import locked as holding
from aotcache.store.opening import directory, tier_folder
from aotcache.types import Digest, is_digest

_DRAFT = ".unpacking-"
_REMOVING = ".removing-"
_LONGEST_URL = 4096


def collect_copies(
    url: str | None = None,
    *,
    max_bytes: int | None = None,
    max_age: float | None = None,
    locked: Some[str] = frozenset(),
    dry_run: bool = False,
    told: Callable[[str], None] = lambda _: None,
) -> Collected:
    """Remove copies and unpacked libraries that the limits do not allow, and what killed processes left of either.

    Args:
        url: Only the copies of this store; by default those of all, and what is unpacked.
        max_bytes: Of all of it together.
        max_age: Seconds that a copy or an unpacked folder may go unopened.
        locked: Digests that lock files name.
        dry_run: Only tell.
        told: Told now and then what is being done.

    Raises:
        StoreError: if it cannot be read or written at all, or others could write there.
    """
    config = Settings()
    home, problems = config.home, list[str]()
    folders = _tiers(home) if url is None else [folder for folder in [tier_folder(url)] if folder.is_dir()]
    places = _places(folders)
    runs = [Collection(directory(folder), place, dry_run=dry_run) for folder, place in places.items()]
    others: list[Candidate] = []
    if url is None:
        if not dry_run:
            _clear_drafts(home, config.locks)
        others = _unpacked(home)

    def remove(candidate: Candidate) -> bool:
        try:
            return _remove(home, config.locks, candidate)
        except StoreError as error:
            problems.append(str(error))
            return False

    where = f"the copies in {home}" if url is None else f"this host's copies of {url}"
    return carry_out(
        where,
        runs,
        others,
        Limits(max_bytes, max_age),
        Protected(locked=frozenset(locked)),
        dry_run=dry_run,
        told=told,
        remove=remove,
        problems=problems,
    )


def _tiers(home: Path) -> list[Path]:
    return sorted(path for path in _names(home / "tiers") if path.is_dir() and not path.is_symlink())


def _places(folders: Iterable[Path]) -> dict[Path, str]:
    """What to call each; by its own name if it says the same as another, as a folder does that somebody copied."""
    found = dict[Path, str]()
    for folder in folders:
        origin = _origin(folder)
        found[folder] = str(folder) if origin in found.values() else origin
    return found


def _origin(folder: Path) -> str:
    """What a folder's copies are of; its own name where it does not say."""
    try:
        with (folder / "origin").open("rb") as file:
            said = file.read(_LONGEST_URL).decode(errors="replace").strip()
    except OSError:
        said = ""
    return said or str(folder)


def _unpacked(home: Path) -> list[Candidate]:
    found = []
    for path in _names(home / UNPACKED):
        if is_digest(path.name) and path.is_dir() and not path.is_symlink():
            try:
                used, size = path.stat().st_mtime, _bytes(path)
            except FileNotFoundError:
                continue
            found.append(Candidate("unpacked", None, "", Digest(path.name), size, used, UNPACKED))
    return found


def _bytes(folder: Path) -> int:
    total = 0
    for here, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(here, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _remove(home: Path, locks: Path, candidate: Candidate) -> bool:
    """Remove an unpacked folder that nobody has used since; whether it is gone."""
    folder = home / UNPACKED / str(candidate.digest)
    away = folder.with_name(f"{_REMOVING}{uuid.uuid4().hex}")
    try:
        with holding(locks, f"unpack {candidate.digest}", 0):
            if folder.stat().st_mtime > candidate.used:
                return False
            # At once, so that nobody finds half of it.
            os.rename(folder, away)
    except FileNotFoundError:
        return True
    except StoreError:
        return False  # somebody unpacks it
    except OSError as error:
        raise StoreError(f"cannot remove {folder}: {error.strerror}", path=str(folder)) from error
    shutil.rmtree(away, ignore_errors=True)
    return True


def _clear_drafts(home: Path, locks: Path) -> None:
    """Remove what processes left that were killed while they unpacked or collected."""
    for path in _names(home / UNPACKED):
        if path.is_symlink():
            continue
        if path.name.startswith(_REMOVING):
            shutil.rmtree(path, ignore_errors=True)
        elif path.name.startswith(_DRAFT):
            try:
                with holding(locks, f"unpack {path.name.removeprefix(_DRAFT)}", 0):
                    shutil.rmtree(path, ignore_errors=True)
            except StoreError:
                continue  # somebody unpacks into it right now


def _names(folder: Path) -> list[Path]:
    try:
        problem = private_problem(folder)
        found = sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"cannot read {folder}: {error.strerror}", path=str(folder)) from error
    if problem is not None:
        raise StoreError(
            f"{folder} is not collected: {problem}; take it over (chown, chmod go-w), or set AOTCACHE_HOME to a "
            "place of your own",
            path=str(folder),
        )
    return found


__all__ = ["collect_copies"]
