"""What a user would have been told: the diagnosis of a scenario, at its first alarm and at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trimtab.experiments.faults.measures import LOSS_MECHANISM
from trimtab.experiments.faults.models import ModelKind, every_monitor
from trimtab.monitors.alarms import Alarm
from trimtab.monitors.diagnosis import diagnose

__all__ = ["said_of"]


def said_of(
    model: ModelKind, before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]
) -> dict[str, str]:
    """The mechanism that is named when the first alarm that is not one on the loss is raised, and in the end.

    Args:
        model: The kind of model, for what its monitors' alarms are a sign of: asked anew, so that a part that is
            finished need not be run again where a mechanism goes by another name since.
        before: Alarms and notices before the fault; a user would not know those to be false.
        after: Those of the scenario.
    """
    mechanisms = {
        (monitor.name, metric): rule.mechanism or getattr(monitor, "mechanism", "") or monitor.name
        for monitor in every_monitor(model)
        for metric, rule in getattr(monitor, "alarm_rules", {}).items()
    }
    alarms = [
        Alarm.from_dict({**alarm, "mechanism": mechanisms[alarm["monitor"], alarm["metric"]]})
        for alarm in (*before, *after)
    ]
    own = [
        alarm.step for alarm in alarms[len(before) :] if alarm.level == "alarm" and alarm.mechanism != LOSS_MECHANISM
    ]
    at_first = [alarm for alarm in alarms if own and alarm.step <= min(own)]
    return {"said": diagnose(alarms).mechanism, "said_first": diagnose(at_first).mechanism}
