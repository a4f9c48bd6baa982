"""The largest magnitude of a unit's operand as a risk, against its own earlier ones; vectorised over units.

Everything is (units,).
"""

from __future__ import annotations

from trimtab.control.arrays import Array, Place
from trimtab.control.own_history import OwnHistory, judge_by_history
from trimtab.control.policy import Policy

__all__ = ["AMAX_CLIP", "judge_amaxes"]

AMAX_CLIP = 2.0
"""An amax enters its mean as at most this many times the mean; ours.

Measured at a limit of 12, over three healthy runs of the demo's model on 4-bit copies: so clipped, a fault of 200 times
that lasts is seen for 56 steps, and no healthy unit is flagged (largest ratio 10.8 from the first step on, 4.8 after
``robust``'s burn-in). Clipped at the limit itself, that fault is the mean after 7 steps; at 1.5, as channel errors are,
the mean is too slow for the first steps of a run, in which a down-projection's operand grows a hundredfold.
"""


def judge_amaxes(
    history: OwnHistory, amaxes: Array, limit: float, step: int, policy: Policy, place: Place
) -> tuple[Array, OwnHistory]:
    """The risk that one step's amaxes are, and the history after them.

    Args:
        history: What is remembered of earlier steps.
        amaxes: float64, from 0; +inf = a non-finite operand; NaN and what is below 0 = not known.
        limit: The policy's ``amax_limit``.
        step: The optimizer step, from 1.
        policy: The settings.
        place: Where the arrays live.

    Returns:
        The risk, finite and at least 0, 0 where the amax is not known; and the history.
    """
    return judge_by_history(history, amaxes, limit, AMAX_CLIP, step, policy, place)
