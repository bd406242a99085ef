"""The process-wide registry of opened artifacts: unpacked once per host, opened once per process.

The only global mutable state of the worker half. Everything that ends up in `dlopen`
passes here, so this is where the manifest's signature is verified and the bytes are
checked against the manifest, every time.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import threading
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from aotcache.archive import chunks, judged
from aotcache.config import Settings
from aotcache.errors import CorruptArtifact, RecalledArtifact, RejectedArtifact, StoreError
from aotcache.manifest import Manifest
from aotcache.ownership import first_link
from aotcache.passing import again, remove_tree
from aotcache.recall import recall_problem
from aotcache.runtime.function import Executable
from aotcache.runtime.openings import FirstRun, Opening, marked
from aotcache.runtime.runner import Library, PackageRunner, Runner
from aotcache.store.base import Store
from aotcache.store.files import touch
from aotcache.store.local import UNPACKED, is_dir, make_dirs, once, require_private
from aotcache.trust import standing, trust_problem
from aotcache.types import Digest

logger = logging.getLogger(__name__)

_ARCHIVE = "archive.pt2"
"""The archive itself, kept where torch's own loader is to read it."""

_KEPT = (".so", ".json")
"""Members that are unpacked."""

_opened: dict[tuple[Digest, str], Executable] = {}
_opening: dict[tuple[Digest, str], threading.Lock] = {}
_guard = threading.Lock()


def open_artifact(manifest: Manifest, store: Store, home: Path) -> tuple[Executable, bool]:
    """The opened artifact of a manifest that this host accepts.

    Any number of threads may ask at once: one opens, the others wait for it. Two
    manifests of one archive (identical graphs under two keys) share its libraries.
    Whether the manifest is trusted, and not recalled, is asked before anything is fetched, and anew
    when all lies ready to be opened: keys may have been removed while an archive came.

    Args:
        manifest: As the store gave it; the verdict is the caller's to ask.
        store: Where the archive is, if it is not unpacked on this host yet.
        home: AOTCACHE_HOME.

    Returns:
        The executable, and whether this call opened it.

    Raises:
        CorruptArtifact: archive or members are not what the manifest says.
        RecalledArtifact: somebody whose key is trusted took it back.
        RejectedArtifact: nobody who is trusted vouches for it, or the libraries cannot be opened here.
        StoreError: the archive cannot be fetched or unpacked.
    """
    _require_trusted(manifest, store, home)
    mark = (manifest.digest, manifest.key)
    found = _opened.get(mark)
    if found is not None:
        return found, False
    with _guard:
        lock = _opening.setdefault(mark, threading.Lock())
    with lock:
        found = _opened.get(mark)
        if found is not None:
            return found, False
        made = _opened[mark] = _unpack_and_open(manifest, store, home)
        return made, True


def _unpack_and_open(manifest: Manifest, store: Store, home: Path) -> Executable:
    """Once more if a collection removes the archive or the folder between two steps."""
    retried = False
    while True:
        try:
            folder = unpack(manifest, _Fetched(store), home)
            _require_trusted(manifest, store, home, opening=True)
            made = _open_marked(manifest, folder, store, home)
        except (RejectedArtifact, StoreError, OSError) as error:
            vanished = not unpacked_folder(home, manifest.digest).is_dir()
            if retried or not (vanished and type(error) in (RejectedArtifact, StoreError, FileNotFoundError)):
                raise
            retried = True
            logger.info("archive %s is unpacked once more: %s", manifest.digest, error)
            continue
        store.used(manifest.digest)
        touch(folder)
        return made


def unpacked_folder(home: Path, digest: Digest) -> Path:
    """Where the members of an archive are unpacked."""
    return home / UNPACKED / digest


