"""The service: downloads against nginx, `resolve`, listings, a million rows, and memory under transfers.

All of it on one machine, clients and database included. Ratios have both sides in one run, in turn.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from aotcache.db.engine import Database
from bench import serve_rows, serve_traffic
from bench.common import Bar, Report, fresh, main, text_of_seconds

MODULE = "bench.serve"
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything."""

    archive: int = 200
    """MiB."""
    rounds: int = 15
    rows: int = 1_000_000
    listed: int = 10_000
    requests: int = 400
    downloads: int = 100
    uploads: int = 20


QUICK = Sizes(rounds=5, rows=50_000, requests=60, downloads=20, uploads=5)
PAGE = 100


def run(quick: bool) -> Report:
    """The sides of a ratio take turns in one process; each other part has one of its own."""
    sizes = QUICK if quick else Sizes()
    speed = fresh(MODULE, "downloads", archive=sizes.archive, rounds=sizes.rounds)
    pages = fresh(MODULE, "pages", rows=sizes.listed, sweeps=3 if quick else 10)
    memory = fresh(MODULE, "memory", archive=sizes.archive, downloads=sizes.downloads, uploads=sizes.uploads)
    rows = {
        name: fresh(MODULE, "rows", dialect=name, rows=sizes.rows, requests=sizes.requests)
        for name in ("sqlite", "postgresql")
    }
    table: list[tuple[str, str]] = [
        (f"download of {sizes.archive} MiB, nginx", f"{speed['nginx'] / 1e6:.0f} MB/s"),
        (f"download of {sizes.archive} MiB, aotcache serve", f"{speed['aotcache'] / 1e6:.0f} MB/s"),
        *(
            (f"page of {PAGE} of {sizes.listed:,} artifacts, {place}", text_of_seconds(pages[place]))
            for place in ("start", "middle", "end")
        ),
        ("memory of the server, idle", f"{memory['idle'] / MIB:.0f} MiB"),
        (
            f"the same, most during {sizes.downloads} downloads of {sizes.archive} MiB at once",
            f"{memory['downloads'] / MIB:.0f} MiB",
        ),
        (
            f"the same, most during {sizes.uploads} uploads of {sizes.archive} MiB at once",
            f"{memory['uploads'] / MIB:.0f} MiB",
        ),
    ]
    for dialect, found in rows.items():
        for clients, times in found["resolve"].items():
            table.append(
                (
                    f"POST /v1/resolve of 1,000 keys among {sizes.rows:,}, {clients} clients, {dialect}: p50, p99",
                    f"{text_of_seconds(times['p50'])}, {text_of_seconds(times['p99'])}",
                )
            )
        for what, cost in found["costs"].items():
            table.append(
                (
                    f"{what}, of {sizes.rows:,} rows in {dialect}: p50, p99",
                    f"{text_of_seconds(cost['p50'])}, {text_of_seconds(cost['p99'])}",
                )
            )
    return Report(
        name="serve",
        title="The service on one machine, clients included",
        columns=("what", "measured"),
        rows=table,
        bars=[
            Bar("download, aotcache serve over nginx", speed["ratio"], 0.7, at_least=True),
            Bar("a page at the end over one at the start", pages["end"] / pages["start"], 1.5),
            Bar(
                "growth of the server's memory under downloads, over one archive",
                (memory["downloads"] - memory["idle"]) / (sizes.archive * MIB),
                1.5,
            ),
        ],
        data={"download": speed, "pages": pages, "memory": memory, "rows": rows},
    )


def side_downloads(archive: int, rounds: int) -> dict[str, Any]:
    """Bytes per second of each server, taken in turn: medians over `rounds`, also of the ratios of the rounds."""
    with _folder() as folder:
        store = folder / "store"
        digest = _put_archive(store, archive)
        with serve_traffic.nginx(folder / "nginx", store) as other:
            with serve_traffic.serving(folder, store=store) as (port, _):
                sides = {
                    "nginx": (other, f"/blobs/{digest[:2]}/{digest}"),
                    "aotcache": (port, f"/v1/blobs/{digest}"),
                }
                rates: dict[str, list[float]] = {name: [] for name in sides}
                for turn in range(rounds + 1):
                    for name, (at, path) in sides.items():
                        size, took = serve_traffic.download(at, path)
                        if size != archive * MIB:
                            raise RuntimeError(f"{name} sent {size} of {archive * MIB} bytes")
                        if turn:  # the first reads and checks the file, in both
                            rates[name].append(size / took)
    ratio = median(a / b for a, b in zip(rates["aotcache"], rates["nginx"], strict=True))
    return {name: median(found) for name, found in rates.items()} | {"ratio": ratio, "rounds": rates}


