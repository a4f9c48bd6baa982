"""The specification: GNMR and its policy for one unit after the other, in plain Python.

Slow on purpose, and meant to be read beside Kong et al. 2026, Algorithms 1 and 2. ``Controller`` is the fast form, and
is tested against this one, to the last bit, on any input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trimtab.control.amax_history import AMAX_CLIP
from trimtab.control.arrays import LARGEST
from trimtab.control.checkpoint import ControllerMemory, UnitMemory
from trimtab.control.decision import Decision
from trimtab.control.policy import Policy
from trimtab.control.reasons import REASONS
from trimtab.control.scores import CLIP_AFTER, downscale
from trimtab.control.units import recoverable_mask, unit_names

__all__ = ["ReferenceController"]


class ReferenceController:
    """What ``Controller`` computes, in plain Python: its specification.

    The decisions hold lists in place of arrays. A schedule that gives no valid threshold raises here.

    Args:
        units: Number of units, or their names from the input to the loss.
        policy: The settings.
        recoverable: None for all units, a mask over the units, or the names of those with a recovery path.

    Raises:
        ConfigError: see ``Controller``.

    Source: Kong et al. 2026, Algorithms 1 and 2; the deviations are in the comments.

    Example:
        >>> from trimtab.control import Controller
        >>> norms = [1.0, 0.0, float("nan"), 3.0]
        >>> slow, fast = (kind(4, Policy(max_active=2)) for kind in (ReferenceController, Controller))
        >>> slow.update(norms).active == fast.update(norms).active.tolist()
        True
    """

    def __init__(
        self,
        units: int | Sequence[str],
        policy: Policy,
        recoverable: Sequence[bool] | Sequence[str] | None = None,
    ) -> None:
        self.units = unit_names(units)
        self.policy = policy
        self.recoverable = recoverable_mask(recoverable, self.units)
        self.budget = policy.budget(sum(self.recoverable))
        self.step = 0
        self.memories = [UnitMemory() for _ in self.units]

    def update(
        self,
        norms: Sequence[float],
        errors: Sequence[float | None] | None = None,
        risks: Sequence[float | None] | None = None,
        amaxes: Sequence[float | None] | None = None,
    ) -> Decision:
        """Take the decision of one optimizer step; see ``Controller.update``."""
        if len(norms) != len(self.units):
            raise ValueError(f"norms: got {len(norms)}, but the controller has {len(self.units)} units.")
        errors, risks, amaxes = (
            self._one_a_unit(name, values)
            for name, values in (("errors", errors), ("risks", risks), ("amaxes", amaxes))
        )
        self.step += 1
        alpha, beta = self.policy.thresholds(self.step)
        gnmr, delta, risk, scale, cause = [], [], [], [], []
        columns = zip(self.memories, map(float, norms), errors, risks, amaxes, strict=True)
        for memory, norm, error, raised, amax in columns:
            if is_failed(norm):
                unit_gnmr = unit_delta = unit_risk = math.inf
                unit_scale = 0.0
                terms = {"failed": math.inf}
            elif norm == 0:
                unit_gnmr = unit_delta = math.nan
                unit_risk, unit_scale = 0.0, 1.0
                terms = {}
            else:
                unit_gnmr = gnmr_of(memory, norm)
                unit_delta = delta_of(memory, unit_gnmr, self.policy)
                terms = terms_of(unit_gnmr, unit_delta, alpha, beta, self.step, self.policy)
                unit_risk = max(terms.values())
                unit_scale = min(1.0, memory.mean / norm) if unit_risk > 1 and memory.mean > 0 else 1.0
                remember(memory, norm, unit_gnmr, self.policy)
            gnmr.append(unit_gnmr)
            delta.append(unit_delta)
            # Only here: damping went by what the norm alone says, the choice of units goes by the greatest of all.
            terms |= {
                "error": error_risk_of(memory, error, self.step, self.policy),
                "raised": raised_risk_of(raised),
                "amax": amax_risk_of(memory, amax, self.step, self.policy),
            }
            risk.append(max(terms.values()))
            cause.append(max(terms, key=lambda name: terms[name]) if risk[-1] > 1 else "none")  # of equals the first
            scale.append(unit_scale)
        chosen = choose(risk, self.memories, self.recoverable, self.budget)
        for unit, memory in enumerate(self.memories):
            memory.active = unit in chosen
            if memory.active and not risk[unit] > 1:
                cause[unit] = "locked"
            if not memory.active:
                memory.lock = 0
            elif risk[unit] > 1:
                memory.lock = self.policy.lock_steps
            else:
                memory.lock = max(memory.lock - 1, 0)
        return Decision(
            gnmr=gnmr,
            delta=delta,
            risk=risk,
            active=[memory.active for memory in self.memories],
            lock=[memory.lock for memory in self.memories],
            scale=scale,
            step=self.step,
            alpha=alpha,
            beta=beta,
            reason=[REASONS.index(name) for name in cause],
        )

    def state_dict(self) -> dict[str, Any]:
        """What ``Controller.state_dict`` returns after the same norms."""
        alpha, beta = self.policy.thresholds(max(self.step, 1))
        return ControllerMemory(self.step, alpha, beta, dict(zip(self.units, self.memories, strict=True))).to_dict()

    def _one_a_unit(self, name: str, values: Sequence[float | None] | None) -> Sequence[float | None]:
        """``values``, if there is one for each unit; where there are none, None for each."""
        if values is None:
            return [None] * len(self.units)
        if len(values) != len(self.units):
            raise ValueError(f"{name}: got {len(values)}, but the controller has {len(self.units)} units.")
        return values


def is_failed(norm: float) -> bool:
    """Whether a norm says that the gradient is broken."""
    return math.isnan(norm) or math.isinf(norm) or norm < 0


def gnmr_of(memory: UnitMemory, norm: float) -> float:
    """The norm against the mean of the earlier ones; 1 where there is none."""
    if memory.mean == 0:
        return 1.0
    return min(norm / memory.mean, LARGEST)  # +inf is kept for failed units


def delta_of(memory: UnitMemory, gnmr: float, policy: Policy) -> float:
    """GNMR against its own recent mean; 1 until the queue is full."""
    if len(memory.queue) < policy.window_steps:
        return 1.0
    recent = mean_of(memory.queue, policy.window_steps)
    return 1.0 if recent == 0 else min(gnmr / recent, LARGEST)


def terms_of(gnmr: float, delta: float, alpha: float, beta: float, step: int, policy: Policy) -> dict[str, float]:
    """Both scores, each in units of its threshold; the risk is the greatest term."""
    if step <= policy.act_from_step:
        return {"gnmr": 0.0, "delta": 0.0}
    return {"gnmr": min(gnmr / alpha, LARGEST), "delta": min(delta / beta, LARGEST)}


def error_risk_of(memory: UnitMemory, error: float | None, step: int, policy: Policy) -> float:
    """The channel error in units of its limit; 0 where it is not known, or nothing limits it.

    With an "ema" history the limit is one of the ratio to the mean of the unit's earlier errors, which this one enters.
    """
    if policy.error_limit is None or error is None or not error >= 0:  # not `error < 0`: NaN is not known either
        return 0.0
    error, limit = float(error), policy.error_limit
    if policy.error_history == "absolute":
        return min(error / limit, LARGEST)  # +inf is kept for failed norms
    risk, memory.error_seen, memory.error_mean = judge_by_history(
        error, memory.error_seen, memory.error_mean, limit, limit, step, policy
    )
    return risk


def amax_risk_of(memory: UnitMemory, amax: float | None, step: int, policy: Policy) -> float:
    """The ratio of amax to the mean of the unit's earlier ones, in units of its limit; 0 as for errors."""
    if policy.amax_limit is None or amax is None or not amax >= 0:
        return 0.0
    risk, memory.amax_seen, memory.amax_mean = judge_by_history(
        float(amax), memory.amax_seen, memory.amax_mean, policy.amax_limit, AMAX_CLIP, step, policy
    )
    return risk


