"""What the monitors cost a training step, as ratios measured in one run, arms interleaved step by step.

Arms: watched by gradient norms alone; with each monitor at its default cadence; with all three. The reading of the
attention spectrum, every 50 steps, is timed by itself and spread over them.
"""

from __future__ import annotations

import copy
import statistics
import time
from typing import Any

import torch

import trimtab
from trimtab.experiments.bench.figures import Figure, ratio
from trimtab.experiments.bench.step import build, stepper
from trimtab.monitors import AttentionSpectrum, ShiftResidual, UsualSignals

__all__ = ["measure_monitors"]

_WARM_STEPS = 2  # the first take their snapshots
_UNIT = "of a step without monitors"


def measure_monitors(parameters: int = 60, num_steps: int = 12, batch: int = 2, sequence: int = 128) -> list[Figure]:
    """A step without monitors, with each, and with all three, taking turns; see ``measure_step``."""
    base: Any = build(parameters)
    ids = torch.randint(0, base.config.vocab_size, (batch, sequence))
    arms: dict[str, list[Any]] = {
        "no monitor": [],
        "attention spectrum": [AttentionSpectrum()],
        "shift residual": [ShiftResidual()],
        "usual signals": [UsualSignals()],
        "all three": [AttentionSpectrum(), ShiftResidual(), UsualSignals()],
    }
    guards, steps = [], {}
    for name, monitors in arms.items():
        model = copy.deepcopy(base)
        guards.append(trimtab.attach(model, monitors=monitors))
        steps[name] = stepper(model, ids, guards[-1])
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    try:
        for number in range(num_steps + _WARM_STEPS):
            for name, step in steps.items():
                taken, _ = step()
                if number >= _WARM_STEPS:
                    seconds[name].append(taken)
    finally:
        for guard in guards:
            guard.detach()
    plain = statistics.median(seconds["no monitor"])
    reading = _reading_s(base) / plain
    return [
        Figure(name="a step without monitors", value=1e3 * plain, unit="ms"),
        *(ratio(name, taken, seconds["no monitor"], _UNIT) for name, taken in seconds.items() if name != "no monitor"),
        Figure(name="one reading of the attention spectrum", value=reading, unit=_UNIT),
        Figure(name="the same, spread over 50 steps", value=reading / 50, unit=_UNIT),
    ]


def _reading_s(base: Any) -> float:
    """Seconds of one reading of the attention spectrum."""
    model = copy.deepcopy(base)
    spectrum = AttentionSpectrum(every_steps=1)
    spectrum.start(model)
    spectrum.observe(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1e-4 * torch.randn_like(p))
    start = time.perf_counter()
    spectrum.observe(2)
    elapsed_s = time.perf_counter() - start
    spectrum.stop()
    return elapsed_s
