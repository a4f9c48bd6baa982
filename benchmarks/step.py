"""What watching and routing cost a training step, as ratios measured in one run, arms interleaved step by step.

    python benchmarks/step.py [--parameters 60] [--steps 12] [--threads 2]

Arms: untouched training that clips; the same, watched (norms, decision, record); static 4-bit; GNMR 4/8; static 8-bit.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from torch import nn

import trimtab
from trimtab.control import Policy, robust
from trimtab.precision import SavedActivations

# (hidden, ffn, layers, heads), by millions of parameters; 60 is the smallest model of Kong et al. 2026.
SHAPES = {60: (512, 1376, 8, 8), 15: (256, 688, 8, 8), 1: (128, 256, 4, 4)}
VOCABULARY = 32_000


def build(shape: tuple[int, int, int, int]) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, ffn, layers, heads = shape
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY if hidden > 128 else 256,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def stepper(model: nn.Module, batch: torch.Tensor, guard: trimtab.Guard | None) -> Callable[[], tuple[float, float]]:
    """A function that takes one step and returns its seconds, and those of clipping or ``guard.step`` within it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> tuple[float, float]:
        start = time.perf_counter()
        model(input_ids=batch, labels=batch).loss.backward()
        between = time.perf_counter()
        if guard is None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            guard.step(max_norm=1.0)
        clipped = time.perf_counter() - between
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start, clipped

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=60, choices=sorted(SHAPES))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    base = build(SHAPES[options.parameters])
    batch = torch.randint(0, base.config.vocab_size, (options.batch, options.sequence))
    folder = tempfile.mkdtemp()
    # A policy that acts from the start, so that the switched arm really switches.
    busy = Policy(alpha=1.01, beta=1.01, window_steps=3, max_active=0.2)
    arms: dict[str, tuple[SavedActivations | None, Policy] | None] = {
        "untouched": None,
        "watched": (None, robust()),
        "static 4-bit": (SavedActivations(4, 8), Policy(max_active=0)),
        "GNMR 4/8": (SavedActivations(4, 8), busy),
        "static 8-bit": (SavedActivations(8, 8), Policy(max_active=0)),
    }
    steps: dict[str, Callable[[], tuple[float, float]]] = {}
    guards = []
    for name, arm in arms.items():
        model = copy.deepcopy(base)
        guard = None
        if arm is not None:
            guard = trimtab.attach(model, arm[0], policy=arm[1], record=f"{folder}/{name.replace('/', '-')}")
            guards.append(guard)
        steps[name] = stepper(model, batch, guard)
    times: dict[str, list[float]] = {name: [] for name in steps}
    clips: dict[str, list[float]] = {name: [] for name in steps}
    # The collector would charge its pauses to whichever arm it falls on.
    gc.disable()
    for index in range(options.steps + 2):
        names = list(steps) if index % 2 else list(reversed(steps))
        for name in names:
            seconds, clipped = steps[name]()
            if index >= 2:
                times[name].append(seconds)
                clips[name].append(clipped)
        gc.collect()
    for guard in guards:
        guard.detach()
    count = sum(p.numel() for p in base.parameters())
    print(
        f"{count / 1e6:.1f}M parameters, batch {options.batch} x {options.sequence}, {options.threads} threads, "
        f"torch {torch.__version__}, median of {options.steps} interleaved steps (and of the ratios step by step)"
    )
    for name, taken in times.items():
        against = "static 4-bit" if name.startswith("GNMR") else "untouched"
        ratios = [a / b for a, b in zip(taken, times[against], strict=True)]
        spread = statistics.quantiles(ratios, n=4)
        print(
            f"  {name:13s} {statistics.median(taken) * 1e3:9.1f} ms   {statistics.median(ratios):.3f} of {against} "
            f"(quartiles {spread[0]:.3f} to {spread[2]:.3f})   clipping {statistics.median(clips[name]) * 1e3:6.2f} ms"
        )
    # The whole step is noisy on a shared machine; what watching adds all happens where the untouched arm clips.
    added = statistics.median(clips["watched"]) - statistics.median(clips["untouched"])
    share = added / statistics.median(times["untouched"])
    print(f"  watching adds {added * 1e3:.2f} ms where it clips: {share:.2%} of a step")


if __name__ == "__main__":
    main()
