"""Run as a process: asks a store for one archive and one key, logs everything, and ends as it ends.

Arguments: the store's address, a digest, where to write, and `through copies` to keep copies on this host.
The token of a service is in AOTCACHE_TOKEN.
"""

from __future__ import annotations

import logging
import sys
import traceback
from pathlib import Path

from aotcache.config import Settings
from aotcache.errors import AotcacheError
from aotcache.store import open_store
from aotcache.store.base import Store
from aotcache.store.http import HttpStore
from aotcache.store.session import Limits, ServiceSession
from aotcache.types import CacheKey, Digest


def main() -> None:
    url, digest, dest = sys.argv[1], Digest(sys.argv[2]), Path(sys.argv[3])
    logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
    settings = Settings()
    store: Store
    if sys.argv[4:] == ["through copies"]:
        store = open_store(url)
        print(repr(settings), repr(store), vars(store))
    else:
        assert settings.token is not None
        token = settings.token.get_secret_value()
        session = ServiceSession(url, token, limits=Limits(read=0.4, call=5, attempts=2))
        store = HttpStore(url, session)
        print(repr(settings), repr(store), repr(session), vars(session), session._clients)
    try:
        print("lookup:", len(store.lookup(CacheKey("0" * 64))), sum(1 for _ in store.list()))
    except AotcacheError as error:
        print(
            "lookup failed:",
            "".join(traceback.TracebackException.from_exception(error).format()),
        )
        print(repr(error), error.details)
    store.fetch(digest, dest)
    print("fetched")


if __name__ == "__main__":
    main()
