"""Channel errors as a risk: against a limit, or against the unit's own earlier errors; vectorised over units.

Everything is (units,).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.control.arrays import Array, Place, to_numpy
from trimtab.control.checkpoint import UnitMemory
from trimtab.control.policy import Policy

__all__ = ["ErrorHistory", "judge_errors"]


@dataclass(frozen=True, slots=True)
class ErrorHistory:
    """What is remembered of every unit's channel errors; nothing enters it while ``error_history`` is "absolute".

    Attributes:
        seen: Errors that were finite and above 0, burn-in included. float64.
        mean: Exponential mean; 0 = no history. float64.
    """

    seen: Array
    mean: Array

    @classmethod
    def of(cls, memories: Sequence[UnitMemory], place: Place) -> ErrorHistory:
        """The arrays that hold ``memories``, one a unit."""
        return cls(
            seen=place.floats([memory.error_seen for memory in memories]),
            mean=place.floats([memory.error_mean for memory in memories]),
        )

    def moved_to(self, place: Place) -> ErrorHistory:
        """The same history at another place."""
        return ErrorHistory(place.floats(to_numpy(self.seen)), place.floats(to_numpy(self.mean)))


def judge_errors(
    history: ErrorHistory, errors: Array, limit: float, step: int, policy: Policy, place: Place
) -> tuple[Array, ErrorHistory]:
    """The risk that one step's errors are, and the history after them.

    Args:
        history: What is remembered of earlier steps.
        errors: float64, from 0; +inf = a non-finite operand; NaN and what is below 0 = not known.
        limit: The policy's ``error_limit``.
        step: The optimizer step, from 1.
        policy: The settings.
        place: Where the arrays live.

    Returns:
        The risk, finite and at least 0, 0 where the error is not known; and the history.
    """
    xp, threshold = place.xp, place.number(limit)
    if policy.error_history == "absolute":
        term = xp.minimum(errors / threshold, place.largest)
        return xp.where(errors >= place.zero, term, place.zero), history
    finite = errors <= place.largest
    # An error of 0 is no observation, as a norm of 0 is none: an operand of zeros says nothing about the others.
    observed = finite & (errors > place.zero)
    has_mean = history.mean > place.zero
    if step > policy.act_from_step:
        ratio = xp.minimum(errors / xp.where(has_mean, history.mean, place.one), place.largest)
        ratio = xp.where(has_mean, ratio, place.one)
        term = xp.where(observed, xp.minimum(ratio / threshold, place.largest), place.zero)
    else:
        term = xp.zeros_like(history.mean)
    term = xp.where(errors > place.largest, place.largest, term)
    factor = policy.error_ema_factor
    entering = xp.minimum(errors, history.mean * limit)
    mean = xp.minimum(history.mean * factor + entering * (1 - factor), place.largest)
    mean = xp.where(has_mean, mean, errors)
    enters = observed & (history.seen >= policy.burn_in_steps)
    seen = history.seen + place.widen(observed)
    return term, ErrorHistory(seen=seen, mean=xp.where(enters, mean, history.mean))
