"""What the arms of a comparison are measured by: rates, detection, repair. NumPy alone; nothing here trains.

T: steps, U: units that the recipe can switch. Row t-1 is optimizer step t.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trimtab.control.reasons import REASONS

__all__ = [
    "TOLERANCE_STEPS",
    "Window",
    "by_step",
    "detection",
    "difference",
    "fault_steps",
    "full_share",
    "mean_of_lines",
    "over_seeds",
    "reason_counts",
    "repair",
    "repaired_share",
    "switches",
    "trigger_rate",
]

TOLERANCE_STEPS = 5
"""So long after a fault's end a risk above 1 still counts as right: averages of past steps have yet to forget it."""

_T_QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_T95 = {**dict(enumerate(_T_QUANTILES, start=1)), 40: 2.021, 60: 2.000, 120: 1.980}
"""97.5% quantile of Student's t by its degrees of freedom."""

_Bools = NDArray[np.bool_]


class Window(Protocol):
    """Where and when a fault holds."""

    @property
    def unit(self) -> str:
        """Name of its unit."""

    @property
    def start_step(self) -> int:
        """First optimizer step that suffers it."""

    @property
    def end_step(self) -> int:
        """The first one that no longer does."""


def fault_steps(
    windows: Iterable[Window], units: Sequence[str], num_steps: int, *, after: int = 0, longer: int = 0
) -> _Bools:
    """Which unit-steps lie in a fault.

    Args:
        windows: The faults.
        units: Names of the U units; faults of others are left out.
        num_steps: T.
        after: Leave out so many steps at the beginning of each.
        longer: Add so many steps after the end of each.

    Returns: Shape (T, U).

    Example:
        >>> from types import SimpleNamespace
        >>> window = SimpleNamespace(unit="k", start_step=2, end_step=4)
        >>> fault_steps([window], ["q", "k"], 4)[:, 1].tolist()
        [False, True, True, False]
        >>> fault_steps([window], ["q", "k"], 4, after=1, longer=1)[:, 1].tolist()
        [False, False, True, True]
    """
    index = {name: i for i, name in enumerate(units)}
    inside = np.zeros((num_steps, len(units)), dtype=np.bool_)
    for window in windows:
        if window.unit in index:
            inside[window.start_step + after - 1 : max(0, window.end_step + longer - 1), index[window.unit]] = True
    return inside


def switches(routed: _Bools) -> int:
    """How often a unit entered the recovery path; on it from the first step on counts too. ``routed``: (T, U).

    Example:
        >>> switches(np.array([[True, False], [True, False], [False, True], [True, True]]))
        3
    """
    before = np.vstack([np.zeros_like(routed[:1]), routed[:-1]])
    return int((routed & ~before).sum())


def trigger_rate(gnmr: NDArray[np.float64], risk: NDArray[np.float64]) -> float | None:
    """Share of the observed unit-steps whose risk is above 1; None where none was observed.

    Args:
        gnmr: NaN = not observed. Shape (T, U).
        risk: Shape (T, U).

    Example:
        >>> trigger_rate(np.array([[1.0, np.nan], [2.0, 1.0]]), np.array([[0.5, 0.0], [1.5, 0.5]]))
        0.3333333333333333
    """
    observed = ~np.isnan(gnmr)
    return float((risk[observed] > 1).mean()) if observed.any() else None


def full_share(routed: _Bools, budget: int) -> float | None:
    """Share of the steps in which the budget was full; None for a budget of 0. ``routed``: (T, U).

    Example:
        >>> full_share(np.array([[True, False], [True, True]]), 2)
        0.5
    """
    return float((routed.sum(axis=1) >= budget).mean()) if budget else None


