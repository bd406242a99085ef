"""transformers models with `attn_implementation="aotcache"`, from artifacts and without.

The reference is the same model with transformers' own eager attention.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Trainer, TrainingArguments

import aotcache
from aotcache.errors import ArtifactMiss
from aotcache.graph.functions import CREATE_BLOCK_MASK
from aotcache.integrations import transformers as integration
from aotcache.integrations.transformers import AotcacheCallback
from aotcache.runtime import tripwire
from tests.integration.conftest import WarmedModel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS, THREADS = 20, 3
LENGTHS = (11, 16, 27)
"""Two of them fall into one bucket."""
TOLERANCE = 1e-5
"""Relative, of a step from equal weights."""


def clean(stats: dict[str, Any]) -> bool:
    return stats["hits"] > 0 and not (stats["traces"] or stats["eager_calls"] or stats["misses"])


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def require_close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == want.keys()
    errors = {name: float((got[name] - want[name]).norm() / want[name].norm()) for name in want}
    assert max(errors.values()) < tolerance, errors


# -- training -----------------------------------------------------------------


def train(model: nn.Module, batches: list[dict[str, Tensor]]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of all steps, gradients of the last one."""
    torch.get_num_threads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, gradients(model)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_threads_train_as_eager_would_and_never_trace(
    name: str, models_of: Callable[[str], WarmedModel]
) -> None:
    warmed = models_of(name)
    buckets = aotcache.Buckets.from_spec(warmed.spec)
    models = [warmed.build(seed=thread) for thread in range(THREADS)]
    batches = [
        [warmed.batch(LENGTHS[step % 3], 100 * thread + step) for step in range(STEPS)]
        for thread in range(THREADS)
    ]

    def work(thread: int) -> Any:
        with warmed.attach(models[thread], lock=warmed.lock) as handle:
            handle.prefetch()
            return *train(models[thread], [buckets.pad(b).batch for b in batches[thread]]), handle.stats()

    with ThreadPoolExecutor(THREADS) as pool:
        results = list(pool.map(work, range(THREADS)))

    for thread, (losses, grads, stats) in enumerate(results):
        assert clean(stats), stats
        called = "flex_attention" if name == "qwen3" else "model.layers.1"
        assert stats["regions"][called]["hits"] >= STEPS
        want_losses, want_grads = train(warmed.build(attention="eager", seed=thread), batches[thread])
        assert losses == pytest.approx(want_losses, rel=10 * TOLERANCE)
        require_close(grads, want_grads, 100 * TOLERANCE)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_row_of_padding_alone_changes_nothing(name: str, models_of: Callable[[str], WarmedModel]) -> None:
    warmed = models_of(name)
    model, reference = warmed.build(), warmed.build(attention="eager")
    batch = warmed.batch(16, seed=3)
    alone = {key: value[:1] for key, value in batch.items()}
    batch["attention_mask"][1], batch["labels"][1] = 0, -100
    with warmed.attach(model) as handle:
        loss = model(**batch).loss
        loss.backward()
        assert clean(handle.stats())
    want = reference(**alone).loss
    want.backward()
    assert loss.item() == pytest.approx(want.item(), rel=TOLERANCE)
    require_close(gradients(model), gradients(reference), 10 * TOLERANCE)