def side_pages(rows: int, sweeps: int) -> dict[str, Any]:
    """Seconds of a page at the start, in the middle and at the end of a listing: medians."""
    with _folder() as folder:
        address = f"sqlite:///{folder}/service.db"
        _filled(address, rows).close()
        with serve_traffic.serving(folder, store=_empty(folder), database=address) as (port, _):
            serve_traffic.page_times(port, PAGE)
            taken = [serve_traffic.page_times(port, PAGE) for _ in range(sweeps)]
    pages = len(taken[0])
    places = {
        "start": range(5),
        "middle": range(pages // 2 - 2, pages // 2 + 3),
        "end": range(pages - 5, pages),
    }
    return {
        "pages": pages,
        **{place: median(times[i] for times in taken for i in at) for place, at in places.items()},
    }


def side_memory(archive: int, downloads: int, uploads: int) -> dict[str, Any]:
    """The server's peak of resident memory, in bytes: idle, and after many transfers at once."""
    with _folder() as folder:
        store = folder / "store"
        digest = _put_archive(store, archive)
        source = folder / "upload"
        name = _write_archive(source, archive)
        with serve_traffic.serving(folder, store=store) as (port, pid):
            serve_traffic.download(port, "/healthz")
            found: dict[str, Any] = {"idle": serve_traffic.peak_memory(pid)}

            def get() -> None:
                size, _ = serve_traffic.download(port, f"/v1/blobs/{digest}")
                if size != archive * MIB:
                    raise RuntimeError(f"{size} of {archive * MIB} bytes came")

            def put() -> None:
                status = serve_traffic.upload(port, f"/v1/blobs/{name}", source)
                if status not in (200, 201):
                    raise RuntimeError(f"an upload was answered {status}")

            found["download_seconds"] = serve_traffic.together(downloads, get)
            found["downloads"] = serve_traffic.peak_memory(pid)
            found["upload_seconds"] = serve_traffic.together(uploads, put)
            found["uploads"] = serve_traffic.peak_memory(pid)
    return found


def side_rows(dialect: str, rows: int, requests: int) -> dict[str, Any]:
    """What statements and `resolve` requests cost with many rows."""
    made: Callable[[], AbstractContextManager[str]] = getattr(serve_rows, dialect)
    with made() as address, _folder() as folder:
        database = _filled(address, rows)
        try:
            costs = serve_rows.costs(database, rows, 50)
        finally:
            database.close()
        resolve = {}
        with serve_traffic.serving(folder, store=_empty(folder), database=address) as (port, _):
            serve_traffic.resolve_times(port, rows, 1, 10)
            for clients in (1, 20):
                times = serve_traffic.resolve_times(port, rows, clients, max(5, requests // clients))
                resolve[str(clients)] = serve_rows.spread(times)
    return {"costs": costs, "resolve": resolve}


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="aotcache-bench-") as name:
        yield Path(name)


def _empty(folder: Path) -> Path:
    store = folder / "store"
    store.mkdir(exist_ok=True)
    return store


def _filled(address: str, rows: int) -> Database:
    database = Database(address)
    serve_rows.fill(database, rows)
    return database


def _put_archive(store: Path, size: int) -> str:
    """Put random bytes where the store keeps archives; their digest."""
    draft = _empty(store.parent) / "draft"
    digest = _write_archive(draft, size)
    place = store / "blobs" / digest[:2] / digest
    place.parent.mkdir(parents=True)
    os.replace(draft, place)
    return digest


def _write_archive(path: Path, size: int) -> str:
    hashed = hashlib.sha256()
    with path.open("wb") as file:
        for _ in range(size):
            piece = os.urandom(MIB)
            hashed.update(piece)
            file.write(piece)
    return hashed.hexdigest()


if __name__ == "__main__":
    main(
        "serve",
        run,
        {"downloads": side_downloads, "pages": side_pages, "memory": side_memory, "rows": side_rows},
    )
