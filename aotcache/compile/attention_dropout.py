"""Dropout inside of scaled dot-product attention, where eager computes it by plain operators.

On a CPU, attention with dropout has no kernel of its own: eager multiplies queries and
keys, takes the softmax, drops some weights and multiplies with the values. Drawn outside,
the mask is that of `dropout` on a tensor of the weights' shape.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from aotcache.compile.graphs import argument_of
from aotcache.manifest import Draw, InputSlot

# private torch names, tried on 2.13.0
_MATH = torch.ops.aten._scaled_dot_product_attention_math.default
# end of private torch names

OPERATOR = torch.ops.aten.scaled_dot_product_attention.default

_DTYPES = (torch.float32, torch.float64)
"""Beyond these, eager draws in another dtype than that of its inputs."""


def slot(node: fx.Node, name: str) -> InputSlot | None:
    """What is drawn for an attention with dropout; None where eager does not draw by plain operators."""
    query, key = (argument_of(node, argument).meta["val"] for argument in ("query", "key"))
    grouped = bool(argument_of(node, "enable_gqa"))
    same = query.shape[:-2] == key.shape[:-2] or (grouped and query.shape[:-3] == key.shape[:-3])
    probability = argument_of(node, "dropout_p")
    if query.device.type != "cpu" or query.dtype not in _DTYPES or not same or type(probability) is not float:
        return None
    shape = (*(int(s) for s in query.shape[:-1]), int(key.shape[-2]))
    stride = tuple(int(s) for s in torch.empty(shape, device="meta").stride())
    return InputSlot(
        kind="random",
        name=name,
        dtype=str(query.dtype).removeprefix("torch."),
        shape=shape,
        stride=stride,
        requires_grad=False,
        draw=Draw("aten.dropout.default", (probability,)),
    )


def attention(
    noise: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention whose weights are multiplied with `noise`; the rest as torch's operator takes it."""
    del dropout_p
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        # The operator turns it into what is added to the scores before it comes to the plain ones.
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -math.inf)
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    _, weights = _MATH(query, key, value, attn_mask, 0.0, is_causal, None, **options)
    if enable_gqa:
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    mixed: torch.Tensor = (weights * noise) @ value
    return mixed
