"""What the monitors cost a training step, as ratios measured in one run, arms interleaved step by step.

    python benchmarks/monitors.py [--parameters 60] [--steps 12] [--threads 2]

Arms: watched by gradient norms alone; with each monitor at its default cadence; with all. The reading of the attention
spectrum, every 50 steps, is timed by itself and spread over them.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from typing import Any

import torch

import trimtab
from step import SHAPES, build, stepper
from trimtab.monitors import AttentionSpectrum, Router, ShiftResidual, UsualSignals


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
    arms: dict[str, list[Any]] = {
        "no monitor": [],
        "attention spectrum": [AttentionSpectrum()],
        "shift residual": [ShiftResidual()],
        "usual signals": [UsualSignals()],
        "all": [AttentionSpectrum(), ShiftResidual(), Router(), UsualSignals()],
    }
    steps = {}
    for name, monitors in arms.items():
        model = copy.deepcopy(base)
        steps[name] = stepper(model, batch, trimtab.attach(model, monitors=monitors))
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(options.steps + 2):
        for name, step in steps.items():
            taken, _ = step()
            if number >= 2:  # the first take their snapshots
                seconds[name].append(taken)
    plain = statistics.median(seconds["no monitor"])
    size = sum(p.numel() for p in base.parameters()) / 1e6
    print(f"{size:.0f}M parameters, {options.batch * options.sequence} tokens a step, a step {1e3 * plain:.0f} ms; = 1")
    for name, taken in seconds.items():
        pairs = sorted(a / b for a, b in zip(taken, seconds["no monitor"], strict=True))
        quartiles = pairs[len(pairs) // 4], pairs[3 * len(pairs) // 4]
        print(f"  {name}: {statistics.median(pairs):.3f} (quartiles {quartiles[0]:.3f} to {quartiles[1]:.3f})")
    model = copy.deepcopy(base)
    spectrum = AttentionSpectrum(every_steps=1)
    spectrum.start(model)
    spectrum.observe(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1e-4 * torch.randn_like(p))
    start = time.perf_counter()
    spectrum.observe(2)
    reading = time.perf_counter() - start
    told = f"{reading / plain:.2f} steps, {reading / plain / 50:.4f} of a step when spread over 50"
    print(f"  one reading of the attention spectrum: {told}")


if __name__ == "__main__":
    main()
