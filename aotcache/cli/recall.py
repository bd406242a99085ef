"""Taking artifacts back: `recall`."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import typer
from rich.text import Text

from aotcache.cli.contact import meet
from aotcache.cli.entries import find
from aotcache.cli.output import (
    JsonFlag,
    StoreOption,
    count,
    emit_json,
    err,
    human_time,
    print_lines,
    print_table,
)
from aotcache.cli.quantities import duration
from aotcache.config import settings
from aotcache.errors import ConfigError, NotStored, ServiceError, StoreError
from aotcache.recall import InForce, Recalls, publish_list
from aotcache.recall_list import Recalled, RecallList, merged, require_reason
from aotcache.rotation import signing_keys
from aotcache.store import Store, open_store
from aotcache.trust import SigningKey
from aotcache.types import is_digest

EXPIRES = "90d"


def recall(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WHAT",
            help="Keys or digests: all 64 characters, or a unique beginning of what the store has.",
        ),
    ] = None,
    reason: Annotated[
        str | None, typer.Option("--reason", help="Why, in one line: whoever is refused it is told.")
    ] = None,
    lift: Annotated[bool, typer.Option("--lift", help="Let what was recalled be opened again.")] = False,
    renew: Annotated[
        bool, typer.Option("--renew", help="Only sign the list anew, before it expires.")
    ] = False,
    expires: Annotated[
        str,
        typer.Option(
            "--expires",
            help="How long hosts may rely on the list as being the newest: s, m, h, d or w after a number.",
        ),
    ] = EXPIRES,
    store: StoreOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Take artifacts back: no host that trusts this one's key opens them again, from wherever.

    A digest is one archive: warm builds another in its place. A key is all that is or will be stored
    under it, until it is lifted. What is recalled stays so when the list has expired. Without WHAT,
    lists what is recalled here and in the store; exit code 1 if that is not certain.
    """
    opened = open_store(store)
    known = Recalls(settings().home)
    if not what and not renew:
        if lift or reason is not None:
            raise ConfigError("name what to recall or to lift: a key or a digest")
        _show(opened, known, as_json)
        return
    if renew and (what or lift or reason is not None):
        raise ConfigError("--renew changes nothing in the list: give it alone")
    if not all(what or []):
        raise ConfigError(
            "a key or digest to recall or to lift is empty, as of a shell variable that is not set"
        )
    meet(store)
    seconds = duration(expires).total_seconds()
    if not seconds:
        raise ConfigError("a list that expires at once leaves every host uncertain: give --expires some time")
    keys = signing_keys(settings())
    wanted: set[str] = set()
    if lift:
        wanted = _known(what or [], known, opened, keys)
        made = _by_each(
            keys, lambda key: publish_list(opened, key, known, lift=sorted(wanted), seconds=seconds)
        )
    elif renew:
        made = _renew(opened, known, keys, seconds)
    else:
        text = _reason(reason)
        wanted = {_named(opened, one) for one in what or []}
        reasons = dict.fromkeys(sorted(wanted), text)
        made = _by_each(keys, lambda key: publish_list(opened, key, known, recall=reasons, seconds=seconds))
    _report(opened, "renewed" if renew else "lifted" if lift else "recalled", made, as_json, wanted)
    still = [one for one in known.in_force() if lift and one.entry.what in wanted]
    for one in still:
        err().print(Text(f"not lifted: {_recalled_by(one)}"))
    if still:
        raise typer.Exit(1)


def _by_each(keys: Sequence[SigningKey], publish: Callable[[SigningKey], RecallList]) -> list[RecallList]:
    """A list by each key. While one takes the other's place, a service may trust one of the two alone."""
    made: list[RecallList] = []
    refused: list[ServiceError] = []
    for key in keys:
        try:
            made.append(publish(key))
        except ServiceError as error:
            if error.details.get("type") != "untrusted":
                raise
            refused.append(error)
    if not made:
        raise refused[0]
    for refusal in refused:
        err().print(Text(f"by one of this host's {len(keys)} keys alone: {refusal}"))
    return made


def _reason(given: str | None) -> str:
    if given is None:
        raise ConfigError("say why, for whoever is refused it: --reason TEXT")
    try:
        require_reason(given)
    except ValueError as error:
        raise ConfigError(f"--reason: {error}") from None
    return given


def _named(store: Store, text: str) -> str:
    """The key or digest that is meant. One in full need not be in this store: it may lie elsewhere."""
    wanted = text.lower()
    if is_digest(wanted):
        return wanted
    entries = find(store, text)
    if entries[0].key.startswith(wanted):
        return entries[0].key
    manifest = entries[0].manifest
    assert manifest is not None  # nothing else has a digest
    return manifest.digest


