"""Channel errors as a risk: against a limit, or against the unit's own earlier errors; vectorised over units.

Everything is (units,).
"""

from __future__ import annotations

from trimtab.control.arrays import Array, Place
from trimtab.control.own_history import OwnHistory, judge_by_history
from trimtab.control.policy import Policy

__all__ = ["judge_errors"]


def judge_errors(
    history: OwnHistory, errors: Array, limit: float, step: int, policy: Policy, place: Place
) -> tuple[Array, OwnHistory]:
    """The risk that one step's errors are, and the history after them.

    Args:
        history: What is remembered of earlier steps; nothing enters it while ``error_history`` is "absolute".
        errors: float64, from 0; +inf = a non-finite operand; NaN and what is below 0 = not known.
        limit: The policy's ``error_limit``.
        step: The optimizer step, from 1.
        policy: The settings.
        place: Where the arrays live.

    Returns:
        The risk, finite and at least 0, 0 where the error is not known; and the history.
    """
    if policy.error_history == "ema":
        return judge_by_history(history, errors, limit, limit, step, policy, place)
    term = place.xp.minimum(errors / place.number(limit), place.largest)
    return place.xp.where(errors >= place.zero, term, place.zero), history
