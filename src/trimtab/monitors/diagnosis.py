"""From alarms to a mechanism: what is probably wrong, on what evidence, and what to do about it.

A table of what is known, and no more: an alarm of a mechanism that is not in it is evidence that is shown, and names
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from trimtab.monitors.alarms import Alarm

__all__ = ["Diagnosis", "diagnose"]

_ADVICE = {
    "healthy": "Nothing has given alarm.",
    "biased attention backward": (
        "The gradient of the keys does not cancel over the sequence, step after step in the same direction, which no "
        "rounding error does. Run the attention backward in higher precision, or change the attention kernel; a lower "
        "learning rate only delays what follows."
    ),
    "attention dynamics": (
        "The updates of the attention weights crowd into few directions, and their gradients show no fault. Lower the "
        "learning rate or lengthen its warm-up; go back to a checkpoint from before the first alarm."
    ),
    "router": (
        "The routing has narrowed before anything else. Look at the router: lower its learning rate, enlarge the batch "
        "or strengthen load balancing; keep the router in high precision."
    ),
    "combined": "Several mechanisms give alarm. See to the one that was first, and then look again.",
    "unknown": "The alarms are of no mechanism that is known here. Look at the evidence, in order of time.",
}
_SIGNS = {
    "attention backward": "biased attention backward",
    "attention": "attention dynamics",
    "router": "router",
}
"""By the ``mechanism`` of an alarm."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the alarms of a run amount to.

    Args:
        mechanism: "healthy", "biased attention backward", "attention dynamics", "router", "combined" or "unknown".
        since_step: The first step of the first alarm that speaks for it; None when healthy.
        evidence: A sentence an alarm, in order of time.
        advice: What to do.
    """

    mechanism: str
    since_step: int | None
    evidence: tuple[str, ...]
    advice: str


def diagnose(alarms: Iterable[Alarm]) -> Diagnosis:
    """What is probably wrong.

    - "attention backward", the coherence of the key gradients: *biased attention backward*. An update spectrum that
      narrows with it or after it is what it leads to, and no mechanism of its own.
    - "attention", a narrowing update spectrum, while the shift residual is clean: *attention dynamics*, the learning
      rate. One that comes before a biased backward stands for itself: *combined*.
    - "router", the routing entropy: *router*, its learning rate or the batch size, when it is first; an attention
      spectrum that narrows after it is what it leads to.
    - Several that do not follow from one another: *combined*.

    Args:
        alarms: Of one run, in any order.

    Source: Huang et al. 2026 for the signs; that D2 also moves under a learning rate 10 times too high, so that it
        speaks for the dynamics only while the backward is clean, was measured here.

    Example:
        >>> diagnose([]).mechanism
        'healthy'
    """
    in_time = sorted(alarms, key=lambda alarm: (alarm.first_step, alarm.step))
    if not in_time:
        return Diagnosis("healthy", None, (), _ADVICE["healthy"])
    evidence = tuple(_evidence(alarm) for alarm in in_time)
    first: dict[str, int] = {}
    for alarm in in_time:
        if alarm.mechanism in _SIGNS:
            first.setdefault(_SIGNS[alarm.mechanism], alarm.first_step)
    # What follows from another mechanism is none of its own.
    spectrum = first.get("attention dynamics")
    causes = [first[cause] for cause in ("biased attention backward", "router") if cause in first]
    if spectrum is not None and causes and min(causes) <= spectrum:
        del first["attention dynamics"]
    if not first:
        return Diagnosis("unknown", in_time[0].first_step, evidence, _ADVICE["unknown"])
    since = min(first.values())
    if len(first) == 1:
        (mechanism,) = first
        return Diagnosis(mechanism, since, evidence, _ADVICE[mechanism])
    in_order = sorted(first, key=lambda name: first[name])
    parts = " ".join(f"{name[0].upper()}{name[1:]}: {_ADVICE[name]}" for name in in_order)
    return Diagnosis("combined", since, evidence, f"{_ADVICE['combined']} {parts}")


def _evidence(alarm: Alarm) -> str:
    since = f" (since step {alarm.first_step})" if alarm.first_step != alarm.step else ""
    return f"Step {alarm.step}{since}, {alarm.monitor}/{alarm.metric}: {alarm.sentence}"
