"""Everything that reads what others wrote, as functions of bytes: each returns, or raises an AotcacheError.

The tests feed them what hypothesis makes (`test_parsers.py`), `make fuzz` what a coverage-guided fuzzer
makes (`guided.py`). No torch here: a fuzzer's process is to start at once.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from aotcache.api.ranges import Range, Unsatisfiable, accepts, matches, parse_range, range_applies
from aotcache.archive import contents, differences, flaws, readable
from aotcache.build.content import ContentIndex
from aotcache.cli.quantities import byte_size, duration
from aotcache.config import Settings
from aotcache.envelope import Envelope, Signature
from aotcache.errors import AotcacheError
from aotcache.key import KeyParts
from aotcache.lockfile import Lock, LockedCell, read_lock
from aotcache.manifest import Manifest
from aotcache.recall import Recalls
from aotcache.recall_list import Recalled, RecallList, SignedList
from aotcache.recorded import INDEX, Index, RecordedCall, RecordedKey, read_index
from aotcache.runtime import openings
from aotcache.runtime.openings import Deaths, known_deaths
from aotcache.service import cursors
from aotcache.spec import load_spec
from aotcache.store import layout, open_store
from aotcache.store.answers import error_of, retry_after, service_url
from aotcache.store.deaths import Report
from aotcache.store.http import HttpStore
from aotcache.store.pins import Pin, read_pin
from aotcache.store.sse import parse_events
from aotcache.store.survey import is_newer
from aotcache.trust import PublicKey, SigningKey, TrustedKeys, sign
from aotcache.types import CacheKey, Digest, Target
from tests.manifests import make_manifest

_SEEDED = 7
"""What of a seed's key material is made from: seeds are the same in every run."""


@dataclass(frozen=True)
class Parser:
    """One reader.

    Attributes:
        name: For reports.
        read: Takes what somebody wrote. Its own checks are assertions, which are faults, too.
        seeds: Documents that it reads without an error.
        allowed: Errors that its callers expect beside AotcacheError.
    """

    name: str
    read: Callable[[bytes], object]
    seeds: Callable[[], Sequence[bytes]]
    allowed: tuple[type[Exception], ...] = ()


PARSERS: dict[str, Parser] = {}


def _parser(
    name: str, seeds: Callable[[], Sequence[bytes]], *, allowed: tuple[type[Exception], ...] = ()
) -> Callable[[Callable[[bytes], object]], Callable[[bytes], object]]:
    def add(read: Callable[[bytes], object]) -> Callable[[bytes], object]:
        PARSERS[name] = Parser(name, read, cache(seeds), allowed)
        return read

    return add


@cache
def _folder() -> Path:
    """For readers of files; on memory where there is some."""
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix="aotcache-fuzz-", dir=shared))


def _file(name: str, data: bytes) -> Path:
    path = _folder() / name
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.write_bytes(data)
    return path


@cache
def _key() -> SigningKey:
    return SigningKey(Ed25519PrivateKey.from_private_bytes(bytes([_SEEDED]) * 32))


def _text(data: bytes) -> str:
    """As headers are read: any bytes are a text."""
    return data.decode("latin-1")


def _manifests() -> Sequence[bytes]:
    bare = make_manifest()
    return [bare.to_json(), bare.document(), sign(bare, _key()).document()]


@_parser("manifest", _manifests)
def _manifest(data: bytes) -> None:
    """What is read is written as the same again, and nothing of it can lead anywhere as a path."""
    found = Manifest.from_json(data, where="here")
    again = Manifest.from_json(found.document(), where="here")
    assert again.to_json() == found.to_json()
    assert again.document() == found.document()
    assert layout.entry_of(layout.ref(found.key, str(found.variant))) == (found.key, str(found.variant))


def _envelopes() -> Sequence[bytes]:
    signed = sign(make_manifest(), _key()).document()
    return [
        Envelope(b"payload", ()).to_json(),
        Envelope(b"", (Signature("k", bytes(64)),), "text/plain").to_json(),
        signed,
    ]


@_parser("envelope", _envelopes)
def _envelope(data: bytes) -> None:
    """One text for one value: what is read is written as the same value, base64 included."""
    found = Envelope.from_json(data, where="here")
    assert Envelope.from_json(found.to_json(), where="here") == found


