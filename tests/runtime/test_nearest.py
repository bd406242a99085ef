"""Which stored entry a miss is compared with."""

from __future__ import annotations

import torch

from aotcache.graph.functions import function_regions
from aotcache.graph.region import Call
from aotcache.manifest import Manifest
from aotcache.runtime.resolve import nearest
from aotcache.spec import CompileOptions
from tests.manifests import make_manifest


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
