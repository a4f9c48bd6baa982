"""Which units an alarm's action is about, and what it asks of the guard."""

from __future__ import annotations

import pytest

from trimtab.errors import ConfigError
from trimtab.monitors import Alarm, RaiseRisk, StopTraining

UNITS = ("model.layers.0.q_proj", "model.layers.1.q_proj", "model.layers.10.q_proj")


class Asked:
    units = UNITS

    def __init__(self):
        self.calls = []

    def raise_risk(self, units, risk, steps):
        self.calls.append((tuple(units), risk, steps))

    def request_stop(self, reason, save):
        self.calls.append((reason, save))


def alarm(*places: str) -> Alarm:
    return Alarm(
        step=1, first_step=1, monitor="m", mechanism="m", metric="x", places=places, value=1.0, reference=0.5,
        sentence="Too large.",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("units", "places", "expected"),
    [
        (None, ("layer_1/head_3",), UNITS[1:2]),
        (None, ("layer_0", "layer_10/head_0"), (UNITS[0], UNITS[2])),
        (None, ("",), UNITS),
        (None, ("layer_7",), UNITS),
        (lambda name: name.endswith("10.q_proj"), ("layer_1",), UNITS[2:]),
        ({"layer_1": [UNITS[0], UNITS[2]], "layer_2": UNITS[0]}, ("layer_1", "layer_2"), (UNITS[0], UNITS[2])),
        ({"layer_1": [UNITS[0]]}, ("layer_5",), ()),
    ],
)
def test_risk_is_raised_for_the_units_of_the_alarms_places(units, places, expected):
    guard = Asked()
    RaiseRisk(units, risk=3.0, steps=4)(alarm(*places), guard)
    assert guard.calls == [(expected, 3.0, 4)]


def test_stopping_gives_the_alarms_sentence_as_the_reason():
    guard = Asked()
    StopTraining(save=False)(alarm(""), guard)
    assert guard.calls == [("Too large.", False)]


def test_actions_that_change_what_all_ranks_do_say_so():
    assert RaiseRisk().needs_every_rank
    assert StopTraining().needs_every_rank


@pytest.mark.parametrize("wrong", [{"units": ["q"]}, {"risk": 0.0}, {"risk": float("nan")}, {"steps": 0}])
def test_settings_that_cannot_be_meant_are_refused(wrong):
    with pytest.raises(ConfigError) as caught:
        RaiseRisk(**wrong)
    assert caught.value.setting in wrong
