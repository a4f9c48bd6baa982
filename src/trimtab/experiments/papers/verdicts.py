"""Rules that turn the figures of a comparison into plain words. No word here is about a particular result.

Intervals are the 95% ones of ``compare.measures``: Student's t over the seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trimtab.experiments.compare.arms import read_arm
from trimtab.experiments.papers.repair import (
    difference_of,
    harm_of,
    is_natural,
    num_diverged,
    repair_of,
    twin_of,
)

__all__ = [
    "FULL",
    "SLIGHT",
    "Outcome",
    "Verdict",
    "budget_line",
    "direct_line",
    "harm_line",
    "outcome_of",
    "verdicts_of",
]

Outcome = Literal[
    "helped",
    "as_random",
    "below_random",
    "random_diverged",
    "untested",
    "damping",
    "slight",
    "not_told",
    "no_interval",
    "worse",
    "no_harm",
    "one_seed",
    "diverged",
    "unknown",
]
"""What came of an arm: it helped, and more than random recovery; it did, but is not told from random; it did, but less
than random; it did, and random recovery diverged; it did, and there is no random arm beside; it did, by damping alone;
its whole interval is next to nothing; not told from no repair at all; a share without an interval; worse than the
low-cost path; there was nothing to repair; one seed, so that nothing is told; a loss diverged; no figure."""

SLIGHT = 0.05
"""An interval that lies within this share on both sides of 0 is next to nothing."""

FULL = 0.5
"""From this share of steps with a full budget on, that is told."""

_OF_OUTCOME: Mapping[Outcome, str] = {
    "helped": "It helped, more than as many units at random.",
    "as_random": "It helped, but is not told from as many units at random.",
    "below_random": "It helped, but less than as many units at random.",
    "random_diverged": "It helped; the arm with as many units at random has no figure to set beside it: it diverged.",
    "untested": "It helped; no arm with as many units at random is beside it.",
    "damping": "It helped against the low-cost path. It recovers nothing; it only scales gradients back.",
    "slight": "That is next to nothing.",
    "not_told": "Not told from no repair: its interval includes 0.",
    "no_interval": "Nothing is told: the harm is too uncertain for an interval of the share.",
    "worse": "It did harm: it is worse than the low-cost path alone.",
    "no_harm": "There was no harm to repair that these seeds tell.",
    "one_seed": "One seed has no interval: nothing is told by it.",
    "diverged": "No share: a loss diverged.",
    "unknown": "No figure: an arm that is needed is missing.",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one arm.

    Args:
        arm: The arm, as written.
        title: What it is called.
        outcome: See ``Outcome``.
        share: Repaired share; None where there is none.
        interval: Its interval.
        random: By what share of the harm its loss lies below that of as many units at random, with the interval.
        diverged: On how many seeds each arm that matters diverged, in words; empty where none did.
    """

    arm: str
    title: str
    outcome: Outcome
    share: float | None = None
    interval: Sequence[float] | None = None
    random: tuple[float, Sequence[float]] | None = None
    diverged: str = ""

    @property
    def sentence(self) -> str:
        """In words.

        Example:
            >>> Verdict("gnmr", "GNMR", "worse", -0.2, (-0.3, -0.1)).sentence
            'GNMR: repaired -20% (-30 to -10). It did harm: it is worse than the low-cost path alone.'
        """
        figures = ""
        if self.share is not None and self.outcome != "no_harm":
            figures = f" repaired {_share_text(self.share, self.interval)}"
            if self.random is not None:
                figures += f"; against random {_points_more(*self.random)}"
            figures += "."
        tail = f" Diverged: {self.diverged}." if self.diverged else ""
        return f"{self.title}:{figures} {_OF_OUTCOME[self.outcome]}{tail}"


def outcome_of(
    found: Mapping[str, Any] | None,
    over_random: Mapping[str, Any] | None = None,
    *,
    num_seeds: int,
    random_diverged: bool = False,
    only_damps: bool = False,
) -> Outcome:
    """What came of an arm, by its repair and by how it stands to its twin.

    Args:
        found: See ``measures.repair``; None where an arm that it needs is missing.
        over_random: ``measures.difference`` of the losses of as many units at random and of the arm; None without them.
        num_seeds: Of the comparison.
        random_diverged: Whether a loss of as many units at random is no number.
        only_damps: Whether the arm recovers nothing, so that random recovery is nothing to set beside it.

    Example:
        >>> arm = {"did_harm": True, "share": 0.8, "interval": [0.6, 0.9]}
        >>> outcome_of(arm, num_seeds=3), outcome_of(arm, {"interval": [0.1, 0.5]}, num_seeds=3)
        ('untested', 'helped')
        >>> outcome_of(arm, {"interval": [-0.1, 0.5]}, num_seeds=3), outcome_of(arm, num_seeds=3, only_damps=True)
        ('as_random', 'damping')
    """
    if found is None:
        return "unknown"
    if any((found.get("num_diverged") or {}).values()):
        return "diverged"
    if num_seeds < 2:
        return "one_seed"
    if found["did_harm"] is None:
        return "unknown"
    if not found["did_harm"]:
        return "no_harm"
    if found["share"] is None or found["interval"] is None:
        return "no_interval"
    low, high = found["interval"]
    if low > -SLIGHT and high < SLIGHT:
        return "slight"
    if high < 0:
        return "worse"
    if low <= 0:
        return "not_told"
    return "damping" if only_damps else _beside_random(over_random, random_diverged)


def _beside_random(over_random: Mapping[str, Any] | None, diverged: bool) -> Outcome:
    if diverged:
        return "random_diverged"
    if over_random is None or over_random["interval"] is None:
        return "untested"
    low, high = over_random["interval"]
    return "helped" if low > 0 else "below_random" if high < 0 else "as_random"