def test_another_attention_function_under_the_name_is_a_miss(models_of: Callable[[str], WarmedModel]) -> None:
    warmed = models_of("llama")
    model, batch = warmed.build(), warmed.batch(16, seed=1)

    def doubled(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return 2 * integration.attention(*args, **kwargs)[0], None

    with warmed.attach(model) as handle:
        model(**batch)
        AttentionInterface.register(integration.NAME, doubled)
        try:
            with pytest.raises(ArtifactMiss, match="doubled"):
                model(**batch)
        finally:
            integration.register()
        model(**batch)
        assert handle.stats()["misses"] == 1


# -- Trainer ------------------------------------------------------------------


def rows_of(warmed: WarmedModel, count: int) -> list[dict[str, Tensor]]:
    """Single rows of several lengths, without padding."""
    rows = []
    for i in range(count):
        batch = warmed.batch(LENGTHS[i // 2 % 3] - i % 2, seed=i)
        rows.append({"input_ids": batch["input_ids"][0], "labels": batch["labels"][0]})
    return rows


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pads to the longest row."""
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(name: str, fill: int) -> Tensor:
        return torch.stack(
            [nn.functional.pad(r[name], (0, longest - len(r[name])), value=fill) for r in rows]
        )

    ids = padded("input_ids", 0)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": padded("labels", -100)}


def trainer_of(model: nn.Module, warmed: WarmedModel, folder: Path, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        max_steps=4,
        optim="sgd",
        learning_rate=0.05,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    rows = rows_of(warmed, 12)
    return Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:6], **options)  # type: ignore[arg-type]


def history(trainer: Trainer) -> list[float]:
    return [
        entry[name] for entry in trainer.state.log_history for name in ("loss", "eval_loss") if name in entry
    ]


def test_trainer_trains_and_evaluates_from_artifacts(
    models_of: Callable[[str], WarmedModel], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    warmed = models_of("llama")
    buckets = aotcache.Buckets.from_spec(warmed.spec)
    callback = AotcacheCallback(warmed.spec, store=warmed.store, lock=warmed.lock)
    model = warmed.build()
    trainer = trainer_of(
        model,
        warmed,
        tmp_path,
        data_collator=lambda rows: buckets.pad(collate(rows)).batch,
        callbacks=[callback],
    )
    trainer.train()
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("aotcache: ")]
    assert len(printed) == 2
    assert printed[0].startswith("aotcache: tiny-llama: opened ")
    assert printed[1].endswith(" calls ran from artifacts, 0 misses, 0 eager, 0 traces")
    assert callback.stats is not None
    assert clean(callback.stats), callback.stats
    assert "forward" not in vars(model.model.layers[0])
    assert not tripwire._points.wires

    reference = trainer_of(warmed.build(attention="eager"), warmed, tmp_path, data_collator=collate)
    reference.train()
    assert len(history(trainer)) == 4 + 2
    assert history(trainer) == pytest.approx(history(reference), rel=10 * TOLERANCE)
    require_close(model.state_dict(), reference.model.state_dict(), 10 * TOLERANCE)


def test_a_training_that_fails_leaves_nothing_attached(
    models_of: Callable[[str], WarmedModel], tmp_path: Path
) -> None:
    warmed = models_of("llama")
    buckets = aotcache.Buckets.from_spec(warmed.spec)
    model = warmed.build()
    seen = []

    def fail_later(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        seen.append(len(tripwire._points.wires))
        if len(seen) == 4:
            raise OSError("a shard is gone")
        return buckets.pad(collate(rows)).batch  # type: ignore[no-any-return]

    callback = AotcacheCallback(warmed.spec, store=warmed.store)
    trainer = trainer_of(model, warmed, tmp_path, data_collator=fail_later, callbacks=[callback])
    with pytest.raises(OSError, match="a shard is gone"):
        trainer.train()
    assert seen == [1, 1, 1, 1]
    assert callback.stats is not None
    assert callback.stats["hits"] > 0
    assert not tripwire._points.wires

    # Added later, it is not told of failures.
    seen.clear()
    late = AotcacheCallback(warmed.spec, store=warmed.store)
    with late:
        trainer = trainer_of(model, warmed, tmp_path, data_collator=fail_later)
        trainer.add_callback(late)
        with pytest.raises(OSError, match="a shard is gone"):
            trainer.train()
        assert late.handle is not None
        trainer.train()
        assert late.handle is None
        seen.clear()
        with pytest.raises(OSError, match="a shard is gone"):
            trainer.train()
    assert not tripwire._points.wires
    assert "forward" not in vars(model.model.layers[0])
    assert not model.model.layers[0]._forward_pre_hooks


# -- generation ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_generation_with_a_cache_equals_eager(name: str, unwarmed: Callable[[str], WarmedModel]) -> None:
    warmed = unwarmed(name)
    model, reference = warmed.build().eval(), warmed.build(attention="eager").eval()
    prompt = warmed.batch(9, seed=4)["input_ids"][:1]
    prompt = torch.cat([torch.nn.functional.pad(prompt[:, :6], (3, 0)), prompt])
    options: dict[str, Any] = {
        "attention_mask": (prompt != 0).long(),
        "max_new_tokens": 8,
        "do_sample": False,
        "use_cache": True,
    }
    with warmed.attach(model, on_miss="eager") as handle:
        tokens = model.generate(prompt, **options)
        assert handle.stats()["traces"] == 0
        assert handle.stats()["eager_calls"] > 8
    assert tokens.tolist() == reference.generate(prompt, **options).tolist()


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_length_that_nothing_covers_says_what_to_do(
    name: str, unwarmed: Callable[[str], WarmedModel]
) -> None:
    warmed = unwarmed(name)
    model = warmed.build().eval()
    with warmed.attach(model):
        with pytest.raises(
            ArtifactMiss, match=r"(?s)9 queries and 9 keys.*on_miss='eager'.*'sdpa'"
        ) as caught:
            model.generate(warmed.batch(9, seed=4)["input_ids"], max_new_tokens=2, use_cache=True)
    assert caught.value.details["region"] == CREATE_BLOCK_MASK
    model.set_attn_implementation("sdpa")
    assert model.generate(warmed.batch(9, seed=4)["input_ids"], max_new_tokens=2).shape == (2, 11)
