"""What watching and routing cost a training step, as ratios measured in one run, arms interleaved step by step."""

from __future__ import annotations

import copy
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import trimtab
from trimtab.control import Policy, robust
from trimtab.errors import MissingExtraError
from trimtab.experiments.bench.figures import Figure, ratio
from trimtab.precision import SavedActivations

__all__ = ["SHAPES", "build", "measure_step", "stepper"]

SHAPES = {60: (512, 1376, 8, 8), 15: (256, 688, 8, 8), 1: (128, 256, 4, 4)}
"""(hidden, ffn, layers, heads), by millions of parameters; 60 is the smallest model of Kong et al. 2026."""
_VOCABULARY = 32_000
_WARM_STEPS = 2


def build(parameters: int) -> nn.Module:
    """A LLaMA of about so many million parameters, with random weights.

    Raises: MissingExtraError: without transformers.
    """
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        raise MissingExtraError("Timing a training step", "transformers", "hf") from None
    hidden, ffn, layers, heads = SHAPES[parameters]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCABULARY if hidden > 128 else 256,
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


def measure_step(parameters: int = 60, num_steps: int = 12, batch: int = 2, sequence: int = 128) -> list[Figure]:
    """A step untouched, watched, static 4-bit, switched 4/8 and static 8-bit, taking turns.

    Args:
        parameters: Of the model, in millions; a key of ``SHAPES``.
        num_steps: Timed steps of each arm, after two that are not.
        batch: Sequences.
        sequence: Tokens of a sequence.
    """
    base: Any = build(parameters)
    ids = torch.randint(0, base.config.vocab_size, (batch, sequence))
    # A policy that acts from the start, so that the switched arm really switches.
    busy = Policy(alpha=1.01, beta=1.01, window_steps=3, max_active=0.2)
    arms: dict[str, tuple[SavedActivations | None, Policy] | None] = {
        "untouched": None,
        "watched": (None, robust()),
        "static 4-bit": (SavedActivations(4, 8), Policy(max_active=0)),
        "GNMR 4/8": (SavedActivations(4, 8), busy),
        "static 8-bit": (SavedActivations(8, 8), Policy(max_active=0)),
    }
    times: dict[str, list[float]] = {name: [] for name in arms}
    clips: dict[str, list[float]] = {name: [] for name in arms}
    guards = []
    with tempfile.TemporaryDirectory() as folder:
        steps: dict[str, Callable[[], tuple[float, float]]] = {}
        for name, arm in arms.items():
            model = copy.deepcopy(base)
            guard = None
            if arm is not None:
                guard = trimtab.attach(model, arm[0], policy=arm[1], record=f"{folder}/{name.replace('/', '-')}")
                guards.append(guard)
            steps[name] = stepper(model, ids, guard)
        # The collector would charge its pauses to whichever arm it falls on.
        was_collecting = gc.isenabled()
        gc.disable()
        try:
            for index in range(num_steps + _WARM_STEPS):
                names = list(steps) if index % 2 else list(reversed(steps))
                for name in names:
                    seconds, clipped = steps[name]()
                    if index >= _WARM_STEPS:
                        times[name].append(seconds)
                        clips[name].append(clipped)
                gc.collect()
        finally:
            if was_collecting:
                gc.enable()
            for guard in guards:
                guard.detach()
    size = sum(p.numel() for p in base.parameters()) / 1e6
    untouched = statistics.median(times["untouched"])
    about = f"untouched, {size:.1f}M parameters, {batch * sequence} tokens"
    figures = [Figure(name=about, value=1e3 * untouched, unit="ms")]
    for name, taken in times.items():
        if name != "untouched":
            against = "static 4-bit" if name.startswith("GNMR") else "untouched"
            figures.append(ratio(name, taken, times[against], f"of {against}"))
    # The whole step is noisy on a shared machine; what watching adds all happens where the untouched arm clips.
    added = statistics.median(clips["watched"]) - statistics.median(clips["untouched"])
    figures.append(
        Figure(name="what watching adds where it clips", value=added / untouched, unit="of an untouched step")
    )
    return figures