def _recall() -> RecallList:
    return RecallList(1, 1.0, 2.0, (Recalled("a" * 64, "it was wrong", 1.0),), ())


@_parser("recall list", lambda: [_recall().to_json()])
def _recall_list(data: bytes) -> None:
    found = RecallList.from_json(data, where="here")
    assert found.to_json() == data


@_parser("signed recall list", lambda: [SignedList.make(_recall(), _key()).document])
def _signed_list(data: bytes) -> None:
    found = SignedList.from_document(data, where="here")
    found.by(_key().public)


def _lock() -> Lock:
    cell = LockedCell(
        "layers.0", "train", {"seq": 256}, "cpu:x86_64-avx2", "torch2.13.0-cccccccc-cpu",
        CacheKey("a" * 64), Digest("b" * 64),
    )  # fmt: skip
    return Lock("dflash", [cell])


@_parser("lock file", lambda: [_lock().to_json().encode()])
def _lock_file(data: bytes) -> None:
    found = read_lock(_file("spec.toml.lock", data))
    assert read_lock(_file("spec.toml.lock", found.to_json().encode())) == found
    found.digests()


_SPEC = b"""
[drafter]
name = "dflash"
factory = "drafters:build"
batch = "drafters:batch"
regions = ["layers.*"]
modes = ["train"]
dtype = "bfloat16"
kwargs = { layers = 5 }
[buckets]
seq = [1024, 2048]
[axes]
hidden_states = { 1 = "seq" }
inner.ids = { -1 = "seq", pad = -1 }
[compile]
memory_budget = 0.5
[targets]
archs = ["native", "cuda:sm_90a"]
"""

_RECORDED = b"""
[drafter]
name = "dflash"
factory = "drafters:build"
calls = "spec.calls"
[buckets]
call = [1, 2]
"""


@_parser("spec", lambda: [_SPEC, _RECORDED])
def _spec(data: bytes) -> None:
    found = load_spec(_file("fuzz.toml", data))
    if sum(map(len, found.buckets.values())) < 20 and len(found.buckets) < 5:
        found.cells()
    found.targets(lambda: Target("cpu", "x86_64-avx2"))


def _index() -> bytes:
    manifest = make_manifest()
    parts = KeyParts.from_json(manifest.components)
    parts_of = {c.digest: p for c, p in zip(parts.components, parts.to_json(), strict=True)}
    key = RecordedKey("train", {"layers.0": 2}, [c.digest for c in parts.components])
    call = RecordedCall("train", [manifest.key], 2, [], "it was a generator")
    return json.dumps(asdict(Index("s", "run", [call], {manifest.key: key}, parts_of))).encode()


@_parser("recorded calls", lambda: [_index()])
def _recorded(data: bytes) -> None:
    found = read_index(_file(f"spec.calls/{INDEX}", data).parent)
    found.problems()
    found.merged(found)


@_parser("trusted key", lambda: [_trusted()])
def _trusted_key(data: bytes) -> None:
    name = _key().public.fingerprint.removeprefix("ed25519:")
    path = _file(f"trusted/{name}.json", data)
    path.chmod(0o600)
    assert [key.key for key in TrustedKeys(path.parent).list()] == [_key().public]


def _trusted() -> bytes:
    return json.dumps({"name": "b", "public": _key().public.to_text(), "added": 1.0, "origin": None}).encode()


@_parser("public key", lambda: [_key().public.to_text().encode()])
def _public_key(data: bytes) -> None:
    found = PublicKey.from_text(_text(data))
    assert PublicKey.from_text(found.to_text()) == found


@_parser("signing key", lambda: [_pem()])
def _signing_key(data: bytes) -> None:
    path = _file("signing.pem", data)
    path.chmod(0o600)
    SigningKey.load(path)


def _pem() -> bytes:
    path = _folder() / "seed.pem"
    path.unlink(missing_ok=True)
    _key().save(path)
    return path.read_bytes()


