"""Rules that turn the figures of a comparison into plain words. No word here is about a particular result.

An interval is that of ``compare.measures.repair``: the middle 95% over resampled seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trimtab.experiments.papers.repair import harm_of, is_natural, repair_of, twin_of

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

Outcome = Literal["helped", "as_random", "untested", "slight", "not_told", "worse", "no_harm", "one_seed", "unknown"]
"""What came of an arm: it helped, and more than random recovery; it did, but is not told from random; it did, and there
is no random arm beside; its whole interval is next to nothing; not told from no repair at all; worse than the low-cost
path; there was nothing to repair; one seed, so that nothing is told; no figure."""

SLIGHT = 0.05
"""An interval that lies within this share on both sides of 0 is next to nothing."""

FULL = 0.5
"""From this share of steps with a full budget on, the budget is said to bind."""

_OF_OUTCOME: Mapping[Outcome, str] = {
    "helped": "It helped, more than as many units at random.",
    "as_random": "It helped, but is not told from as many units at random.",
    "untested": "It helped; no arm with as many units at random is beside it.",
    "slight": "That is next to nothing.",
    "not_told": "Not told from no repair: its interval includes 0.",
    "worse": "It did harm: it is worse than the low-cost path alone.",
    "no_harm": "There was no harm to repair.",
    "one_seed": "One seed has no interval: nothing is told by it.",
    "unknown": "No figure: a loss was no number, or an arm that is needed is missing.",
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
        random: Share and interval of the arm with as many units at random.
    """

    arm: str
    title: str
    outcome: Outcome
    share: float | None = None
    interval: Sequence[float] | None = None
    random: tuple[float, Sequence[float]] | None = None

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
                figures += f"; at random {_share_text(*self.random)}"
            figures += "."
        return f"{self.title}:{figures} {_OF_OUTCOME[self.outcome]}"


def outcome_of(found: Mapping[str, Any] | None, random: Mapping[str, Any] | None) -> Outcome:
    """By an arm's repair, and that of the arm with as many units at random.

    Example:
        >>> arm = {"did_harm": True, "share": 0.8, "interval": [0.6, 0.9]}
        >>> outcome_of(arm, None), outcome_of(arm, arm | {"interval": [-0.1, 0.5]}), outcome_of(arm, arm)
        ('untested', 'helped', 'as_random')
    """
    if found is None or not found.get("num_seeds", 1):
        return "unknown"
    if not found["did_harm"]:
        return "no_harm"
    if found["share"] is None:
        return "unknown"
    if found["interval"] is None:
        return "one_seed"
    low, high = found["interval"]
    if low > -SLIGHT and high < SLIGHT:
        return "slight"
    if high < 0:
        return "worse"
    if low <= 0:
        return "not_told"
    if random is None or random["interval"] is None:
        return "untested"
    return "helped" if random["interval"][1] < low else "as_random"


def verdicts_of(comparison: Mapping[str, Any], arms: Sequence[str]) -> list[Verdict]:
    """What came of each of ``arms`` that was run."""
    return [_verdict(comparison, arm) for arm in arms if arm in comparison["arms"]]


def _verdict(comparison: Mapping[str, Any], arm: str) -> Verdict:
    found, twin = repair_of(comparison, arm), twin_of(comparison, arm)
    random = None if twin is None else repair_of(comparison, twin)
    beside = None
    if random is not None and random["share"] is not None and random["interval"] is not None:
        beside = (random["share"], random["interval"])
    share, interval = (None, None) if found is None else (found["share"], found["interval"])
    return Verdict(arm, comparison["arms"][arm]["title"], outcome_of(found, random), share, interval, beside)


def harm_line(comparison: Mapping[str, Any]) -> str:
    """What the faults, or the low-cost path by itself, cost."""
    harm = harm_of(comparison)
    if harm is None or harm["mean"] is None:
        return "What it cost is not known: an arm that would tell is missing, or a loss was no number."
    cause = "The low-cost path cost" if is_natural(comparison) else "The faults cost the low-cost path"
    beside = "the unquantized model" if is_natural(comparison) else "the same without them"
    count = "one seed" if harm["num_seeds"] == 1 else f"{harm['num_seeds']} seeds"
    spread = "" if harm["num_seeds"] == 1 else f", from {harm['least']:.4f} to {harm['greatest']:.4f}"
    figures = f"{cause} {harm['mean']:.4f} nats a token over {beside} ({count}{spread})"
    if harm["did_harm"]:
        return f"{figures}."
    return f"{figures}: **no harm to repair**, since that is no more than twice its standard error."


def budget_line(comparison: Mapping[str, Any], arm: str) -> str | None:
    """That the budget was full for much of the run; None where it was not."""
    figures = comparison["arms"].get(arm, {})
    full = (figures.get("full_share") or {}).get("mean")
    # A set that is fixed is full by its nature.
    if full is None or full < FULL or not figures["scores_decide"]:
        return None
    title = comparison["arms"][arm]["title"]
    return f"{title}: the budget was full in {full:.0%} of the steps, so that it decided which units were left out."


def direct_line(comparison: Mapping[str, Any], gnmr: str, direct: str | None) -> str | None:
    """Whether the channel error repaired more than GNMR did; None where there is nothing to say."""
    if direct is None or direct not in comparison["arms"] or gnmr not in comparison["arms"]:
        return None
    ours, theirs = repair_of(comparison, direct), repair_of(comparison, gnmr)
    if ours is None or theirs is None or ours["interval"] is None or theirs["interval"] is None:
        return None
    if ours["interval"][0] > theirs["interval"][1]:
        return "With the channel error more was repaired than by gradient norms alone."
    if theirs["interval"][0] > ours["interval"][1]:
        return "With the channel error less was repaired than by gradient norms alone."
    return "With the channel error or without: the intervals overlap, and neither is told to repair more."


def _share_text(share: float, interval: Sequence[float] | None) -> str:
    return f"{share:.0%}" + (f" ({100 * interval[0]:.0f} to {100 * interval[1]:.0f})" if interval else "")
