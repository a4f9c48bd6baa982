"""Who is on the recovery path next, under a hard budget, and for how long.

Everything is (units,).
"""

from __future__ import annotations

from trimtab.control.arrays import Array, Place

__all__ = ["next_lock", "select_active"]


def select_active(risk: Array, candidates: Array, budget: int, place: Place) -> Array:
    """The ``budget`` candidates with the greatest risk.

    Of equal risks, several +inf too, the highest index wins: the unit nearest the loss. One sort gives the risk of the
    last unit that fits; those above it are in, and the places left go to its equals, counted from the end.

    Args:
        risk: >= 0, never NaN.
        candidates: bool.
        budget: Most units to choose. >= 0.
        place: Where the arrays live.

    Returns:
        bool, at most ``budget`` of them true.

    Source: Kong et al. 2026, Algorithm 2; the order of ties is ours.
    """
    xp = place.xp
    num_units = risk.shape[0]
    if budget <= 0:
        return xp.zeros(num_units, dtype=xp.bool, device=place.device)
    if budget >= num_units:
        return candidates
    ranked = xp.where(candidates, risk, -place.one)
    last = xp.sort(ranked, stable=False)[num_units - budget]
    above = ranked > last
    equal = (ranked == last) & candidates
    places_left = budget - xp.sum(xp.astype(above, xp.int64))
    from_the_end = xp.flip(xp.cumulative_sum(xp.flip(xp.astype(equal, xp.int64))))
    return above | (equal & (from_the_end <= places_left))


def next_lock(lock: Array, active: Array, risky: Array, lock_steps: int, place: Place) -> Array:
    """The locks after a decision: renewed by a risk above 1, counted down without, lost outside the active set.

    Args:
        lock: int64, before the decision.
        active: bool, as decided.
        risky: bool, risk above 1.
        lock_steps: A fresh lock.
        place: Where the arrays live.

    Source: Kong et al. 2026, Algorithm 2.
    """
    xp = place.xp
    counted_down = lock - xp.astype(lock > 0, xp.int64)
    renewed = xp.full(lock.shape, lock_steps, dtype=xp.int64, device=place.device)
    return xp.where(risky, renewed, counted_down) * xp.astype(active, xp.int64)
