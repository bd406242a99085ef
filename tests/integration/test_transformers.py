"""transformers models with `attn_implementation="aotcache"`, from artifacts and without.

The reference is the same model with transformers' own eager attention.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_mask
from transformers import AttentionInterface, Trainer, TrainingArguments, masking_utils
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2_attention
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_attention
from transformers.utils import ModelOutput

import aotcache
from aotcache.errors import ArtifactMiss, CallRefused
from aotcache.graph.capture import find_regions, recording
from aotcache.graph.functions import CREATE_BLOCK_MASK, FLEX_ATTENTION, function_regions
from aotcache.graph.redirect import redirect_flex
from aotcache.graph.region import Call, Region
from aotcache.integrations import transformers as integration
from aotcache.integrations.transformers import AotcacheCallback
from aotcache.runtime import tripwire
from aotcache.runtime.dense import dense_attention
from aotcache.spec import Spec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
STEPS, THREADS = 20, 3
LENGTHS = (11, 16, 27)
"""Two of them fall into one bucket."""
TOLERANCE = 1e-5
"""Relative, of a step from equal weights."""


@dataclass(frozen=True)
class Warmed:
    """A spec of this folder, warmed."""

    spec: Spec
    store: str

    def build(self, **changes: Any) -> Any:
        return self.spec.resolve_factory()(**{**self.spec.drafter.kwargs, **changes})

    def batch(self, length: int, seed: int) -> dict[str, Tensor]:
        make: Callable[..., Any] = self.spec.resolve_batch()
        return make({"seq": length}, "cpu", seed=seed)[1]  # type: ignore[no-any-return]

    def attach(self, model: nn.Module, **options: Any) -> Any:
        return aotcache.attach(model, self.spec, store=self.store, **options)

    @property
    def lock(self) -> str:
        return f"{self.spec.path}.lock"


@pytest.fixture(scope="session")
def specs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies, because warming writes a lock file beside the spec."""
    folder = tmp_path_factory.mktemp("transformers")
    for file in ("transformers_models.py", "llama.toml", "qwen3.toml"):
        shutil.copy(HERE / file, folder)
    return folder


@pytest.fixture(scope="session")
def models_of(specs: Path) -> Callable[[str], Warmed]:
    """Warms a spec once. Both share a store, and the masks that both need."""
    store = (specs / "store").as_uri()
    done: dict[str, Warmed] = {}

    def warm(name: str) -> Warmed:
        if name not in done:
            spec = aotcache.load_spec(specs / f"{name}.toml")
            report = aotcache.warm(spec, store=store, jobs=2)
            assert report.ok, [str(failed.error) for failed in report.failed]
            done[name] = Warmed(spec, store)
        return done[name]

    return warm


@pytest.fixture
def unwarmed(specs: Path, tmp_path: Path) -> Callable[[str], Warmed]:
    """A spec of this folder beside an empty store."""

    def find(name: str) -> Warmed:
        return Warmed(aotcache.load_spec(specs / f"{name}.toml"), (tmp_path / "empty").as_uri())

    return find


@pytest.fixture
def eager(unwarmed: Callable[[str], Warmed]) -> Iterator[Any]:
    """A handle under which calls of `aotcache.flex` run without artifacts."""
    warmed = unwarmed("qwen3")
    with warmed.attach(nn.Module(), on_miss="eager") as handle:
        yield handle
        assert handle.stats()["traces"] == 0


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
def test_threads_train_as_eager_would_and_never_trace(name: str, models_of: Callable[[str], Warmed]) -> None:
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
def test_a_row_of_padding_alone_changes_nothing(name: str, models_of: Callable[[str], Warmed]) -> None:
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


def test_another_attention_function_under_the_name_is_a_miss(models_of: Callable[[str], Warmed]) -> None:
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


def rows_of(warmed: Warmed, count: int) -> list[dict[str, Tensor]]:
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


def trainer_of(model: nn.Module, warmed: Warmed, folder: Path, **options: Any) -> Trainer:
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
    models_of: Callable[[str], Warmed], tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
    models_of: Callable[[str], Warmed], tmp_path: Path
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
def test_generation_with_a_cache_equals_eager(name: str, unwarmed: Callable[[str], Warmed]) -> None:
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
def test_a_length_that_nothing_covers_says_what_to_do(name: str, unwarmed: Callable[[str], Warmed]) -> None:
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


def test_batches_of_one_shape_have_one_key(unwarmed: Callable[[str], Warmed]) -> None:
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
    unwarmed: Callable[[str], Warmed], monkeypatch: pytest.MonkeyPatch
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


def test_how_far_a_static_cache_is_filled_makes_no_new_key(unwarmed: Callable[[str], Warmed]) -> None:
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
