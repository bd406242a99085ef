"""Run as a process: forks many workers that want the same archives from one store at the same moment.

Arguments: the store's address, how many workers, a folder for what goes wrong, the digests' file.
Each worker opens the store for itself; nothing but imports is shared with the parent.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
import traceback
from pathlib import Path

from aotcache.store import http, open_store, tiered  # noqa: F401
from aotcache.types import Digest


def work(url: str, digests: list[Digest], go: int) -> None:
    random.shuffle(digests)
    os.read(go, 1)
    store = open_store(url)
    for digest in digests:
        path = store.blob_path(digest)
        assert path is not None
        assert hashlib.sha256(path.read_bytes()).hexdigest() == digest


def main() -> int:
    url, workers, folder, listed = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    digests = [Digest(line) for line in listed.read_text().split()]
    waits, go = os.pipe()
    children = []
    for _ in range(workers):
        child = os.fork()
        if child == 0:
            os.close(go)
            try:
                work(url, digests, waits)
            except BaseException:
                (folder / f"{os.getpid()}.failed").write_text(traceback.format_exc())
                os._exit(1)
            os._exit(0)
        children.append(child)
    os.close(go)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(main())
