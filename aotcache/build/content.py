"""One compile for one graph on this host, whichever keys and processes ask for it."""

from __future__ import annotations

import json
import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from aotcache.config import Settings
from aotcache.drafts import replace_file
from aotcache.errors import AotcacheError
from aotcache.manifest import Manifest
from aotcache.recall import recall_problem
from aotcache.store import open_store
from aotcache.store.base import Store
from aotcache.store.local import is_dir, locked, make_dirs
from aotcache.store.refusal import refusal

logger = logging.getLogger(__name__)

UNSTORED = "unstored"
"""Folder of the home: what was built and could not be stored. A store of this user's own."""


class ContentIndex:
    """Finds a trusted artifact of an identical graph, or holds the right to compile it.

    Keeps `content/<content key>.json` under the home: which entry was built from that
    graph on this host. Builders of one graph, in any process of this host, go one
    after the other, so that the later ones find what the first one made. What was built and could
    not be stored is kept in `unstored/` of the home, and found there the next time.
    """

    def __init__(self, config: Settings, store: Store, staging: Path) -> None:
        self._config = config
        self._store = store
        self._staging = staging
        self._held = ExitStack()
        self._archive: Path | None = None
        self.reused = False

    def claim(self, content: str, *, force: bool) -> dict[str, Any]:
        """The builder's next step: to compile, or to take an archive that is there."""
        self._held.enter_context(locked(self._config.locks, f"content {content}", self._config.build_seconds))
        for store in () if force else (self._store, self._unstored()):
            known = None if store is None else self._recall(content, store)
            if store is None or known is None:
                continue
            archive = self._archive = self._staging / f"{known.digest}.pt2"
            try:
                store.fetch(known.digest, archive)
            except AotcacheError:
                continue
            self.reused = True
            return {"do": "reuse", "archive": str(archive), "manifest": known.to_json().decode()}
        return {"do": "compile"}

    def _unstored(self) -> Store | None:
        """Where what could not be stored lies, if there is any."""
        folder = self._config.home / UNSTORED
        return open_store(folder.as_uri()) if is_dir(folder) else None

    def _path(self, content: str) -> Path:
        return self._config.home / "content" / f"{content}.json"

    def _recall(self, content: str, store: Store) -> Manifest | None:
        try:
            data = json.loads(self._path(content).read_bytes())
            manifests = store.lookup(data["key"])
            # The builder runs what it takes, and it is published under a key of ours.
            return next(
                (
                    m
                    for m in manifests
                    if m.content == content
                    and refusal(store, m, self._config) is None
                    and recall_problem(m, home=self._config.home) is None
                ),
                None,
            )
        except (OSError, ValueError, KeyError, TypeError, RecursionError, AotcacheError):
            return None

    def keep(self, manifest: Manifest, archive: Path) -> Path | None:
        """Keep what was built and cannot be stored, for the next build of the graph.

        Returns:
            The folder; None if there is no room for it either.
        """
        try:
            open_store((self._config.home / UNSTORED).as_uri()).publish(
                Manifest.from_json(manifest.to_json(), where="what was built"), archive, replace=True
            )
        except AotcacheError as error:
            logger.warning("%s", error)
            return None
        self._note(manifest)
        return self._config.home / UNSTORED

    def remember(self, manifest: Manifest) -> None:
        """Note which entry holds the graph. A note that cannot be written costs a build, no more."""
        self._note(manifest)
        try:
            unstored = self._unstored()
            if unstored is not None:
                unstored.delete(manifest.key, manifest.variant)
        except AotcacheError as error:
            logger.warning("%s", error)

    def _note(self, manifest: Manifest) -> None:
        path = self._path(manifest.content)
        try:
            make_dirs(path.parent, 0o700)
            replace_file(path, json.dumps({"key": manifest.key}).encode(), 0o600)
        except OSError as error:
            logger.warning("cannot note graph %s in %s: %s", manifest.content, path, error)

    def close(self) -> None:
        """Let the next builder of the graph go on."""
        if self._archive is not None:
            self._archive.unlink(missing_ok=True)
        self._held.close()
