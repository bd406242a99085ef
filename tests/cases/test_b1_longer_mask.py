"""B1: a block mask that is longer than the input counts for the input's positions; a shorter one is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import aotcache
from aotcache.errors import CallRefused
from aotcache.flex import flex_attention
from aotcache.spec import Spec
from tests.cases import eagle_mask, tiny
from tests.cases.support import assert_close, write_spec


@pytest.fixture(scope="module")
def spec(specs: Path, warmed: Callable[..., str]) -> Spec:
    made = write_spec(
        specs / "b1.toml",
        factory="tests.cases.eagle_mask:build",
        batch_function="tests.cases.eagle_mask:batch",
        regions=[],
        modes=["train"],
        buckets={},
        axes="",
    )
    warmed(made)
    return made


def reference(copies: dict[str, Tensor]) -> Tensor:
    """REF: a dense boolean mask of 200 x 400."""
    at = torch.arange(2 * eagle_mask.REAL)
    real = eagle_mask.visible(at, at, at[: eagle_mask.REAL, None], at)
    return tiny.dense(copies["q"], copies["k"], copies["v"], real)


def test_the_real_rows_and_their_gradients_are_those_of_the_real_lengths(spec: Spec) -> None:
    _, batch = eagle_mask.batch({}, seed=1)
    model = eagle_mask.build()
    with aotcache.attach(model, spec) as handle:
        out, loss = model(**batch)
        loss.backward()
        stats = handle.stats()
    copies = {name: batch[name].detach().requires_grad_() for name in "qkv"}
    want = reference(copies)
    (want * batch["target"]).sum().backward()
    assert_close(out, want)
    for name, copy in copies.items():
        assert copy.grad is not None
        error = (batch[name].grad - copy.grad).abs().max() / copy.grad.abs().max()
        assert error <= 1e-3, (name, float(error))
    assert (stats["hits"], stats["misses"], stats["traces"]) == (1, 0, 0)


@pytest.mark.parametrize(("q_len", "kv_len"), [(128, 512), (256, 384), (199, 400), (200, 399)])
def test_a_shorter_mask_is_refused_and_the_artifact_still_serves(
    spec: Spec,
    q_len: int,
    kv_len: int,
) -> None:
    _, batch = eagle_mask.batch({}, seed=2)
    model = eagle_mask.build()
    with aotcache.attach(model, spec):
        with pytest.raises(
            CallRefused, match=f"{q_len} queries and {kv_len} keys, the input has 200 and 400"
        ):
            flex_attention(
                *(batch[name] for name in "qkv"), block_mask=eagle_mask.mask(q_len, kv_len), enable_gqa=True
            )
        out, _ = model(**batch)
        assert_close(out, reference(batch))
