"""One callback in transformers.Trainer. Runs in a few seconds on a CPU."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from trimtab.integrations.transformers import TrimtabCallback
from trimtab.precision import SavedActivations

torch.manual_seed(0)
text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
windows = [{"input_ids": w, "labels": w} for w in text.unfold(0, 32, 3)]
config = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, use_cache=False
)
trainer = Trainer(
    model=LlamaForCausalLM(config),
    args=TrainingArguments(
        output_dir="runs/hf-trainer", max_steps=200, learning_rate=3e-3, logging_steps=50, report_to=[], use_cpu=True
    ),
    train_dataset=windows,
    callbacks=[TrimtabCallback(SavedActivations(low_bits=4, high_bits=8), record="runs/hf-trainer")],
)
trainer.train()
print("Look at it with: trimtab runs runs/hf-trainer")
