"""Published settings, and ours, as functions that return a ``Policy``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Literal, get_args

from trimtab.control.policy import ErrorHistory, Policy
from trimtab.control.schedules import Threshold, TwoStage
from trimtab.errors import ConfigError, TrimtabWarning, nearest_names

__all__ = ["PRESETS", "PaperSetting", "paper", "preset", "robust"]

PaperSetting = Literal["activations", "activations-2.0", "activations-3.0", "deepseek", "lora", "moe"]
"""The runs of Kong et al. 2026 whose settings are published."""

_FIRST_STAGE = 0.025
"""Share of the run in which a two-stage alpha has its first value (Kong et al. 2026, section 5.2)."""

_LEARNING = 20
"""Observations from which the robust preset learns before it acts, after as many of burn-in. Our choice."""


def robust(
    *,
    warmup_steps: int = 0,
    total_steps: int | None = None,
    alpha: Threshold = 4.0,
    beta: Threshold = 3.0,
    window_steps: int = 5,
    lock_steps: int = 10,
    max_active: int | float = 0.2,
    ema_factor: float = 0.95,
    history_clip: float | None = 4.0,
    burn_in_steps: int | None = None,
    act_from_step: int | None = None,
    error_limit: float | None = None,
    error_history: ErrorHistory = "absolute",
    amax_limit: float | None = None,
    damping: bool = False,
) -> Policy:
    """The settings to train with: an exponential mean, clipped updates, and quiet while healthy.

    A full mean is dominated by the large norms at the start of a run, so that thresholds above 1 grow blind to later
    faults; the exponential mean follows, and its clip keeps a fault from becoming the new normal.

    Args:
        warmup_steps: Steps of the learning rate's warm-up. >= 0.
        total_steps: Length of the run where known; a run under 4 times ``act_from_step`` is warned about.
        alpha: See ``Policy``.
        beta: See ``Policy``.
        window_steps: See ``Policy``.
        lock_steps: See ``Policy``.
        max_active: See ``Policy``. The default is 20% of the recoverable units.
        ema_factor: See ``Policy``.
        history_clip: See ``Policy``.
        burn_in_steps: None for max(20, ``warmup_steps``).
        act_from_step: None for ``burn_in_steps`` + 20.
        error_limit: See ``Policy``; which one is right depends on the recipe's number format.
        error_history: See ``Policy``; "ema" is for INT4, with an ``error_limit`` of 1.5.
        amax_limit: See ``Policy``; for INT4, 12.
        damping: See ``Policy``.

    Raises:
        ConfigError: when a setting is out of its range.

    Source: ours, on Kong et al. 2026, Algorithms 1 and 2.

    Example:
        >>> policy = robust(warmup_steps=100)
        >>> policy.burn_in_steps == 100 and policy.act_from_step == policy.burn_in_steps + 20
        True
    """
    _check_steps("warmup_steps", warmup_steps, 0)
    burn_in = max(_LEARNING, warmup_steps) if burn_in_steps is None else burn_in_steps
    policy = Policy(
        alpha=alpha,
        beta=beta,
        window_steps=window_steps,
        lock_steps=lock_steps,
        max_active=max_active,
        history="ema",
        ema_factor=ema_factor,
        history_clip=history_clip,
        burn_in_steps=burn_in,
        act_from_step=burn_in + _LEARNING if act_from_step is None else act_from_step,
        error_limit=error_limit,
        error_history=error_history,
        amax_limit=amax_limit,
        damping=damping,
    )
    if total_steps is not None:
        _check_steps("total_steps", total_steps, 1)
        if total_steps < 4 * policy.act_from_step:
            warnings.warn(
                f"total_steps={total_steps}: the robust policy only learns up to step {policy.act_from_step}, more "
                f"than a quarter of this run. Train at least {4 * policy.act_from_step} steps, or lower burn_in_steps "
                "and act_from_step.",
                TrimtabWarning,
                stacklevel=2,
            )
    return policy


def paper(
    setting: PaperSetting = "activations",
    *,
    total_steps: int | None = None,
    max_active: int | float | None = None,
    damping: bool = False,
) -> Policy:
    """The published settings, with the full mean.

    "activations", "activations-2.0", "activations-3.0": 4-bit saved activations, alpha and beta (1.5, 1.3), (2, 1.5),
    (3, 2); 4 units, lock 1. "deepseek": alpha 1.5, then 1.1 after 2.5% of the steps, beta 1.5, 25% of the units.
    "lora": the same thresholds, window 5, 10 units, lock 1. "moe": alpha 0.9.

    Not published, and ours: window 10 where none is named; for "lora" the share of the first stage, taken from
    "deepseek"; for "deepseek" and "moe" lock 1; for "moe" beta 1.3 and 4 units.

    "moe" was run with every operator on the recovery path for the first 5% of the steps. That is a setting of the run,
    not of the policy, and is *not* in what this returns: a policy cannot exceed its budget. ``act_from_step`` is no
    stand-in for it (it holds units on the low-cost path), and stays 0: the scores are warm when that phase ends.

    Args:
        setting: Which run.
        total_steps: Length of the run; needed by "deepseek" and "lora", not used by the others.
        max_active: None for the published budget.
        damping: See ``Policy``.

    Raises:
        ConfigError: when ``setting`` is unknown, or a two-stage one has no ``total_steps``.

    Source: Kong et al. 2026, sections 5.1 to 5.3.

    Example:
        >>> policy = paper("deepseek", total_steps=1000)
        >>> policy.thresholds(25), policy.thresholds(26)
        ((1.5, 1.5), (1.1, 1.5))
    """
    if setting not in get_args(PaperSetting):
        near = nearest_names(str(setting), get_args(PaperSetting))
        remedy = f"Did you mean {near[0]!r}?" if near else "Use one of them."
        allowed = f"the published settings are {', '.join(map(repr, get_args(PaperSetting)))}."
        raise ConfigError("setting", setting, allowed, remedy)
    if total_steps is not None:
        _check_steps("total_steps", total_steps, 1)

    alpha: Threshold
    budget: int | float
    beta, window_steps, budget = 1.3, 10, 4
    if setting == "activations-2.0":
        alpha, beta = 2.0, 1.5
    elif setting == "activations-3.0":
        alpha, beta = 3.0, 2.0
    elif setting == "deepseek":
        alpha, beta, budget = _two_stage_alpha(setting, total_steps), 1.5, 0.25
    elif setting == "lora":
        alpha, beta, window_steps, budget = _two_stage_alpha(setting, total_steps), 1.5, 5, 10
    else:
        alpha = 0.9 if setting == "moe" else 1.5
    return Policy(
        alpha=alpha,
        beta=beta,
        window_steps=window_steps,
        lock_steps=1,
        max_active=budget if max_active is None else max_active,
        damping=damping,
    )


PRESETS: Mapping[str, Callable[..., Policy]] = MappingProxyType(
    {
        "robust": robust,
        "paper": partial(paper, "activations"),
        "paper-2.0": partial(paper, "activations-2.0"),
        "paper-3.0": partial(paper, "activations-3.0"),
        "paper-deepseek": partial(paper, "deepseek"),
        "paper-lora": partial(paper, "lora"),
        "paper-moe": partial(paper, "moe"),
    }
)
"""The presets by the names that the command line and configuration files use; each takes ``total_steps``."""


def preset(name: str, *, total_steps: int | None = None) -> Policy:
    """The preset of that name.

    Args:
        name: One of ``PRESETS``.
        total_steps: Length of the run where known.

    Raises:
        ConfigError: when there is no such preset (with the nearest name), or it needs ``total_steps``.

    Example:
        >>> preset("paper-2.0") == paper("activations-2.0")
        True
    """
    if name not in PRESETS:
        near = nearest_names(str(name), PRESETS)
        remedy = f"Did you mean {near[0]!r}?" if near else "Use one of them."
        raise ConfigError("policy", name, f"the presets are {', '.join(map(repr, PRESETS))}.", remedy)
    return PRESETS[name](total_steps=total_steps)


def _two_stage_alpha(setting: str, total_steps: int | None) -> TwoStage:
    if total_steps is None:
        allowed = f"{setting!r} lowers alpha after {_FIRST_STAGE:.1%} of the run, and needs its length."
        raise ConfigError("total_steps", None, allowed, "Pass the number of optimizer steps.")
    return TwoStage(1.5, 1.1, switch_step=round(_FIRST_STAGE * total_steps))


def _check_steps(setting: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(setting, value, "it is a number of optimizer steps.", f"Set an int of {least} or more.")
