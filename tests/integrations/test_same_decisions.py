"""One model, one order of data, many loops: the same norms, and so the same decisions."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trimtab
from trimtab.control import Policy
from trimtab.precision import SavedActivations
from trimtab.trace import open_run, replay

transformers = pytest.importorskip("transformers")

# Nervous enough to switch units in a few healthy steps.
NERVOUS = Policy(alpha=1.02, beta=1.02, window_steps=2, max_active=3, lock_steps=2)
NUM_STEPS, BATCH, LR, CLIP = 8, 2, 3e-3, 0.3
EXAMPLES = Path(__file__).parents[2] / "examples"
COLUMNS = ("step", "norms", "risk", "active", "lock", "grad_norm", "lr")


def build() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, use_cache=False
    )
    return transformers.LlamaForCausalLM(config).train()


def rows(accumulate: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(32, (8,), generator=generator) for _ in range(NUM_STEPS * BATCH * accumulate)]


def loader(accumulate: int) -> Any:
    return torch.utils.data.DataLoader(rows(accumulate), batch_size=BATCH)


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)


def plain_loop(folder: Path, accumulate: int) -> None:
    model = build()
    optimizer = adamw(model)
    with trimtab.attach(model, SavedActivations(), policy=NERVOUS, record=folder) as guard:
        for i, batch in enumerate(loader(accumulate), start=1):
            (model(input_ids=batch, labels=batch).loss / accumulate).backward()
            if i % accumulate == 0:
                guard.step(max_norm=CLIP)
                optimizer.step()
                optimizer.zero_grad()


def accelerate_loop(folder: Path, accumulate: int) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model = build()
    model, optimizer, batches = accelerator.prepare(model, adamw(model), loader(accumulate))
    with trimtab.attach(model, SavedActivations(), policy=NERVOUS, record=folder) as guard:
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(input_ids=batch, labels=batch).loss)
                if accelerator.sync_gradients:
                    guard.step(max_norm=CLIP, scaler=accelerator.scaler)
                optimizer.step()
                optimizer.zero_grad()


def transformers_trainer(folder: Path, accumulate: int) -> None:
    from trimtab.integrations.transformers import TrimtabCallback

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "out"),
        max_steps=NUM_STEPS,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=accumulate,
        learning_rate=LR,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        max_grad_norm=CLIP,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
    callback = TrimtabCallback(SavedActivations(), policy=NERVOUS, record=folder)
    data = [{"input_ids": row, "labels": row} for row in rows(accumulate)]
    trainer = InOrder(build(), arguments, train_dataset=data, callbacks=[callback])
    # Else the loss is a sum over the step's tokens, divided by their number: the same up to rounding.
    trainer.model_accepts_loss_kwargs = False
    trainer.train()


def lightning_trainer(folder: Path, accumulate: int) -> None:
    pl = pytest.importorskip("lightning.pytorch")

    from trimtab.integrations.lightning import TrimtabCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = build()

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.model(input_ids=batch, labels=batch).loss

        def configure_optimizers(self) -> Any:
            return adamw(self)

    trainer = pl.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=1,
        max_steps=NUM_STEPS,
        gradient_clip_val=CLIP,
        accumulate_grad_batches=accumulate,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[TrimtabCallback(SavedActivations(), policy=NERVOUS, record=folder)],
    )
    trainer.fit(Module(), loader(accumulate))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("loop", [accelerate_loop, transformers_trainer, lightning_trainer], ids=lambda f: f.__name__)
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated")
def test_every_loop_observes_and_decides_as_the_plain_one(loop, accumulate, tmp_path):
    plain_loop(tmp_path / "plain", accumulate)
    loop(tmp_path / "other", accumulate)
    with open_run(tmp_path / "plain") as one, open_run(tmp_path / "other") as other:
        expected, found = one.steps(), other.steps()
        assert one.finished
        assert other.finished
        assert replay(other).num_different == 0
    assert expected.active.any()
    # Of lightning's module the model is a part.
    assert [n[n.index("layers") :] for n in found.units] == [n[n.index("layers") :] for n in expected.units]
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
    np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-6)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_functions_in_torchtitans_style_observe_and_decide_as_a_plain_loop(accumulate, tmp_path):
    spec = importlib.util.spec_from_file_location("torchtitan_like", EXAMPLES / "torchtitan_like.py")
    example: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    # The example's model gives logits for bytes.
    tokens = torch.stack(rows(accumulate)).split(BATCH)
    steps = [tokens[i : i + accumulate] for i in range(0, len(tokens), accumulate)]

    def started(folder: Path) -> Any:
        model = example.parallelize(example.build_model(torch.device("cpu")), None, compile_blocks=False)
        optimizer, scheduler = example.build_optimizers(model, NUM_STEPS)
        guard = trimtab.attach(model, SavedActivations(), policy=NERVOUS, record=folder)
        return model, optimizer, scheduler, guard

    model, optimizer, scheduler, guard = started(tmp_path / "functions")
    with guard:
        for micro_batches in steps:
            example.train_step(model, micro_batches, guard, optimizer)
            scheduler.step()
    model, optimizer, scheduler, guard = started(tmp_path / "plain")
    with guard:
        for micro_batches in steps:
            for batch in micro_batches:
                logits = model(batch[:, :-1]).flatten(0, 1)
                (torch.nn.functional.cross_entropy(logits, batch[:, 1:].flatten()) / accumulate).backward()
            guard.step(max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    with open_run(tmp_path / "plain") as one, open_run(tmp_path / "functions") as other:
        expected, found = one.steps(), other.steps()
        assert replay(other).num_different == 0
    assert expected.active.any()
    assert np.isfinite(found.loss).all()  # told, where the plain loop's model has none to find
    assert found.units == expected.units
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
