"""Recall lists: what one key's owner has taken back. Signed, numbered and dated. Pure.

A list is cumulative: each one by a key holds all that its owner recalled, and all that was lifted
again, each with its time. So lists can be put together in any order, and an old one that is shown
again undoes nothing: for every key and digest the latest word counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from pydantic import ConfigDict, TypeAdapter, with_config

from aotcache.envelope import Envelope, Signature
from aotcache.errors import ManifestError
from aotcache.trust import PublicKey, SigningKey, signed_by
from aotcache.types import is_digest

RECALL_TYPE = "application/vnd.aotcache.recall+json"

LARGEST = 1 << 20
"""Bytes of a signed list."""
MOST = 2000
"""Keys and digests that a list names, recalled and lifted ones together."""
MOST_REASON = 300
"""Characters."""

_FORMAT = 1
_LARGEST_NUMBER = (1 << 53) - 1
_LATEST = 253_402_300_800.0
"""The end of the year 9999."""

_PREFIX = "ed25519:"
_STRICT = ConfigDict(extra="forbid", strict=True)


@with_config(_STRICT)
@dataclass(frozen=True, slots=True, order=True)
class Recalled:
    """One thing that must not be opened.

    Attributes:
        what: A key, or the digest of an archive.
        reason: One line for people.
        at: When it was recalled, in seconds since the epoch, by its signer's clock.
    """

    what: str
    reason: str
    at: float


@with_config(_STRICT)
@dataclass(frozen=True, slots=True, order=True)
class Lifted:
    """One thing that was recalled once and may be opened again; `at` as in `Recalled`."""

    what: str
    at: float


@with_config(_STRICT)
@dataclass(frozen=True, slots=True)
class RecallList:
    """What a signature is over.

    Attributes:
        number: Larger than that of every earlier list by the same key.
        issued, expires: Seconds since the epoch. What is recalled stays so when the list has
            expired; only that nothing else was is no longer certain then.
        recalled, lifted: In the order of what they name; nothing is in both.
    """

    number: int
    issued: float
    expires: float
    recalled: tuple[Recalled, ...] = ()
    lifted: tuple[Lifted, ...] = ()
    format: Literal[1] = 1

    def covers(self, other: RecallList) -> bool:
        """Whether this is a later list that has everything of `other`, or later words on it."""
        if self.number <= other.number:
            return self == other
        own = merged([self])
        return all(
            what in own and _weight(own[what]) >= _weight(entry) for what, entry in merged([other]).items()
        )

    def to_json(self) -> bytes:
        """Canonical JSON: sorted keys, no spaces, ASCII."""
        return json.dumps(
            {
                "format": self.format,
                "number": self.number,
                "issued": self.issued,
                "expires": self.expires,
                "recalled": [{"what": e.what, "reason": e.reason, "at": e.at} for e in self.recalled],
                "lifted": [{"what": e.what, "at": e.at} for e in self.lifted],
            },
            sort_keys=True,
            separators=(",", ":"),
        ).encode()

    @classmethod
    def from_json(cls, data: bytes, *, where: str) -> RecallList:
        """Read what `to_json` writes, and nothing else.

        Raises:
            ManifestError: for anything else.
        """
        try:
            if len(data) > LARGEST:
                raise ValueError(f"{len(data)} bytes, expected at most {LARGEST}")
            found = _LIST.validate_json(data)
            found.require_sound()
            if found.to_json() != data:
                raise ValueError("it is not in canonical form")
        except (ValueError, RecursionError) as error:
            raise ManifestError(f"{where}: not a recall list of format {_FORMAT}: {error}") from error
        return found

    def require_sound(self) -> None:
        """Raises ValueError for what no signer may have meant."""
        if not 1 <= self.number <= _LARGEST_NUMBER:
            raise ValueError(f"its number is {self.number}")
        named = [*(e.what for e in self.recalled), *(e.what for e in self.lifted)]
        times = [self.issued, self.expires, *(e.at for e in self.recalled), *(e.at for e in self.lifted)]
        if not all(0 <= moment < _LATEST for moment in times):
            raise ValueError("a time is none that the calendar knows")
        if len(named) > MOST:
            raise ValueError(f"it names {len(named)} keys and digests, expected at most {MOST}")
        if not all(map(is_digest, named)) or len(set(named)) != len(named):
            raise ValueError("expected keys and digests of 64 lower-case hex characters, each once")
        if sorted(self.recalled) != list(self.recalled) or sorted(self.lifted) != list(self.lifted):
            raise ValueError("its entries are not sorted")
        for entry in self.recalled:
            require_reason(entry.reason)


def require_reason(reason: str) -> None:
    """Raises ValueError for a reason that is not one line of text."""
    if not 1 <= len(reason) <= MOST_REASON or not reason.isprintable():
        raise ValueError(f"a reason is one line of 1 to {MOST_REASON} printable characters")


def merged(lists: Iterable[RecallList]) -> dict[str, Recalled | Lifted]:
    """The latest word of several lists by one key on everything they name; of two at one time, "recalled"."""
    found: dict[str, Recalled | Lifted] = {}
    for listed in lists:
        words: tuple[Recalled | Lifted, ...] = (*listed.recalled, *listed.lifted)
        for entry in words:
            known = found.get(entry.what)
            if known is None or _weight(entry) > _weight(known):
                found[entry.what] = entry
    return found


def _weight(entry: Recalled | Lifted) -> tuple[float, bool, str]:
    return entry.at, isinstance(entry, Recalled), entry.reason if isinstance(entry, Recalled) else ""


def next_list(
    known: Iterable[RecallList],
    *,
    recall: Mapping[str, str] | None = None,
    lift: Iterable[str] = (),
    now: float,
    seconds: float,
    after: int = 0,
) -> RecallList:
    """The list that follows those by one key that are known.

    Args:
        known: All of them, also ones that were made without knowing of each other.
        recall: Reasons, by key or digest.
        lift: Keys and digests that may be opened again.
        now: Seconds since the epoch. A word on what was spoken of before is always a later one,
            whatever the clocks of the hosts say on which the two were spoken.
        seconds: Until it expires.
        after: A number that is taken already.

    Raises:
        ManifestError: it would be larger than lists may be.
    """
    known = list(known)
    words = merged(known)

    def at(what: str) -> float:
        before = words.get(what)
        return now if before is None else max(now, before.at + 0.001)

    for what, reason in (recall or {}).items():
        words[what] = Recalled(what, reason, at(what))
    for what in lift:
        words[what] = Lifted(what, at(what))
    made = RecallList(
        max([after, *(listed.number for listed in known)]) + 1,
        now,
        now + seconds,
        tuple(sorted(entry for entry in words.values() if isinstance(entry, Recalled))),
        tuple(sorted(entry for entry in words.values() if isinstance(entry, Lifted))),
    )
    try:
        made.require_sound()
    except ValueError as error:
        raise ManifestError(
            f"the recall list that this would make is none: {error}; nothing was recalled or lifted. A list that is "
            "full stays as it is: sign with a new key (aotcache keygen --rotate)"
        ) from error
    return made


@dataclass(frozen=True, slots=True)
class SignedList:
    """A list as it is stored.

    Attributes:
        signer: Hex of the fingerprint of the key that is said to have signed it.
        listed: What it says.
        document: Its bytes.
    """

    signer: str
    listed: RecallList
    document: bytes

    @classmethod
    def make(cls, listed: RecallList, key: SigningKey) -> SignedList:
        """Sign a list. Raises ManifestError if it is too large."""
        bare = Envelope(listed.to_json(), (), RECALL_TYPE)
        signature = Signature(key.public.fingerprint, key.sign(bare.signed_bytes))
        document = Envelope(bare.payload, (signature,), RECALL_TYPE).to_json()
        if len(document) > LARGEST:
            raise ManifestError(
                f"the recall list would have {len(document)} bytes, expected at most {LARGEST}; give shorter "
                "reasons, or sign with a new key (aotcache keygen --rotate)"
            )
        return cls(signer_of(key.public), listed, document)

    @classmethod
    def from_document(cls, document: bytes, *, where: str) -> SignedList:
        """Read a stored list; whose it is, `by` answers.

        Raises:
            ManifestError: it is none.
        """
        if len(document) > LARGEST:
            raise ManifestError(
                f"{where}: a recall list of {len(document)} bytes, expected at most {LARGEST}"
            )
        envelope = Envelope.from_json(document, where=where)
        named = [s.keyid for s in envelope.signatures]
        signer = named[0].removeprefix(_PREFIX) if len(named) == 1 and named[0].startswith(_PREFIX) else ""
        if envelope.kind != RECALL_TYPE or not is_digest(signer) or envelope.to_json() != document:
            raise ManifestError(
                f"{where}: expected {RECALL_TYPE} in canonical form with one Ed25519 signature"
            )
        return cls(signer, RecallList.from_json(envelope.payload, where=where), document)

    def by(self, key: PublicKey) -> bool:
        """Whether this key's owner signed it."""
        return signer_of(key) == self.signer and signed_by(
            Envelope.from_json(self.document, where="a recall list"), key
        )


def signer_of(key: PublicKey) -> str:
    """What lists by a key are filed under: the hex digits of its fingerprint."""
    return key.fingerprint.removeprefix(_PREFIX)


@lru_cache(maxsize=16)
def parsed(document: bytes) -> SignedList:
    """`SignedList.from_document`, remembered: the same few lists are looked at at every opening."""
    return SignedList.from_document(document, where="a recall list")


@lru_cache(maxsize=16)
def verified(document: bytes, key: PublicKey) -> SignedList | None:
    """A document, if it is a list by this key; remembered, too."""
    try:
        found = parsed(document)
    except ManifestError:
        return None
    return found if found.by(key) else None


_LIST = TypeAdapter(RecallList)

__all__ = [
    "LARGEST",
    "MOST",
    "RECALL_TYPE",
    "Lifted",
    "RecallList",
    "Recalled",
    "SignedList",
    "merged",
    "next_list",
    "parsed",
    "require_reason",
    "signer_of",
    "verified",
]
