"""A loop of accelerate's, with gradient accumulation. Runs in a few seconds on a CPU; also under accelerate launch."""

from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

import trimtab
from trimtab.integrations.loggers import log_to_csv

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, use_cache=False
)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
loader = torch.utils.data.DataLoader(text.unfold(0, 32, 3), batch_size=4, shuffle=True, drop_last=True)

# mixed_precision="fp16" on a GPU makes the scaler that the guard is given below.
accelerator = Accelerator(gradient_accumulation_steps=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
guard = trimtab.attach(
    model, trimtab.precision.SavedActivations(low_bits=4, high_bits=8), record="runs/accelerate-loop"
)
# Or log_to_tensorboard(SummaryWriter(...)), log_to_run(wandb.init(...)), or accelerator.log by hand.
log = log_to_csv("runs/accelerate-loop/metrics.csv")
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            # In place of accelerator.clip_grad_norm_, and like it only after the last micro-batch.
            guard.step(max_norm=1.0, scaler=accelerator.scaler)
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients and guard.num_steps % 20 == 0:
        accelerator.print(f"step {guard.num_steps}: loss {loss.item():.3f}")
        if accelerator.is_main_process:
            log(guard.metrics(), guard.num_steps)
guard.detach()
accelerator.print("Look at it with: trimtab runs runs/accelerate-loop")