def _require_trusted(manifest: Manifest, store: Store, home: Path, *, opening: bool = False) -> None:
    recalled = recall_problem(manifest, home=home)
    if recalled is not None:
        raise RecalledArtifact(
            f"archive {manifest.digest} of key {manifest.key} in {store.url} is not opened: {recalled}",
            key=manifest.key,
            digest=manifest.digest,
        )
    if store.own and manifest.envelope is None:
        store.require_own(manifest)
        return  # the usual case, which need not read the settings
    config = Settings()
    problem = trust_problem(manifest, own=store.own, config=config, url=store.url)
    if problem is not None:
        raise RejectedArtifact(
            f"archive {manifest.digest} of key {manifest.key} in {store.url} is not opened, because opening an "
            f"artifact runs its code: {problem}",
            key=manifest.key,
            digest=manifest.digest,
        )
    if opening and config.trust_unsigned:
        found = standing(manifest, own=store.own, config=config)
        if found.problem is not None:
            logger.warning(
                "AOTCACHE_TRUST_UNSIGNED is set: opening archive %s of key %s (region %r) from %s, although %s",
                manifest.digest,
                manifest.key,
                manifest.region,
                store.url,
                found.problem,
            )


class _Fetched:
    """Gets an archive from a store when it is needed."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __call__(self, digest: Digest, folder: Path) -> Path:
        path = self._store.blob_path(digest)
        if path is None:
            path = folder / _ARCHIVE
            self._store.fetch(digest, path)
        return path


class _AtHand:
    """An archive that lies in a file already."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, digest: Digest, folder: Path) -> Path:
        return self._path


def open_unshared(manifest: Manifest, archive: Path, home: Path) -> Executable:
    """Unpack and open an artifact that this process has just built, for the builder's check.

    Asks nobody for trust, and keeps nothing in the registry.
    """
    return _open_folder(manifest, unpack(manifest, _AtHand(archive), home))


def _open_marked(manifest: Manifest, folder: Path, store: Store, home: Path) -> Executable:
    """Open what is unpacked; a death in it, or in the first run of a graph, is seen by the next process."""
    what = Opening(manifest.digest, manifest.key, manifest.region, store.url)
    with marked(home, what, "open"):
        forward, backward = _runners(manifest, folder)
    return Executable(
        manifest,
        FirstRun(forward.run, home, what, "forward"),
        None if backward is None else FirstRun(backward.run, home, what, "backward"),
    )


def _open_folder(manifest: Manifest, folder: Path) -> Executable:
    return Executable(manifest, *_runners(manifest, folder))


def _runners(manifest: Manifest, folder: Path) -> tuple[Runner, Runner | None]:
    forward = _runner(manifest, folder, "forward")
    return forward, _runner(manifest, folder, "backward") if manifest.pair is not None else None


def _runner(manifest: Manifest, folder: Path, graph: str) -> Runner:
    inputs, outputs = len(manifest.inputs), len(manifest.outputs)
    pair = manifest.pair
    if pair is not None:
        if graph == "forward":
            outputs += pair.intermediates
        else:
            inputs = (
                len(pair.saved_inputs) + len(pair.saved_outputs) + pair.intermediates + len(pair.tangents)
            )
            outputs = len(pair.gradients)
    if manifest.runner == "torch":
        return PackageRunner(folder / _ARCHIVE, graph, inputs=inputs, outputs=outputs)
    members = [name for name in manifest.members if f"/{graph}/" in name and name.endswith(".so")]
    if len(members) != 1:
        raise RejectedArtifact(
            f"artifact {manifest.digest} has {len(members)} libraries for its {graph} graph, expected 1",
            digest=manifest.digest,
        )
    return _library(folder / members[0], inputs, outputs)


_libraries: dict[Path, Library] = {}


def _library(path: Path, inputs: int, outputs: int) -> Library:
    with _guard:
        known = _libraries.get(path)
        if known is None:
            known = _libraries[path] = Library(path, inputs=inputs, outputs=outputs)
    return known


