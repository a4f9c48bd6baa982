"""Four lines in a plain PyTorch loop: attach, step, and the record. Runs in a few seconds on a CPU."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import trimtab

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, use_cache=False
)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()

guard = trimtab.attach(
    model,
    trimtab.precision.SavedActivations(low_bits=4, high_bits=8),
    policy=trimtab.control.robust(max_active=4),
    record="runs/plain-loop",
)
for step in range(60):
    starts = torch.randint(len(text) - 33, (8,))
    batch = torch.stack([text[s : s + 32] for s in starts])
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    guard.step(max_norm=1.0)  # one pass: norms, decision for the next step, clipping
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    if step % 20 == 19:
        print(f"step {step + 1}: loss {loss.item():.3f}, on the recovery path: {', '.join(guard.active) or 'nothing'}")
guard.detach()
print("Look at it with: trimtab runs runs/plain-loop")
