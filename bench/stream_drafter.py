"""What `bench.stream` trains: a DFlash drafter of the `speculators` package, whole, on packed documents.

Two layers of hidden size 256, one of them sliding, a vocabulary of 4096, blocks of 8 tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from speculators.losses import resolve_loss_config
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from torch import Tensor, nn
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from aotcache.integrations.speculators import switch

HIDDEN, VOCAB, BLOCK, TAPS = 256, 4096, 8, 2


def build(attention: str = "aotcache") -> nn.Module:
    """The same drafter each time: on artifacts, or on one of the package's own attention functions."""
    torch.manual_seed(0)
    layers = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=4096,
        sliding_window=256,
        use_sliding_window=True,
        layer_types=["sliding_attention", "full_attention"],
    )
    layers._attn_implementation = None if attention == "aotcache" else attention
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=VOCAB,
        block_size=BLOCK,
        aux_hidden_state_layer_ids=[1, 2],
        mask_token_id=VOCAB - 1,
    )
    model = DFlashDraftModel(config)
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name or "lm_head" in name:  # the package leaves them to the verifier
            nn.init.normal_(parameter, std=0.05)
    return switch(model) if attention == "aotcache" else model


def batch(
    bucket: dict[str, int], device: Any = "cpu", *, seed: int | None = None
) -> tuple[tuple[()], dict[str, Any]]:
    """`seq` tokens of documents of their own lengths, `anchors` blocks; the draft's own loss."""
    generator = torch.Generator()
    generator.seed() if seed is None else generator.manual_seed(seed)
    seq = bucket["seq"]
    begins = torch.rand(1, seq, generator=generator) < 4.0 / seq
    loss_mask = torch.ones(1, seq)
    loss_mask[:, seq - BLOCK :] = 0  # no anchors at the end, padded or not

    def states(width: int) -> Tensor:
        return torch.randn(1, seq, width, generator=generator).to(device)

    return (), {
        "hidden_states": states(TAPS * HIDDEN),
        "input_ids": torch.randint(0, VOCAB - 1, (1, seq), generator=generator).to(device),
        "loss_mask": loss_mask.to(device),
        "verifier_last_hidden_states": states(HIDDEN),
        "document_ids": begins.long().cumsum(1).to(device),
        "max_anchors": bucket["anchors"],
        "loss_config": resolve_loss_config("kl_div", "eager"),
    }
