"""What `attn_implementation="aotcache"` means, call by call: attention, masks and keys, without artifacts.

The references are float64 formulas and transformers' own functions.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_mask
from transformers import masking_utils
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2_attention
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_attention
from transformers.utils import ModelOutput

from aotcache.errors import CallRefused
from aotcache.graph.capture import find_regions, recording
from aotcache.graph.functions import CREATE_BLOCK_MASK, FLEX_ATTENTION, function_regions
from aotcache.graph.redirect import redirect_flex
from aotcache.graph.region import Call, Region
from aotcache.integrations import transformers as integration
from aotcache.runtime.dense import dense_attention
from tests.integration.conftest import WarmedModel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


# -- what attention means -----------------------------------------------------


class Layer(nn.Module):
    """What attention functions of transformers look at."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = groups
        self.sinks = nn.Parameter(torch.randn(6, dtype=torch.float64))


def inputs(heads: int, kv_heads: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(heads)
    shapes = [(2, heads, 7, 8), (2, kv_heads, 9, 8), (2, kv_heads, 9, 8)]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes
    ]


def both(got: Tensor, want: Tensor, wanted: list[Tensor]) -> None:
    """Values and gradients agree."""
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    direction = torch.randn(want.shape, dtype=want.dtype, generator=torch.Generator().manual_seed(1))
    for mine, theirs in zip(
        torch.autograd.grad(got, wanted, direction), torch.autograd.grad(want, wanted, direction), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 2), (6, 6)])
def test_scores_and_masks_as_tensors(heads: int, kv_heads: int, eager: Any) -> None:
    layer = Layer(heads // kv_heads)
    q, k, v = inputs(heads, kv_heads)
    generator = torch.Generator().manual_seed(0)
    for shape in ((2, 1, 7, 9), (1, heads, 7, 9), (2, 1, 1, 9), (1, 1, 7, 9)):
        added = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        got, weights = integration.attention(
            layer, q, k, v, None, scaling=0.3, softcap=2.0, position_bias=added
        )
        # Gemma 2's own softmax is in float32.
        k_all, v_all = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
        scores = torch.tanh(q @ k_all.mT * 0.3 / 2.0) * 2.0 + added
        both(got, (scores.softmax(-1) @ v_all).transpose(1, 2), [q, k, v, added])
        assert weights is None
        longer = torch.nn.functional.pad(added.detach(), (0, 3))
        both(
            integration.attention(layer, q, k, v, longer, scaling=0.3)[0],
            ((q @ k_all.mT * 0.3 + added.detach()).softmax(-1) @ v_all).transpose(1, 2),
            [q, k, v],
        )
        seen = torch.rand(shape, generator=generator) > 0.4
        seen[..., 0] = True
        both(
            integration.attention(layer, q, k, v, seen)[0],
            nn.functional.scaled_dot_product_attention(q, k_all, v_all, seen).transpose(1, 2),
            [q, k, v],
        )


def test_softcap_and_sinks_are_those_of_the_models(eager: Any) -> None:
    layer = Layer(3)
    q, k, v = inputs(6, 2)
    got = integration.attention(layer, q, k, v, None, scaling=0.5, s_aux=layer.sinks)[0]
    both(got, gpt_oss_attention(layer, q, k, v, None, scaling=0.5)[0], [q, k, v, layer.sinks])
    capped = integration.attention(layer, q, k, v, None, scaling=0.5, softcap=1.5)[0]
    want = gemma2_attention(layer, q, k, v, None, scaling=0.5, softcap=1.5)[0]
    torch.testing.assert_close(capped, want, rtol=1e-5, atol=1e-6)


def test_what_attention_cannot_do_is_refused(eager: Any) -> None:
    layer, (q, k, v) = Layer(2), inputs(4, 2)
    with pytest.raises(CallRefused, match=r"dropout is 0\.1, expected 0"):
        integration.attention(layer, q, k, v, None, dropout=0.1)
    for wrong in (
        torch.zeros(3, 1, 7, 9),
        torch.zeros(2, 1, 7, 8),
        torch.zeros(7, 9),
        torch.zeros(2, 1, 7, 9).long(),
    ):
        with pytest.raises(CallRefused, match=r"attention_mask is .*expected a boolean or floating-point"):
            integration.attention(layer, q, k, v, wrong)


# -- what masks mean ----------------------------------------------------------

LEFT = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1] * 8]).bool()
RIGHT = torch.tensor([[1] * 8, [1, 1, 1, 1, 1, 0, 0, 0]]).bool()
NOTHING = torch.tensor([[0] * 8, [1] * 8]).bool()
PACKED = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2], [0, 0, 0, 0, 0, 0, 1, 1]])
WINDOW = masking_utils.sliding_window_causal_mask_function(3)
CHUNKS = masking_utils.chunked_causal_mask_function(3, torch.tensor([2, 0]))
CALLS: dict[str, dict[str, Any]] = {
    "causal": {"q_length": 8, "kv_length": 8},
    "bidirectional": {"q_length": 5, "kv_length": 8, "mask_function": masking_utils.bidirectional_mask_function},
    "padded left": {"q_length": 8, "kv_length": 8, "attention_mask": LEFT},
    "padded right": {"q_length": 8, "kv_length": 8, "attention_mask": RIGHT, "mask_function": WINDOW},
    "all padding": {"q_length": 8, "kv_length": 8, "attention_mask": NOTHING},
    "packed": {
        "q_length": 8,
        "kv_length": 8,
        "mask_function": masking_utils.and_masks(
            masking_utils.causal_mask_function, masking_utils.packed_sequence_mask_function(PACKED)
        ),
    },
    "chunks": {"q_length": 8, "kv_length": 8, "attention_mask": LEFT, "mask_function": CHUNKS},
    "one token": {"q_length": 1, "kv_length": 8, "q_offset": 7, "attention_mask": LEFT},
    "past window": {"q_length": 2, "kv_length": 4, "q_offset": 6, "kv_offset": 4, "attention_mask": LEFT,
                    "mask_function": WINDOW},
    "static cache": {"q_length": 2, "kv_length": 12, "q_offset": torch.tensor(6), "attention_mask": RIGHT},
    "static cache alone": {"q_length": 1, "kv_length": 12, "q_offset": torch.tensor([3])},
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_masks_are_those_of_eager_attention(name: str, eager: Any) -> None:
    call = {"batch_size": 2, "device": "cpu", **CALLS[name]}
    mask = integration.block_mask(**call)
    assert isinstance(mask, BlockMask)
    if isinstance(call.get("q_offset"), Tensor):
        want = masking_utils.sdpa_mask(**call, allow_is_causal_skip=False)
        call["q_offset"].add_(1)  # as a cache does once it has the mask
    else:
        want = masking_utils.sdpa_mask(**call, allow_is_causal_skip=False)
    seen = create_mask(mask.mask_mod, 2, 1, call["q_length"], call["kv_length"], device="cpu")
    assert want is not None
    assert torch.equal(seen, want)
    assert torch.equal(mask.to_dense()[:, :, 0, 0].bool(), want.flatten(1).any(1, keepdim=True))


def keys_of(model: nn.Module, batches: list[dict[str, Tensor]]) -> dict[str, set[str]]:
    """Keys of the functions that a model calls."""
    calls: list[Call] = []
    with recording([], calls.append, function_regions({})), redirect_flex(dense_attention):
        for batch in batches:
            model(**batch)
    return {
        name: {call.parts.key for call in calls if call.region.name == name}
        for name in (FLEX_ATTENTION, CREATE_BLOCK_MASK)
    }


def test_batches_of_one_shape_have_one_key(unwarmed: Callable[[str], WarmedModel]) -> None:
    warmed = unwarmed("llama")
    model = warmed.build()
    batch = warmed.batch(8, seed=0)
    full = {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}
    left = {**batch, "attention_mask": LEFT.long()}
    assert [len(keys) for keys in keys_of(model, [batch, full, left]).values()] == [1, 1]

    bare = {"input_ids": batch["input_ids"], "labels": batch["labels"]}
    whole = {**bare, "position_ids": torch.arange(8).expand(2, -1)}
    packed = {**bare, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 0, 1]])}
    assert [len(keys) for keys in keys_of(model, [bare, whole, packed]).values()] == [1, 1]