def unpack(manifest: Manifest, source: _Fetched | _AtHand, home: Path) -> Path:
    """The folder with the artifact's members, checked against the manifest.

    `unpacked/<digest>` appears whole or not at all; whichever process comes first makes it.
    """
    folder = unpacked_folder(home, manifest.digest)
    make_dirs(folder.parent, 0o700)

    def intact() -> Path | None:
        return folder if is_dir(folder) and _problem(manifest, folder, home) is None else None

    def make() -> Path:
        # What lies there, if anything, somebody has changed.
        _clear(folder)
        _unpack_anew(manifest, source, folder)
        problem = _problem(manifest, folder, home)
        if problem is not None:
            raise problem
        return folder

    config = Settings()
    return once(home / "locks", f"unpack {manifest.digest}", config.lock_seconds, ready=intact, make=make)


def _problem(manifest: Manifest, folder: Path, home: Path) -> CorruptArtifact | None:
    for name, digest in _files(manifest):
        path = folder / name
        try:
            found = again(lambda path=path: _measured(path, folder, home), path)  # type: ignore[misc]
        except OSError as error:
            found = f"nothing ({error.strerror})"
        if found != digest:
            return CorruptArtifact(
                f"{path}: expected sha256 {digest}, found {found}; delete {folder}, it is made anew",
                path=str(path),
                expected=digest,
                found=found,
            )
    return None


def _measured(path: Path, folder: Path, home: Path) -> str:
    if first_link(path, folder.parent) is not None:
        raise OSError(errno.ELOOP, "a symbolic link, expected a file of its own")
    require_private(path, home)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _files(manifest: Manifest) -> Iterator[tuple[str, Digest]]:
    """What an unpacked folder holds, by name, with the sha256 of each."""
    if manifest.runner == "torch":
        yield _ARCHIVE, manifest.digest
    for name, digest in manifest.members.items():
        if name.endswith(_KEPT):
            yield name, digest


def _clear(path: Path) -> None:
    """Remove a folder, or whatever is in its place; a link itself, never what it leads to."""
    if os.path.islink(path) or os.path.isfile(path):
        path.unlink(missing_ok=True)
    else:
        remove_tree(path)


def _unpack_anew(manifest: Manifest, source: _Fetched | _AtHand, folder: Path) -> None:
    """Needs the lock of this digest. The draft's name is fixed, so that what a killed process
    left is cleared away by the next."""
    draft = folder.with_name(f".unpacking-{manifest.digest}")
    try:
        again(lambda: _fill(manifest, source, draft), draft)
        os.replace(draft, folder)
    except OSError as error:
        if os.path.isdir(folder):
            return
        raise StoreError(
            f"cannot unpack artifact {manifest.digest} to {folder}: {error.strerror}; make room there, or set "
            "AOTCACHE_HOME to another place",
            path=str(folder),
        ) from error
    finally:
        if os.path.lexists(draft):
            remove_tree(draft)


def _fill(manifest: Manifest, source: _Fetched | _AtHand, draft: Path) -> None:
    _clear(draft)
    draft.mkdir(mode=0o700)
    archive = source(manifest.digest, draft)
    with judged(archive, manifest.members, what=f"artifact {manifest.digest}") as package:
        for info in package.infolist():
            _extract(package, info, manifest, draft)
    if manifest.runner == "torch":
        target = draft / _ARCHIVE
        if archive != target:
            shutil.copyfile(archive, target)
        target.chmod(0o600)
    elif archive.parent == draft:
        archive.unlink()


def _extract(package: zipfile.ZipFile, info: zipfile.ZipInfo, manifest: Manifest, draft: Path) -> None:
    """Check a member, and keep it if it is of use here."""
    path = draft / info.filename
    digest = hashlib.sha256()
    with ExitStack() as stack:
        out = None
        if info.filename.endswith(_KEPT):
            make_dirs(path.parent, 0o700)
            out = stack.enter_context(path.open("xb"))
        for chunk in chunks(package, info):
            digest.update(chunk)
            if out is not None:
                out.write(chunk)
    expected = manifest.members[info.filename]
    if digest.hexdigest() != expected:
        raise CorruptArtifact(
            f"artifact {manifest.digest}: member {info.filename} has sha256 {digest.hexdigest()}, "
            f"expected {expected}",
            digest=manifest.digest,
        )
    if out is not None:
        path.chmod(0o700)


def opened() -> int:
    """How many artifacts this process has open."""
    return len(_opened)
