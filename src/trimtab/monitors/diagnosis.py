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
    "inexact attention backward": (
        "The updates of the attention weights crowd into few directions, and the attention backward was inexact before "
        "they did. That its error keeps no direction of its own does not clear it: rounding the attention's output to "
        "the nearest bit leaves such an error and did no harm, as measured, and truncating it to 1 bit leaves one too, "
        "and D2 fell and the loss followed. Run the attention backward in higher precision, from a checkpoint before "
        "the first alarm. If D2 recovers, that was it; if it falls with an exact backward too, it is the dynamics: "
        "lower the learning rate."
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
_INEXACT = "inexact attention backward"
"""The ``mechanism`` of a notice, and what is said where a spectrum narrows with it or after it."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the alarms of a run amount to.

    Args:
        mechanism: "healthy", "biased attention backward", "inexact attention backward", "attention dynamics", "router",
            "combined" or "unknown".
        since_step: The first step of the first alarm that speaks for it; None when healthy.
        evidence: A sentence an alarm or a notice, in order of time.
        advice: What to do.
    """

    mechanism: str
    since_step: int | None
    evidence: tuple[str, ...]
    advice: str


def diagnose(alarms: Iterable[Alarm]) -> Diagnosis:
    """What is probably wrong.

    An update spectrum that narrows, an "attention" alarm, is read by what there was with it or before it:

    | before it, or with it | it is a sign of |
    | --- | --- |
    | "attention backward", the coherence of the key gradients | *biased attention backward*, and nothing of its own |
    | a notice "inexact attention backward", and never a coherence | *inexact attention backward* |
    | "router", the routing entropy | *router*, and nothing of its own |
    | nothing: the shift residual is clean | *attention dynamics*, the learning rate |

    - A coherence alarm is a sign of a *biased attention backward*, whatever else there is; a routing alarm, of the
      *router*, its learning rate or the batch size.
    - A notice by itself is a sign of nothing: without an alarm a run is *healthy*.
    - Several signs that do not follow from one another: *combined*. So is a spectrum that narrows before a coherence
      alarm, unless a notice tells that the backward was inexact by then.

    Args:
        alarms: Alarms and notices of one run, in any order.

    Source: Huang et al. 2026 for the signs; that D2 also moves under a learning rate 10 times too high, so that it
        speaks for the dynamics only while the backward is clean, and that it falls under an error of the backward
        without a direction, was measured here.

    Example:
        >>> diagnose([]).mechanism
        'healthy'
    """
    in_time = sorted(alarms, key=lambda alarm: (alarm.first_step, alarm.step))
    evidence = tuple(_evidence(alarm) for alarm in in_time)
    found = [alarm for alarm in in_time if alarm.level == "alarm"]
    if not found:
        return Diagnosis("healthy", None, evidence, _ADVICE["healthy"])
    first: dict[str, int] = {}
    for alarm in found:
        if alarm.mechanism in _SIGNS:
            first.setdefault(_SIGNS[alarm.mechanism], alarm.first_step)
    notices = [alarm.first_step for alarm in in_time if alarm.level == "notice" and alarm.mechanism == _INEXACT]
    _read_spectrum(first, min(notices, default=None))
    if not first:
        return Diagnosis("unknown", found[0].first_step, evidence, _ADVICE["unknown"])
    since = min(first.values())
    if len(first) == 1:
        (mechanism,) = first
        return Diagnosis(mechanism, since, evidence, _ADVICE[mechanism])
    in_order = sorted(first, key=lambda name: first[name])
    parts = " ".join(f"{name[0].upper()}{name[1:]}: {_ADVICE[name]}" for name in in_order)
    return Diagnosis("combined", since, evidence, f"{_ADVICE['combined']} {parts}")


def _read_spectrum(first: dict[str, int], inexact_since: int | None) -> None:
    """Replace "attention dynamics" in ``first``, the first step by sign, by what the table of ``diagnose`` says."""
    spectrum = first.get("attention dynamics")
    if spectrum is None:
        return
    is_inexact = inexact_since is not None and inexact_since <= spectrum
    backward, router = first.get("biased attention backward"), first.get("router")
    is_biased = backward is not None and (is_inexact or backward <= spectrum)
    is_routing = router is not None and router <= spectrum
    if is_inexact and backward is None:
        first[_INEXACT] = first.pop("attention dynamics")
    elif is_biased or is_routing:
        del first["attention dynamics"]


def _evidence(alarm: Alarm) -> str:
    since = f" (since step {alarm.first_step})" if alarm.first_step != alarm.step else ""
    kind = ", a notice" if alarm.level == "notice" else ""
    return f"Step {alarm.step}{since}{kind}, {alarm.monitor}/{alarm.metric}: {alarm.sentence}"
