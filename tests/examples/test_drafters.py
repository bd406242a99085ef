"""The bundled drafters: they learn, padding does not count, and masks are what they say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from aotcache.buckets import Buckets
from aotcache.runtime.dense import eager_without_tracing
from aotcache.spec import load_spec
from examples.dflash import dflash_drafter as dflash
from examples.eagle3 import eagle3_drafter as eagle3

ROOT = Path(__file__).parents[2] / "examples"
SMALLEST = {dflash: {"seq": 128, "anchors": 16}, eagle3: {"seq": 64}}
SHORTER = {dflash: {"seq": 93, "anchors": 11}, eagle3: {"seq": 41}}
SPECS = {dflash: ROOT / "dflash" / "dflash.toml", eagle3: ROOT / "eagle3" / "eagle3.toml"}

both = pytest.mark.parametrize("drafter", [dflash, eagle3], ids=["dflash", "eagle3"])


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    torch.manual_seed(0)
    with eager_without_tracing():
        yield


def step(model: torch.nn.Module, batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and every gradient, that of the target's states included."""
    states = batch["hidden_states"].detach().requires_grad_()
    loss = model(**{**batch, "hidden_states": states})
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss, [*parameters.values(), states])
    return loss.detach(), dict(zip([*parameters, "hidden_states"], gradients, strict=True))


def close(ours: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    error = (ours - expected).abs().max().item()
    assert error <= 1e-10 * max(expected.abs().max().item(), 1e-6), f"{name}: error {error}"


def double(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**batch, "hidden_states": batch["hidden_states"].double()}


@both
def test_training_makes_the_loss_fall(drafter: ModuleType) -> None:
    model = drafter.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(40):
        _, batch = drafter.batch(SMALLEST[drafter], "cpu")
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


@both
def test_every_parameter_gets_a_gradient(drafter: ModuleType) -> None:
    model = drafter.build()
    _, gradients = step(model, drafter.batch(SMALLEST[drafter], "cpu")[1])
    assert [name for name, gradient in gradients.items() if not gradient.abs().sum() > 0] == []


@both
def test_a_padded_batch_gives_the_loss_and_gradients_of_the_shorter_one(drafter: ModuleType) -> None:
    model = drafter.build().double()
    batch = double(drafter.batch(SHORTER[drafter], "cpu")[1])
    padded = Buckets.from_spec(SPECS[drafter]).pad(batch)
    assert padded.bucket == SMALLEST[drafter]
    loss, gradients = step(model, batch)
    padded_loss, padded_gradients = step(model, padded.batch)
    close(padded_loss, loss, "loss")
    states = padded_gradients.pop("hidden_states")
    length = SHORTER[drafter]["seq"]
    assert torch.equal(states[:, length:], torch.zeros_like(states[:, length:]))
    close(states[:, :length], gradients.pop("hidden_states"), "hidden_states")
    for name, gradient in gradients.items():
        close(padded_gradients[name], gradient, name)


def test_padding_blocks_among_real_ones_count_nothing() -> None:
    """B9: two samples, eight blocks of sixteen, the last three of the second are padding."""
    model = dflash.build(block=16).double()
    batch = double(dflash.batch({"seq": 128, "anchors": 8}, "cpu")[1])
    batch["anchors"] = torch.tensor([[3, 20, 41, 60, 77, 90, 101, 119], [5, 15, 40, 66, 80, -1, -1, -1]])
    loss, gradients = step(model, batch)
    assert loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    # The reference takes the samples apart, the second without its padding, and weighs them.
    total, counted = torch.zeros((), dtype=torch.float64), 0
    summed = {name: torch.zeros_like(gradient) for name, gradient in gradients.items()}
    for row, blocks in ((0, 8), (1, 5)):
        alone = {name: tensor[row : row + 1] for name, tensor in batch.items()}
        alone["anchors"] = alone["anchors"][:, :blocks]
        count = labels_of(alone, 16)
        part, part_gradients = step(model, alone)
        total, counted = total + part * count, counted + count
        for name, gradient in part_gradients.items():
            place = summed[name][row : row + 1] if name == "hidden_states" else summed[name]
            place += gradient * count
    close(loss, total / counted, "loss")
    for name, gradient in gradients.items():
        close(gradient, summed[name] / counted, name)


def labels_of(batch: dict[str, torch.Tensor], block: int) -> int:
    documents = batch["document_ids"][0].tolist()
    return sum(
        1
        for anchor in batch["anchors"][0].tolist()
        for position in range(anchor + 1, anchor + block)
        if position < len(documents) and documents[position] == documents[anchor]
    )


def test_a_batch_without_any_anchor_has_loss_zero() -> None:
    model = dflash.build()
    _, batch = dflash.batch(SMALLEST[dflash], "cpu")
    batch["anchors"].fill_(dflash.NOWHERE)
    loss, gradients = step(model, batch)
    assert loss == 0
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients.values())


@both
def test_two_batches_of_one_bucket_differ_in_every_tensor(drafter: ModuleType) -> None:
    (_, first), (_, second) = (drafter.batch(SMALLEST[drafter], "cpu") for _ in range(2))
    assert first.keys() == second.keys()
    for name in first:
        assert first[name].shape == second[name].shape
        assert not torch.equal(first[name], second[name]), name


