"""False alarms and steps, counted: rates a monitor, with an exact Poisson upper bound. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trimtab.monitors.calibrate import poisson_upper_bound

__all__ = ["false_alarm_rates"]

CONFIDENCE = 0.95


def false_alarm_rates(
    runs: Sequence[tuple[Sequence[Mapping[str, Any]], int, Sequence[str]]],
) -> dict[str, dict[str, Any]]:
    """By metric, ``<monitor>/<metric>``, and for all of them together as ``"all"``.

    Args:
        runs: Of each run its alarms, its steps, and the metrics that it was judged by.

    Returns: Alarms, steps, alarms per 1,000 steps and the upper end of their one-sided 95% interval.

    Example:
        >>> rates = false_alarm_rates([([], 1000, ["m/a"]), ([{"monitor": "m", "metric": "a"}], 1000, ["m/a"])])
        >>> rates["m/a"]["per_1000_steps"], round(rates["m/a"]["upper_per_1000_steps"], 2)
        (0.5, 2.37)
    """
    metrics = list(dict.fromkeys(metric for _, _, judged in runs for metric in judged))
    rates = {}
    for metric in [*metrics, "all"]:
        num_steps = sum(steps for _, steps, judged in runs if metric == "all" or metric in judged)
        num_alarms = sum(
            metric in ("all", f"{alarm['monitor']}/{alarm['metric']}") for alarms, _, _ in runs for alarm in alarms
        )
        rates[metric] = {
            "alarms": num_alarms,
            "steps": num_steps,
            "per_1000_steps": 1000 * num_alarms / num_steps,
            "upper_per_1000_steps": 1000 * poisson_upper_bound(num_alarms, CONFIDENCE) / num_steps,
        }
    return rates