def judge_by_history(
    value: float, seen: int, mean: float, limit: float, clip: float, step: int, policy: Policy
) -> tuple[float, int, float]:
    """The risk of ``value`` beside the ``mean`` of those before; how many were ``seen`` with it, and their mean."""
    if math.isinf(value):
        return LARGEST, seen, mean  # a broken operand, at any step; it enters no history
    if value == 0:
        return 0.0, seen, mean  # not observed, as a norm of 0 is not
    ratio = 1.0 if mean == 0 else min(value / mean, LARGEST)
    risk = 0.0 if step <= policy.act_from_step else min(ratio / limit, LARGEST)
    if seen < policy.burn_in_steps:
        return risk, seen + 1, mean
    if mean == 0:
        return risk, seen + 1, value
    factor = policy.error_ema_factor
    return risk, seen + 1, min(factor * mean + (1 - factor) * min(value, clip * mean), LARGEST)


def raised_risk_of(raised: float | None) -> float:
    """The risk that something else has raised the unit's to; 0 where nothing has."""
    if raised is None or not raised >= 0:  # not `raised < 0`: NaN is none too
        return 0.0
    return min(float(raised), LARGEST)  # +inf is kept for failed norms


def remember(memory: UnitMemory, norm: float, gnmr: float, policy: Policy) -> None:
    """Let the norm enter the unit's history, and its GNMR the queue."""
    memory.queue = [*memory.queue, gnmr * downscale(policy.window_steps) / downscale(policy.window_steps)]
    memory.queue = memory.queue[-policy.window_steps :]
    memory.seen += 1
    if memory.seen <= policy.burn_in_steps:
        return
    entering = norm
    # A mean of 0 is no history: clipping to it would keep it at 0 for ever.
    if policy.history_clip is not None and memory.entered >= CLIP_AFTER and memory.mean > 0:
        entering = min(norm, policy.history_clip * memory.mean)
    memory.entered += 1
    if policy.history == "window":
        entering = entering * downscale(policy.history_steps) / downscale(policy.history_steps)
        memory.history = [*memory.history, entering][-policy.history_steps :]
        memory.mean = mean_of(memory.history, policy.history_steps)
    elif memory.entered == 1:
        memory.mean = entering
    elif policy.history == "ema":
        memory.mean = policy.ema_factor * memory.mean + (1 - policy.ema_factor) * entering
    else:
        memory.mean += (entering - memory.mean) / memory.entered


def mean_of(values: Sequence[float], steps: int) -> float:
    """The mean of up to ``steps`` values, oldest first, downscaled by a power of two so that no sum overflows."""
    total = 0.0
    for value in values:  # not `sum`, which compensates its rounding in newer Pythons
        total += value * downscale(steps)
    return min(total / (len(values) * downscale(steps)), LARGEST)


def choose(risk: Sequence[float], memories: Sequence[UnitMemory], recoverable: Sequence[bool], budget: int) -> set[int]:
    """The candidates with the greatest risk, of equals the one nearest the loss, at most ``budget``."""
    candidates = [
        unit for unit, memory in enumerate(memories) if recoverable[unit] and (risk[unit] > 1 or memory.lock > 0)
    ]
    candidates.sort(key=lambda unit: (risk[unit], unit), reverse=True)
    return set(candidates[:budget])