@both
def test_a_generator_makes_the_data_order(drafter: ModuleType) -> None:
    made = [
        drafter.batch(SMALLEST[drafter], "cpu", generator=torch.Generator().manual_seed(seed))[1]
        for seed in (7, 7, 8)
    ]
    assert torch.equal(made[0]["input_ids"], made[1]["input_ids"])
    assert not torch.equal(made[0]["input_ids"], made[2]["input_ids"])


def test_dflash_masks_are_what_the_paper_draws() -> None:
    config = dflash.Config()
    length, block = 40, 8
    documents = torch.tensor([[0] * 15 + [1] * 20 + [-1] * 5, [0] * 40])
    anchors = torch.tensor([[3, 30, -1], [0, 39, 20]])
    for window in (None, 9):
        made = create_mask(
            dflash.draft_mask(documents, anchors, config.block, window), 2, 1, 24, length + 24, device="cpu"
        )
        for b in range(2):
            for q in range(24):
                anchor = anchors[b, q // block].item()
                for kv in range(length + 24):
                    if anchor < 0:
                        want = False
                    elif kv >= length:
                        want = (kv - length) // block == q // block
                    else:
                        want = kv < anchor and documents[b, kv].item() == documents[b, anchor].item()
                        want = want and (window is None or anchor - kv <= window)
                    assert made[b, 0, q, kv].item() == want, (window, b, q, kv)


@pytest.mark.parametrize("step", [0, 1, 2])
def test_eagle3_masks_are_a_causal_part_and_a_diagonal(step: int) -> None:
    documents = torch.tensor([[0] * 15 + [1] * 20 + [-1] * 5])
    mask = eagle3.step_mask(documents, step)
    made = create_mask(mask.mask_mod, 1, 1, 40, 80, device="cpu")
    same = (documents[0][:, None] == documents[0]) & (documents[0] >= 0)[:, None]
    causal = same & torch.ones(40, 40).tril(-1 if step == 0 else 0).bool()
    diagonal = torch.diag(documents[0] >= 0)
    assert torch.equal(made[0, 0], torch.cat([causal, diagonal], dim=1))


def test_dflash_does_not_look_at_or_after_its_anchor() -> None:
    """What a drafter cannot know when it drafts has no influence on what it drafts."""
    model = dflash.build()
    _, batch = dflash.batch(SMALLEST[dflash], "cpu")
    batch["document_ids"].zero_()
    batch["anchors"] = torch.tensor([[40, 20, -1], [70, -1, -1]])
    _, gradients = step(model, batch)
    states = gradients["hidden_states"]
    assert torch.equal(states[0, 40:], torch.zeros_like(states[0, 40:]))
    assert torch.equal(states[1, 70:], torch.zeros_like(states[1, 70:]))
    assert states[0, 39].abs().sum() > 0
    assert states[1, 69].abs().sum() > 0


def test_eagle3_step_zero_is_plain_causal_attention() -> None:
    """Keys twice as long as queries give what torch's own causal attention gives."""
    model = eagle3.build(steps=1).double()
    attention = model.layer.attention
    inputs = torch.randn(2, 16, 2 * model.config.hidden, dtype=torch.float64)
    documents = torch.zeros(2, 16, dtype=torch.int64)
    rotary = eagle3.rotary_tables(model.config, documents, 0, torch.float64)
    ours = attention(torch.cat([inputs, inputs], dim=1), eagle3.step_mask(documents, 0), rotary)
    cos, sin = (table[:, :, :16] for table in rotary)
    q, k, v = (
        attention._heads(project(inputs))
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        eagle3.rotate(q, cos, sin), eagle3.rotate(k, cos, sin), v, is_causal=True, enable_gqa=True
    )
    close(ours, attention.o_proj(expected.transpose(1, 2).flatten(2)), "output")


@pytest.mark.parametrize("path", sorted(ROOT.glob("*/*.toml")), ids=lambda path: path.stem)
def test_every_spec_names_what_exists_and_builds(path: Path) -> None:
    spec = load_spec(path)
    factory, make_batch = spec.resolve_factory(), spec.resolve_batch()
    with torch.device("meta"):
        model = factory(**spec.drafter.kwargs)
    assert any(name.startswith(spec.drafter.regions[0].rstrip("*")) for name, _ in model.named_modules())
    _, batch = make_batch({**spec.cells()[0], "seq": 32}, "cpu")
    assert model.fc.in_features == batch["hidden_states"].size(-1)
    assert {rule.name for rule in spec.axes} == set(batch)


def test_real_sizes_are_real() -> None:
    with torch.device("meta"):
        sizes = [sum(p.numel() for p in model.layers.parameters()) for model in [dflash.build("qwen3-8b")]]
        sizes.append(sum(p.numel() for p in eagle3.build("llama-8b").layer.parameters()))
    # five Qwen3-8B layers; a Llama 8B layer whose attention reads twice its width
    assert sizes == [964_732_160, 243_273_728]
