"""The processes of a soak: `python -m tests.faults.soak_processes client|builder|operator FOLDER NUMBER SECONDS`.

NUMBER tells those of one kind apart, SECONDS are how long the service lives each time.
"""

from __future__ import annotations

import sys
from pathlib import Path

from aotcache.store.session import session_for
from tests.faults.soak_operator import Operator
from tests.faults.soak_workers import Builder, Client
from tests.faults.soak_world import World


def main() -> None:
    kind, folder, number, seconds = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    world, name = World.load(folder), f"{kind}-{number}"
    if kind == "operator":
        Operator(world, name, seconds).work()
    else:
        (Client if kind == "client" else Builder)(world, name, number).work()
    session_for(world.url).close()


if __name__ == "__main__":
    main()
