"""Nothing that a trusted key did not sign is ever opened, from whichever store it comes."""

from __future__ import annotations

import hashlib
import logging
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from aotcache import host
from aotcache.config import settings
from aotcache.db.engine import Database
from aotcache.envelope import Envelope, Signature
from aotcache.errors import CorruptArtifact, RejectedArtifact, ServiceUnavailable, StoreError
from aotcache.graph.functions import function_regions
from aotcache.key import Component, KeyParts
from aotcache.manifest import Manifest
from aotcache.runtime import registry
from aotcache.runtime.prefetch import prefetch
from aotcache.runtime.resolve import Resolved, Resolver
from aotcache.runtime.stats import Stats
from aotcache.service.index import Index
from aotcache.spec import CompileOptions
from aotcache.store import open_store
from aotcache.store.base import Store
from aotcache.store.objects import ObjectStore
from aotcache.store.tiered import TieredStore
from aotcache.trust import SigningKey, sign, trusted_keys
from aotcache.types import CacheKey, Digest, Miss, Target
from tests.manifests import copies, make_manifest, write_archive
from tests.runtime import artifacts
from tests.runtime.artifacts import Artifact, inputs
from tests.services.s3 import S3, s3_server
from tests.services.serving import Serving, serving

_dlopened: list[str] = []
_watched: list[bool] = []


@pytest.fixture(scope="session", autouse=True)
def _watch_dlopen() -> None:
    """Hooks of this kind stay for good; several modules ask for this one."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "ctypes.dlopen":
            _dlopened.append(str(arguments[0]))

    if not _watched:
        _watched.append(True)
        sys.addaudithook(hook)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return artifacts.pair(tmp_path_factory)


@pytest.fixture(scope="session")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """What only torch's own loader runs."""
    return artifacts.proxied(tmp_path_factory)


@pytest.fixture
def manifest(pair: Artifact, request: pytest.FixtureRequest) -> Manifest:
    """Under a key of the test's own: the registry is the process's."""
    return pair.renamed(request.node.name)


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SigningKey:
    """The one key that is trusted in this test."""
    monkeypatch.setenv("AOTCACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AOTCACHE_CONFIG_HOME", str(tmp_path / "config"))
    made = SigningKey.generate()
    trusted_keys(settings()).add(made.public, "builder")
    return made


def mapped() -> set[str]:
    """Libraries below the directory of temporary files that this process has mapped.

    torch's own loader unpacks an archive there and opens its libraries past Python: no audit hook sees them.
    """
    lines = (line.split(None, 5) for line in Path("/proc/self/maps").read_text().splitlines())
    paths = {fields[5].removesuffix(" (deleted)") for fields in lines if len(fields) == 6}
    return {path for path in paths if path.startswith(tempfile.gettempdir()) and path.endswith(".so")}


@dataclass
class Place:
    """A store as a worker opens it, and a way to put anything there past all checks.

    Attributes:
        worker: What the worker reads from.
        behind: The objects themselves.
        home: The worker's home.
        entered: Called once something was put.
        laid: Files that were put there for the test, or that come with it.
        mapped: Libraries that the process had mapped when the first thing was put.
    """

    worker: Store
    behind: ObjectStore
    home: Path
    entered: Callable[[], object] = lambda: None
    laid: set[Path] = field(default_factory=set)
    mapped: set[str] | None = None

    def put(self, key: CacheKey, document: bytes, manifest: Manifest, archive: bytes) -> None:
        if self.mapped is None:
            self.mapped = mapped()
        digest = manifest.digest
        self.behind._client.put(f"blobs/{digest[:2]}/{digest}", archive, create=False)
        self.behind._client.put(f"refs/{key[:2]}/{key}/{manifest.variant}.json", document, create=False)
        self.entered()
        self.laid = {path for path in self.home.rglob("*") if path.is_file()}

    def resolver(self) -> Resolver:
        return Resolver(self.worker, self.home, host.host_facts(), None, Stats())

    def opened(self) -> list[str]:
        """Libraries that were opened: of this test's home, and whatever torch's own loader has opened."""
        past_python = mapped() - (self.mapped or set()) - set(_dlopened)
        return [*(path for path in _dlopened if path.startswith(str(self.home))), *sorted(past_python)]

    def fetched(self) -> list[Path]:
        """Whatever came of the archive to this host, or was unpacked of it."""
        came = [p for p in self.home.rglob("*") if p.is_file() and p not in self.laid]
        return [p for p in came if p.suffix in (".so", ".pt2") or p.parents[1].name == "blobs"]


