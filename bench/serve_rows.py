"""A database of the service with many rows, and what its statements cost and how they are planned."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter, sleep
from typing import Any

from sqlalchemy import event, text

from aotcache.db.engine import Database
from aotcache.db.migrate import upgrade
from aotcache.db.models import ArtifactRow, BlobRow, UsageRow
from aotcache.service.index import Index
from aotcache.types import CacheKey

TARGETS = ("cpu:x86_64-avx2", "cpu:x86_64-avx512", "cuda:sm_90")
VERSIONS = ("2.11.0", "2.13.0", "2.14.1")
_PART = 20_000
"""Rows of one statement."""


def key_of(number: int) -> CacheKey:
    """The key of the n-th row: spread over the whole range, as real ones are."""
    return CacheKey(hashlib.sha256(b"key %d" % number).hexdigest())


def rows_of(numbers: Iterable[int]) -> Iterator[dict[str, dict[str, Any]]]:
    """One artifact each, with its usage and its blob; key components are left out: no statement here reads them."""
    for n in numbers:
        key, digest = key_of(n), hashlib.sha256(b"blob %d" % n).hexdigest()
        target, torch = TARGETS[n % 3], VERSIONS[n // 3 % 3]
        variant = f"{target.replace(':', '-')}+torch{torch}-{'c' * 8}-cpu"
        size = 200_000 + n % 1000
        yield {
            "artifacts": {
                "key": key,
                "variant": variant,
                "digest": digest,
                "size": size,
                "document": digest,
                "region": f"layers.{n % 40}",
                "mode": "train" if n % 2 else "infer",
                "bucket": {"seq": 1024},
                "target": target,
                "torch": torch,
                "build_seconds": 25.0,
                "created": float(n),
                "modified": float(n),
            },
            "usage": {
                "key": key,
                "variant": variant,
                "hits": n % 7,
                "last_used": float(n * 7919 % 1_000_003),
            },
            "blobs": {"digest": digest, "size": size, "stored": float(n)},
        }


def fill(database: Database, count: int) -> None:
    """Bring a new database to `count` artifacts."""
    upgrade(database)
    tables = {"artifacts": ArtifactRow, "usage": UsageRow, "blobs": BlobRow}
    # In the order of the keys, and with room for whole indexes: that fills a database minutes sooner.
    ordered = sorted(range(count), key=key_of)
    for start in range(0, count, _PART):
        made = list(rows_of(ordered[start : start + _PART]))
        with database.connection(write=True) as connection:
            if database.dialect == "sqlite":
                connection.exec_driver_sql("PRAGMA cache_size = -1000000")
            for name, model in tables.items():
                connection.execute(model.__table__.insert(), [row[name] for row in made])
    # What autovacuum does by itself some time later: statistics, and pages that an index alone can answer for.
    with database._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("ANALYZE" if database.dialect == "sqlite" else "VACUUM ANALYZE"))


def costs(database: Database, count: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds (p50, p99) and the plan of each statement that must stay cheap, by what it does."""
    index = Index(database)
    draw = random.Random(0)
    middle = index.page(cursor=None, limit=1000).next
    for _ in range(20):
        middle = index.page(cursor=middle, limit=1000).next

    def resolve() -> None:
        index.resolve([key_of(draw.randrange(count + count // 10)) for _ in range(1000)])

    work: dict[str, Callable[[], Any]] = {
        "resolve 1,000 keys": resolve,
        "page of 100": lambda: index.page(cursor=middle, limit=100),
        "page of 100, one region": lambda: index.page(cursor=middle, limit=100, region="layers.7"),
        "page of 100, three filters": lambda: index.page(
            cursor=middle, limit=100, region="layers.7", target=TARGETS[1], torch=VERSIONS[1]
        ),
        "1,000 oldest, for collection": lambda: index.oldest(1000),
    }
    return {
        name: {"plan": plan_of(database, call), **spread([seconds(call) for _ in range(rounds)])}
        for name, call in work.items()
    }


def seconds(call: Callable[[], Any]) -> float:
    """How long a call took."""
    start = perf_counter()
    call()
    return perf_counter() - start


def spread(times: list[float]) -> dict[str, float]:
    """p50 and p99, in seconds."""
    return {"p50": median(times), "p99": quantiles(times, n=100, method="inclusive")[98]}


def plan_of(database: Database, call: Callable[[], Any]) -> list[str]:
    """How the database goes about the one statement that `call` makes."""
    seen: list[tuple[str, Any]] = []

    def note(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> None:
        if statement.lstrip().upper().startswith(("SELECT", "WITH")):
            seen.append((statement, parameters))

    engine = database._engine
    event.listen(engine, "before_cursor_execute", note)
    try:
        call()
    finally:
        event.remove(engine, "before_cursor_execute", note)
    if len(seen) != 1:
        raise RuntimeError(f"expected one statement, found {len(seen)}")
    explain = "EXPLAIN QUERY PLAN " if database.dialect == "sqlite" else "EXPLAIN (COSTS OFF) "
    with database.connection() as connection:
        rows = connection.exec_driver_sql(explain + seen[0][0], seen[0][1]).all()
    return [str(row[-1]).strip()[:160] for row in rows]


@contextmanager
def sqlite() -> Iterator[str]:
    """Address of a new SQLite database."""
    with tempfile.TemporaryDirectory(prefix="aotcache-bench-") as folder:
        yield f"sqlite:///{folder}/service.db"


@contextmanager
def postgresql() -> Iterator[str]:
    """Address of a new PostgreSQL server with its usual settings.

    Raises:
        RuntimeError: none is installed.
    """
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found:
        raise RuntimeError("PostgreSQL is not installed; on Debian: apt-get install postgresql")
    programs = found[-1].parent
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # PostgreSQL refuses to be run by root.
    user = "postgres" if os.getuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="aotcache-bench-"))
    data = folder / "data"
    try:
        if user is not None:
            shutil.chown(folder, user)
        init = [programs / "initdb", "-D", data, "-U", "aotcache", "-A", "trust", "-E", "UTF8", "--no-sync"]
        subprocess.run(init, check=True, user=user, stdout=subprocess.DEVNULL, cwd=folder)
        server = subprocess.Popen(
            [programs / "postgres", "-D", data, "-p", str(port), "-k", folder, "-h", "127.0.0.1"],
            user=user,
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            ready = [programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port), "-t", "1"]
            for _ in range(600):
                if subprocess.run(ready, stdout=subprocess.DEVNULL, check=False).returncode == 0:
                    break
                sleep(0.1)
            else:
                raise RuntimeError("PostgreSQL did not come up within a minute")
            yield f"postgresql://aotcache@127.0.0.1:{port}/postgres"
        finally:
            server.terminate()
            server.wait(30)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
