"""A loop whose optimizer steps inside backward, to hold no gradients: watched and recovered all the same.

Each parameter has an optimizer of its own, which a hook steps as soon as the gradient has come in, and clears it. So
the gradients are never there all at once: the guard takes each norm before that hook runs, and decides after backward.
What would change gradients by what is known of all of them is refused: damping, clipping, a loss scaler. Each backward
is an optimizer step; there is no accumulation over micro-batches. Runs in a few seconds on a CPU.
"""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import trimtab

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, use_cache=False
)
model = LlamaForCausalLM(config)
optimizers = {parameter: torch.optim.AdamW([parameter], lr=3e-3) for parameter in model.parameters()}
text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()


def step_and_free(parameter: torch.Tensor) -> None:
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(step_and_free)

guard = trimtab.attach(
    model,
    trimtab.precision.SavedActivations(low_bits=4, high_bits=8),
    policy=trimtab.control.robust(max_active=4),
    record="runs/optimizer-in-backward",
    optimizer_in_backward=True,
)
for step in range(60):
    starts = torch.randint(len(text) - 33, (8,))
    batch = torch.stack([text[s : s + 32] for s in starts])
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()  # the optimizers step in here
    guard.step()  # decides the next step's route from the norms that were taken on the way
    if step % 20 == 19:
        print(f"step {step + 1}: loss {loss.item():.3f}, on the recovery path: {', '.join(guard.active) or 'nothing'}")
guard.detach()
print("Look at it with: trimtab runs runs/optimizer-in-backward")
