"""Clocks that are an hour off: the signer's, the reader's and the server's, against each other."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

from tests.faults import entries
from tests.faults.surroundings import Server, surroundings
from tests.faults.tally import Tally

HOUR = 3600.0
LIMIT = 20.0
SIZE = 30_000


_ANY = (-HOUR, 0.0, HOUR)


def clocks(
    folder: Path,
    *,
    servers: Sequence[float] = _ANY,
    others: Sequence[tuple[float, float]] = tuple(product(_ANY, _ANY)),
    progress: Callable[[str], None] = lambda text: None,
) -> list[Tally]:
    """Publish, look up, fetch and unpack with clocks that are right, early and late.

    Args:
        folder: For everything.
        servers: How many seconds the server's is ahead.
        others: The same for signer and reader.
        progress: Told after each round.
    """
    made = []
    with surroundings(folder) as around:
        assert around.key is not None
        for of_server in servers:
            tally = Tally(
                "clocks", f"the server's {_said(of_server)}, signer's and reader's any", limit=LIMIT
            )
            server = Server(around, around.place(), before=_shift(of_server))
            server.start()
            seed = 0
            for of_signer, of_reader in others:
                seed += 1
                home = around.place()
                archive = entries.written(home, seed, SIZE)
                arguments = {"url": server.url, "archive": str(archive), "seed": seed, "size": SIZE}
                published = around.hatched.run(
                    "tests.faults.acts:publish",
                    {**arguments, "sign": True, "tier": False},
                    before=_shift(of_signer),
                    limit=LIMIT,
                    counted=False,
                )
                tally.rounds += 1
                tally.hit += any((of_server, of_signer, of_reader))
                tally.took(published.seconds)
                where = f"signer's {_said(of_signer)}, reader's {_said(of_reader)}: "
                if published.status != 0:
                    tally.note([f"unusable: {published.error}"], where)
                    continue
                (entry,) = published.acknowledged
                tally.acknowledged += 1
                for act in ("take", "unpack"):
                    read = around.hatched.run(
                        f"tests.faults.acts:{act}",
                        {"url": server.url, "key": entry["key"]},
                        before=_shift(of_reader),
                        environment={"AOTCACHE_HOME": str(home / "home")},
                        limit=LIMIT,
                        counted=False,
                    )
                    tally.took(read.seconds)
                    if read.status != 0:
                        tally.note([f"unusable: {act}: {read.error}"], where)
                shutil.rmtree(home)
                progress(f"clocks: {tally.rounds} of {len(others)}, {len(tally.problems)} problems")
            server.stop()
            made.append(tally)
    return made


def _shift(seconds: float) -> dict[str, dict[str, float]]:
    return {"tests.faults.acts:shift_clock": {"seconds": seconds}} if seconds else {}


def _said(seconds: float) -> str:
    return "right" if not seconds else f"an hour {'ahead' if seconds > 0 else 'behind'}"