def _known(given: Sequence[str], known: Recalls, store: Store, keys: Sequence[SigningKey]) -> set[str]:
    """What is to be lifted, by what this host's keys recalled."""
    known.learn(store)
    own: set[str] = set()
    for key in keys:
        words = merged(found.listed for found in known.by(key.public))
        own |= {what for what, entry in words.items() if isinstance(entry, Recalled)}
    found = set()
    for text in given:
        matches = {what for what in own if what.startswith(text.lower())}
        if len(matches) != 1:
            others = [one for one in known.in_force() if one.entry.what.startswith(text.lower())]
            if not matches and others:
                raise NotStored(_recalled_by(others[0]))
            raise NotStored(
                f"{len(matches)} recalled keys or digests begin with {text!r}, expected one; aotcache recall lists "
                "them"
            )
        found |= matches
    return found


def _renew(store: Store, known: Recalls, keys: Sequence[SigningKey], seconds: float) -> list[RecallList]:
    known.learn(store)
    having = [key for key in keys if known.by(key.public)]
    if not having:
        raise NotStored(f"this host's key has signed no recall list, neither in {store.url} nor elsewhere")
    return _by_each(having, lambda key: publish_list(store, key, known, seconds=seconds))


def renewing(store: Store) -> str:
    """The command that signs a store's list anew."""
    return shlex.join(["aotcache", "recall", "--renew", "--store", store.url])


def _recalled_by(one: InForce) -> str:
    return (
        f"{one.entry.what} was recalled by {one.signer}: only that key lifts it again; whoever trusts it no more is "
        "not bound by it (aotcache trust remove)"
    )


def _report(
    store: Store, done: str, made: Sequence[RecallList], as_json: bool, what: Iterable[str] = ()
) -> None:
    newest = made[0]
    if as_json:
        emit_json({"store": store.url, "done": done, "list": _list_json(newest)})
        return
    lines = [
        *(f"{done}: {one}" for one in sorted(what)),
        f"{done}: recall list {newest.number} in {store.url}, with {count(len(newest.recalled), 'recall')}",
        f"every host learns it with its next look-up; before {human_time(newest.expires)}: {renewing(store)}",
        "hosts that use other stores do not see it: run the same with --store for each of them",
    ]
    print_lines(lines)


def _list_json(made: RecallList) -> dict[str, Any]:
    return {
        "number": made.number,
        "issued": made.issued,
        "expires": made.expires,
        "recalled": [{"what": e.what, "reason": e.reason, "at": e.at} for e in made.recalled],
    }


def _show(store: Store, known: Recalls, as_json: bool) -> None:
    problem: str | None = None
    try:
        known.learn(store)
        problem = known.stale(store)
    except StoreError as error:
        problem = str(error)
    found, lists = known.in_force(), known.newest()
    uncounted = known.uncounted()
    if as_json:
        emit_json(
            {
                "store": store.url,
                "recalled": [_row_json(one) for one in found],
                "lists": [
                    {
                        "signer": signer.name,
                        "fingerprint": signer.key.fingerprint,
                        "number": listed.number,
                        "issued": listed.issued,
                        "expires": listed.expires,
                    }
                    for signer, listed in lists
                ],
                "not_counted": uncounted,
                "problem": problem,
            }
        )
    else:
        if found:
            rows = [
                (one.entry.what, human_time(one.entry.at), str(one.signer.name), one.entry.reason)
                for one in found
            ]
            print_table(("key or digest", "recalled", "by", "reason"), rows)
        else:
            print_lines(["nothing is recalled"])
        now = time.time()
        for signer, listed in lists:
            ahead = ", which lies ahead of this host's clock" if listed.issued > now + 60 else ""
            dates = f"of {human_time(listed.issued)}{ahead}, expires {human_time(listed.expires)}"
            print_lines([f"list {listed.number} by {signer}: {dates}"])
        print_lines(f"not counted: lists by {key}, which is not trusted here (any more)" for key in uncounted)
        print_lines([] if problem is None else [problem])
    if problem is not None:
        raise typer.Exit(1)


def _row_json(one: InForce) -> dict[str, Any]:
    return {
        "what": one.entry.what,
        "reason": one.entry.reason,
        "at": one.entry.at,
        "signer": one.signer.name,
        "fingerprint": one.signer.key.fingerprint,
    }


__all__ = ["EXPIRES", "recall", "renewing"]
