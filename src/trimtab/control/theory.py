"""What the theory of recovery computes: the gap of a unit, the oracle, what a policy captures, bounds, calibration.

T: steps, U: units. NumPy alone; nothing here takes part in a decision.

Source: Kong et al. 2026, section 4, appendices C and D.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trimtab.control.policies.scored import greatest
from trimtab.control.policy import is_real, whole_number
from trimtab.errors import ConfigError, verbatim

__all__ = [
    "Capture",
    "alpha_for_false_trigger_rate",
    "capture",
    "memory_bound",
    "oracle_set",
    "penalty",
    "recovery_gap",
]


def penalty(eta: ArrayLike, G: ArrayLike, mu: ArrayLike, L: ArrayLike, Gamma: ArrayLike, v: ArrayLike) -> Any:
    """What a perturbed gradient may cost of a step's descent: ``eta*G*mu + L*eta^2/2*Gamma*v``.

    The first term is bias against the gradient, the second one the noise that smoothness lets through.

    Args:
        eta: Learning rate.
        G: Norm of the gradient, or a bound of it.
        mu: Norm of the mean perturbation.
        L: Smoothness of the loss.
        Gamma: Factor of the second moment in the bound.
        v: Second moment of the perturbation, the mean of its squared norm. v >= mu^2.

    Returns:
        The penalty, of the common shape of the arguments; a number of NumPy where all are numbers.

    Source: Kong et al. 2026, section 4.

    Example:
        >>> float(penalty(eta=0.1, G=2.0, mu=0.0, L=1.0, Gamma=1.0, v=0.0))
        0.0
        >>> bool(penalty(0.1, 2.0, 0.5, 1.0, 1.0, 0.25) > penalty(0.1, 2.0, 0.0, 1.0, 1.0, 0.25))
        True
    """
    eta, G, mu, L, Gamma, v = (np.asarray(value, dtype=np.float64) for value in (eta, G, mu, L, Gamma, v))
    return eta * G * mu + L * eta**2 / 2 * Gamma * v


def recovery_gap(low: ArrayLike, high: ArrayLike) -> Any:
    """The penalty that recovery saves a unit: that of the low-cost path minus that of the recovery path.

    Example:
        >>> recovery_gap([3.0, 1.0], [1.0, 2.0]).tolist()
        [2.0, -1.0]
    """
    return np.asarray(low, dtype=np.float64) - np.asarray(high, dtype=np.float64)


def oracle_set(gaps: ArrayLike, max_active: int) -> NDArray[np.bool_]:
    """The ``max_active`` largest positive gaps of each step; of equal ones, those of the units nearest the loss.

    Args:
        gaps: Recovery gaps, shape (U,) or (T, U). NaN = not known, never chosen.
        max_active: The budget. >= 0.

    Returns:
        bool, of the shape of ``gaps``.

    Raises:
        ConfigError: when ``max_active`` is no int of 0 or more, or a gap is infinite.

    Source: Kong et al. 2026, section 4; the order of ties is that of ``Controller``.

    Example:
        >>> oracle_set([2.0, -1.0, 2.0, 0.5], max_active=2).tolist()
        [True, False, True, False]
    """
    budget = whole_number("max_active", max_active, 0, "a count of units is 0 or more.")
    values = _gaps(gaps)
    rows = np.atleast_2d(values)
    everyone = np.ones(rows.shape[1], dtype=np.bool_)
    chosen = np.array([greatest(row, everyone, budget) for row in rows], dtype=np.bool_)
    return chosen.reshape(values.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """How much of what the oracle would have recovered a policy did recover."""

    per_step: NDArray[np.float64]
    """Of each step, at most 1 within the budget. Where no gap is positive: 1, for nothing was missed, or -inf where
    units with a negative gap were recovered. (T,)"""
    of_run: float
    """Of the whole run: the gaps recovered in all steps over the oracle's. Steps without a positive gap only count by
    what was lost in them. Where no step has one, as in a single step."""


def capture(gaps: ArrayLike, active: ArrayLike, max_active: int) -> Capture:
    """The gap that a policy recovered over the gap that the oracle would have, under the same budget.

    Args:
        gaps: Recovery gaps, shape (U,) or (T, U), in the step that the decision routes. NaN = not known, counts as 0.
        active: The active sets, bool, of the same shape.
        max_active: The oracle's budget; that of the policy, for a fair comparison. >= 0.

    Returns:
        It for each step and for the run.

    Raises:
        ConfigError: when the shapes differ, a gap is infinite, or ``max_active`` is no int of 0 or more.

    Source: Kong et al. 2026, section 4; what holds where the oracle has nothing to recover is ours.

    Example:
        >>> found = capture([[3.0, 1.0], [0.0, -1.0]], [[False, True], [False, False]], max_active=1)
        >>> found.per_step.round(3).tolist(), round(found.of_run, 3)
        ([0.333, 1.0], 0.333)
    """
    values, chosen = np.atleast_2d(_gaps(gaps)), np.atleast_2d(np.asarray(active, dtype=np.bool_))
    if values.shape != chosen.shape:
        shapes = verbatim(f"{chosen.shape}")
        allowed = f"the gaps have shape {values.shape}."
        raise ConfigError("active", shapes, allowed, "Pass one flag for each unit and step.")
    known = np.where(np.isnan(values), 0.0, values)
    recovered = np.where(chosen, known, 0.0).sum(axis=1)
    best = np.where(oracle_set(values, max_active), known, 0.0).sum(axis=1)
    return Capture(
        np.array([_share(*pair) for pair in zip(recovered, best, strict=True)]), _share(recovered.sum(), best.sum())
    )


def memory_bound(saved_elements: ArrayLike, low_bits: float, high_bits: float, max_active: int) -> float:
    """Bytes that recovery adds to the activations kept for backward, at most, whichever units are active.

    ``dM <= (high_bits - low_bits)/8 * sum of the max_active largest saved_elements``. Scales are not counted.

    Args:
        saved_elements: Activation elements that each unit keeps, shape (U,).
        low_bits: Bits an element on the low-cost path.
        high_bits: Bits an element on the recovery path. >= ``low_bits``.
        max_active: The budget. >= 0.

    Raises:
        ConfigError: when ``max_active`` is no int of 0 or more, ``high_bits`` is below ``low_bits``, or a unit keeps
            fewer than 0 elements.

    Source: Kong et al. 2026, appendices C and D.

    Example:
        >>> memory_bound([100, 400, 200], low_bits=4, high_bits=8, max_active=2)
        300.0
    """
    budget = whole_number("max_active", max_active, 0, "a count of units is 0 or more.")
    if not high_bits >= low_bits >= 0:
        allowed = f"the recovery path keeps no fewer bits than the low-cost path ({low_bits!r})."
        raise ConfigError("high_bits", high_bits, allowed, "Swap them, or check both.")
    elements = np.sort(np.asarray(saved_elements, dtype=np.float64).ravel())
    if not (elements >= 0).all():
        raise ConfigError("saved_elements", verbatim("(below 0)"), "a count is 0 or more.", "Pass elements a unit.")
    return float((high_bits - low_bits) / 8 * elements[len(elements) - min(budget, len(elements)) :].sum())


def alpha_for_false_trigger_rate(gnmr: ArrayLike, rate: float, confidence: float | None = None) -> float:
    """The alpha above which GNMR comes in a healthy run at most as often as wanted: a threshold's calibration.

    Without ``confidence`` it is the order statistic whose exceedance by a further value has a probability of at most
    ``rate``, the records of all such runs taken together: rank ceil((n+1)(1-rate)) of n. With it, the smallest one
    of which that holds for this very record with that confidence: P(Binomial(n, rate) <= k) <= 1 - confidence, k
    values being above it. Both hold whatever the distribution, for values that are exchangeable. Those of one run
    are not quite: neighbouring steps and units move together, so that n values say less than n independent ones would,
    and the confidence is that of fewer. Leave out the first steps, whose history is short.

    Args:
        gnmr: GNMR values of a healthy record, of any shape. NaN = not observed, left out.
        rate: Wanted share of observed unit-steps with GNMR > alpha. 0 < rate < 1.
        confidence: With which the rate is to hold. 0 < confidence < 1, None for on average.

    Returns:
        Alpha, one of the values.

    Raises:
        ConfigError: when a setting is out of its range, a value is not that of a healthy record, or there are too few
            for the rate: with the number that is needed.

    Source: Kong et al. 2026, Theorem 2; order statistics in place of its distribution, and the confidence, are ours.

    Example:
        >>> healthy = np.linspace(0.5, 1.5, 1001)
        >>> alpha = alpha_for_false_trigger_rate(healthy, rate=0.01)
        >>> bool(np.mean(healthy > alpha) <= 0.01)
        True
        >>> alpha < alpha_for_false_trigger_rate(healthy, rate=0.01, confidence=0.95)
        True
    """
    for name, value in (("rate", rate), ("confidence", 0.5 if confidence is None else confidence)):
        if not is_real(value) or not 0 < value < 1:
            raise ConfigError(name, value, "it is a share above 0 and below 1.", "Set 0.01, or a confidence of 0.95.")
    values = np.asarray(gnmr, dtype=np.float64).ravel()
    values = np.sort(values[~np.isnan(values)])
    if not ((values > 0) & (values < math.inf)).all():
        allowed = "GNMR of a healthy record is finite and above 0."
        raise ConfigError("gnmr", verbatim("(failed values)"), allowed, "Leave out the steps of the fault.")
    n = len(values)
    above = math.floor((n + 1) * rate) - 1 if confidence is None else _most_above(n, rate, confidence)
    if above < 0:
        least = (
            math.ceil(1 / rate - 1) if confidence is None else math.ceil(math.log(1 - confidence) / math.log1p(-rate))
        )
        allowed = f"a rate of {rate:g} needs at least {least} values."
        raise ConfigError("gnmr", verbatim(f"({n} values)"), allowed, "Record more steps, or allow a higher rate.")
    return float(values[n - 1 - above])


def _gaps(gaps: ArrayLike) -> NDArray[np.float64]:
    values = np.asarray(gaps, dtype=np.float64)
    if values.ndim not in (1, 2) or np.isinf(values).any():
        given = verbatim(f"(shape {values.shape})")
        raise ConfigError("gaps", given, "gaps are finite or NaN, of shape (U,) or (T, U).", "Leave out the others.")
    return values


def _share(recovered: float, best: float) -> float:
    if best > 0:
        return float(recovered / best)
    return 1.0 if recovered >= 0 else -math.inf


def _most_above(n: int, rate: float, confidence: float) -> int:
    """The greatest k with P(Binomial(n, rate) <= k) <= 1 - confidence; -1 where there is none."""
    # Term by term in logarithms, for the first one of a long record is no double any more.
    log_term, total, k = n * math.log1p(-rate), 0.0, -1
    while k < n:
        total += math.exp(log_term)
        if total > 1 - confidence:
            break
        k += 1
        if k < n:
            log_term += math.log((n - k) / (k + 1)) + math.log(rate) - math.log1p(-rate)
    return k