def detection(
    risk: NDArray[np.float64],
    windows: Sequence[Window],
    units: Sequence[str],
    *,
    first_step: int,
    tolerance_steps: int = TOLERANCE_STEPS,
) -> dict[str, Any]:
    """How well a risk above 1 tells the faults, by unit-step and by fault, in the steps after ``first_step``.

    Recall: of the faulty unit-steps, those with a risk above 1; a step's risk is of its own gradient, which suffers the
    fault from its first step on. Event recall: of the faults, those with a risk above 1 at least once while they last.
    Precision: of the unit-steps with a risk above 1, those in a fault or at most ``tolerance_steps`` after its end.
    Of a run that recovers, a recovered unit's gradient is healthy: there a policy that works lowers its own recall.

    Args:
        risk: Of each step's own decision. Shape (T, U).
        windows: The faults.
        units: Names of the U units.
        first_step: Steps up to this one are left out of everything; the same for all that are compared.
        tolerance_steps: How long after a fault's end a risk is still right; likewise.

    Returns: recall, event_recall and precision (None where there is nothing to divide by, and where there are no
        faults), and the counts behind them.
    """
    scored = np.zeros((len(risk), 1), dtype=np.bool_)
    scored[first_step:] = True
    flagged = (risk > 1) & scored
    faulty = fault_steps(windows, units, len(risk)) & scored
    near = fault_steps(windows, units, len(risk), longer=tolerance_steps)
    num_faulty, num_flagged = int(faulty.sum()), int(flagged.sum())
    found, right = int((flagged & faulty).sum()), int((flagged & near).sum())
    events = [fault_steps([window], units, len(risk)) & scored for window in windows]
    events = [event for event in events if event.any()]
    num_seen = sum(bool((flagged & event).any()) for event in events)
    return {
        "recall": found / num_faulty if num_faulty else None,
        "event_recall": num_seen / len(events) if events else None,
        "precision": right / num_flagged if num_flagged and windows else None,
        "faulty_unit_steps": num_faulty,
        "faulty_and_flagged": found,
        "flagged_unit_steps": num_flagged,
        "flagged_in_fault": right,
    }


def reason_counts(codes: NDArray[np.integer[Any]]) -> dict[str, int]:
    """In how many unit-steps each reason held a unit or made its risk; "none" is left out.

    Example:
        >>> reason_counts(np.array([[0, 1], [1, 6]]))["gnmr"]
        2
    """
    counts = np.bincount(np.asarray(codes).astype(np.int64).ravel(), minlength=len(REASONS))
    return {name: int(count) for name, count in zip(REASONS, counts, strict=True) if name != "none"}


def repaired_share(low: float, clean: float, arm: float) -> float | None:
    """Of the loss that the faults cost the low-cost path, how much the arm did not suffer; None where they cost none.

    Example:
        >>> repaired_share(low=2.0, clean=1.0, arm=1.25), repaired_share(low=1.0, clean=1.0, arm=0.5)
        (0.75, None)
    """
    harm = low - clean
    return (low - arm) / harm if math.isfinite(harm) and harm > 0 and math.isfinite(arm) else None


def repair(low: Sequence[float], clean: Sequence[float], arm: Sequence[float]) -> dict[str, Any]:
    """The repaired share over seeds: the ratio of the mean differences, with its interval.

    The differences of a seed are those of runs on the same weights, data and faults. Whether there was harm follows
    from ``low`` and ``clean`` alone: it was where it is above 0 on every seed, and its mean is more than twice its
    standard error. Of harmless causes one in some fourteen passes that with three seeds (one in twenty would be 4.3
    standard errors, which harm that differs from seed to seed as the faults do seldom reaches): look at
    ``harm_interval`` too.

    The share's interval takes the harm of each seed as it was, and Student's t over what the seeds deviate from one
    common share of it. So harm that differs between the seeds does not make it wider.

    A run whose loss is no number has diverged. It is never left out so that the others speak for it: nothing is said of
    a harm or a share that it belongs to, but how many they are.

    Args:
        low: Loss of the low-cost path, by seed; NaN where it diverged.
        clean: Of what it would be without harm.
        arm: Of the arm.

    Returns:
        share: None unless there was harm and every run is finite.
        interval: Of the share, 95%; None where there is no share.
        did_harm: None with fewer than two seeds, or where ``low`` or ``clean`` diverged.
        mean_harm, harm_interval: Of low - clean; None where one of these diverged, the interval also with one seed.
        num_seeds: All of them.
        num_diverged: How many runs of low, clean and arm.

    Source: the ratio estimator of survey sampling; Cochran 1977, Sampling Techniques, chapter 6.

    Example:
        >>> found = repair([2.0, 2.2, 2.1], [1.0, 1.1, 1.0], [1.2, 1.4, 1.2])
        >>> found["did_harm"], round(found["share"], 3), found["num_seeds"]
        (True, 0.781, 3)
        >>> found = repair([2.0, 2.2], [1.0, 1.2], [1.1, float("nan")])
        >>> found["did_harm"], found["share"], found["num_diverged"]["arm"]
        (True, None, 1)
    """
    losses = {name: np.array(values, dtype=np.float64) for name, values in _named(low, clean, arm)}
    diverged = {name: int((~np.isfinite(values)).sum()) for name, values in losses.items()}
    n = len(losses["low"])
    found: dict[str, Any] = {
        "share": None,
        "interval": None,
        "did_harm": None,
        "mean_harm": None,
        "harm_interval": None,
        "num_seeds": n,
        "num_diverged": diverged,
    }
    if not n or diverged["low"] or diverged["clean"]:
        return found
    harms = losses["low"] - losses["clean"]
    found["mean_harm"] = float(harms.mean())
    found["harm_interval"] = _interval_of_mean(harms)
    if n > 1:
        standard_error = float(harms.std(ddof=1)) / math.sqrt(n)
        found["did_harm"] = bool((harms > 0).all() and harms.mean() > 2 * standard_error)
    if found["did_harm"] and not diverged["arm"]:
        repaired = losses["low"] - losses["arm"]
        found["share"] = float(repaired.mean() / harms.mean())
        found["interval"] = _interval_of_ratio(repaired, harms)
    return found


