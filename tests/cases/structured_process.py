"""A process that runs `structured` without having imported where its result is defined."""

from __future__ import annotations

import json
import sys
import types
from typing import Any

import torch

import aotcache
from tests.cases import structured

DEFINED = "tests.cases.head_output"


def main(spec: str, store: str, missing: bool) -> None:
    """Prints what the head returned, or what refused it.

    Args:
        spec, store: What was warmed, and where it is.
        missing: Whether the defining module is one without the class.
    """
    answer: dict[str, Any] = {"imported before": DEFINED in sys.modules}
    if missing:
        sys.modules[DEFINED] = types.ModuleType(DEFINED)
    model = structured.build()
    hidden = torch.randn(structured.ROWS, structured.HIDDEN).requires_grad_()
    with aotcache.attach(model, spec, store=store) as handle:
        try:
            result = model.head(hidden=hidden, scale=torch.ones(structured.HIDDEN))
            answer |= {"class": f"{type(result).__module__}:{type(result).__qualname__}", "loss": result.loss}
            answer["imported"] = type(result) is vars(sys.modules[DEFINED])["HeadOutput"]
        except Exception as error:
            answer |= {"error": type(error).__name__, "text": str(error)}
        answer["hits"] = handle.stats()["hits"]
    print(json.dumps(answer))
