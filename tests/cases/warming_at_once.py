"""One of A3's processes: builds TINY-D without memory, waits for the word, then warms it."""

from __future__ import annotations

import json
import sys

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import aotcache
from aotcache.errors import AotcacheError
from tests.cases import tiny


def main(spec: str, fake: bool) -> None:
    """Ask for the artifact under the meta device, or inside a FakeTensorMode of its own."""
    with FakeTensorMode() if fake else torch.device("meta"):
        request(spec, tiny.build())


def request(spec: str, model: tiny.Tiny) -> None:
    assert all(isinstance(p, FakeTensor) or p.is_meta for p in model.parameters())
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
