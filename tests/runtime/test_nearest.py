"""Which stored entry a miss is compared with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aotcache.config import settings
from aotcache.graph.functions import function_regions
from aotcache.graph.region import Call
from aotcache.manifest import Manifest
from aotcache.runtime.resolve import explain, nearest
from aotcache.spec import CompileOptions
from aotcache.trust import SigningKey, sign, trusted_keys
from tests.manifests import copies, make_manifest, write_archive


def stored(call: Call) -> Manifest:
    parts = call.parts
    return make_manifest(key=parts.key, components=tuple(parts.to_json()), mode=call.mode)


def test_a_drop_in_function_is_compared_with_itself_alone() -> None:
    functions = function_regions(CompileOptions().for_key())
    short, long = (torch.ones(1, 1, n, 4) for n in (8, 16))
    call, other = (functions["flex_attention"].describe((x, x, x), {}) for x in (short, long))
    made = (torch.empty(0), lambda b, h, i, j: i >= j, None, None, 8, 8, 128, {})
    mask = functions["create_block_mask"].describe(made, {})
    assert call.mode == mask.mode == "infer"
    layer = make_manifest(mode="infer")
    assert nearest(call.parts, "infer", [stored(mask), layer]) is None
    found = nearest(call.parts, "infer", [stored(mask), layer, stored(other)])
    assert found is not None
    assert found.manifest == stored(other)


@pytest.mark.parametrize("trusted", [True, False])
def test_what_is_there_and_not_trusted_is_not_to_be_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trusted: bool
) -> None:
    monkeypatch.setenv("AOTCACHE_CONFIG_HOME", str(tmp_path / "config"))
    key, x = SigningKey.generate(), torch.ones(1, 1, 8, 4)
    call = function_regions(CompileOptions().for_key())["flex_attention"].describe((x, x, x), {})
    store = copies(tmp_path / "copies")
    assert store.publish(sign(stored(call), key), write_archive(tmp_path, b"archive"))
    if trusted:
        trusted_keys(settings()).add(key.public, "builder")
    text = explain(call, "the reason", store, "aotcache warm drafter.toml")
    assert ("aotcache warm" in text) is trusted  # then it is of another variant, or for another host