def _memory(tmp_path: Path) -> Place:
    store = open_store(f"memory:///{hashlib.sha256(str(tmp_path).encode()).hexdigest()}")
    assert isinstance(store, ObjectStore)
    return Place(store, store, tmp_path / "home")


def _copies(tmp_path: Path) -> Place:
    """A directory of copies: what lies in a local tier."""
    store = copies(tmp_path / "copies")
    return Place(store, store, tmp_path / "home")


@pytest.fixture(scope="module")
def bucket_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("service")) as server:
        yield server


def _own(tmp_path: Path) -> Place:
    """A directory of this user's own: what is signed there must be signed well, all the same."""
    store = open_store(tmp_path / "own")
    assert isinstance(store, ObjectStore)
    return Place(store, store, tmp_path / "home")


def _tier(url: str, tmp_path: Path) -> Place:
    """Somebody who can write to this host's copies of what lies at a service, which knows nothing of it."""
    worker = open_store(url)
    assert isinstance(worker, TieredStore)
    worker.local.mark_origin(url)
    return Place(worker, worker.local, tmp_path / "home")


@pytest.fixture(scope="module")
def nobody() -> Iterator[str]:
    """The address of a service that is away: it is bound, and nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


def _bucket(server: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    url = server.bucket()
    behind = open_store(url, tier=False)
    assert isinstance(behind, ObjectStore)
    return Place(open_store(url), behind, tmp_path / "home")


def _service(server: Serving, tmp_path: Path, database: Database) -> Place:
    """Somebody who can write to the service's own store, past the service."""
    behind = open_store(server.store)
    assert isinstance(behind, ObjectStore)
    return Place(
        open_store(server.url), behind, tmp_path / "home", entered=lambda: Index(database).reindex(behind)
    )


PLACES = ("memory", "own directory", "copies", "bucket", "service", "tier, origin up", "tier, origin away")


