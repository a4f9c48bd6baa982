"""A controller's state as plain values that survive JSON, keyed by unit name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from trimtab.errors import ConfigError, verbatim

__all__ = ["VERSION", "ControllerMemory", "LoadReport", "UnitMemory"]

VERSION = 1
"""Version of the state's form; a higher one is refused."""

_REMEDY = "Pass what state_dict() of a controller returned."

_IF_SEEN = {"error_seen": ("error_seen", "error_mean"), "amax_seen": ("amax_seen", "amax_mean")}
"""Entries that are kept only where something was seen, by the one that counts it."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load matched by name and what it did not.

    Attributes:
        new: Units of the controller that the state does not know; they start fresh.
        gone: Units of the state that the controller does not have; they are dropped.
    """

    new: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()


@dataclass(slots=True)
class UnitMemory:
    """All that is remembered of one unit.

    Attributes:
        seen: Observations, burn-in included.
        entered: Norms that entered the history.
        mean: Historical mean; 0 = no history.
        queue: Recent GNMR values, oldest first.
        history: Recent norms, oldest first; only a "window" history has them.
        lock: Further decisions in which the unit stays a candidate.
        active: Whether the unit is on the recovery path.
        error_seen: Channel errors that were finite and above 0, burn-in included; 0 unless they are judged by history.
        error_mean: Exponential mean of channel errors; 0 = no history.
        amax_seen: Amaxes that were finite and above 0, burn-in included; 0 unless they are judged.
        amax_mean: Exponential mean of amaxes; 0 = no history.
    """

    seen: int = 0
    entered: int = 0
    mean: float = 0.0
    queue: list[float] = field(default_factory=list)
    history: list[float] = field(default_factory=list)
    lock: int = 0
    active: bool = False
    error_seen: int = 0
    error_mean: float = 0.0
    amax_seen: int = 0
    amax_mean: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """The entry as plain values; what is remembered of channel errors and amaxes only where something is."""
        values = asdict(self)
        left_out = {key for count, keys in _IF_SEEN.items() if not values[count] for key in keys}
        return {key: value for key, value in values.items() if key not in left_out}

    @classmethod
    def from_dict(cls, name: str, values: Any) -> UnitMemory:
        """Read one unit's entry.

        Raises:
            ConfigError: when it is not one.
        """
        if not isinstance(values, Mapping):
            raise _no_state(f"units[{name!r}]", values, "the state of a unit is a mapping.")
        values = {"error_seen": 0, "error_mean": 0.0, "amax_seen": 0, "amax_mean": 0.0, **values}
        for item in fields(cls):
            if item.name not in values:
                raise _no_state(f"units[{name!r}].{item.name}", verbatim("(missing)"), "every unit has one.")
        for key in ("seen", "entered", "lock", "error_seen", "amax_seen"):
            _check_count(f"units[{name!r}].{key}", values[key])
        for key in ("mean", "error_mean", "amax_mean"):
            _check_number(f"units[{name!r}].{key}", values[key])
        for key in ("queue", "history"):
            if not isinstance(values[key], Sequence) or isinstance(values[key], str):
                raise _no_state(f"units[{name!r}].{key}", values[key], "it is a list of numbers.")
            for value in values[key]:
                _check_number(f"units[{name!r}].{key}", value)
        if not isinstance(values["active"], bool):
            raise _no_state(f"units[{name!r}].active", values["active"], "it is true or false.")
        return cls(
            seen=int(values["seen"]),
            entered=int(values["entered"]),
            mean=float(values["mean"]),
            queue=[float(value) for value in values["queue"]],
            history=[float(value) for value in values["history"]],
            lock=int(values["lock"]),
            active=values["active"],
            error_seen=int(values["error_seen"]),
            error_mean=float(values["error_mean"]),
            amax_seen=int(values["amax_seen"]),
            amax_mean=float(values["amax_mean"]),
        )


@dataclass(frozen=True, slots=True)
class ControllerMemory:
    """The state of a controller: its step, the thresholds last in force, and every unit's memory by name."""

    step: int
    alpha: float
    beta: float
    units: dict[str, UnitMemory]

    def to_dict(self) -> dict[str, Any]:
        """The state as plain values. Every float is finite, so ``json.dumps(..., allow_nan=False)`` takes it."""
        units = {name: memory.to_dict() for name, memory in self.units.items()}
        return {"version": VERSION, "step": self.step, "alpha": self.alpha, "beta": self.beta, "units": units}

    @classmethod
    def from_dict(cls, state: Any) -> ControllerMemory:
        """Read a state back.

        Raises:
            ConfigError: when it is no state of a controller, or one of a newer version.
        """
        if not isinstance(state, Mapping):
            raise _no_state("state", verbatim(type(state).__name__), "the state of a controller is a mapping.")
        for key in ("version", "step", "alpha", "beta", "units"):
            if key not in state:
                raise _no_state(f"state.{key}", verbatim("(missing)"), "every state of a controller has it.")
        if state["version"] != VERSION:
            raise _no_state("state.version", state["version"], f"this version of trimtab reads version {VERSION}.")
        _check_count("state.step", state["step"])
        for key in ("alpha", "beta"):
            _check_number(f"state.{key}", state[key])
            if not state[key] > 0:
                raise _no_state(f"state.{key}", state[key], "a threshold is above 0.")
        if not isinstance(state["units"], Mapping):
            raise _no_state("state.units", state["units"], "it is a mapping from unit names to their state.")
        units = {name: UnitMemory.from_dict(name, values) for name, values in state["units"].items()}
        return cls(int(state["step"]), float(state["alpha"]), float(state["beta"]), units)

    def match(self, names: Iterable[str]) -> tuple[list[UnitMemory], LoadReport]:
        """The memory of each of ``names``, fresh where there is none, and what did not match."""
        names = list(names)
        new = tuple(name for name in names if name not in self.units)
        present = set(names)
        gone = tuple(name for name in self.units if name not in present)
        return [self.units.get(name) or UnitMemory() for name in names], LoadReport(new, gone)


def _no_state(setting: str, given: object, allowed: str) -> ConfigError:
    return ConfigError(setting, given, allowed, _REMEDY)


def _check_count(setting: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _no_state(setting, value, "it is an int of 0 or more.")


def _check_number(setting: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise _no_state(setting, value, "it is a finite number of 0 or more.")
