"""Thresholds from a healthy run: as sensitive as a wanted rate of false alarms allows.

Every alarm in a healthy run is false. So each rule is replayed over the recorded values, place by place, at ever less
sensitive thresholds, until it gives few enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trimtab.errors import ConfigError
from trimtab.monitors.alarms import AlarmRule, AlarmWatch, Reading
from trimtab.monitors.detectors import Above, AnyOf, Cusum, Detector, Floor, PeakDrop

__all__ = ["CalibratedRule", "Calibration", "ReadingsRecord", "calibrate", "poisson_upper_bound"]

LASTING_STEPS = 100
"""An alarm that lasts counts again after as many readings: while it is on, the rule is blind. Our choice."""
_GRID = 64
"""Thresholds tried between the most and the least sensitive one."""


class ReadingsRecord(Protocol):
    """A record, as calibration reads it: ``trimtab.trace.Run`` is one."""

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the run."""
        ...

    def readings(self, monitor: str, metric: str) -> tuple[NDArray[Any], NDArray[Any], tuple[str, ...]]:
        """Steps, values (steps, places) and names of places."""
        ...


class HasRules(Protocol):
    """A monitor, or anything else with a name and alarm rules."""

    name: str
    alarm_rules: Mapping[str, AlarmRule]


@dataclass(frozen=True, slots=True)
class CalibratedRule:
    """A rule with the threshold found for it.

    Args:
        rule: The rule.
        num_false: Alarms that it gives in the healthy run; one that lasts counts again every ``LASTING_STEPS``.
        upper_per_1000_steps: Upper confidence bound of its rate of false alarms, an exact Poisson one: with no alarm in
            n steps, about 3,000/n at 95% (the rule of three).
    """

    rule: AlarmRule
    num_false: int
    upper_per_1000_steps: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a healthy run says about alarm rules.

    Args:
        found: By monitor and metric.
        left_out: Why a metric has no rule here, by ``<monitor>/<metric>``.
        num_steps: Optimizer steps that all of it rests on.
        confidence: Of the bounds.
    """

    found: Mapping[str, Mapping[str, CalibratedRule]]
    left_out: Mapping[str, str]
    num_steps: int
    confidence: float

    def rules(self, monitor: str) -> dict[str, AlarmRule]:
        """The rules of a monitor by metric, to be its ``alarm_rules``."""
        return {metric: one.rule for metric, one in self.found.get(monitor, {}).items()}


def calibrate(
    record: ReadingsRecord,
    monitors: Iterable[HasRules],
    false_per_1000_steps: float,
    *,
    confidence: float = 0.95,
) -> Calibration:
    """Find the most sensitive threshold of each rule that keeps to a rate of false alarms in a healthy run.

    Only the threshold is searched: ``drop`` of PeakDrop, ``level`` of Floor and Above, ``limit`` of Cusum; the rest of
    a rule stays. The parts of AnyOf share the rate. What is found was replayed as it is; that a less sensitive
    threshold never gives more alarms is not assumed of the result, only of the search.

    A rate that the run kept to is no promise: the bound beside each rule is what these steps can show.

    Args:
        record: The record of a healthy run, opened. Its readings are float32, as the record keeps them.
        monitors: Whose rules to calibrate.
        false_per_1000_steps: The wanted rate, for each rule. Above 0.
        confidence: Of the upper bounds. Above 0, below 1.

    Raises: ConfigError: when a setting is out of its range, the record is too short to show an alarm at the wanted
        rate, or it holds no readings of these monitors.
    """
    if not 0 < false_per_1000_steps < math.inf:
        raise ConfigError(
            "false_per_1000_steps", false_per_1000_steps, "it is a rate above 0.", "Set 1.0, and record a long run."
        )
    if not 0 < confidence < 1:
        raise ConfigError("confidence", confidence, "it is a probability above 0 and below 1.", "Set 0.95.")
    num_steps = record.num_steps
    if num_steps * false_per_1000_steps < 1000:
        raise ConfigError(
            "record",
            f"{num_steps} steps",
            f"at {false_per_1000_steps:g} false alarms per 1,000 steps a healthy run this short shows none either way.",
            f"Record at least {math.ceil(1000 / false_per_1000_steps)} steps, or allow more false alarms.",
        )
    allowed = math.floor(num_steps * false_per_1000_steps / 1000)
    found: dict[str, dict[str, CalibratedRule]] = {}
    left_out: dict[str, str] = {}
    for monitor in monitors:
        for metric, rule in monitor.alarm_rules.items():
            if rule.level != "alarm":
                left_out[f"{monitor.name}/{metric}"] = "it gives notices, and no alarm"
                continue
            steps, values, places = record.readings(monitor.name, metric)
            if not len(steps):
                left_out[f"{monitor.name}/{metric}"] = "the record holds no readings of it"
                continue
            trace = _Trace(steps, np.asarray(values, dtype=np.float64), tuple(places))
            best = _calibrated(rule, trace, allowed)
            if best is None:
                left_out[f"{monitor.name}/{metric}"] = "every threshold gives more false alarms than wanted"
                continue
            num_false = trace.num_alarms(best)
            upper = 1000 * poisson_upper_bound(num_false, confidence) / num_steps
            found.setdefault(monitor.name, {})[metric] = CalibratedRule(best, num_false, upper)
    if not found and not any("more false" in reason for reason in left_out.values()):
        raise ConfigError(
            "record",
            ", ".join(left_out) or "no rule",
            "the record holds no readings of these monitors' rules.",
            "Record a healthy run with the same monitors attached.",
        )
    return Calibration(found, left_out, num_steps, confidence)


def poisson_upper_bound(num_events: int, confidence: float = 0.95) -> float:
    """The largest mean of a Poisson count that ``num_events`` or fewer is still likely enough for.

    Source: Garwood 1936; for no event it is the rule of three.

    Example:
        >>> round(poisson_upper_bound(0), 3), round(poisson_upper_bound(2), 3)
        (2.996, 6.296)
    """
    low, high = float(num_events), 10.0 + 10.0 * num_events - 10.0 * math.log(1 - confidence)
    for _ in range(200):
        middle = (low + high) / 2
        terms = [k * math.log(middle) - math.lgamma(k + 1) - middle if middle else 0.0 for k in range(num_events + 1)]
        likely = sum(math.exp(term) for term in terms) > 1 - confidence
        low, high = (middle, high) if likely else (low, middle)
    return high


@dataclass(frozen=True, slots=True)
class _Trace:
    """The recorded readings of one metric."""

    steps: NDArray[Any]
    values: NDArray[np.float64]
    places: tuple[str, ...]

    def num_alarms(self, rule: AlarmRule) -> int:
        """How many alarms ``rule`` gives along it, a lasting one counted again and again."""
        watch = AlarmWatch({"": {"": rule}})
        count, lasted = 0, -1
        for step, row in zip(self.steps, self.values, strict=True):
            judgement = watch.judge(int(step), {"": {"": Reading(self.places, row)}})
            if judgement.alarms:
                lasted = 0
            elif any(change.what == "ended" for change in judgement.changes):
                lasted = -1
            elif lasted >= 0:
                lasted += 1
            count += lasted >= 0 and lasted % LASTING_STEPS == 0
        return count


def _calibrated(rule: AlarmRule, trace: _Trace, allowed: int) -> AlarmRule | None:
    """The rule with the most sensitive threshold that gives at most ``allowed`` alarms; None when there is none."""
    if isinstance(rule.detector, AnyOf):
        share = allowed // len(rule.detector.detectors)
        parts = [_calibrated(replace(rule, detector=part), trace, share) for part in rule.detector.detectors]
        kept = [part.detector for part in parts if part is not None]
        whole = replace(rule, detector=AnyOf(*kept)) if kept else None
        return whole if whole is not None and trace.num_alarms(whole) <= allowed else None
    candidates, with_threshold = _thresholds(rule.detector, trace.values)
    rules = [replace(rule, detector=with_threshold(threshold)) for threshold in candidates]
    if not rules or trace.num_alarms(rules[-1]) > allowed:
        return None
    too_many, few_enough = -1, len(rules) - 1
    while few_enough - too_many > 1:
        middle = (too_many + few_enough) // 2
        if trace.num_alarms(rules[middle]) <= allowed:
            few_enough = middle
        else:
            too_many = middle
    return rules[few_enough]


def _thresholds(detector: Detector, values: NDArray[np.float64]) -> tuple[Sequence[float], Callable[[float], Detector]]:
    """Thresholds to try, the most sensitive first, and how to make a detector with one."""
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    if isinstance(detector, PeakDrop):
        return [i / 100 for i in range(5, 100)], lambda drop: replace(detector, drop=drop)
    if isinstance(detector, Floor):
        return np.linspace(high, low, _GRID).tolist(), lambda level: replace(detector, level=level)
    if isinstance(detector, Above):
        return np.linspace(low, high, _GRID).tolist(), lambda level: replace(detector, level=level)
    if isinstance(detector, Cusum):
        return np.geomspace(1.0, 1000.0, _GRID).tolist(), lambda limit: replace(detector, limit=limit)
    # Of one that is not ours it is not known what its threshold is: it is only counted.
    return [0.0], lambda _: detector
