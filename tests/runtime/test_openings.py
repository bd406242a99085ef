"""A process that dies while it opens or first runs an artifact is found by the next one."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from aotcache import host
from aotcache.errors import ServiceUnavailable
from aotcache.runtime import openings
from aotcache.runtime.openings import Deaths, Opening, deaths_of, known_deaths, look_back, marked
from aotcache.runtime.resolve import Resolver
from aotcache.runtime.stats import Stats
from aotcache.store import open_store
from aotcache.store.base import Store
from aotcache.types import CacheKey, Digest
from tests.runtime import dying
from tests.runtime.dying import Dying

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 120
"""Seconds that a child may take."""

WHAT = Opening(Digest("a" * 64), CacheKey("b" * 64), "layers.0", "file:///store")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Dying:
    return dying.build(tmp_path_factory.mktemp("dying") / "built")


@dataclass
class Place:
    """A store with the artifact, a home, and the processes that use them."""

    folder: Path
    store: Store
    artifact: Dying

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def digest(self) -> Digest:
        return self.artifact.manifest.digest

    def start(self, how: str = "", *more: str) -> subprocess.Popen[str]:
        """A worker that dies as `dying.c` is told to."""
        manifest = self.folder / "manifest.json"
        manifest.write_bytes(self.artifact.manifest.document())
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.runtime.dying",
                str(manifest),
                self.store.url,
                str(self.home),
                *more,
            ],
            env={**os.environ, "AOTCACHE_TEST_DYING": how},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def die(self, how: str) -> int:
        """Run a worker to its end."""
        with self.start(how) as worker:
            worker.communicate(timeout=LIMIT)
        return worker.returncode

    def marks(self) -> list[Path]:
        return sorted((self.home / "opening").glob("*"))


@pytest.fixture
def place(tmp_path: Path, artifact: Dying) -> Place:
    store = open_store(tmp_path / "store")
    assert store.publish(artifact.manifest, artifact.archive)
    return Place(tmp_path, store, artifact)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_process_that_ends_as_it_should_leaves_no_mark(place: Place) -> None:
    assert place.die("") == 0
    assert place.marks() == []
    look_back(place.home, place.store)
    assert known_deaths(place.home) == []


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("open:crash", -signal.SIGSEGV),
        ("forward:kill", -signal.SIGKILL),
        ("backward:exit", 0),
    ],
)
def test_a_death_is_said_once_by_the_next_process_and_kept(
    place: Place, caplog: pytest.LogCaptureFixture, how: str, code: int
) -> None:
    assert place.die(how) == code
    assert len(place.marks()) == 1
    for _ in range(2):
        look_back(place.home, place.store)
    (said,) = warnings(caplog)
    assert place.digest in said
    assert "'layers.0'" in said
    assert "1 death so far" in said
    (known,) = known_deaths(place.home)
    assert (known.digest, known.region, known.count) == (place.digest, "layers.0", 1)
    assert known.stage == how.partition(":")[0]
    assert place.marks() == []


def test_deaths_add_up_and_nothing_is_blocked(place: Place) -> None:
    leave(place.home, 2, digest=place.digest, stage="forward")
    look_back(place.home, place.store)
    known = deaths_of(place.home, place.digest)
    assert known is not None
    assert (known.count, known.stage, known.last) == (2, "forward", 6.0)
    stats = Stats()
    resolver = Resolver(place.store, place.home, host.host_facts(), None, stats)
    assert resolver.open(place.artifact.manifest)
    assert resolver.open(place.artifact.manifest)
    assert stats.snapshot(traces=0)["deaths"] == 2


@pytest.mark.parametrize("stage", ["open", "backward"])
def test_a_process_that_lives_in_the_middle_of_it_is_not_taken_for_dead(place: Place, stage: str) -> None:
    with place.start(f"{stage}:wait") as worker:
        try:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "here\n"
            look_back(place.home, place.store)
            assert known_deaths(place.home) == []
            assert len(place.marks()) == 1
        finally:
            worker.kill()
            worker.communicate(timeout=LIMIT)
    look_back(place.home, place.store)
    assert [known.stage for known in known_deaths(place.home)] == [stage]


def test_a_program_that_ends_beside_a_thread_in_the_middle_of_it_is_no_death(place: Place) -> None:
    with place.start("forward:wait", "exit") as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "here\n"
        assert len(place.marks()) == 1
        worker.communicate("\n", timeout=LIMIT)
    assert worker.returncode == 0
    assert place.marks() == []


_LOOK = """
import logging, sys
from pathlib import Path
from aotcache.runtime.openings import look_back
from aotcache.store import open_store
logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
store = open_store(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
look_back(Path(sys.argv[1]), store)
"""


def leave(home: Path, number: int, **changes: Any) -> None:
    """Marks of processes that are gone."""
    folder = home / "opening"
    folder.mkdir(parents=True, exist_ok=True)
    for n in range(number):
        said = {
            "digest": "a" * 64, "key": "b" * 64, "region": "layers.0", "store": "file:///store", "stage": "open",
            "at": 5.0 + n, "pid": 1, "host": "here",
        }  # fmt: skip
        (folder / f"{n:032x}.json").write_text(json.dumps(said | changes))


def test_processes_that_start_at_once_count_each_death_once(tmp_path: Path) -> None:
    leave(tmp_path, 20)
    looking = [
        subprocess.Popen(
            [sys.executable, "-c", _LOOK, str(tmp_path), str(tmp_path / "store")],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for process in looking:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    with ThreadPoolExecutor(len(looking)) as pool:
        said = "".join(pool.map(lambda p: p.communicate("\n", timeout=LIMIT)[0], looking))
    assert said.count("a process of this host") == 20
    (known,) = known_deaths(tmp_path)
    assert known.count == 20


def test_a_process_id_that_lives_again_says_nothing(tmp_path: Path) -> None:
    """Neither that a mark is held, nor that it is not."""
    leave(tmp_path, 1, pid=os.getpid())
    store = open_store(tmp_path / "store")
    with held(tmp_path, pid=2**22 + 1):
        look_back(tmp_path, store)
    (known,) = known_deaths(tmp_path)
    assert (known.digest, known.count) == ("a" * 64, 1)


@contextmanager
def held(home: Path, **changes: Any) -> Iterator[None]:
    """A mark that is held, and says something else than who holds it."""
    with marked(home, WHAT, "open"):
        (path,) = (
            p for p in (home / "opening").glob("*.json") if "pid" in p.read_text() and p.stem != "0" * 32
        )
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        yield


def test_a_death_that_was_counted_by_one_who_died_then_counts_once(tmp_path: Path) -> None:
    leave(tmp_path, 1)
    mark = next((tmp_path / "opening").iterdir())
    data = mark.read_bytes()
    store = open_store(tmp_path / "store")
    look_back(tmp_path, store)
    mark.write_bytes(data)
    look_back(tmp_path, store)
    assert [known.count for known in known_deaths(tmp_path)] == [1]
    assert list((tmp_path / "opening").iterdir()) == []


OUTSIDE = {"digest": "../../x", "stage": "open", "at": 1, "key": "", "region": "", "store": "", "pid": 1}
NO_STAGE = {"digest": "a" * 64, "stage": "lunch"}


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "[" * 5000, json.dumps(OUTSIDE), json.dumps(NO_STAGE)]
)
def test_a_mark_that_cannot_be_read_is_cleared_away(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "opening"
    folder.mkdir()
    (folder / "x.json").write_text(text)
    look_back(tmp_path, open_store(tmp_path / "store"))
    assert known_deaths(tmp_path) == []
    assert list(folder.iterdir()) == []


def _no_folder(home: Path, patch: pytest.MonkeyPatch) -> None:
    home.mkdir()
    (home / "opening").write_text("a file in its place")


def _no_locks(home: Path, patch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    patch.setattr(fcntl, "flock", refuse)


def _no_room(home: Path, patch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    patch.setattr(os, "write", refuse)


def _read_only(home: Path, patch: pytest.MonkeyPatch) -> None:
    (home / "opening").mkdir(parents=True)
    plain = os.open

    def refuse(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_CREAT and "opening" in str(path):
            raise OSError(30, "Read-only file system")
        return plain(path, flags, *rest, **options)

    patch.setattr(os, "open", refuse)


@pytest.mark.parametrize("broken", [_no_folder, _no_locks, _no_room, _read_only])
def test_where_marks_cannot_be_written_training_goes_on(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: Any
) -> None:
    with monkeypatch.context() as patch:
        broken(place.home, patch)
        with marked(place.home, WHAT, "open"):
            pass
        look_back(place.home, place.store)
        assert warnings(caplog) == []
    assert dying.step(place.artifact.manifest, place.store.url, place.home) is not None


class Telling:
    """A service that hears of deaths, or is away."""

    own = False
    url = "https://cache.example.org"


def test_a_service_is_told_of_what_came_from_it_until_it_has_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(tmp_path, 2, store=Telling.url)
    leave(tmp_path / "other", 1)
    heard: list[list[str]] = []
    away = True

    def send(store: Any, reports: Any) -> bool:
        heard.append(sorted(r.id for r in reports))
        if away:
            raise ServiceUnavailable("https://cache.example.org was not reached within 5 s")
        return True

    monkeypatch.setattr(openings, "send", send)
    store: Any = Telling()
    for _ in range(2):
        told(tmp_path, store)
    away = False
    for _ in range(2):
        told(tmp_path, store)
    assert heard == [[f"{n:032x}" for n in range(2)]] * 3
    (known,) = known_deaths(tmp_path)
    assert (known.count, known.reports) == (2, ())


def told(home: Path, store: Store) -> None:
    """`look_back`, and the end of the thread that tells."""
    import threading

    look_back(home, store)
    for thread in threading.enumerate():
        if thread.name == "aotcache-deaths":
            thread.join(LIMIT)
            assert not thread.is_alive()


def test_what_is_no_services_is_told_to_nobody(tmp_path: Path) -> None:
    leave(tmp_path, 1)
    look_back(tmp_path, open_store(tmp_path / "store"))
    (known,) = known_deaths(tmp_path)
    assert known.reports == ()
    assert isinstance(known, Deaths)
