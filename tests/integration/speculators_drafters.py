"""Drafters of the `speculators` package at a size that trains on a CPU, for specs and tests.

They are switched over by `aotcache.integrations.speculators.switch` and else as the package makes
them: the losses are its eager ones, the weights that its constructors leave as NaN are drawn here.
Its anchor sampling draws from torch's one CPU generator, so it is seeded from the batch under a
lock: a step is then a function of its weights and its batch, and no thread's depends on another's.

`attention="eager"` builds the same drafter on the package's own dense attention, which
neither flex attention nor aotcache has a part in: the reference that tests compare with.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from speculators.losses import resolve_loss_config
from speculators.models.dflash import DFlashDraftModel
from speculators.models.dflash import core as dflash_core
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
from speculators.models.peagle import core as peagle_core
from torch import nn
from transformers import LlamaConfig, PretrainedConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from aotcache.integrations.speculators import switch

FLEX = "simple_flex_attention"
HIDDEN = 64
VOCAB = 96
MASK_TOKEN = VOCAB - 1
BLOCK = 8
DEPTHS = 4
TTT_STEPS = 2

Batch = tuple[tuple[Any, ...], dict[str, Any]]

# -- factories ---------------------------------------------------------------


class CompiledDFlash(DFlashDraftModel):
    """What the package's class is on a host with CUDA."""

    forward = torch.compile(DFlashDraftModel.forward)


def build_dflash(
    *,
    layers: int = 2,
    attention: str = FLEX,
    seed: int = 0,
    kind: type[DFlashDraftModel] = DFlashDraftModel,
) -> nn.Module:
    """DFlash, or a drafter of its `kind`: Qwen3 layers with a sliding window."""
    kinds = ["sliding_attention"] * layers
    transformer = _qwen3(layers, attention, sliding_window=48, use_sliding_window=True, layer_types=kinds)
    config = kind.config_class(
        transformer_layer_config=transformer,
        draft_vocab_size=VOCAB,
        block_size=BLOCK,
        aux_hidden_state_layer_ids=[1, 2],
        mask_token_id=MASK_TOKEN,
    )
    return _finish(kind(config), attention, seed)


def build_eagle3(*, layers: int = 1, attention: str = FLEX, seed: int = 0) -> nn.Module:
    """EAGLE-3: Llama layers, unrolled over test-time steps with a growing cache."""
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=_llama(layers, attention),
        draft_vocab_size=VOCAB,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
    )
    return _finish(Eagle3DraftModel(config), attention, seed)


def build_peagle(*, layers: int = 1, attention: str = FLEX, seed: int = 0) -> nn.Module:
    """P-EAGLE: Qwen3 layers over all depths at once, with trained embeddings."""
    config = PEagleSpeculatorConfig(
        transformer_layer_config=_qwen3(layers, attention),
        draft_vocab_size=VOCAB,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        mask_token_id=MASK_TOKEN,
    )
    return _finish(PEagleDraftModel(config), attention, seed)


def _qwen3(layers: int, attention: str, **more: Any) -> PretrainedConfig:
    return _layer_config(Qwen3Config, layers, attention, **more)


def _llama(layers: int, attention: str) -> PretrainedConfig:
    return _layer_config(LlamaConfig, layers, attention)


def _layer_config(kind: type, layers: int, attention: str, **more: Any) -> PretrainedConfig:
    config: PretrainedConfig = kind(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HIDDEN // 4,
        max_position_embeddings=4096,
        **more,
    )
    config._attn_implementation = attention
    return config