@pytest.fixture(params=PLACES)
def place(
    request: pytest.FixtureRequest, tmp_path: Path, key: SigningKey, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    if request.param == "bucket":
        yield _bucket(request.getfixturevalue("bucket_server"), tmp_path, monkeypatch)
    elif request.param == "service":
        server: Serving = request.getfixturevalue("service")
        database = Database(server.database)
        made = _service(server, tmp_path, database)
        yield made
        database.close()
        made.worker.remote.session.close()  # type: ignore[attr-defined]
    elif request.param == "tier, origin up":
        made = _tier(request.getfixturevalue("service").url, tmp_path)
        yield made
        made.worker.remote.session.close()  # type: ignore[attr-defined]
    elif request.param == "tier, origin away":
        yield _tier(request.getfixturevalue("nobody"), tmp_path)
    else:
        yield {"memory": _memory, "copies": _copies, "own directory": _own}[request.param](tmp_path)


def test_what_a_trusted_key_signed_is_opened_and_runs(
    place: Place, pair: Artifact, manifest: Manifest, key: SigningKey
) -> None:
    place.put(manifest.key, sign(manifest, key).document(), manifest, pair.archive.read_bytes())
    answer = place.resolver().by_key(manifest.key)
    assert isinstance(answer, Resolved)
    assert len(place.opened()) == 2
    assert len(answer.executable.train(inputs(1))) == 3


Forge = Callable[[Manifest, SigningKey], bytes]


def _by_a_stranger(manifest: Manifest, key: SigningKey) -> bytes:
    return sign(manifest, SigningKey.generate()).document()


def _under_a_trusted_name(manifest: Manifest, key: SigningKey) -> bytes:
    envelope = sign(manifest, SigningKey.generate()).envelope
    assert envelope is not None
    (made,) = envelope.signatures
    return replace(envelope, signatures=(Signature(key.public.fingerprint, made.sig),)).to_json()


def _with_another_payload(manifest: Manifest, key: SigningKey) -> bytes:
    """A signature that is good, in front of members that it was not made for."""
    envelope = sign(manifest, key).envelope
    assert envelope is not None
    other = replace(manifest, members=dict.fromkeys(manifest.members, Digest("f" * 64)))
    return replace(envelope, payload=other.to_json()).to_json()


def _of_another_type(manifest: Manifest, key: SigningKey) -> bytes:
    """What the key signed was never said to be a manifest."""
    bare = Envelope(manifest.to_json(), (), "text/plain")
    signature = Signature(key.public.fingerprint, key.sign(bare.signed_bytes))
    return Envelope(manifest.to_json(), (signature,)).to_json()


def _with_no_signature(manifest: Manifest, key: SigningKey) -> bytes:
    return Envelope(manifest.to_json(), ()).to_json()


def _of_another_key(manifest: Manifest, key: SigningKey) -> bytes:
    """Another entry, validly signed, under this one's key."""
    parts = manifest.components
    other = make_other(manifest)
    assert other.components != parts
    return sign(other, key).document()


def _rekeyed(manifest: Manifest, key: SigningKey) -> bytes:
    """Another entry whose manifest says this one's key, and is signed so."""
    return sign(replace(make_other(manifest), key=manifest.key), key).document()


def make_other(manifest: Manifest) -> Manifest:
    return Artifact(manifest, Path(), open_store("memory:///unused")).renamed("another")


FORGERIES = (
    _by_a_stranger,
    _under_a_trusted_name,
    _with_another_payload,
    _of_another_type,
    _with_no_signature,
    _of_another_key,
    _rekeyed,
)


@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__.strip("_"))
def test_what_no_trusted_key_signed_is_a_miss_and_not_one_byte_of_it_is_fetched(
    place: Place, pair: Artifact, manifest: Manifest, key: SigningKey, forge: Forge
) -> None:
    document = forge(manifest, key)
    place.put(manifest.key, document, manifest, pair.archive.read_bytes())
    answer = place.resolver().by_key(manifest.key)
    assert isinstance(answer, Miss), answer
    try:
        read = Manifest.from_json(document, where="here")
    except StoreError:
        pass  # nothing that could be opened
    else:
        if read.key == manifest.key:
            assert "trust" in answer.reason
            with pytest.raises(RejectedArtifact, match="opening an artifact runs its code"):
                registry.open_artifact(read, place.worker, place.home)
    assert place.opened() == []
    assert place.fetched() == []


def test_nothing_of_that_reaches_torchs_own_loader_either(
    place: Place, proxied: Artifact, request: pytest.FixtureRequest, key: SigningKey
) -> None:
    archive = proxied.archive.read_bytes()
    for forge in FORGERIES:
        forged = proxied.renamed(f"{request.node.name} {forge.__name__}")
        place.put(forged.key, forge(forged, key), forged, archive)
        assert isinstance(place.resolver().by_key(forged.key), Miss)
        assert place.opened() == []
        assert place.fetched() == []
    manifest = proxied.renamed(request.node.name)
    assert manifest.runner == "torch"
    place.put(manifest.key, sign(manifest, key).document(), manifest, archive)
    assert isinstance(place.resolver().by_key(manifest.key), Resolved)
    assert len(place.opened()) == 1


def test_a_miss_names_the_key_and_the_command(place: Place, pair: Artifact, manifest: Manifest) -> None:
    stranger = SigningKey.generate()
    place.put(manifest.key, sign(manifest, stranger).document(), manifest, pair.archive.read_bytes())
    answer = place.resolver().by_key(manifest.key)
    assert isinstance(answer, Miss)
    assert f"it is signed by {stranger.public.fingerprint}" in answer.reason
    assert "aotcache trust add" in answer.reason


