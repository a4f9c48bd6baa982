"""From alarms to a mechanism: what speaks for it, since when, and what to do."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from trimtab.monitors import Alarm, diagnose

MONITORS = {"attention backward": "shift_residual", "attention": "attention_spectrum", "router": "router"}


def alarm(mechanism: str, step: int, first_step: int | None = None, level: Any = "alarm") -> Alarm:
    return Alarm(
        step=step,
        first_step=step if first_step is None else first_step,
        monitor=MONITORS.get(mechanism, "mine"),
        mechanism=mechanism,
        metric="metric",
        places=("layer_0",),
        value=0.1,
        reference=0.5,
        sentence=f"{mechanism} has moved.",
        level=level,
    )


def notice(step: int, mechanism: str = "inexact attention backward") -> Alarm:
    return alarm(mechanism, step, level="notice")


def test_without_an_alarm_a_run_is_healthy_and_there_is_nothing_to_do():
    found = diagnose([])
    assert (found.mechanism, found.since_step, found.evidence) == ("healthy", None, ())


@pytest.mark.parametrize(
    ("alarms", "mechanism", "since"),
    [
        ([("attention backward", 5)], "biased attention backward", 5),
        ([("attention", 5)], "attention dynamics", 5),
        ([("router", 5)], "router", 5),
        ([("attention backward", 5), ("attention", 9)], "biased attention backward", 5),
        ([("attention backward", 5), ("attention", 5)], "biased attention backward", 5),
        ([("attention", 5), ("attention backward", 9)], "combined", 5),
        ([("router", 5), ("attention", 9)], "router", 5),
        ([("attention", 5), ("router", 9)], "combined", 5),
        ([("attention backward", 5), ("router", 9)], "combined", 5),
        ([("mine", 5)], "unknown", 5),
        ([("mine", 3), ("router", 5)], "router", 5),
    ],
)
def test_each_mechanism_is_known_by_its_alarms_and_their_order_in_time(alarms, mechanism, since):
    for order in itertools.permutations(alarms):
        found = diagnose(alarm(*one) for one in order)
        assert (found.mechanism, found.since_step) == (mechanism, since)
        assert len(found.evidence) == len(alarms)


@pytest.mark.parametrize(
    ("alarms", "notices", "mechanism", "since"),
    [
        ([], [3], "healthy", None),
        ([("mine", 5)], [3], "unknown", 5),
        ([("attention backward", 5)], [3], "biased attention backward", 5),
        # A spectrum that narrows: what there was with it or before it.
        ([("attention", 5)], [3], "inexact attention backward", 5),
        ([("attention", 5)], [5], "inexact attention backward", 5),
        ([("attention", 5)], [6], "attention dynamics", 5),
        ([("attention", 5)], [6, 3], "inexact attention backward", 5),
        # That the error has a direction comes to light later, and it was there before.
        ([("attention", 5), ("attention backward", 9)], [3], "biased attention backward", 9),
        ([("attention", 5), ("attention backward", 9)], [6], "combined", 5),
        # The routing would explain it as well.
        ([("router", 4), ("attention", 5)], [3], "combined", 4),
        ([("router", 4), ("attention", 5)], [6], "router", 4),
    ],
)
def test_a_notice_changes_what_a_narrowing_spectrum_means_and_means_nothing_alone(alarms, notices, mechanism, since):
    given = [*(alarm(*one) for one in alarms), *map(notice, notices)]
    for order in itertools.permutations(given):
        found = diagnose(order)
        assert (found.mechanism, found.since_step) == (mechanism, since)
        assert len(found.evidence) == len(given)


def test_a_notice_of_something_else_is_evidence_and_no_more():
    found = diagnose([notice(3, "mine"), alarm("attention", 5)])
    assert found.mechanism == "attention dynamics"
    assert found.evidence[0] == "Step 3, a notice, mine/metric: mine has moved."


def test_the_evidence_is_in_order_of_time_and_says_where_to_look():
    found = diagnose([alarm("router", 9), alarm("attention backward", 7, first_step=4)])
    assert found.evidence == (
        "Step 7 (since step 4), shift_residual/metric: attention backward has moved.",
        "Step 9, router/metric: router has moved.",
    )


def test_the_advice_names_what_to_change_and_for_several_each_of_them():
    assert "learning rate" in diagnose([alarm("attention", 1)]).advice
    assert "higher precision" in diagnose([alarm("attention backward", 1)]).advice
    assert "batch" in diagnose([alarm("router", 1)]).advice
    inexact = diagnose([notice(1), alarm("attention", 1)]).advice
    assert "higher precision" in inexact
    assert "recovers" in inexact
    both = diagnose([alarm("attention backward", 1), alarm("router", 2)]).advice
    assert "higher precision" in both
    assert "batch" in both


def test_each_monitor_that_names_a_mechanism_names_one_that_the_diagnosis_knows():
    from trimtab.monitors import AttentionSpectrum, Router, ShiftResidual
    from trimtab.monitors.diagnosis import _SIGNS

    assert {monitor.mechanism for monitor in (AttentionSpectrum, Router, ShiftResidual)} == set(_SIGNS)
