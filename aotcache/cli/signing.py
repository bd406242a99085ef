"""Adding the signature of a new key to what is stored: `sign`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from aotcache.cli.entries import SHORT, recalls_in
from aotcache.cli.output import JsonFlag, Progress, StoreOption, count, emit_json, print_lines
from aotcache.config import settings
from aotcache.errors import AotcacheError
from aotcache.manifest import Manifest
from aotcache.recall import Recalls, publish_list
from aotcache.recall_list import Recalled, merged, signer_of
from aotcache.rotation import sign_with, signing_keys
from aotcache.store import Store, open_store
from aotcache.store.refusal import written_by_others
from aotcache.trust import SigningKey, signed_by, standing

_SECONDS = 90 * 24 * 3600.0
"""How long the recall lists last that a new key takes over: as with `aotcache recall`."""


def sign(store: StoreOption = None, as_json: JsonFlag = False) -> None:
    """Add this host's signature to every entry that is trusted here, and to the recalls of the key before it.

    For a key that takes the place of another one (aotcache keygen --rotate). What nobody trusted
    has signed, and what is recalled, is left as it is. Exit code 1 if an entry could not be signed.
    """
    keys = signing_keys(settings())
    opened = open_store(store)
    recalls = recalls_in(opened)
    lists = _take_over(opened, keys, recalls)
    entries = [entry for entry in opened.entries() if entry.usable is not None]
    signed: list[Manifest] = []
    left: list[dict[str, Any]] = []
    with Progress("sign", len(entries)) as progress:
        for entry in entries:
            manifest = entry.usable
            assert manifest is not None
            name = f"{entry.key[:SHORT]} {entry.variant}"
            problem = _problem(opened, manifest, recalls)
            if problem is None and not _has_all(manifest, keys):
                problem = _put(opened, manifest, keys)
                signed += [manifest] if problem is None else []
            if problem is not None:
                left.append({"key": entry.key, "variant": entry.variant, "problem": problem})
            progress.step(f"{name} {problem or 'signed'}")
    if as_json:
        done = [{"key": m.key, "variant": str(m.variant), "digest": m.digest} for m in signed]
        emit_json({"store": opened.url, "signed": done, "left": left, "recall_lists": lists})
    else:
        whole = len(entries) - len(signed) - len(left)
        of = f"{count(len(entries), 'entry')} in {opened.url}"
        print_lines(
            [f"of {of}: {len(signed)} signed now, {whole} were already, {len(left)} left as they are"]
        )
        print_lines(f"{row['key']} {row['variant']}: {row['problem']}" for row in left)
    if left:
        raise typer.Exit(1)


def _problem(store: Store, manifest: Manifest, recalls: Recalls) -> str | None:
    found = standing(manifest, own=store.own, config=settings())
    return found.problem or written_by_others(store, manifest) or recalls.problem(manifest)


def _has_all(manifest: Manifest, keys: Sequence[SigningKey]) -> bool:
    envelope = manifest.envelope
    return envelope is not None and all(signed_by(envelope, key.public) for key in keys)


def _put(store: Store, manifest: Manifest, keys: list[SigningKey]) -> str | None:
    """Write one signed anew, unless another one has taken its place meanwhile."""
    try:
        if all(found != manifest for found in store.lookup(manifest.key)):
            return "another one has taken its place meanwhile: run it again"
        store.put_ref(sign_with(manifest, keys), replace=True)
    except AotcacheError as error:
        return str(error)
    return None


def _take_over(store: Store, keys: Sequence[SigningKey], recalls: Recalls) -> int:
    """Have each key's list name all that the others' lists recall; how many lists were made for that."""
    words = {}
    for key in keys:
        words[signer_of(key.public)] = merged(found.listed for found in recalls.by(key.public))
    wanted = {
        what: entry.reason
        for found in words.values()
        for what, entry in found.items()
        if isinstance(entry, Recalled)
    }
    made = 0
    for key in keys:
        own = words[signer_of(key.public)]
        lacking = {what: reason for what, reason in wanted.items() if what not in own}
        if lacking:
            publish_list(store, key, recalls, recall=lacking, seconds=_SECONDS)
            made += 1
    return made


__all__ = ["sign"]
