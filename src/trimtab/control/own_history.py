"""What a unit's quantizer says, against what it said before: a ratio as a risk; vectorised over units.

Everything is (units,).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.control.arrays import Array, Place, to_numpy
from trimtab.control.policy import Policy

__all__ = ["OwnHistory", "judge_by_history"]


@dataclass(frozen=True, slots=True)
class OwnHistory:
    """What is remembered of one value of every unit.

    Attributes:
        seen: Values that were finite and above 0, burn-in included. float64.
        mean: Exponential mean; 0 = no history. float64.
    """

    seen: Array
    mean: Array

    @classmethod
    def of(cls, seen: Sequence[float], mean: Sequence[float], place: Place) -> OwnHistory:
        """The same as arrays, at ``place``."""
        return cls(place.floats(seen), place.floats(mean))

    def moved_to(self, place: Place) -> OwnHistory:
        """The same history at another place."""
        return OwnHistory(place.floats(to_numpy(self.seen)), place.floats(to_numpy(self.mean)))


def judge_by_history(
    history: OwnHistory, values: Array, limit: float, clip: float, step: int, policy: Policy, place: Place
) -> tuple[Array, OwnHistory]:
    """The risk that one step's values are, and the history after them.

    Args:
        history: What is remembered of earlier steps.
        values: float64, from 0; +inf = a non-finite operand; NaN and what is below 0 = not known.
        limit: Of the ratio to the mean.
        clip: A value enters the mean as at most this many times the mean.
        step: The optimizer step, from 1.
        policy: The settings.
        place: Where the arrays live.

    Returns:
        The risk, finite and at least 0, 0 where the value is not known; and the history.
    """
    xp = place.xp
    finite = values <= place.largest
    # A value of 0 is no observation, as a norm of 0 is none: an operand of zeros says nothing about the others.
    observed = finite & (values > place.zero)
    has_mean = history.mean > place.zero
    if step > policy.act_from_step:
        ratio = xp.minimum(values / xp.where(has_mean, history.mean, place.one), place.largest)
        ratio = xp.where(has_mean, ratio, place.one)
        term = xp.where(observed, xp.minimum(ratio / place.number(limit), place.largest), place.zero)
    else:
        term = xp.zeros_like(history.mean)
    term = xp.where(values > place.largest, place.largest, term)
    factor = policy.error_ema_factor
    entering = xp.minimum(values, history.mean * clip)
    mean = xp.minimum(history.mean * factor + entering * (1 - factor), place.largest)
    mean = xp.where(has_mean, mean, values)
    enters = observed & (history.seen >= policy.burn_in_steps)
    seen = history.seen + place.widen(observed)
    return term, OwnHistory(seen=seen, mean=xp.where(enters, mean, history.mean))
