"""What a guard does about alarms: judge the monitors' readings, record, act, and hold the risks that were raised.

It is asked before the controller, so that what an action raises counts in the decision of the same step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from trimtab.errors import ConfigError, nearest_names
from trimtab.journal import Journal
from trimtab.monitors.alarms import Alarm, AlarmRule, AlarmWatch
from trimtab.monitors.group import Readings

if TYPE_CHECKING:
    from trimtab.guard import Guard

__all__ = ["AlarmAction", "AlarmResponse", "StopRequest"]

AlarmAction = Callable[[Alarm, "Guard"], None]
"""What ``attach(on_alarm=[...])`` takes; see ``trimtab.monitors.actions``."""

_MOST_ALARMS = 1000
"""As many are kept in memory and in checkpoints, the latest; the record has them all."""


@dataclass(frozen=True, slots=True)
class StopRequest:
    """That training should stop.

    Args:
        step: Steps observed when it was asked for.
        reason: Why, as a sentence.
        save: Whether to save a checkpoint first.
    """

    step: int
    reason: str
    save: bool


@dataclass(slots=True)
class _RaisedRisk:
    """Units whose risk is held at ``risk`` for ``steps`` more decisions."""

    units: list[str]
    risk: float
    steps: int


class AlarmResponse:
    """The alarms of a guard, and what follows from them.

    Args:
        rules: The monitors' rules, by monitor and metric.
        mechanisms: What each monitor's alarms are a sign of, where it says so.
        actions: What is called for each alarm, in this order.
        units: Names of the watched units.
        journal: Where alarms are written and said.

    Attributes:
        alarms: The latest ones, oldest first.
        notices: The latest notices, oldest first: what alarm rules of that level have found.
        stop: That training should stop, or None.

    Raises: ConfigError: when an action cannot be called, or a rule is none.
    """

    def __init__(
        self,
        rules: Mapping[str, Mapping[str, AlarmRule]],
        mechanisms: Mapping[str, str],
        actions: Sequence[AlarmAction],
        units: Sequence[str],
        journal: Journal,
    ) -> None:
        for monitor, own in rules.items():
            for metric, rule in own.items():
                if not isinstance(rule, AlarmRule):
                    raise ConfigError(
                        f"alarm_rules[{metric!r}]", rule, f"the monitor {monitor!r} has rules.", "Make it an AlarmRule."
                    )
        self._rules = rules
        self._watch = AlarmWatch(rules, mechanisms, self._say)
        self._actions = _checked(actions)
        self._units = dict.fromkeys(units)
        self._journal = journal
        self._raised: list[_RaisedRisk] = []
        self._to_say: list[tuple[str, str]] = []
        self.alarms: deque[Alarm] = deque(maxlen=_MOST_ALARMS)
        self.notices: deque[Alarm] = deque(maxlen=_MOST_ALARMS)
        self.stop: StopRequest | None = None

    def to_dict(self) -> dict[str, Any]:
        """The rules and the actions as plain values, for the record; what is not named in it is a function's own."""
        return {
            "alarm_rules": {
                monitor: {metric: rule.to_dict() for metric, rule in own.items()}
                for monitor, own in self._rules.items()
                if own
            },
            "on_alarm": [
                {"action": _name_of(action)}
                | ({f.name: getattr(action, f.name) for f in fields(action)} if is_dataclass(action) else {})
                for action in self._actions
            ],
        }

    @property
    def needs_every_rank(self) -> bool:
        """Whether an action changes what all ranks do, so that they must see the same readings."""
        return any(getattr(action, "needs_every_rank", False) for action in self._actions)

    def respond(self, step: int, readings: Readings, guard: Guard) -> None:
        """Judge the readings of ``step``, write down what they amount to, and call the actions on alarms."""
        judgement = self._watch.judge(step, readings)
        for change in judgement.changes:
            self._journal.event("note", {change.level: asdict(change)}, _one_place(change.places), step)
        for notice in judgement.notices:
            self.notices.append(notice)
            self._journal.event("notice", notice.to_dict(), _one_place(notice.places), step)
        for alarm in judgement.alarms:
            self.alarms.append(alarm)
            self._journal.event("alarm", alarm.to_dict(), _one_place(alarm.places), step)
            self._say(f"alarm {alarm.mechanism}", alarm.sentence)
            for action in list(self._actions):
                try:
                    action(alarm, guard)
                except Exception as error:
                    self._actions.remove(action)
                    name = _name_of(action)
                    self._say(f"action {name}", f"The action {name} on an alarm failed and is off: {error!r}.")

    def say(self) -> None:
        """Warn of what has come up; after the decision is taken, as a warning may be made an error."""
        to_say, self._to_say = self._to_say, []
        for key, text in to_say:
            self._journal.say_once(key, text)

    def raise_risk(self, units: Sequence[str], risk: float, steps: int) -> None:
        """Hold the risk of these units at ``risk`` or above for the next ``steps`` decisions.

        Raises: ConfigError: when a unit does not exist, or a number cannot be meant.
        """
        if isinstance(units, str):
            raise ConfigError("units", units, "it is a list of names.", f"Write [{units!r}].")
        for name in units:
            if name not in self._units:
                near = ", ".join(nearest_names(name, self._units) or list(self._units)[:3])
                raise ConfigError("units", name, "no watched unit has this name.", f"The nearest names are {near}.")
        if isinstance(risk, bool) or not isinstance(risk, Real) or not 0 < risk < math.inf:
            raise ConfigError("risk", risk, "a risk is a finite number above 0.", "Set 2.0; above 1 is risky.")
        if isinstance(steps, bool) or not isinstance(steps, Integral) or steps < 1:
            raise ConfigError("steps", steps, "it counts decisions, 1 or more.", "Set 10, say.")
        if units:
            self._raised.append(_RaisedRisk(list(dict.fromkeys(units)), float(risk), int(steps)))

    def take_risks(self) -> dict[str, float]:
        """The risks that count in the decision that is being taken, by unit; each counts in one decision less then."""
        risks: dict[str, float] = {}
        for raised in self._raised:
            for unit in raised.units:
                risks[unit] = max(raised.risk, risks.get(unit, 0.0))
            raised.steps -= 1
        self._raised = [raised for raised in self._raised if raised.steps > 0]
        return risks

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs; JSON-able. A request to stop is not in it: the resumed run would stop at once."""
        return {
            "detectors": self._watch.state_dict(),
            "alarms": [alarm.to_dict() for alarm in self.alarms],
            "notices": [notice.to_dict() for notice in self.notices],
            "raised": [asdict(raised) for raised in self._raised],
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Take back what ``state_dict`` gave; None, or what is no such state, starts afresh.

        Raised risks of units that are gone are let go.
        """
        self._watch.load_state_dict([])
        self.alarms.clear()
        self.notices.clear()
        self._raised, self.stop = [], None
        if state is None:
            return
        try:
            alarms = [Alarm.from_dict(alarm) for alarm in state["alarms"]]
            notices = [Alarm.from_dict(notice) for notice in state.get("notices", ())]
            raised = [_RaisedRisk(**one) for one in state["raised"]]
            self._watch.load_state_dict(state["detectors"])
        except (KeyError, TypeError, ValueError) as error:
            self._watch.load_state_dict([])
            self._journal.say_once(
                "alarm state", f"The checkpoint's state of the alarms is not usable ({error!r}); they start afresh."
            )
            return
        self.alarms.extend(alarms)
        self.notices.extend(notices)
        for one in raised:
            one.units = [name for name in one.units if name in self._units]
        self._raised = [one for one in raised if one.units]

    def _say(self, key: str, text: str) -> None:
        self._to_say.append((key, text))


def _checked(actions: Sequence[AlarmAction]) -> list[AlarmAction]:
    # A class can be called too; what is needed is an action that was made from it.
    if isinstance(actions, Sequence):
        wrong = [action for action in actions if not callable(action) or isinstance(action, type)]
    else:
        wrong = [actions]
    if wrong:
        raise ConfigError(
            "on_alarm",
            wrong[0],
            "it is a list of actions, each called as action(alarm, guard).",
            "Pass a list, such as [StopTraining()].",
        )
    return list(actions)


def _name_of(action: AlarmAction) -> str:
    return str(getattr(action, "__name__", type(action).__name__))


def _one_place(places: Sequence[str]) -> str:
    return places[0] if len(places) == 1 else ""
