"""What a walk over a region finds, and what decides which of it counts.

An attribute counts where some code on the way names it. Code is found while walking, so
what was left out is remembered: a walk that left out something that counts is done again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from aotcache.errors import Unfingerprintable
from aotcache.graph.code import CodeFacts, file_digest
from aotcache.graph.guards import Checks

Items = list[tuple[str, str]]

# How code gets at environment variables.
_ENVIRONMENT = frozenset({"environ", "environb", "getenv"})


@dataclass(frozen=True, slots=True)
class Reads:
    """What some code on the way reads, and so what counts of the values that it meets.

    Attributes:
        names: Attribute names.
        texts: Texts found as values; they select entries of registries.
        dynamic: Whether code reads attributes whose names do not stand in it: then all count.
    """

    names: frozenset[str] = frozenset()
    texts: frozenset[str] = frozenset()
    dynamic: bool = False

    def __or__(self, other: Reads) -> Reads:
        return Reads(self.names | other.names, self.texts | other.texts, self.dynamic or other.dynamic)


NOTHING = Reads()


class Findings:
    """Named items (for the key) and checks (for later calls), and what decides whether a value counts.

    Args:
        what: The region's name, for errors.
        modules: The region's own modules by id, with their names in it.
        reads: What is known to be read; grows as code is found.
    """

    def __init__(self, what: str, modules: dict[int, str], reads: Reads = NOTHING) -> None:
        self.what = what
        self.modules = modules
        self.names = set(reads.names)
        self.texts = set(reads.texts)
        self.unread: set[str] = set()
        self.items: Items = []
        self.checks = Checks()
        self.files: dict[str, str] = {}
        self.dynamic = reads.dynamic
        self.environment = False
        self._first = reads
        self._seen: dict[int, str] = {}
        self._keep: list[Any] = []

    def reads(self) -> Reads:
        """What is read, as far as it is known by now."""
        return Reads(frozenset(self.names), frozenset(self.texts), self.dynamic)

    def passed_over(self, reads: Reads) -> bool:
        """Whether something was left out on the way that counts, now that `reads` is known."""
        new = (reads.names - self._first.names) | (reads.texts - self._first.texts)
        return reads.dynamic is not self._first.dynamic or not new.isdisjoint(self.unread)

    def named(self, names: Iterable[str]) -> set[str]:
        """Those of the names that stand in code on the way; the others are remembered as left out."""
        names = set(names)
        self.unread |= names - self.names
        return names & self.names

    def counts(self, names: Iterable[str]) -> set[str]:
        """The same for attributes of an object: all, where names are made up."""
        return set(names) if self.dynamic else self.named(names)

    def add(self, path: str, value: str) -> None:
        """Record one item."""
        self.items.append((path, value))

    def fail(self, path: str, value: Any, why: str, fix: str) -> Unfingerprintable:
        """The error for a value that has no stable fingerprint."""
        return Unfingerprintable(
            f"region {self.what!r}: {path} is a {type(value).__module__}.{type(value).__qualname__}, {why}; {fix}",
            region=self.what,
            path=path,
        )

    def note_code(self, code_facts: CodeFacts) -> None:
        """Take over what a function reads."""
        self.names |= code_facts.names
        self.dynamic = self.dynamic or code_facts.dynamic
        self.environment = self.environment or not _ENVIRONMENT.isdisjoint(code_facts.names)
        for file in code_facts.files:
            digest = file_digest(file)
            if digest is not None:
                self.files.setdefault(digest, file)
