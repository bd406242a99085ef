"""Why an entry of a store must not be opened, as far as trust goes: for whoever asks without opening it."""

from __future__ import annotations

from aotcache.config import Settings
from aotcache.errors import RejectedArtifact, StoreError
from aotcache.manifest import Manifest
from aotcache.store.base import Store
from aotcache.trust import trust_problem


def refusal(store: Store, manifest: Manifest, config: Settings) -> str | None:
    """Why the loader would not open an entry, and what to do; None if it would, as far as trust goes.

    Args:
        store: Where it lies.
        manifest: As the store gave it.
        config: Where trusted keys are, and whether unsigned artifacts are let through.

    Raises:
        ConfigError: a trusted key's file cannot be understood.
    """
    problem = trust_problem(manifest, own=store.own, config=config, url=store.url)
    return problem or written_by_others(store, manifest)


def written_by_others(store: Store, manifest: Manifest) -> str | None:
    """Why an unsigned entry of a store of this user's own may be somebody else's; None if it is not, or is signed.

    To be asked before an entry is shown as good, and before it is signed: a signature would make it
    trusted everywhere.
    """
    if not store.own or manifest.envelope is not None:
        return None
    try:
        store.require_own(manifest)
    except (RejectedArtifact, StoreError) as error:
        return str(error)
    return None


__all__ = ["refusal", "written_by_others"]
