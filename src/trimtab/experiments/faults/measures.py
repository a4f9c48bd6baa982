"""What the parts of the experiment amount to: first alarms, when the loss leaves its twin, leads, false alarms.

Plain numbers in, plain numbers out; no torch. Steps are counted from the start of the run; a lead is in steps, and
positive where the alarm comes before the harm.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = [
    "LEAVE_LOOKS",
    "LEAVE_NATS",
    "LOSS_MECHANISM",
    "differences",
    "first_alarms",
    "lead_steps",
    "leave_step",
    "over_seeds",
    "scenario_row",
    "spread",
]

LEAVE_NATS = 0.02
"""The loss has left its twin where it is so much above it, on average over the last ``LEAVE_LOOKS`` looks. Our choice:
four times the deviation, over single looks, of the control whose error is unbiased, 0.005; the summary has the
``deviation`` of every scenario."""
LEAVE_LOOKS = 5
"""Looks that the average is over, where there are as many since the fault began."""

LOSS_MECHANISM = "loss"
"""The mechanism of the alarms on the loss itself, which the others are compared with."""

_NUMBERS = (
    "first_mechanism_alarm",
    "loss_alarm",
    "loss_leaves",
    "loss_leaves_by_0.05",
    "lead_steps",
    "loss_alarm_lead_steps",
    "extra_loss_at_end",
    "deviation",
)


def leave_step(apart: Sequence[tuple[int, float]], nats: float = LEAVE_NATS) -> int | None:
    """The first step at which the difference from the twin is ``nats`` on average over the looks before; None if never.

    Args:
        apart: Steps and differences since the fault began, as ``differences`` gives them.
        nats: How much is more than chance.

    Example:
        >>> leave_step([(310, 0.0), (320, 0.03), (330, 0.03), (340, 0.03)])
        330
    """
    for i, (step, _) in enumerate(apart):
        recent = [difference for _, difference in apart[max(0, i + 1 - LEAVE_LOOKS) : i + 1]]
        if math.fsum(recent) / len(recent) >= nats:
            return step
    return None


def differences(
    held_out: Iterable[Sequence[float | None]], twin: Iterable[Sequence[float | None]], start_step: int
) -> list[tuple[int, float]]:
    """How far a held-out loss is above its twin's, at each look after ``start_step``.

    A loss that is not finite, or null, is infinitely far.

    Args:
        held_out: Pairs of a step and a loss.
        twin: The same of the healthy twin.
        start_step: The last step before the fault.

    Example:
        >>> differences([(10, 2.0), (20, 2.5), (30, None)], [(10, 2.0), (20, 2.0), (30, 2.0)], 10)
        [(20, 0.5), (30, inf)]
    """
    of_twin = {pair[0]: pair[1] for pair in twin}
    return [
        (int(step), _difference(loss, of_twin[step]))
        for step, loss in held_out
        if step is not None and step > start_step
    ]


def first_alarms(alarms: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """The step of the first alarm on each metric, ``<monitor>/<metric>``; the earliest first.

    Example:
        >>> first_alarms([{"monitor": "m", "metric": "a", "step": 9}, {"monitor": "m", "metric": "a", "step": 7}])
        {'m/a': 7}
    """
    first: dict[str, int] = {}
    for alarm in sorted(alarms, key=lambda alarm: alarm["step"]):
        first.setdefault(f"{alarm['monitor']}/{alarm['metric']}", int(alarm["step"]))
    return first


def lead_steps(left: int | None, alarm: int | None) -> int | None:
    """Steps from an alarm to the loss leaving its twin; None where one of them never came.

    Example:
        >>> lead_steps(620, 451), lead_steps(620, 640), lead_steps(None, 451)
        (169, -20, None)
    """
    return None if left is None or alarm is None else left - alarm


def scenario_row(
    figures: Mapping[str, Any], twin: Mapping[str, Any], expected: Sequence[str], start_step: int
) -> dict[str, Any]:
    """What one scenario of one seed shows.

    Args:
        figures: Its part's figures, and what was said.
        twin: Those of the healthy twin.
        expected: Diagnoses that name what was injected.
        start_step: The last step before the fault.
    """
    of_mechanisms = [alarm for alarm in figures["alarms"] if alarm["mechanism"] != LOSS_MECHANISM]
    of_loss = [alarm for alarm in figures["alarms"] if alarm["mechanism"] == LOSS_MECHANISM]
    first = min((int(alarm["step"]) for alarm in of_mechanisms), default=None)
    loss_alarm = min((int(alarm["step"]) for alarm in of_loss), default=None)
    apart = differences(figures["held_out"], twin["held_out"], start_step)
    left = leave_step(apart)
    last = [difference for _, difference in apart[-LEAVE_LOOKS:]]
    each = [difference for _, difference in apart]
    return {
        "first_alarms": first_alarms([*figures["alarms"], *figures["notices"]]),
        "first_mechanism_alarm": first,
        "loss_alarm": loss_alarm,
        "loss_leaves": left,
        "loss_leaves_by_0.05": leave_step(apart, 0.05),
        "lead_steps": lead_steps(left, first),
        "loss_alarm_lead_steps": lead_steps(left, loss_alarm),
        "said_first": figures["said_first"],
        "said": figures["said"],
        "named": figures["said"] in expected if expected else None,
        "named_first": figures["said_first"] in expected if expected else None,
        "num_alarms": len(figures["alarms"]),
        "extra_loss_at_end": math.fsum(last) / len(last) if last else None,
        "deviation": math.sqrt(math.fsum(d * d for d in each) / len(each)) if each else None,
        "same_weights_as_twin": figures["digest"] == twin["digest"],
    }


def spread(values: Iterable[float | None]) -> dict[str, Any]:
    """Mean, standard deviation, least and greatest of those that are there and finite, and how many of how many are.

    Example:
        >>> spread([100, None, 140])["mean"], spread([100, None, 140])["num"], spread([])["mean"]
        (120.0, 2, None)
    """
    given = list(values)
    there = [float(value) for value in given if value is not None and math.isfinite(value)]
    return {
        "mean": statistics.fmean(there) if there else None,
        "sd": statistics.stdev(there) if len(there) > 1 else None,
        "least": min(there, default=None),
        "greatest": max(there, default=None),
        "num": len(there),
        "of": len(given),
    }


def over_seeds(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One scenario over its seeds.

    Args:
        rows: What ``scenario_row`` gave, one a seed.
    """
    metrics = sorted({metric for row in rows for metric in row["first_alarms"]})
    judged = [row["named"] for row in rows if row["named"] is not None]
    return {
        "first_alarms": {metric: spread(row["first_alarms"].get(metric) for row in rows) for metric in metrics},
        **{name: spread(row[name] for row in rows) for name in _NUMBERS},
        "said": [row["said"] for row in rows],
        "said_first": [row["said_first"] for row in rows],
        "num_named": sum(judged) if judged else None,
        "num_alarms": sum(row["num_alarms"] for row in rows),
        "num_seeds": len(rows),
    }


def _difference(loss: float | None, of_twin: float | None) -> float:
    if loss is None or not math.isfinite(loss):
        return math.inf
    return loss - of_twin if of_twin is not None and math.isfinite(of_twin) else -math.inf
