"""One of A3's processes: waits for the word, then warms TINY-D."""

from __future__ import annotations

import json
import sys

import aotcache
from aotcache.errors import AotcacheError


def main(spec: str) -> None:
    loaded = aotcache.load_spec(spec)
    store = aotcache.open_store(None)
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        report = aotcache.warm(loaded, store=store)
    except AotcacheError as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        return
    print(
        json.dumps(
            {
                "error": [str(b.error) for b in report.failed],
                "cells": sorted({(row.cell.key, str(row.digest)) for row in report.plan}),
                "compiled": sum(not b.reused for b in report.built),
            }
        )
    )
