"""Thresholds that change in the course of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from numbers import Integral, Real
from typing import Any

from trimtab.errors import ConfigError, nearest_names, verbatim

__all__ = ["SCHEDULES", "Threshold", "TwoStage", "schedule_from_dict", "schedule_to_dict", "threshold_at"]

Threshold = float | Callable[[int], float]
"""A threshold: a number, or a function of the optimizer step (the first update is step 1)."""


@dataclass(frozen=True)
class TwoStage:
    """One value for the first steps of a run, then another.

    Early norms are large, so that a full mean is too high later on; a lower second threshold makes up for it.

    Args:
        first: Value at steps 1 to ``switch_step``, that one included. > 0.
        then: Value at later steps. > 0.
        switch_step: Last optimizer step of the first stage. >= 0.

    Raises:
        ConfigError: when a value is not a finite number above 0, or ``switch_step`` is not an int of 0 or more.

    Source: Kong et al. 2026, section 5 (settings of the DeepSeek-style and LoRA runs).

    Example:
        >>> schedule = TwoStage(1.5, 1.1, switch_step=10)
        >>> schedule(10) == schedule.first, schedule(11) == schedule.then
        (True, True)
    """

    first: float
    then: float
    switch_step: int

    def __post_init__(self) -> None:
        for name in ("first", "then"):
            object.__setattr__(self, name, threshold_at(name, getattr(self, name), 1))
        given = self.switch_step
        if isinstance(given, bool) or not isinstance(given, Integral) or given < 0:
            raise ConfigError("switch_step", given, "it is an optimizer step, an int of 0 or more.", "Set such an int.")
        object.__setattr__(self, "switch_step", int(given))

    def __call__(self, step: int) -> float:
        """The value in force at ``step``."""
        return self.first if step <= self.switch_step else self.then


SCHEDULES: Mapping[str, type[TwoStage]] = {"two_stage": TwoStage}
"""Schedules that ``Policy.from_dict`` can rebuild, by their ``kind``."""


def threshold_at(setting: str, threshold: Threshold, step: int) -> float:
    """The value of ``threshold`` at ``step``.

    Args:
        setting: Name of the setting, for the message.
        threshold: A number or a function of the step.
        step: Optimizer step, the first is 1.

    Returns:
        A finite number above 0.

    Raises:
        ConfigError: when it is anything else, or the function raises.

    Example:
        >>> threshold_at("alpha", lambda step: 1 + 1 / step, 2)
        1.5
    """
    if not callable(threshold):
        if isinstance(threshold, bool) or not isinstance(threshold, Real) or not 0 < threshold < math.inf:
            allowed = "a threshold is a finite number above 0, or a function of the step that gives one."
            raise ConfigError(setting, threshold, allowed, "Set 1.5 for instance.")
        return float(threshold)
    given, remedy = verbatim(f"{threshold!r}"), "Make it return a finite number above 0 at every step."
    try:
        value = float(threshold(step))
    except Exception as error:
        allowed = f"the function raised {type(error).__name__} at step {step} ({error})."
        raise ConfigError(setting, given, allowed, remedy) from error
    if not 0 < value < math.inf:
        raise ConfigError(setting, given, f"the function gave {value!r} at step {step}.", remedy)
    return value


def schedule_to_dict(threshold: Threshold) -> Any:
    """``threshold`` as a JSON-able value: a number, a dict with a ``kind``, or the ``repr`` of a function.

    Example:
        >>> schedule = TwoStage(1.5, 1.1, switch_step=10)
        >>> schedule_from_dict("alpha", schedule_to_dict(schedule)) == schedule
        True
    """
    if not callable(threshold):
        return threshold
    if is_dataclass(threshold) and not isinstance(threshold, type):
        kind = next((kind for kind, known in SCHEDULES.items() if type(threshold) is known), type(threshold).__name__)
        values = {item.name: getattr(threshold, item.name) for item in fields(threshold)}
        if all(isinstance(value, bool | int | str) or _is_finite_float(value) for value in values.values()):
            return {"kind": kind, **values}
    return repr(threshold)


def schedule_from_dict(setting: str, value: Any) -> Any:
    """The inverse of ``schedule_to_dict``; what is no dict is returned as it is.

    Raises:
        ConfigError: when the ``kind`` or a key is unknown, or ``value`` is the ``repr`` of a function.
    """
    if isinstance(value, str):
        allowed = "a function cannot be read back from its name."
        raise ConfigError(setting, value, allowed, "Pass the function itself, a number, or a dict with a kind.")
    if not isinstance(value, Mapping):
        return value
    values = dict(value)
    kind = values.pop("kind", None)
    if kind not in SCHEDULES:
        near = nearest_names(str(kind), SCHEDULES) or sorted(SCHEDULES)
        raise ConfigError(f"{setting}.kind", kind, "no schedule has this kind.", f"Use {' or '.join(map(repr, near))}.")
    schedule = SCHEDULES[kind]
    known = [item.name for item in fields(schedule)]
    for key in values:
        if key not in known:
            near = nearest_names(str(key), known) or known
            raise ConfigError(f"{setting}.{key}", values[key], f"{kind} has no such setting.", f"Use {near[0]!r}.")
    for key in known:
        if key not in values:
            raise ConfigError(f"{setting}.{key}", verbatim("(missing)"), f"{kind} needs it.", f"Add {key!r}.")
    return schedule(**values)


def _is_finite_float(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)
