"""The Trainer's callback in TRL's SFTTrainer, which is a Trainer, and on models with adapters of PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trimtab.control import Policy
from trimtab.precision import Int8Base, SavedActivations
from trimtab.trace import open_run, replay

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")

from trimtab.integrations.transformers import TrimtabCallback  # noqa: E402

# Said inside of PEFT.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

# Nervous enough to switch units in a few healthy steps.
NERVOUS = Policy(alpha=1.02, beta=1.02, window_steps=2, max_active=3, lock_steps=2)


def tokenizer() -> Any:
    vocabulary = {name: i for i, name in enumerate(["<pad>", "<eos>", *"abcdefghijklmnop "])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def train(folder: Path, recipe: Any, lora: bool, watch: bool = True) -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        use_cache=False,
        pad_token_id=0,
        eos_token_id=1,
    )
    model = transformers.LlamaForCausalLM(config)
    letters = np.random.default_rng(0).choice(list("abcdefghijklmnop "), size=(32, 12))
    data = datasets.Dataset.from_dict({"text": ["".join(row) for row in letters]})
    arguments = trl.SFTConfig(
        output_dir=str(folder / "out"),
        max_steps=8,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        logging_steps=2,
        max_length=16,
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        activation_checkpointing=False,
    )
    adapters = None
    if lora:
        peft = pytest.importorskip("peft")
        adapters = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    callbacks = []
    if watch:
        callbacks = [TrimtabCallback(recipe, policy=NERVOUS, record=folder / "run", log_metrics=True)]
    trainer = trl.SFTTrainer(
        model,
        args=arguments,
        train_dataset=data,
        processing_class=tokenizer(),
        peft_config=adapters,
        callbacks=callbacks,
    )
    trainer.train()
    return trainer, {k: v.detach().clone() for k, v in trainer.model.state_dict().items()}


@pytest.mark.parametrize("lora", [False, True])
def test_watching_changes_no_weight_and_records_what_the_trainer_logs(lora, tmp_path):
    plain, expected = train(tmp_path / "plain", None, lora, watch=False)
    trainer, found = train(tmp_path, None, lora)
    assert found.keys() == expected.keys()
    for key in found:
        torch.testing.assert_close(found[key], expected[key], rtol=0, atol=0)
    logs = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["grad_norm"] for row in logs] == [r["grad_norm"] for r in plain.state.log_history if "loss" in r]
    with open_run(tmp_path / "run") as run:
        steps = run.steps()
        assert run.finished
    assert steps.grad_norm[1::2].tolist() == [row["grad_norm"] for row in logs]
    # With adapters the norm of a unit is that of its adapter's gradients, and the others have none.
    observed = {unit.rsplit(".", 1)[-1] for unit, norm in zip(steps.units, steps.norms[0], strict=True) if norm > 0}
    assert observed == ({"q_proj", "v_proj"} if lora else {u.rsplit(".", 1)[-1] for u in steps.units})
    assert all("trimtab/risk/max" in row for row in logs)


@pytest.mark.parametrize(("recipe", "lora"), [(SavedActivations(), False), (Int8Base(), True)])
def test_units_are_switched_as_replay_says(recipe, lora, tmp_path):
    train(tmp_path, recipe, lora)
    with open_run(tmp_path / "run") as run:
        assert run.steps().active.any()
        assert replay(run).num_different == 0