def test_an_archive_that_is_not_the_signed_one_is_never_opened(
    place: Place, pair: Artifact, manifest: Manifest, key: SigningKey
) -> None:
    data = bytearray(pair.archive.read_bytes())
    data[len(data) // 2] ^= 1
    place.put(manifest.key, sign(manifest, key).document(), manifest, bytes(data))
    try:
        answer = place.resolver().by_key(manifest.key)
    except CorruptArtifact as error:
        found = str(error)
    else:  # a service looks before it serves, and has dropped it then; a tier drops it and finds no other
        assert isinstance(answer, Miss)
        found = answer.reason
    assert re.search("do not match|is gone from there|cannot be fetched", found)
    assert manifest.digest in found
    assert place.opened() == []


def _older_torch(manifest: Manifest) -> Manifest:
    return replace(manifest, toolchain=replace(manifest.toolchain, torch="2.1.0"))


def _other_processor(manifest: Manifest) -> Manifest:
    return replace(manifest, target=Target("cpu", "aarch64-baseline"))


def _other_gpu(manifest: Manifest) -> Manifest:
    return replace(manifest, target=Target("cuda", "sm_90a"))


def _more_features(manifest: Manifest) -> Manifest:
    return replace(manifest, host=replace(manifest.host, cpu_features=("avx9",)))


def _newer_libc(manifest: Manifest) -> Manifest:
    return replace(manifest, host=replace(manifest.host, glibc="99.0"))


def _missing_library(manifest: Manifest) -> Manifest:
    return replace(manifest, host=replace(manifest.host, libraries=("libaotcache-none.so.1",)))


def _missing_operator(manifest: Manifest) -> Manifest:
    operators = {"aotcache_none::op": {"schema": "s", "module": "m"}}
    return replace(manifest, host=replace(manifest.host, operators=operators))


MISMATCHES = {
    _older_torch: "built with torch 2.1.0",
    _other_processor: "built for cpu:aarch64-baseline",
    _other_gpu: "built for cuda:sm_90a",
    _more_features: "avx9",
    _newer_libc: "glibc 99.0",
    _missing_library: "libaotcache-none.so.1",
    _missing_operator: "aotcache_none::op",
}


@pytest.mark.parametrize("mismatch", MISMATCHES, ids=lambda mismatch: mismatch.__name__.strip("_"))
def test_what_this_host_cannot_run_is_a_miss_and_not_one_byte_of_it_is_fetched(
    place: Place,
    pair: Artifact,
    manifest: Manifest,
    key: SigningKey,
    mismatch: Callable[[Manifest], Manifest],
) -> None:
    """Signed as it should be, and for another host."""
    other = mismatch(manifest)
    place.put(other.key, sign(other, key).document(), other, pair.archive.read_bytes())
    answer = place.resolver().by_key(other.key)
    assert isinstance(answer, Miss)
    assert MISMATCHES[mismatch] in answer.reason
    assert place.opened() == []
    assert place.fetched() == []


def test_of_several_variants_the_one_that_runs_here_is_opened(
    place: Place, pair: Artifact, manifest: Manifest, key: SigningKey
) -> None:
    archive = pair.archive.read_bytes()
    for other in (_older_torch(manifest), manifest, _other_gpu(manifest)):
        place.put(manifest.key, sign(other, key).document(), other, archive)
    answer = place.resolver().by_key(manifest.key)
    assert isinstance(answer, Resolved)
    assert answer.executable.manifest == manifest


def test_an_unsigned_manifest_is_a_miss_wherever_others_could_have_put_it(
    place: Place, pair: Artifact, manifest: Manifest
) -> None:
    place.put(manifest.key, manifest.document(), manifest, pair.archive.read_bytes())
    answer = place.resolver().by_key(manifest.key)
    if place.worker.own:
        assert isinstance(answer, Resolved)
        return
    assert isinstance(answer, Miss)
    assert "nobody signed it" in answer.reason
    assert place.opened() == []
    assert place.fetched() == []


@pytest.mark.parametrize("what", ["a library", "every library", "a link to it"])
def test_what_was_changed_after_it_was_unpacked_is_made_anew(
    place: Place, pair: Artifact, manifest: Manifest, key: SigningKey, what: str
) -> None:
    """By another process of this user's, between two openings: the good bytes are opened, never the changed ones."""
    place.put(manifest.key, sign(manifest, key).document(), manifest, pair.archive.read_bytes())
    folder = registry.unpack(manifest, registry._AtHand(pair.archive), place.home)
    libraries = sorted(folder.rglob("*.so"))
    for library in libraries if what == "every library" else libraries[:1]:
        evil = place.home / f"evil-{library.name}"
        evil.write_bytes(library.read_bytes()[:-8] + bytes(8))
        library.unlink()
        library.symlink_to(evil) if what == "a link to it" else evil.rename(library)
    answer = place.resolver().by_key(manifest.key)
    assert isinstance(answer, Resolved)
    opened = place.opened()
    assert len(opened) == len(libraries)
    for path in opened:
        name = Path(path).relative_to(folder).as_posix()
        assert hashlib.sha256(Path(path).read_bytes()).hexdigest() == manifest.members[name]
        assert not Path(path).is_symlink()


def test_signed_members_that_are_not_the_archives_are_never_opened(
    place: Place, pair: Artifact, manifest: Manifest, key: SigningKey
) -> None:
    other = replace(manifest, members=dict.fromkeys(manifest.members, Digest("f" * 64)))
    place.put(manifest.key, sign(other, key).document(), manifest, pair.archive.read_bytes())
    with pytest.raises(CorruptArtifact, match="f" * 64):
        place.resolver().by_key(manifest.key)
    assert place.opened() == []


def test_a_manifest_changed_between_its_check_and_its_opening_is_rejected(
    place: Place, pair: Artifact, manifest: Manifest, key: SigningKey
) -> None:
    signed = sign(manifest, key)
    place.put(manifest.key, signed.document(), manifest, pair.archive.read_bytes())
    assert signed.envelope is not None
    other = replace(manifest, runner="torch").with_envelope(signed.envelope)
    with pytest.raises(RejectedArtifact, match="another manifest than the one in use"):
        place.resolver().open(other)
    assert place.opened() == []


class Forgetting:
    """The store, whose user stops trusting the builder while the archive comes."""

    def __init__(self, store: Store, key: SigningKey) -> None:
        self._store, self._key = store, key

    def blob_path(self, digest: Digest) -> Path | None:
        trusted_keys(settings()).remove(self._key.public.fingerprint)
        return self._store.blob_path(digest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_a_key_removed_while_the_archive_comes_opens_nothing(
    place: Place, pair: Artifact, manifest: Manifest, key: SigningKey
) -> None:
    signed = sign(manifest, key)
    place.put(manifest.key, signed.document(), manifest, pair.archive.read_bytes())
    store: Any = Forgetting(place.worker, key)
    with pytest.raises(RejectedArtifact, match="no trusted key signed it"):
        registry.open_artifact(signed, store, place.home)
    assert place.opened() == []


def _unsigned(tmp_path: Path, pair: Artifact, manifest: Manifest) -> Place:
    place = _copies(tmp_path)
    place.put(manifest.key, manifest.to_json(), manifest, pair.archive.read_bytes())
    return place


def test_an_unsigned_copy_of_elsewhere_is_a_miss(
    tmp_path: Path, pair: Artifact, manifest: Manifest, key: SigningKey
) -> None:
    place = _unsigned(tmp_path, pair, manifest)
    answer = place.resolver().by_key(manifest.key)
    assert isinstance(answer, Miss)
    assert "nobody signed it, and it was not built here" in answer.reason
    assert "AOTCACHE_TRUST_UNSIGNED=1" in answer.reason
    with pytest.raises(RejectedArtifact, match="nobody signed it"):
        registry.open_artifact(manifest, place.worker, place.home)
    assert place.opened() == []
    assert place.fetched() == []


def test_an_unsigned_artifact_of_this_hosts_own_store_is_opened(
    pair: Artifact, manifest: Manifest, tmp_path: Path, key: SigningKey
) -> None:
    assert pair.store.own
    _, first = registry.open_artifact(manifest, pair.store, tmp_path / "home")
    assert first


@pytest.mark.parametrize("part", ["", "refs", "its folder", "itself"])
def test_an_unsigned_manifest_that_others_could_have_written_opens_nothing(
    pair: Artifact, manifest: Manifest, tmp_path: Path, key: SigningKey, part: str
) -> None:
    """Also where its archive lies unpacked in a place of this user's, and is not read again."""
    root = tmp_path / "own"
    store = open_store(root)
    first = pair.renamed(f"opened before, {part or 'root'}")
    assert store.publish(first, pair.archive)
    registry.open_artifact(first, store, tmp_path / "home")
    before = len(_dlopened)
    assert store.publish(manifest, pair.archive)
    (ref,) = root.glob(f"refs/*/{manifest.key}/*.json")
    {"": root, "refs": root / "refs", "its folder": ref.parent, "itself": ref}[part].chmod(0o777)
    with pytest.raises(RejectedArtifact, match="other users could have changed it"):
        Resolver(store, tmp_path / "home", host.host_facts(), None, Stats()).by_key(manifest.key)
    assert len(_dlopened) == before


def test_trust_in_unsigned_artifacts_opens_them_with_one_warning_that_names_them(
    tmp_path: Path,
    pair: Artifact,
    manifest: Manifest,
    key: SigningKey,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    place = _unsigned(tmp_path, pair, manifest)
    monkeypatch.setenv("AOTCACHE_TRUST_UNSIGNED", "1")
    resolver = place.resolver()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert isinstance(resolver.by_key(manifest.key), Resolved)
    (record,) = caplog.records
    assert all(text in record.getMessage() for text in (manifest.digest, manifest.key, place.worker.url))
    assert "AOTCACHE_TRUST_UNSIGNED" in record.getMessage()


def test_of_two_variants_the_trusted_one_is_opened(
    place: Place, pair: Artifact, manifest: Manifest, key: SigningKey
) -> None:
    """The other one asks more of the CPU, and would be taken for that."""
    features = (*manifest.host.cpu_features, "sse2", "avx")
    better = replace(
        manifest,
        target=replace(manifest.target, arch="x86_64-avx512"),
        host=replace(manifest.host, cpu_features=features),
    )
    archive = pair.archive.read_bytes()
    place.put(manifest.key, sign(manifest, key).document(), manifest, archive)
    place.put(manifest.key, sign(better, SigningKey.generate()).document(), better, archive)
    answer = place.resolver().by_key(manifest.key)
    assert isinstance(answer, Resolved)
    assert answer.executable.manifest == manifest


class Unreachable:
    """A store that cannot be reached, or whose archives cannot."""

    own = False
    url = "https://cache.example.org"

    def __init__(self, known: Manifest | None = None) -> None:
        self._known = known

    def lookup(self, key: CacheKey) -> list[Manifest]:
        if self._known is None:
            raise ServiceUnavailable("https://cache.example.org was not reached within 5 s")
        return [self._known]

    def recalls(self, of: Any = None) -> list[bytes]:
        raise ServiceUnavailable("https://cache.example.org was not reached within 5 s")

    def blob_path(self, digest: Digest) -> Path | None:
        raise ServiceUnavailable("https://cache.example.org was not reached within 5 s")


@pytest.mark.parametrize("what", ["the entry", "the archive"])
def test_a_store_out_of_reach_is_a_miss_with_its_reason(
    manifest: Manifest, key: SigningKey, tmp_path: Path, what: str
) -> None:
    store: Any = Unreachable(sign(manifest, key) if what == "the archive" else None)
    resolver = Resolver(store, tmp_path / "home", host.host_facts(), None, Stats())
    answer = resolver.by_key(manifest.key)
    assert isinstance(answer, Miss)
    assert "was not reached within 5 s" in answer.reason


def test_a_strangers_manifest_without_code_does_not_fail_the_prefetch_of_others(
    key: SigningKey, tmp_path: Path
) -> None:
    store = copies(tmp_path / "copies")
    parts = KeyParts((Component("other", ()),))
    odd = replace(make_manifest(b"odd"), key=parts.key, components=tuple(parts.to_json()))
    assert store.publish(odd, write_archive(tmp_path, b"odd"))
    region = function_regions(CompileOptions().for_key())["flex_attention"]
    asking = Resolver(store, tmp_path / "home", host.host_facts(), None, Stats())
    assert prefetch(asking, [region], None, on_miss="raise", warm_line="") == frozenset()