def _finish(model: Any, attention: str, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                # Not the ones that norms begin with: a norm whose weight is dropped must show.
                noise = torch.rand(parameter.shape, generator=generator)
                parameter.copy_(0.75 + 0.5 * noise)
            else:
                scale = 1.0 if "embed_tokens" in name else parameter.shape[-1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    _seed_sampling()
    return (switch(model) if attention == FLEX else model).train()


# -- sampling that is a function of the batch --------------------------------

_SAMPLING = threading.Lock()


def _seed_sampling() -> None:
    for module, name in ((dflash_core, "select_anchors"), (peagle_core, "generate_cod_sample_indices")):
        sample = getattr(module, name)
        if not hasattr(sample, "seeded"):
            setattr(module, name, _seeded(sample))


def _seeded(sample: Callable[..., Any]) -> Callable[..., Any]:
    def seeded(*args: Any, **kwargs: Any) -> Any:
        loss_mask = kwargs.get("loss_mask", args[0] if args else None)
        positions = torch.nonzero(loss_mask.squeeze(0)).squeeze(-1)
        with _SAMPLING, torch.random.fork_rng(devices=[]):
            torch.manual_seed(int((positions * positions).sum()))
            return sample(*args, **kwargs)

    seeded.seeded = True  # type: ignore[attr-defined]
    return seeded


# -- batches -----------------------------------------------------------------


def batch_dflash(bucket: dict[str, int], device: Any = "cpu", *, seed: int | None = None) -> Batch:
    """A packed batch: `seq` tokens of a few documents, `anchors` blocks."""
    kwargs = _packed(bucket["seq"], 2, device, seed, loss_end=BLOCK)
    kwargs["max_anchors"] = bucket["anchors"]
    kwargs["loss_config"] = resolve_loss_config("kl_div", "eager")
    return (), kwargs


def batch_eagle3(bucket: dict[str, int], device: Any = "cpu", *, seed: int | None = None) -> Batch:
    """A packed batch of `seq` tokens, `TTT_STEPS` unrolled."""
    kwargs = _packed(bucket["seq"], 3, device, seed, loss_end=TTT_STEPS)
    kwargs["ttt_steps"] = TTT_STEPS
    kwargs["loss_config"] = resolve_loss_config("kl_div", "eager")
    return (), kwargs


def batch_peagle(bucket: dict[str, int], device: Any = "cpu", *, seed: int | None = None) -> Batch:
    """A packed batch of `seq` tokens, `anchors` of which start a chain of `DEPTHS` predictions.

    The layers see `seq` rows and those of the chains; their number depends on `anchors` alone
    as long as more than `anchors` tokens are trained on.
    """
    kwargs = _packed(bucket["seq"], 3, device, seed, loss_end=DEPTHS)
    kwargs["max_anchors"] = bucket["anchors"]
    kwargs["num_depths"] = DEPTHS
    kwargs["loss_config"] = resolve_loss_config("kl_div", "eager")
    return (), kwargs


def _packed(seq: int, taps: int, device: Any, seed: int | None, *, loss_end: int) -> dict[str, Any]:
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    documents = torch.zeros(1, seq, dtype=torch.long)
    loss_mask = torch.ones(1, seq)
    cut = int(torch.randint(seq // 4, seq // 2, (), generator=generator))
    documents[:, cut:] = 1
    documents[:, cut + (seq - cut) // 2 :] = 2
    # Prompts are not trained on, nor are the last tokens, which have no successors.
    for document in range(3):
        start = int(torch.nonzero(documents[0] == document)[0])
        loss_mask[:, start : start + 4] = 0
    loss_mask[:, seq - loss_end :] = 0
    return {
        "hidden_states": torch.randn(1, seq, taps * HIDDEN, generator=generator).to(device),
        "input_ids": torch.randint(0, MASK_TOKEN, (1, seq), generator=generator).to(device),
        "loss_mask": loss_mask.to(device),
        "verifier_last_hidden_states": torch.randn(1, seq, HIDDEN, generator=generator).to(device),
        "document_ids": documents.to(device),
    }


# -- a step -----------------------------------------------------------


def step(model: nn.Module, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    """One forward and backward: the loss, and each trained parameter's gradient."""
    model.zero_grad(set_to_none=True)
    args, kwargs = batch
    _, loss, _ = model(*args, **kwargs)
    loss.backward()
    return float(loss.detach()), {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