@_parser(
    "range header",
    lambda: [b"bytes=0-99", b"bytes=-5", b"bytes=7-", b"*", b'W/"a", "b"'],
    allowed=(Unsatisfiable,),
)
def _range_header(data: bytes) -> None:
    text = _text(data)
    matches(text, ('"a"',))
    range_applies(text, '"a"')
    accepts(text, "zstd")
    for size in (0, 1, 100, 1 << 40):
        try:
            found = parse_range(text, size)
        except Unsatisfiable:
            continue
        assert found is None or _lies_within(found, size)


def _lies_within(found: Range, size: int) -> bool:
    return 0 <= found.start < found.stop <= size == found.size


def _packages() -> Sequence[bytes]:
    found = []
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", method) as package:
            package.writestr("a/b.so", b"x" * 300)
            package.writestr("a/c.json", b"{}")
        found.append(out.getvalue())
    return found


@_parser("archive", _packages)
def _archive(data: bytes) -> None:
    """What has no flaws is read to its end, within its limits, and nothing is written anywhere."""
    path = _file("archive.pt2", data)
    with readable(path, what="an archive") as package:
        found = flaws(package, len(data))
        differences(package, {"a/b.so": Digest("0" * 64)})
        if not found:
            contents(package)
            names = package.namelist()
            assert len(set(names)) == len(names)
            assert not any(name.startswith("/") or ".." in name.split("/") for name in names)


@_parser("cursor", lambda: [cursors.pack("a" * 64, 3).encode()])
def _cursor(data: bytes) -> None:
    key, number = cursors.unpack(_text(data), str, int)
    assert type(key) is str
    assert type(number) is int


@_parser(
    "server-sent events", lambda: [b'id: 3\nevent: state\ndata: {"state": "done"}\n\ndata: [1,\ndata: 2]\n\n']
)
def _events(data: bytes) -> None:
    for event in parse_events(data.decode(errors="replace").split("\n")):
        assert event["id"].isprintable()


@_parser("length of time", lambda: [b"30d", b"90s"])
def _duration(data: bytes) -> None:
    assert duration(_text(data)).total_seconds() >= 0


@_parser("size", lambda: [b"50GiB", b"1.5 TB", b"7"])
def _size(data: bytes) -> None:
    assert byte_size(_text(data)) >= 0


@_parser("target", lambda: [b"cuda:sm_90a", b"cpu:x86_64-avx2"])
def _target(data: bytes) -> None:
    found = Target.parse(_text(data))
    assert Target.parse(str(found)) == found


@_parser("pin", lambda: [Pin("a" * 64, "kept", 1.0).to_json()])
def _pin(data: bytes) -> None:
    """A pin that cannot be read pins all the same."""
    assert read_pin("a" * 64, data).what == "a" * 64


@_parser("ref of a newer release", _manifests)
def _newer(data: bytes) -> None:
    assert type(is_newer(data)) is bool


def _deaths() -> Sequence[bytes]:
    digest = Digest("a" * 64)
    report = Report("b" * 32, digest, "open", 1.0, "https://cache.example.org")
    found = Deaths(digest, CacheKey("c" * 64), "layers.0", 1, "forward", 1.0, "b" * 32, (report,))
    mark = {"digest": digest, "stage": "open", "at": 1.0, "key": "c" * 64, "region": "r", "pid": 1,
            "store": "https://cache.example.org"}  # fmt: skip
    return [json.dumps(asdict(found)).encode(), json.dumps(mark).encode()]


@_parser("deaths and marks", _deaths)
def _death(data: bytes) -> None:
    """Files that cannot be understood are passed over."""
    home = _folder() / "home"
    for name in ("a" * 64, "d" * 64):
        _file(f"home/deaths/{name}.json", data)
    known_deaths(home)
    _file(f"home/opening/{'b' * 32}.json", data)
    openings._settle(home)
    known_deaths(home)


def _notes() -> Sequence[bytes]:
    note = {"url": "https://cache.example.org", "asked": 1.0, "shown": {"a" * 64: 3}}
    return [json.dumps(note).encode(), SignedList.make(_recall(), _key()).document]


