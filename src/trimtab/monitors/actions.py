"""What may be done about an alarm, for ``attach(on_alarm=[...])``; any callable ``(alarm, guard)`` will do as well.

An action is called while the step's decision is being taken, after the alarm is recorded. One that raises an exception
is off from then on, and says so once.

On several ranks the monitors' values may differ. An action whose ``needs_every_rank`` is True changes what all ranks
do; with one, the values are averaged over the ranks before they are judged, so that every rank acts alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from trimtab.errors import ConfigError
from trimtab.monitors.alarms import Alarm

__all__ = ["RaiseRisk", "StopTraining"]

_LAYER = re.compile(r"layer_(\d+)(?:/|$)")


@dataclass(frozen=True, slots=True)
class RaiseRisk:
    """Put units on the recovery path, within the budget: hold their risk up for some decisions.

    Args:
        units: Which units. None: those of the alarm's layers, where places are called ``layer_<i>`` and a unit's name
            has that number as a part, and all units otherwise. A filter ``f(unit_name) -> bool``. Or a mapping from
            the place to names of units; a place that it does not have raises none.
        risk: The risk; above 1 makes candidates of them. Under a budget the greatest risks go first.
        steps: For how many decisions, beginning with that of the step of the alarm.

    Raises: ConfigError: when a setting cannot be meant.

    Example:
        >>> RaiseRisk({"layer_0": ["layers.0.q_proj"]}, steps=5).risk
        2.0
    """

    needs_every_rank: ClassVar[bool] = True

    units: Mapping[str, Sequence[str]] | Callable[[str], bool] | None = None
    risk: float = 2.0
    steps: int = 10

    def __post_init__(self) -> None:
        if self.units is not None and not callable(self.units) and not isinstance(self.units, Mapping):
            raise ConfigError(
                "units",
                self.units,
                "it is None, a filter f(unit_name), or a mapping from places to names of units.",
                "Pass {'layer_0': ['layers.0.q_proj']}, say.",
            )
        if not self.risk > 0:
            raise ConfigError("risk", self.risk, "a risk is a number above 0.", "Set 2.0; above 1 is risky.")
        if self.steps < 1:
            raise ConfigError("steps", self.steps, "it counts decisions, 1 or more.", "Set 10, say.")

    def __call__(self, alarm: Alarm, guard: Any) -> None:
        """Raise the risk of the alarm's units."""
        guard.raise_risk(self.units_of(alarm.places, guard.units), risk=self.risk, steps=self.steps)

    def units_of(self, places: Sequence[str], units: Sequence[str]) -> list[str]:
        """The names, of ``units`` unless a mapping names others, whose risk an alarm at ``places`` raises.

        Example:
            >>> RaiseRisk().units_of(["layer_1/head_0"], ["layers.0.q_proj", "layers.1.q_proj"])
            ['layers.1.q_proj']
        """
        if isinstance(self.units, Mapping):
            named = (self.units.get(place, ()) for place in places)
            return list(dict.fromkeys(u for names in named for u in ([names] if isinstance(names, str) else names)))
        if self.units is not None:
            return [unit for unit in units if self.units(unit)]
        layers = {found[1] for place in places if (found := _LAYER.match(place))}
        of_layers = [unit for unit in units if layers.intersection(unit.split("."))]
        return of_layers or list(units)


@dataclass(frozen=True, slots=True)
class StopTraining:
    """Ask for training to stop.

    The Trainer's callback stops at the end of the step after the alarm's, the same one on every rank. A loop of your
    own reads ``guard.should_stop``.

    Args:
        save: Whether the Trainer is to save a checkpoint first.
    """

    needs_every_rank: ClassVar[bool] = True

    save: bool = True

    def __call__(self, alarm: Alarm, guard: Any) -> None:
        """Ask the guard."""
        guard.request_stop(alarm.sentence, save=self.save)
