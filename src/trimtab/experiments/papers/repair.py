"""What the low-cost path cost, and how much of that an arm repaired, with faults and without. No torch here.

Under injected faults the cost is that of the faults: the low-cost path with them over the same without. Where there are
none it is the low-cost path's own: over the unquantized model on the same weights and data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trimtab.experiments.compare.arms import read_arm
from trimtab.experiments.compare.measures import difference, repair

__all__ = [
    "CLEAN",
    "LOW",
    "UNQUANTIZED",
    "difference_of",
    "harm_of",
    "is_natural",
    "losses_of",
    "num_diverged",
    "repair_of",
    "twin_of",
]

LOW, CLEAN, UNQUANTIZED = "static-low", "static-low-clean", "unquantized-clean"
"""The arms that harm is measured with."""


def is_natural(comparison: Mapping[str, Any]) -> bool:
    """Whether nothing is injected."""
    return bool(comparison["faults"] == "none")


def losses_of(comparison: Mapping[str, Any], arm: str) -> list[float]:
    """Validation loss in nats a token, seed by seed; NaN for one that is no number."""
    by_seed = comparison["arms"][arm]["by_seed"]
    losses = [by_seed[str(seed)]["val_loss"] for seed in comparison["seeds"]]
    return [math.nan if loss is None else loss for loss in losses]


def num_diverged(comparison: Mapping[str, Any], arm: str) -> int:
    """On how many seeds the arm's loss is no finite number."""
    return sum(not math.isfinite(loss) for loss in losses_of(comparison, arm))


def repair_of(comparison: Mapping[str, Any], arm: str) -> dict[str, Any] | None:
    """See ``trimtab.experiments.compare.measures.repair``; None where no arm says what the harm is."""
    arms = comparison["arms"]
    reference = UNQUANTIZED if is_natural(comparison) else CLEAN
    if arm in (LOW, reference, UNQUANTIZED) or LOW not in arms or reference not in arms:
        return None
    return repair(*(losses_of(comparison, one) for one in (LOW, reference, arm)))


def harm_of(comparison: Mapping[str, Any]) -> dict[str, Any] | None:
    """The mean harm, its interval, whether it is one, and its range over the seeds; None where no arm says what it is.

    Returns: mean and interval; did_harm, None where one seed or a loss that is no number leaves it open; least and
        greatest; num_seeds; num_diverged, by the arms "low" and "clean"; reference, the arm that it is over.
    """
    reference = UNQUANTIZED if is_natural(comparison) else CLEAN
    if LOW not in comparison["arms"] or reference not in comparison["arms"]:
        return None
    low, clean = losses_of(comparison, LOW), losses_of(comparison, reference)
    found = repair(low, clean, low)
    each = [a - b for a, b in zip(low, clean, strict=True) if math.isfinite(a - b)]
    return {
        "mean": found["mean_harm"],
        "interval": found["harm_interval"],
        "did_harm": found["did_harm"],
        "num_seeds": len(low),
        "num_diverged": {"low": num_diverged(comparison, LOW), "clean": num_diverged(comparison, reference)},
        "least": min(each, default=None),
        "greatest": max(each, default=None),
        "reference": reference,
    }


def difference_of(comparison: Mapping[str, Any], arm: str, other: str) -> dict[str, Any]:
    """By what share of the harm the loss of ``arm`` lies above that of ``other``; see ``measures.difference``."""
    reference = UNQUANTIZED if is_natural(comparison) else CLEAN
    known = LOW in comparison["arms"] and reference in comparison["arms"]
    between = [losses_of(comparison, one) for one in (LOW, reference)] if known else [[math.nan], [math.nan]]
    harms = [low - clean for low, clean in zip(*between, strict=True)]
    return difference(losses_of(comparison, arm), losses_of(comparison, other), harms)


def twin_of(comparison: Mapping[str, Any], arm: str) -> str | None:
    """The arm that recovered as many units in each step, but chosen at random; None where there is none.

    Example:
        >>> arms = {"gnmr": {}, "random": {}, "gnmr-paper@alpha=2.0": {}, "random@of=gnmr-paper,alpha=2.0": {}}
        >>> [twin_of({"arms": arms}, arm) for arm in ("gnmr", "gnmr-paper@alpha=2.0", "direct")]
        ['random', 'random@of=gnmr-paper,alpha=2.0', None]
    """
    return next((other for other in comparison["arms"] if read_arm(other).reference == arm), None)