@_parser("kept recalls", _notes)
def _kept(data: bytes) -> None:
    """Of a host's own notes nothing may make a list look newer than it is."""
    home, url = _folder() / "home", "https://cache.example.org"
    recalls = Recalls(home)
    _file(str(recalls._note_path(url).relative_to(_folder())), data)
    found = recalls._noted(url)
    assert found is None or found.asked < float("inf")
    signer = _key().public.fingerprint.removeprefix("ed25519:")
    kept = _file(f"home/recalls/{signer}/{1:016d}-{hashlib.sha256(data).hexdigest()[:16]}.json", data)
    recalls._lists(signer)
    kept.unlink()


@_parser("note of a graph", lambda: [json.dumps({"key": make_manifest().key}).encode()])
def _graph(data: bytes) -> None:
    """Costs a build, no more."""
    config = Settings(
        home=_folder() / "home", config_home=_folder() / "config", store=str(_folder() / "store")
    )
    store = open_store(config.store)
    _file("home/content/graph.json", data)
    assert ContentIndex(config, store, _folder())._recall("graph", store) is None


@_parser("address of a service", lambda: [b"https://cache.example.org:8443/team/", b"http://[::1]:80"])
def _address(data: bytes) -> None:
    """No credentials are in what is compared and shown; an @ in the path is none."""
    assert "@" not in urlsplit(service_url(_text(data))).netloc


@_parser(
    "answer with an error",
    lambda: [b'{"error": {"type": "lease_lost", "message": "m", "details": {"a": 1}}}'],
)
def _answered_error(data: bytes) -> None:
    for status in (400, 404, 409, 503):
        error_of("https://cache.example.org/v1", "GET", httpx.Response(status), data)
    headers = [(b"retry-after", data.replace(b"\n", b"").replace(b"\r", b"").replace(b"\0", b""))]
    retry_after(httpx.Response(503, headers=headers), 1e9)


class _Answering:
    """A session whose service answers everything with one document."""

    url = "https://cache.example.org"

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def json(self, *asked: Any, **more: Any) -> Any:
        return self._answer


def _answers() -> Sequence[bytes]:
    manifest = sign(make_manifest(), _key())
    document = json.loads(manifest.document())
    digest = hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    variant = {"variant": str(manifest.variant), "document": digest, "modified": 1.0, "envelope": document}
    row = {
        "key": manifest.key,
        "variant": variant["variant"],
        "digest": manifest.digest,
        "size": 7,
        "deaths": 1,
    }
    found = {
        "found": {manifest.key: [{"variant": variant["variant"], "document": digest}]},
        "recalls": None,
        "variants": [variant],
        "artifacts": [row],
        "next": None,
        "nearest": [{"key": manifest.key}],
        "pins": [{"what": "a" * 64, "reason": "r", "at": 1.0}],
        "deleted": 1,
    }
    return [json.dumps(found).encode(), json.dumps({**found, "recalls": [{"document": document}]}).encode()]


@_parser("answer of a service", _answers)
def _answered(data: bytes) -> None:
    """A service may answer anything: what is taken of it has the name that was asked for."""
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError):
        return  # the session's business
    manifest = make_manifest()
    store = HttpStore("https://cache.example.org", _Answering(answer))  # type: ignore[arg-type]
    asked: tuple[Callable[[], object], ...] = (
        lambda: _named(store.lookup(manifest.key), manifest.key),
        lambda: store.resolve([manifest.key], known={manifest.digest: manifest}),
        lambda: [entry.problem for entry in store.entries()],
        store.usage,
        store.deaths,
        store.pins,
        store.recalls,
        lambda: list(store.near(manifest.parts, "train")),
        lambda: store.delete(manifest.key, "variant"),
    )
    for ask in asked:
        attempt(ask)


def _named(found: Sequence[Manifest], key: CacheKey) -> None:
    assert all(manifest.key == key for manifest in found)


def attempt(act: Callable[[], object], allowed: tuple[type[Exception], ...] = ()) -> None:
    """Do something that may end with a typed error; any other error is the caller's to see."""
    try:
        act()
    except (AotcacheError, *allowed):
        pass


def feed(parser: Parser, data: bytes) -> None:
    """Give a parser something to read. Raises what no caller of it expects."""
    attempt(lambda: parser.read(data), parser.allowed)
