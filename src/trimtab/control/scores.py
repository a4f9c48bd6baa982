"""GNMR and Delta, vectorised over units.

Shape suffixes: everything is (units,). The queue and the window history are tuples of such rows, oldest first, so that
one row is one observation of every unit, and a unit that was not observed simply does not move up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from trimtab.control.arrays import Array, Place, to_numpy
from trimtab.control.checkpoint import UnitMemory
from trimtab.control.policy import Policy

__all__ = [
    "CLIP_AFTER",
    "History",
    "Observation",
    "Scores",
    "downscale",
    "observe",
    "recent_values",
    "remember",
    "score",
]

CLIP_AFTER = 10
"""Norms that have entered a history before ``history_clip`` applies: the mean of fewer says too little."""


@dataclass(frozen=True, slots=True)
class History:
    """What is remembered of every unit's norms.

    Attributes:
        seen: Observations, burn-in included. float64, so that it divides without a conversion.
        entered: Norms that entered the history. float64.
        mean: Historical mean; 0 = no history.
        queued: GNMR values pushed into the queue since it was last loaded. float64.
        queue: ``window_steps`` rows of GNMR, times ``downscale(window_steps)``.
        kept: Norms pushed into ``rows`` since they were last loaded. float64.
        rows: ``history_steps`` rows of norms, times ``downscale(history_steps)``; empty unless a "window" history.
    """

    seen: Array
    entered: Array
    mean: Array
    queued: Array
    queue: tuple[Array, ...]
    kept: Array
    rows: tuple[Array, ...]

    @classmethod
    def of(cls, memories: Sequence[UnitMemory], policy: Policy, place: Place) -> History:
        """The arrays that hold ``memories``, one a unit."""
        windowed = policy.history == "window"
        kept = [memory.history[-policy.history_steps :] for memory in memories] if windowed else [[] for _ in memories]
        queue = [memory.queue[-policy.window_steps :] for memory in memories]
        kept_count = place.floats([len(values) for values in kept])
        rows = _rows(kept, policy.history_steps if windowed else 0, place)
        mean = place.floats([memory.mean for memory in memories])
        return cls(
            seen=place.floats([memory.seen for memory in memories]),
            entered=place.floats([memory.entered for memory in memories]),
            mean=_mean_of_rows(rows, kept_count, place) if windowed else mean,
            queued=place.floats([len(values) for values in queue]),
            queue=_rows(queue, policy.window_steps, place),
            kept=kept_count,
            rows=rows,
        )

    def moved_to(self, place: Place) -> History:
        """The same history at another place."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        rows = ("queue", "rows")
        moved = {name: place.floats(to_numpy(array)) for name, array in values.items() if name not in rows}
        return History(**moved, **{name: tuple(place.floats(to_numpy(row)) for row in values[name]) for name in rows})


@dataclass(frozen=True, slots=True)
class Observation:
    """One step's norms, split by what they are.

    Attributes:
        norms: float64; 0 where not observed or failed.
        observed: bool; finite and above 0.
        failed: bool; NaN, infinite or negative.
    """

    norms: Array
    observed: Array
    failed: Array


@dataclass(frozen=True, slots=True)
class Scores:
    """GNMR and Delta, finite for every unit; those of units that were not observed mean nothing."""

    gnmr: Array
    delta: Array


def downscale(steps: int) -> float:
    """The power of two that values are stored with, so that the sum of ``steps`` of them cannot overflow.

    A power of two, because multiplying by it is exact: the sum has the bits that it would have without.

    Example:
        >>> downscale(10) * 16 == downscale(1) == 1.0
        True
    """
    return 2.0 ** -(steps - 1).bit_length()


def observe(norms: Array, place: Place) -> Observation:
    """Split one step's float64 norms into observed, failed and not observed."""
    finite = norms <= place.largest
    observed = finite & (norms > place.zero)
    failed = ~(finite & (norms >= place.zero))  # not `norms < 0`: NaN compares false with everything
    return Observation(place.xp.where(observed, norms, place.zero), observed, failed)


