"""What is held against an artifact, and what is rounding: by the numerics check and by the check of first uses."""

from __future__ import annotations

import torch

NOISE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Relative error that is never held against an artifact, by dtype: some hundred roundings in
float32, two to four in half precision."""

GRADIENT_FACTOR = 10.0
"""Gradients add up over the batch and the sequence; their noise is larger than the outputs'."""

SMALL = 1e-2
"""A gradient below this share of the largest one is measured against this share: a true gradient
of zero, like that of a bias before batch normalisation, has no relative error."""

__all__ = ["GRADIENT_FACTOR", "NOISE", "SMALL"]
