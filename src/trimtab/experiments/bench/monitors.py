"""What the monitors cost a training step: their own processor time over that of the steps that they watch.

See ``accounting`` for how it is taken. Two models: a LLaMA, and a Mixtral for the router. A model without monitors
takes turns with the watched one, step by step; the ratio of whole steps is there to check the sum against, and scatters
by more than the sum is.
"""

from __future__ import annotations

import copy
import gc
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import trimtab
from trimtab.errors import ConfigError
from trimtab.experiments.bench.accounting import HOOKS, JUDGING, OBSERVE, REST, Account, Owner, accounted
from trimtab.experiments.bench.figures import Figure, ratio
from trimtab.experiments.bench.step import SHAPES, build, stepper
from trimtab.monitors import AttentionSpectrum, Monitor, ResidualNorm, Router, ShiftResidual, UsualSignals

__all__ = ["measure_monitors", "per_step"]

_WARM_STEPS = 2  # the first take their snapshots
_FEWEST_STEPS = 5
_UNIT = "of a step"
# Steps from one reading to the next, by default; every step for those not named.
_CADENCE = {AttentionSpectrum.name: 50, UsualSignals.name: 10}
_TITLES = {
    AttentionSpectrum.name: "attention spectrum",
    ShiftResidual.name: "shift residual",
    UsualSignals.name: "usual signals",
    ResidualNorm.name: "residual norm",
    Router.name: "router",
}


def measure_monitors(parameters: int = 60, num_steps: int = 12, batch: int = 2, sequence: int = 128) -> list[Figure]:
    """Each monitor's share of a step at its default cadence, in its hooks and in its ``observe``, and all together.

    A monitor that reads less often than ``num_steps`` reads once in them; its reading is then spread over its own
    cadence.

    Args:
        parameters: Of the LLaMA, in millions; a key of ``SHAPES``. The Mixtral has its widths and half its layers.
        num_steps: Measured steps, after two that are not. 5 or more.
        batch: Sequences.
        sequence: Tokens of a sequence.

    Raises:
        ConfigError: with fewer steps.
        MissingExtraError: without transformers.
    """
    if num_steps < _FEWEST_STEPS:
        allowed = f"at least {_FEWEST_STEPS}, so that most are without a reading."
        raise ConfigError("num_steps", num_steps, allowed, "Set 12, say.")
    llama: Any = build(parameters)
    vocabulary = llama.config.vocab_size
    figures = _measure("LLaMA", llama, _monitors(num_steps), num_steps, batch, sequence)
    del llama
    mixtral = _mixtral(parameters, vocabulary)
    return figures + _measure("Mixtral", mixtral, [*_monitors(num_steps), Router()], num_steps, batch, sequence)


def _mixtral(parameters: int, vocabulary: int) -> nn.Module:
    """A Mixtral of 8 experts, 2 of which each token goes to, as wide as the LLaMA of so many million parameters."""
    from transformers import MixtralConfig, MixtralForCausalLM

    hidden, ffn, layers, heads = SHAPES[parameters]
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers // 2,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        num_local_experts=8,
        num_experts_per_tok=2,
        use_cache=False,
    )
    return MixtralForCausalLM(config)


def per_step(seconds: Sequence[float], period: int, cadence: int) -> float:
    """The mean of a step of a monitor that was run with a reading every ``period`` steps, and has one a ``cadence``.

    Args:
        seconds: Of consecutive steps, ``period`` or more; those behind the last whole number of periods count.
        period: Steps from one reading to the next, most of them without anything of it.
        cadence: The same, by default; ``period`` or more. The steps in between are as the median one.

    Example:
        >>> per_step([1.0, 1.0, 9.0, 1.0, 1.0, 9.0, 1.0], period=3, cadence=3) == 11 / 3
        True
        >>> per_step([1.0, 1.0, 9.0], period=3, cadence=10) == (11 + 7) / 10
        True
    """
    num_periods = len(seconds) // period
    counted = seconds[len(seconds) - num_periods * period :]
    return (sum(counted) / num_periods + (cadence - period) * statistics.median(counted)) / cadence


def _monitors(num_steps: int) -> list[Monitor]:
    """What any transformer is watched by, each with a reading in ``num_steps`` steps."""
    spectrum, signals = (_period(kind.name, num_steps) for kind in (AttentionSpectrum, UsualSignals))
    return [AttentionSpectrum(every_steps=spectrum), ShiftResidual(), UsualSignals(signals), ResidualNorm()]


def _period(monitor: str, num_steps: int) -> int:
    """The steps from one reading of a monitor to the next, in a run of so many."""
    return min(_CADENCE.get(monitor, 1), num_steps)


def _measure(
    title: str, model: nn.Module, monitors: Sequence[Monitor], num_steps: int, batch: int, sequence: int
) -> list[Figure]:
    """Train a model and, in turn with it, a copy that no monitor watches."""
    base: Any = model
    ids = torch.randint(0, base.config.vocab_size, (batch, sequence))
    copied = copy.deepcopy(model)
    account = Account()
    for monitor in monitors:
        account.watch(monitor)
    watched: list[dict[Owner, float]] = []
    plain: list[dict[Owner, float]] = []
    with accounted(account), trimtab.attach(copied) as idle, trimtab.attach(model, monitors=monitors) as guard:
        arms = [(watched, stepper(model, ids, guard)), (plain, stepper(copied, ids, idle))]
        with _no_collector():
            for number in range(num_steps + _WARM_STEPS):
                for taken, step in arms if number % 2 else reversed(arms):
                    account.take()
                    step()
                    seconds = account.take()
                    if number >= _WARM_STEPS:
                        taken.append(seconds)
                gc.collect()
    rest_s = statistics.fmean(seconds[REST] for seconds in watched)
    size = sum(p.numel() for p in model.parameters()) / 1e6
    about = f"{title}, {size:.1f}M parameters, {batch * sequence} tokens: a step without monitors"
    return [
        Figure(name=about, value=1e3 * rest_s, unit="ms of processor time"),
        *(Figure(name=f"{title}: {name}", value=s / rest_s, unit=_UNIT) for name, s in _per_part(watched, monitors)),
        ratio(f"{title}: whole steps, to check", _totals(watched), _totals(plain), _UNIT),
    ]


def _totals(steps: Sequence[Mapping[Owner, float]]) -> list[float]:
    return [sum(seconds.values()) for seconds in steps]


def _per_part(watched: Sequence[Mapping[Owner, float]], monitors: Sequence[Monitor]) -> Iterator[tuple[str, float]]:
    """The seconds of a step that go into each part of each monitor, and into all of them."""
    total_s = 0.0
    for monitor in monitors:
        title, cadence = _TITLES[monitor.name], _CADENCE.get(monitor.name, 1)
        parts = {part: [seconds.get((monitor.name, part), 0.0) for seconds in watched] for part in (HOOKS, OBSERVE)}
        for part, of_steps in parts.items():
            if any(of_steps):
                mean_s = per_step(of_steps, _period(monitor.name, len(watched)), cadence)
                total_s += mean_s
                yield f"{title}, {part}", mean_s
        if cadence > 1:
            yield f"{title}, a step with a reading", max(map(sum, zip(*parts.values(), strict=True)))
    judging_s = statistics.fmean(seconds[JUDGING] for seconds in watched)
    yield JUDGING[1], judging_s
    yield "all of them", total_s + judging_s


@contextmanager
def _no_collector() -> Iterator[None]:
    """Python's collector off: it would charge its pauses to whomever they fall on."""
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_collecting:
            gc.enable()
