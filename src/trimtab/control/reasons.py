"""Why a unit is risky or held: which term of the risk was the greatest.

Everything is (units,).
"""

from __future__ import annotations

from trimtab.control.arrays import Array, Place

__all__ = ["REASONS", "reasons_of", "without_locks"]

REASONS = ("none", "gnmr", "delta", "error", "raised", "failed", "locked", "amax")
"""What the codes of ``Decision.reason`` stand for, by their number.

none: Its risk is not above 1, and no lock holds it.
gnmr, delta, error, raised, amax: The risk is above 1, and this term is the greatest; of equal ones the first named.
failed: The norm is NaN, infinite or negative.
locked: Active through its lock alone.
"""

NONE, GNMR, DELTA, ERROR, RAISED, FAILED, LOCKED, AMAX = range(len(REASONS))


def reasons_of(terms: dict[int, Array], risky: Array, failed: Array, active: Array, place: Place) -> Array:
    """The reason of each unit, as decided.

    Args:
        terms: The terms of the risk by their code, in the order of ``REASONS``; each >= 0, never NaN.
        risky: bool, risk above 1.
        failed: bool.
        active: bool.
        place: Where the arrays live.

    Returns:
        int8 codes, see ``REASONS``.
    """
    xp, codes = place.xp, place.codes
    (greatest, first), *others = [(term, codes[code]) for code, term in terms.items()]
    reason = first
    for term, code in others:
        reason = xp.where(term > greatest, code, reason)
        greatest = xp.maximum(greatest, term)
    unforced = xp.where(active, codes[LOCKED], codes[NONE])
    return xp.where(failed, codes[FAILED], xp.where(risky, reason, unforced))


def without_locks(reason: Array, place: Place) -> Array:
    """``reason`` where nothing is held by a lock: those that would have been have none."""
    return place.xp.where(reason == place.codes[LOCKED], place.codes[NONE], reason)