def verdicts_of(comparison: Mapping[str, Any], arms: Sequence[str]) -> list[Verdict]:
    """What came of each of ``arms`` that was run."""
    return [_verdict(comparison, arm) for arm in arms if arm in comparison["arms"]]


def _verdict(comparison: Mapping[str, Any], arm: str) -> Verdict:
    found, twin = repair_of(comparison, arm), twin_of(comparison, arm)
    kind = read_arm(arm).kind
    over = None if twin is None else difference_of(comparison, twin, arm)
    lost = 0 if twin is None else num_diverged(comparison, twin)
    outcome = outcome_of(
        found,
        over,
        num_seeds=len(comparison["seeds"]),
        random_diverged=lost > 0,
        only_damps=kind.scores_decide and not kind.has_budget,
    )
    beside = None
    if over is not None and not lost and over["mean"] is not None and over["interval"] is not None:
        beside = (over["mean"], over["interval"])
    share, interval = (None, None) if found is None else (found["share"], found["interval"])
    diverged = ""
    if outcome == "diverged" and found is not None:
        diverged = _diverged_text(comparison, found["num_diverged"])
    elif outcome == "random_diverged":
        diverged = f"it, on {lost} of {len(comparison['seeds'])} seeds"
    return Verdict(arm, comparison["arms"][arm]["title"], outcome, share, interval, beside, diverged)


def _diverged_text(comparison: Mapping[str, Any], counts: Mapping[str, int]) -> str:
    clean = "the unquantized model" if is_natural(comparison) else "the low-cost path without faults"
    names = {"low": "the low-cost path", "clean": clean, "arm": "this arm"}
    num_seeds = len(comparison["seeds"])
    return ", ".join(f"{names[key]} on {count} of {num_seeds} seeds" for key, count in counts.items() if count)


def harm_line(comparison: Mapping[str, Any]) -> str:
    """What the faults, or the low-cost path by itself, cost."""
    harm = harm_of(comparison)
    if harm is None:
        return "What it cost is not known: an arm that would tell is missing."
    if any(harm["num_diverged"].values()):
        return f"What it cost has no figure. Diverged: {_diverged_text(comparison, harm['num_diverged'])}."
    if harm["mean"] is None:
        return "What it cost is not known: no seed has a figure."
    cause = "The low-cost path cost" if is_natural(comparison) else "The faults cost the low-cost path"
    beside = "the unquantized model" if is_natural(comparison) else "the same without them"
    figures = f"{cause} {harm['mean']:.4f} nats a token over {beside}"
    if harm["num_seeds"] == 1:
        return f"{figures} (one seed: whether that is more than chance is not known)."
    interval = harm["interval"]
    around = "" if interval is None else f"; 95% interval {interval[0]:.4f} to {interval[1]:.4f}"
    figures += f" ({harm['num_seeds']} seeds, from {harm['least']:.4f} to {harm['greatest']:.4f}{around})"
    if harm["did_harm"]:
        return f"{figures}."
    why = (
        "it is not above 0 on every seed"
        if harm["least"] is not None and harm["least"] <= 0
        else "it is no more than twice its standard error"
    )
    return f"{figures}: **no harm to repair** that these seeds tell, since {why}."


def budget_line(comparison: Mapping[str, Any], arm: str) -> str | None:
    """That the budget was full for much of the run; None where it was not."""
    figures = comparison["arms"].get(arm, {})
    full = (figures.get("full_share") or {}).get("mean")
    # A set that is fixed is full by its nature.
    if full is None or full < FULL or not figures["scores_decide"]:
        return None
    title = comparison["arms"][arm]["title"]
    return f"{title}: the budget was full in {full:.0%} of the steps; how often a unit was left out is not counted."


def direct_line(comparison: Mapping[str, Any], gnmr: str, direct: str | None) -> str | None:
    """Whether the arm with the channel error lost less than GNMR's, seed by seed; None where nothing can be said."""
    if direct is None or direct not in comparison["arms"] or gnmr not in comparison["arms"]:
        return None
    titles = [comparison["arms"][arm]["title"] for arm in (direct, gnmr)]
    lost = [num_diverged(comparison, arm) for arm in (direct, gnmr)]
    if any(lost):
        num_seeds = len(comparison["seeds"])
        pairs = zip(titles, lost, strict=True)
        said = ", ".join(f"{title} on {count} of {num_seeds} seeds" for title, count in pairs if count)
        return f"{titles[0]} beside {titles[1]}: no figure. Diverged: {said}."
    over = difference_of(comparison, gnmr, direct)
    if over["interval"] is None or over["mean"] is None:
        return None
    low, high = over["interval"]
    told = (
        "With the channel error more was repaired than by gradient norms alone."
        if low > 0
        else "With the channel error less was repaired than by gradient norms alone."
        if high < 0
        else "Neither is told to repair more."
    )
    return f"{titles[0]} against {titles[1]}: {_points_more(over['mean'], over['interval'])}. {told}"


def _points_more(mean: float, interval: Sequence[float]) -> str:
    """A positive figure is more of the harm repaired.

    Example:
        >>> _points_more(0.5, (0.25, 0.75))
        '50 points more (25 to 75)'
    """
    return f"{100 * mean:.0f} points more ({100 * interval[0]:.0f} to {100 * interval[1]:.0f})"


def _share_text(share: float, interval: Sequence[float] | None) -> str:
    return f"{share:.0%}" + (f" ({100 * interval[0]:.0f} to {100 * interval[1]:.0f})" if interval else "")
