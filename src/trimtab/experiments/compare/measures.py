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
    "RESAMPLES",
    "Window",
    "detection",
    "fault_steps",
    "full_share",
    "over_seeds",
    "reason_counts",
    "repair",
    "repaired_share",
    "switches",
    "trigger_rate",
]

RESAMPLES = 4000
"""Resamples of the seeds for an interval."""

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
    act_from_step: int,
    window_steps: int,
) -> dict[str, Any]:
    """How well a risk above 1 tells the faults, by unit-step.

    Recall: of the faulty unit-steps, from the step after each fault's start to its end, those with a risk above 1.
    Precision: of the unit-steps with a risk above 1, after ``act_from_step``, those in a fault or at most
    ``window_steps`` after its end. A unit that is recovered has a healthy gradient, and its risk falls: recall is then
    less than the share of faulty unit-steps in which something was done.

    Args:
        risk: Of each step's own decision. Shape (T, U).
        windows: The faults.
        units: Names of the U units.
        act_from_step: See ``Policy``.
        window_steps: See ``Policy``.

    Returns: recall, precision (None where there is nothing to divide by), and the counts behind them.
    """
    flagged = risk > 1
    faulty = fault_steps(windows, units, len(risk), after=1)
    near = fault_steps(windows, units, len(risk), longer=window_steps)
    acting = flagged.copy()
    acting[:act_from_step] = False
    num_faulty, num_flagged = int(faulty.sum()), int(acting.sum())
    found, right = int((flagged & faulty).sum()), int((acting & near).sum())
    return {
        "recall": found / num_faulty if num_faulty else None,
        "precision": right / num_flagged if num_flagged else None,
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
    """The repaired share over seeds: the ratio of the mean differences, with an interval over the seeds.

    The differences of a seed are those of runs on the same weights, data and faults. The faults did harm where their
    mean cost is above twice its standard error; otherwise there is nothing to take a share of. With one seed no error
    is known, and any cost counts. The interval is the middle 95% of the ratios of resampled seeds, all three losses of
    a seed together; of two or three seeds it can hardly be narrow where they agree by chance. Resamples whose mean cost
    is not above 0 have no ratio, and are left out.

    Args:
        low: Loss of the low-cost path under faults, by seed.
        clean: The same without faults.
        arm: Of the arm.

    Returns: share and interval (None where there is no harm, and with one seed no interval), the mean harm, whether it
        is one, the number of seeds, and the share of resamples without a ratio.

    Example:
        >>> found = repair([2.0, 2.2, 2.1], [1.0, 1.1, 1.0], [1.2, 1.4, 1.2])
        >>> found["did_harm"], round(found["share"], 3), found["num_seeds"]
        (True, 0.781, 3)
    """
    losses = np.array([low, clean, arm], dtype=np.float64)
    losses = losses[:, np.isfinite(losses).all(axis=0)]
    harms, repaired = losses[0] - losses[1], losses[0] - losses[2]
    n = len(harms)
    found: dict[str, Any] = {
        "share": None,
        "interval": None,
        "mean_harm": float(harms.mean()) if n else None,
        "did_harm": bool(n) and _is_harm(harms),
        "num_seeds": n,
        "resamples_without_harm": None,
    }
    if not found["did_harm"]:
        return found
    found["share"] = float(repaired.mean() / harms.mean())
    if n > 1:
        picks = np.random.default_rng(0).integers(n, size=(RESAMPLES, n))
        cost, saved = harms[picks].mean(axis=1), repaired[picks].mean(axis=1)
        known = cost > 0
        found["interval"] = [float(v) for v in np.quantile(saved[known] / cost[known], (0.025, 0.975))]
        found["resamples_without_harm"] = float(1 - known.mean())
    return found


def _is_harm(harms: NDArray[np.float64]) -> bool:
    error = float(harms.std(ddof=1)) / math.sqrt(len(harms)) if len(harms) > 1 else 0.0
    return bool(harms.mean() > 2 * error)


def over_seeds(values: Iterable[float | None]) -> dict[str, Any]:
    """Mean and standard deviation of those that are there and finite, and how many they are.

    Example:
        >>> over_seeds([1.0, None, 3.0])["mean"], over_seeds([1.0])["sd"], over_seeds([])
        (2.0, None, {'mean': None, 'sd': None, 'n': 0})
    """
    there = [float(value) for value in values if value is not None and math.isfinite(value)]
    return {
        "mean": statistics.fmean(there) if there else None,
        "sd": statistics.stdev(there) if len(there) > 1 else None,
        "n": len(there),
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
