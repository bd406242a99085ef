"""One spec's builders on this host: captures and builds cells, and publishes from the parent."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from aotcache import host
from aotcache.build.content import ContentIndex
from aotcache.build.plan import Cell, Plan, Row, make_plan
from aotcache.build.report import Built, Progress
from aotcache.compat import CPU_LEVELS, cpu_level_features
from aotcache.compile.sandbox import Sandbox
from aotcache.config import Settings
from aotcache.errors import AotcacheError, BuildError, ConfigError, LeaseLost, StoreError
from aotcache.key import KeyParts
from aotcache.lockfile import Lock, LockedCell, lock_path, read_lock, write_lock
from aotcache.manifest import Manifest
from aotcache.passing import REMOVING, new_folder, remove_tree, scratch
from aotcache.recall import Recalls
from aotcache.rotation import sign_with, signing_keys
from aotcache.spec import Spec, load_spec
from aotcache.store import open_store
from aotcache.store.base import Store
from aotcache.store.builds import Lease, leasing, service_of, shared
from aotcache.store.local import make_dirs
from aotcache.trust import SigningKey
from aotcache.types import Digest, Target, Variant

_STAGING = "warm-"
"""How the folders begin in which builders work; the process that owns one follows."""


class Session:
    """One spec and what builds it: its store, its staging folder, its builders. See `open_session`.

    Thread-safe, but for one sandbox: its requests are made by one thread at a time.
    """

    def __init__(
        self,
        spec: Spec,
        store: Store,
        targets: list[Target],
        config: Settings,
        staging: Path,
        progress: Progress | None,
    ) -> None:
        self.spec = spec
        self.store = store
        self.targets = targets
        self.config = config
        self.staging = staging
        self.toolchain = host.host_toolchain()
        self._progress = progress
        self._telling = threading.Lock()
        self.stopped = threading.Event()
        self._builders: list[Sandbox] = []
        self._keys: list[SigningKey] = []

    def prepare_to_publish(self) -> None:
        """Take the signing keys in hand if the store asks for signatures: to be called before anything is built.

        Raises:
            ConfigError: the store is not this user's own, and there is no signing key.
        """
        if not self._keys and not self.store.own:
            self._keys = signing_keys(self.config)

    def require_trusted_key(self) -> None:
        """Find out before a build what the service would say after it.

        Raises:
            ConfigError: there is no signing key, or the service that is the store does not trust it.
        """
        self.prepare_to_publish()
        service = service_of(self.store)
        if not self._keys or service is None:
            return
        public = self._keys[0].public
        if all(service.trusts(key.public.fingerprint) is False for key in self._keys):
            raise ConfigError(
                f"{service.url} takes nothing from here: it does not trust this host's key {public.fingerprint}. "
                f"On the service's host, under its AOTCACHE_CONFIG_HOME: aotcache trust add {public.to_text()}",
                fingerprint=public.fingerprint,
            )

    def stop(self) -> None:
        """End every builder at once, and tell the display no more: that they died is no news."""
        with self._telling:
            self.stopped.set()
        for builder in self._builders:
            builder.kill()

    def tell(self, what: Callable[[Progress], None]) -> None:
        """Have the display, if there is one, shown something. One call at a time."""
        with self._telling:
            if self._progress is not None and not self.stopped.is_set():
                what(self._progress)

    def sandbox(self) -> Sandbox:
        """A builder process that has captured nothing yet. The caller closes it."""
        # Builder threads come here at once: a counter of ours could give two of them one folder.
        own = new_folder("builder-", self.staging)
        headers = self.config.home / "headers"
        make_dirs(headers, 0o700)
        memory = self.config.build_memory_gib
        made = Sandbox(
            {
                "spec": str(self.spec.path),
                "staging": str(own),
                "devices": sorted({target.device for target in self.targets}),
            },
            own,
            headers=headers,
            seconds=self.config.build_seconds,
            memory=None if memory is None else int(memory * 2**30),
        )
        self._builders.append(made)
        return made

    def end(self, sandbox: Sandbox) -> None:
        """End a builder process and remove what it has made."""
        sandbox.close()
        self._builders.remove(sandbox)
        remove_tree(sandbox.staging)

    def capture(self, sandbox: Sandbox) -> list[Cell]:
        """Run the drafter in a builder, and list what it calls."""
        self.tell(lambda p: p.stage(None, "start a builder"))
        answer = sandbox.request({"do": "capture"}, lambda e: self.stage(None, e))
        return [
            Cell(
                c["region"],
                c["mode"],
                tuple(c["bucket"].items()),
                target,
                KeyParts.from_json(c["components"]),
            )
            for target in self.targets
            for c in answer["cells"]
            if c["device"] == target.device
        ]

    def plan(self, sandbox: Sandbox) -> Plan:
        """`capture`, and what the store has of it."""
        return make_plan(self.capture(sandbox), shared(self.store), self.toolchain)

    def stage(self, cell: Cell | None, event: Mapping[str, Any]) -> None:
        """Have the display shown what a builder does now, by one of its events."""
        if "bucket" in event:
            sizes = ",".join(f"{name}={size}" for name, size in event["bucket"].items())
            which = "" if cell is None else " in a further builder"
            self.tell(lambda p: p.stage(None, f"capture {event['mode']} {sizes}".rstrip() + which))
        else:
            self.tell(lambda p: p.stage(cell, str(event["stage"])))

    def finished(self, built: Built) -> None:
        """Have the display shown that a build ended."""
        self.tell(lambda p: p.finished(built.cell, built.seconds, built.error))

    def build(self, cell: Cell, sandbox: Sandbox, force: bool, lease: Lease | None = None) -> Built:
        """Build one cell in a builder and publish it. What is wrong with the cell is in the answer.

        Args:
            cell: One of those that `capture` lists.
            sandbox: The builder.
            force: Publish in the place of an entry that is there.
            lease: The service's, under which it is published.

        Raises:
            StoreError: the store cannot be read or written, which fails every cell: said once, at once.
        """
        self.prepare_to_publish()
        started = time.perf_counter()
        recalls = Recalls(self.config.home)
        recalls.learn(self.store)
        index = ContentIndex(self.config, self.store, self.staging)
        try:
            _require_buildable_key(cell, recalls)
            answer = sandbox.request(
                {"do": "build", "key": cell.key, "target": str(cell.target)},
                lambda event: self._answer(cell, event, index, force),
            )
            manifest = self._sign(
                cell, Manifest.from_json(answer["manifest"].encode(), where=f"builder of {cell}")
            )
            _require_another_archive(manifest, recalls)
            try:
                self._publish(manifest, Path(answer["archive"]), force, lease)
            except LeaseLost:
                raise
            except StoreError as error:
                kept = index.keep(manifest, Path(answer["archive"]))
                if kept is None:
                    raise
                raise type(error)(
                    f"{error}. What was built is kept in {kept}: the next warm that misses it stores it without a "
                    "compile",
                    **error.details,
                ) from error
            index.remember(manifest)
            return Built(cell, time.perf_counter() - started, manifest, None, index.reused)
        except LeaseLost as error:
            return Built(cell, time.perf_counter() - started, None, error)
        except StoreError:
            raise
        except AotcacheError as error:
            return Built(cell, time.perf_counter() - started, None, error)
        finally:
            index.close()

    def _publish(self, manifest: Manifest, archive: Path, force: bool, lease: Lease | None) -> None:
        if lease is None:
            self.store.publish(manifest, archive, replace=force)
        else:
            leasing(self.store).publish(manifest, archive, replace=force, lease=lease.claim)

    def _sign(self, cell: Cell, manifest: Manifest) -> Manifest:
        """What is published: signed here, because the builder that ran the drafter's code holds no key.

        A builder is believed no more than it was asked for: it could have the parent sign what
        replaces another drafter's artifact.
        """
        asked = (cell.key, Variant(cell.target, self.toolchain))
        if (manifest.key, manifest.variant) != asked or manifest.envelope is not None:
            raise BuildError(
                f"the builder was asked for {asked[0]}/{asked[1]} and answered with a manifest of "
                f"{manifest.key}/{manifest.variant}; it is not published",
                expected=asked[0],
                found=manifest.key,
            )
        return sign_with(manifest, self._keys)

    def _answer(
        self, cell: Cell, event: Mapping[str, Any], index: ContentIndex, force: bool
    ) -> dict[str, Any] | None:
        if event["event"] != "prepared":
            self.stage(cell, event)
            return None
        return index.claim(event["content"], force=force)

    def write_lock(self, rows: Iterable[Row]) -> Path:
        """Write the lock file beside the spec; every row is covered."""
        path = lock_path(self.spec.path)
        cells = [
            LockedCell(
                region=row.cell.region,
                mode=row.cell.mode,
                bucket=dict(row.cell.bucket),
                target=str(row.cell.target),
                toolchain=str(self.toolchain),
                key=row.cell.key,
                digest=_present(row.digest),
            )
            for row in rows
        ]
        kept = read_lock(path) if os.path.lexists(path) else Lock(self.spec.drafter.name, [])
        write_lock(path, kept.merged(cells))
        return path


def _require_buildable_key(cell: Cell, recalls: Recalls) -> None:
    problem = recalls.word(("key", cell.key))
    if problem is not None:
        raise BuildError(
            f"{cell} is not built: {problem}. Nothing that is built under this key would be opened; when it may be "
            f"again: aotcache recall --lift {cell.key}",
            key=cell.key,
        )


def _require_another_archive(manifest: Manifest, recalls: Recalls) -> None:
    problem = recalls.problem(manifest)
    if problem is not None:
        raise BuildError(
            f"the build gave what was taken back, byte for byte, and is not published: {problem}. Build with another "
            "torch, compiler or [compile] option, change the region's code, or, if it was recalled in error: "
            f"aotcache recall --lift {manifest.digest}",
            key=manifest.key,
            digest=manifest.digest,
        )


def _present(digest: Digest | None) -> Digest:
    assert digest is not None
    return digest


def _sweep(home: Path) -> None:
    """Remove what warms that were killed have left. The home is on this host's disk."""
    for folder in home.glob(f"{_STAGING}*"):
        pid = folder.name.removeprefix(_STAGING).partition("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            remove_tree(folder)
    for folder in home.glob(f"{REMOVING}*"):
        remove_tree(folder)


def _require_buildable(target: Target) -> None:
    """Refuse, before anything runs, what would be built for another device than its name says.

    Drafters are captured on the target's own kind of device, and artifacts are checked on it
    before they are published: code for a GPU is built where there is one of that kind.
    """
    if target.device != "cuda":
        cpu_level_features(target.arch)  # a level that nobody defined
        return
    here = host.host_facts().cuda_archs
    if target.arch not in here:
        raise ConfigError(
            f"target {target} cannot be built on this host, which has {', '.join(here) or 'no CUDA device'}: what "
            "is built is run and checked before it is published. Warm on a host with such a GPU, or name another "
            f"target (--target, or [targets]): native, {', '.join(f'cpu:{level}' for level in CPU_LEVELS)}"
        )


@contextmanager
def open_session(
    spec: Spec | str | Path | None,
    store: Store | str | None,
    targets: Sequence[str] | None,
    progress: Progress | None,
) -> Iterator[Session]:
    """A session, whose folder is removed at the end.

    Args:
        spec: A spec, its path, or None for `aotcache.toml` in the working directory.
        store: A store or its URL; None is the configured one.
        targets: Targets instead of those of the spec.
        progress: A display.

    Raises:
        SpecError, ConfigError: the spec is wrong, or names what cannot be built on this host.
    """
    config = Settings()
    loaded = spec if isinstance(spec, Spec) else load_spec(spec)
    opened = open_store(store) if isinstance(store, str) or store is None else store
    if targets is not None:
        loaded = replace(loaded, archs=tuple(targets))
    wanted = list(loaded.targets(host.native_target))
    for target in wanted:
        _require_buildable(target)
    make_dirs(config.home, 0o700)
    _sweep(config.home)
    with scratch(f"{_STAGING}{os.getpid()}-", config.home) as staging:
        yield Session(loaded, opened, wanted, config, staging, progress)
