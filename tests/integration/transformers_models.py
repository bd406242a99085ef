"""Tiny models of transformers, for specs and tests: built from a configuration, nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from aotcache.integrations.transformers import register

register()

VOCAB, ROWS = 96, 2
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build_llama(*, attention: str = "aotcache", seed: int = 0, **more: Any) -> nn.Module:
    """Two layers of Llama."""
    return _build(LlamaForCausalLM, LlamaConfig(**{**SIZES, **more}), attention, seed)


def build_qwen3(*, window: int, attention: str = "aotcache", seed: int = 0, **more: Any) -> nn.Module:
    """Two layers of Qwen3 that see `window` positions."""
    sliding = {"use_sliding_window": True, "sliding_window": window, "layer_types": ["sliding_attention"] * 2}
    return _build(Qwen3ForCausalLM, Qwen3Config(**{**SIZES, **sliding, **more}), attention, seed)


def _build(kind: Any, config: Any, attention: str, seed: int) -> nn.Module:
    config._attn_implementation = attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = kind(config)
        with torch.no_grad():
            for parameter in model.parameters():
                # Far enough from zero that every part of a model counts in its loss.
                wide = parameter.dim() > 1
                parameter.copy_(
                    torch.randn_like(parameter) * 0.3 if wide else 0.75 + 0.5 * torch.rand_like(parameter)
                )
    return model


def batch(
    bucket: dict[str, int], device: Any = "cpu", *, seed: int | None = None
) -> tuple[tuple[()], dict[str, Tensor]]:
    """Rows of tokens, the second one shorter: its end is padding."""
    generator = torch.Generator()
    generator.seed() if seed is None else generator.manual_seed(seed)
    length = bucket["seq"]
    ids = torch.randint(3, VOCAB, (ROWS, length), generator=generator)
    mask = torch.ones(ROWS, length, dtype=torch.int64)
    short = int(torch.randint(length // 2, length, (), generator=generator))
    ids[1, short:], mask[1, short:] = 0, 0
    labels = ids.masked_fill(mask == 0, -100)
    return (), {"input_ids": ids.to(device), "attention_mask": mask.to(device), "labels": labels.to(device)}