def difference(a: Sequence[float], b: Sequence[float], harms: Sequence[float]) -> dict[str, Any]:
    """The mean of a - b over paired seeds as a share of the harm, with its 95% interval; see ``repair``.

    Args:
        a: Losses, by seed; NaN where the run diverged.
        b: Losses, by seed.
        harms: What the low-cost path lost on each seed.

    Returns: mean and interval (None where a seed diverged or the mean harm is not above 0, the interval also with one
        seed), num_seeds, and num_diverged: in how many seeds a or b did.

    Example:
        >>> found = difference([2.0, 2.2, 2.1], [1.0, 1.1, 1.0], [2.0, 2.2, 2.2])
        >>> round(found["mean"], 2), [round(end, 2) for end in found["interval"]]
        (0.5, [0.5, 0.5])
    """
    differences = np.array(a, dtype=np.float64) - np.array(b, dtype=np.float64)
    below = np.array(harms, dtype=np.float64)
    num_diverged = int((~np.isfinite(differences)).sum())
    known = bool(len(differences)) and not num_diverged and bool(np.isfinite(below).all() and below.mean() > 0)
    return {
        "mean": float(differences.mean() / below.mean()) if known else None,
        "interval": _interval_of_ratio(differences, below) if known else None,
        "num_seeds": len(differences),
        "num_diverged": num_diverged,
    }


def _named(
    low: Sequence[float], clean: Sequence[float], arm: Sequence[float]
) -> tuple[tuple[str, Sequence[float]], ...]:
    return (("low", low), ("clean", clean), ("arm", arm))


def _t95(num_free: int) -> float:
    """The 97.5% quantile of Student's t; between the rows of the table, that of the fewer degrees, which is wider.

    Example:
        >>> _t95(1), _t95(2), _t95(35), _t95(10**6)
        (12.706, 4.303, 2.042, 1.98)
    """
    return _T95[max(free for free in _T95 if free <= num_free)]


def _interval_of_mean(values: NDArray[np.float64]) -> list[float] | None:
    n = len(values)
    if n < 2:
        return None
    reach = _t95(n - 1) * float(values.std(ddof=1)) / math.sqrt(n)
    return [float(values.mean()) - reach, float(values.mean()) + reach]


def _interval_of_ratio(above: NDArray[np.float64], below: NDArray[np.float64]) -> list[float] | None:
    """Of mean(above) / mean(below), with what is below taken as it is; None with one seed."""
    n = len(above)
    if n < 2:
        return None
    ratio = float(above.mean() / below.mean())
    rest = above - ratio * below
    reach = _t95(n - 1) * math.sqrt(float(np.square(rest).sum()) / (n - 1) / n) / float(below.mean())
    return [ratio - reach, ratio + reach]


def over_seeds(values: Iterable[float | None]) -> dict[str, Any]:
    """Mean and standard deviation of those that are there and finite, how many they are, and of how many.

    Example:
        >>> over_seeds([1.0, None, 3.0])["mean"], over_seeds([1.0])["sd"], over_seeds([None])
        (2.0, None, {'mean': None, 'sd': None, 'n': 0, 'of': 1})
    """
    all_of_them = list(values)
    there = [float(value) for value in all_of_them if value is not None and math.isfinite(value)]
    return {
        "mean": statistics.fmean(there) if there else None,
        "sd": statistics.stdev(there) if len(there) > 1 else None,
        "n": len(there),
        "of": len(all_of_them),
    }


def mean_of_lines(lines: Sequence[Sequence[float | None]]) -> list[float | None]:
    """The mean over lines of equal length, point by point; None where a line has none.

    Example:
        >>> mean_of_lines([[1.0, None], [3.0, 2.0]])
        [2.0, None]
    """
    return [None if None in point else statistics.fmean(point) for point in zip(*lines, strict=True)]


def by_step(values: Mapping[int, float]) -> list[list[float]]:
    """Pairs of step and value, in order, for JSON.

    Example:
        >>> by_step({20: 0.5, 10: 1.0})
        [[10, 1.0], [20, 0.5]]
    """
    return [[step, values[step]] for step in sorted(values)]