def score(history: History, seen: Observation, place: Place) -> Scores:
    """Score each norm against the history *before* it.

    Args:
        history: What is remembered of earlier steps.
        seen: This step's norms.
        place: Where both live.

    Returns:
        GNMR and Delta. Without a history, or with a mean of 0, GNMR is 1; until the queue is full, or with its mean
        0, Delta is 1. What would overflow is the largest finite double.

    Source: Kong et al. 2026, Algorithm 1.
    """
    xp = place.xp
    has_mean = history.mean > place.zero
    gnmr = xp.minimum(seen.norms / xp.where(has_mean, history.mean, place.one), place.largest)
    gnmr = xp.where(has_mean, gnmr, place.one)
    window_steps = len(history.queue)
    recent = _sum(history.queue) / place.number(window_steps * downscale(window_steps))
    recent = xp.minimum(recent, place.largest)  # the sum may have been rounded up
    comparable = (recent > place.zero) & (history.queued >= window_steps)
    delta = xp.minimum(gnmr / xp.where(comparable, recent, place.one), place.largest)
    return Scores(gnmr, xp.where(comparable, delta, place.one))


def remember(history: History, seen: Observation, gnmr: Array, policy: Policy, place: Place) -> History:
    """The history after this step. Units that were not observed, or failed, keep theirs.

    Source: Kong et al. 2026, Algorithm 1; other histories, clip and burn-in are ours.
    """
    xp = place.xp
    observed = place.widen(seen.observed)
    if policy.burn_in_steps:
        enters = seen.observed & (history.seen >= policy.burn_in_steps)
        entered = history.entered + place.widen(enters)
    else:
        enters, entered = seen.observed, history.entered + observed
    value = seen.norms
    if policy.history_clip is not None:
        # A mean of 0 counts as no history; clipping to it would keep it at 0 for ever.
        clips = (history.entered >= CLIP_AFTER) & (history.mean > place.zero)
        value = xp.where(clips, xp.minimum(value, history.mean * policy.history_clip), value)
    kept, rows = history.kept, history.rows
    if policy.history == "window":
        kept = kept + place.widen(enters)
        rows = _push(rows, value * downscale(len(rows)), enters, place)
        mean = _mean_of_rows(rows, kept, place)
    elif policy.history == "ema":
        mean = history.mean * policy.ema_factor + value * (1 - policy.ema_factor)
        mean = xp.where(history.entered > place.zero, mean, value)
        mean = xp.where(enters, mean, history.mean)
    else:
        mean = history.mean + (value - history.mean) / xp.maximum(entered, place.one)
        mean = xp.where(enters, mean, history.mean)
    return History(
        seen=history.seen + observed,
        entered=entered,
        mean=mean,
        queued=history.queued + observed,
        queue=_push(history.queue, gnmr * downscale(len(history.queue)), seen.observed, place),
        kept=kept,
        rows=rows,
    )


def recent_values(rows: tuple[Array, ...], pushed: Array, num_units: int) -> list[list[float]]:
    """Each unit's values in ``rows``, oldest first, without the zeros that stand for values not there yet."""
    if not rows:
        return [[] for _ in range(num_units)]
    units = np.stack([to_numpy(row) for row in rows], axis=1) / downscale(len(rows))
    empty = len(rows) - np.minimum(to_numpy(pushed), len(rows)).astype(int)
    return [unit[first:] for unit, first in zip(units.tolist(), empty.tolist(), strict=True)]


def _push(rows: tuple[Array, ...], value: Array, enters: Array, place: Place) -> tuple[Array, ...]:
    """Move the entering units' rows up by one and append ``value``."""
    return tuple(place.xp.where(enters, newer, older) for older, newer in zip(rows, (*rows[1:], value), strict=True))


def _sum(rows: tuple[Array, ...]) -> Array:
    """The sum, oldest first: one order, whatever was saved and loaded in between, gives the same last bit."""
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return total


def _mean_of_rows(rows: tuple[Array, ...], kept: Array, place: Place) -> Array:
    """The mean of the norms in a window history; 0 where there is none."""
    count = place.xp.maximum(place.xp.minimum(kept, place.number(len(rows))), place.one)
    return place.xp.minimum(_sum(rows) / (count * downscale(len(rows))), place.largest)


def _rows(values: Sequence[Sequence[float]], steps: int, place: Place) -> tuple[Array, ...]:
    """Each unit's values, oldest first, as ``steps`` downscaled rows; units with fewer start with zeros."""
    if not steps:
        return ()
    padded = [[0.0] * (steps - len(unit)) + list(unit) for unit in values]
    return tuple(place.floats([unit[row] for unit in padded]) * downscale(steps) for row in range(steps))
