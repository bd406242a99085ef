"""What a store promises. Every implementation passes one contract suite.

- **Reads return values.** A key that is not there, a ref whose bytes are gone and a
  manifest that cannot be read are all misses. Only a store that cannot be reached or
  read at all is an error, and only a digest that was asked for by name can be missing
  with an exception.
- **Writes are all or nothing.** Bytes go first, the ref last. Killed at any moment, a
  publish leaves nothing that a reader can see, and nothing locked.
- **Bytes are checked** against their digest whenever they leave a store.
- **Threads and processes.** Any number of both may use one store at once, also on
  several hosts, without locks. Two publishes of one entry: one of them wins, both leave
  a readable entry. A delete beside a publish can cost a miss, never a wrong answer.
- **Nothing negative is kept**: a write that failed can be tried again.
- **Forks.** A store at a bucket must not be used in a process forked after its first
  use (it raises StoreError); one in a directory or at a service may.
- **Waits end.** A remote store that is out of reach is a ServiceUnavailable, within a time;
  for some seconds after that at once.

Sizes are bytes; times are seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from aotcache.key import KeyParts
from aotcache.manifest import Manifest
from aotcache.store.pins import Pin
from aotcache.types import CacheKey, Digest, Mode, Variant


@dataclass(frozen=True, slots=True)
class Entry:
    """One ref of a listing.

    Attributes:
        key: The key it is filed under.
        variant: The variant's text, as in the ref's name.
        manifest: What it says; None if it cannot be read.
        size: Bytes of the archive that the store really holds; None if it is gone.
        modified: When the ref was written.
        problem: Why a lookup takes this entry for a miss, or None.
    """

    key: CacheKey
    variant: str
    manifest: Manifest | None
    size: int | None
    modified: float
    problem: str | None

    @property
    def usable(self) -> Manifest | None:
        """The manifest, where a lookup takes the entry for a hit."""
        return self.manifest if self.problem is None else None


@dataclass(frozen=True, slots=True)
class Usage:
    """What a store holds. Archives shared by several refs count once."""

    refs: int
    blobs: int
    bytes: int


class Store(Protocol):
    """See the module for the contract."""

    @property
    def url(self) -> str:
        """Where it is; `open_store(url)` opens it again."""

    @property
    def own(self) -> bool:
        """Whether this user put there what lies there, on this host.

        From such a store alone is a manifest without signatures taken, and what is published
        there needs none. A directory that others can write to is another matter: its files
        are refused one by one.
        """

    def require_own(self, manifest: Manifest) -> None:
        """Check that nobody else could have put there what the store says of an unsigned manifest.

        To be asked of a store that is `own`, before what the manifest describes is opened: the
        archive's own file is looked at only when it is read.

        Raises:
            RejectedArtifact: other users of this host could have written it.
        """

    def lookup(self, key: CacheKey) -> list[Manifest]:
        """Every variant that can be fetched for `key`; empty for a miss.

        Raises:
            StoreError: if the store cannot be read at all.
        """

    def resolve(self, keys: Iterable[CacheKey]) -> Mapping[CacheKey, list[Manifest]]:
        """`lookup` of many keys; every key asked for is in the answer."""

    def publish(self, manifest: Manifest, archive: Path, *, replace: bool = False) -> bool:
        """Store an archive and the manifest that names it.

        Args:
            manifest: Its `digest` and `size` must be the archive's.
            archive: The file; only read.
            replace: Put it in the place of an entry that is already there.

        Returns:
            Whether it was stored; False if a readable entry for the key and variant
            was there already and has been left alone. One that is recalled is replaced.

        Raises:
            CorruptArtifact: if the archive is not what the manifest says.
            StoreError: if it could not be written; nothing is visible then.
        """

    def fetch(self, digest: Digest, dest: Path) -> None:
        """Write the checked bytes to `dest`, which appears whole or not at all.

        Raises:
            NotStored: if there are no such bytes.
            CorruptArtifact: if they do not match, also when read again. A store on
                this host has dropped its copy then.
            RejectedArtifact: if other users of this host could have put them there.
            StoreError: if they could not be read or written.
        """

    def blob_path(self, digest: Digest) -> Path | None:
        """A file on this host with the checked bytes, to be only read.

        None if the store's bytes are elsewhere: `fetch` them. Raises as `fetch`.
        """

    def variants(self, key: CacheKey) -> Iterator[Entry]:
        """Every ref of a key, also those that are misses, in the order of their names."""

    def list(self, *, code: Digest | None = None) -> Iterator[Manifest]:
        """Every manifest that can be fetched, in the order of keys.

        Args:
            code: Only those whose key has this digest for its component "code".
        """

    def near(self, parts: KeyParts, mode: Mode) -> Iterator[Manifest]:
        """Manifests of a mode to compare a missing key with, each of which can be fetched.

        Where a look costs a request these are not all that there are: a service picks those that
        share most with the key, of a bucket the ones written last are taken.
        """

    def entries(self) -> Iterator[Entry]:
        """Every ref, in the order of keys; those that are misses with their problem."""

    def delete(self, key: CacheKey, variant: Variant | str) -> bool:
        """Remove a ref, and its archive unless another ref names it.

        Returns:
            Whether there was such a ref.
        """

    def used(self, digest: Digest) -> None:
        """Note that an archive is used now, where the store keeps such a note. Never fails."""

    def pins(self) -> Sequence[Pin]:
        """What no collection removes. One that cannot be read pins all the same."""

    def pin(self, what: str, reason: str) -> Pin:
        """Keep a key's entries, or those with a digest, whatever a collection's limits say.

        Raises:
            StoreError: if it could not be written.
        """

    def unpin(self, what: str) -> bool:
        """Remove a pin; whether there was one."""

    def recalls(self, of: Callable[[str], bool] | None = None) -> Sequence[bytes]:
        """The recall lists here, as they were signed; see `recall_list.py`. Whose they are nobody has checked.

        Costs a service no request where a look-up has just said that nothing changed, and a bucket one.

        Args:
            of: Only those filed under a signer for which this holds (hex of the key's fingerprint).

        Raises:
            ServiceUnavailable: the store is out of reach.
            StoreError: there are lists that cannot be read.
        """

    def put_recall(self, document: bytes, signer: str) -> None:
        """Store a recall list; those by its signer that it covers go.

        Args:
            document: The list, signed.
            signer: Hex of the fingerprint of the key that signed it.

        Raises:
            RecallConflict: the signer has a list with this number here, or a service with a later one.
            ManifestError: it is no list of that signer's.
            StoreError: it could not be stored.
        """

    def put_ref(self, manifest: Manifest, *, replace: bool = False) -> bool:
        """The second half of `publish`: the manifest alone, where its archive is stored already.

        Raises:
            NotStored: there is no such archive.
            CorruptArtifact: the stored one is not of the manifest's size.
            StoreError: it could not be written.
        """

    def usage(self) -> Usage:
        """How much the store holds; walks all of it."""