def test_the_code_of_the_integration_is_in_the_key(
    unwarmed: Callable[[str], WarmedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed = unwarmed("llama")
    model, batch = warmed.build(), warmed.batch(8, seed=0)
    calls: list[Call] = []
    for patched in (False, True):
        if patched:
            monkeypatch.setattr(integration, "_added", lambda *args: None)
        with (
            recording(find_regions(model, ["model.layers.0"], {}), calls.append),
            redirect_flex(dense_attention),
        ):
            model(**batch)
    differences = [str(d) for d in calls[0].parts.diff(calls[1].parts)]
    assert any("_added" in difference for difference in differences), differences


def test_how_far_a_static_cache_is_filled_makes_no_new_key(unwarmed: Callable[[str], WarmedModel]) -> None:
    calls: list[Call] = []
    with recording([], calls.append, function_regions({})), redirect_flex(dense_attention):
        for filled in (3, 4, 9):
            integration.block_mask(
                2,
                1,
                16,
                q_offset=torch.tensor(filled),
                attention_mask=torch.ones(2, filled + 1, dtype=torch.bool),
            )
            integration.block_mask(2, 1, 16, q_offset=filled, attention_mask=None)
    assert len({call.parts.key for call in calls}) == 2


@dataclass
class OwnOutput(ModelOutput):
    logits: Any = None
    loss: Any = None


class ReturnsOwnOutput(nn.Module):
    def forward(self, x: Tensor) -> OwnOutput:
        return OwnOutput(logits=x * 2)


def test_a_region_may_return_a_model_output_of_the_users() -> None:
    region = Region("head", ReturnsOwnOutput(), {})
    call = region.describe([torch.ones(3)], {})
    tensors, template = region.run_flat(call, [torch.ones(3)])
    built = template.build(tensors)
    assert type(built) is OwnOutput
    assert list(built.items()) == [("logits", tensors[0])]
    # The first instance of a class is registered with torch, in a table that is of no account.
    assert region.describe([torch.ones(3)], {}).parts.key == call.parts.key


def test_without_transformers_the_error_names_the_command() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from aotcache.errors import ConfigError\n"
        "try:\n    import aotcache.integrations.transformers\n"
        "except ConfigError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'aotcache[transformers]'" in done.stdout
