"""Thresholds from a healthy run keep to the wanted rate, are as sensitive as that allows, and say what they rest on."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from trimtab.errors import ConfigError
from trimtab.monitors import Above, AlarmRule, AnyOf, Cusum, Floor, PeakDrop, calibrate
from trimtab.monitors.alarms import AlarmWatch, Reading
from trimtab.monitors.calibrate import LASTING_STEPS, poisson_upper_bound
from trimtab.trace import RunWriter, StepRow, UnitRow, open_run

PLACES = ("layer_0", "layer_1", "layer_2")
NUM_STEPS = 1200


class Fake:
    name = "fake"

    def __init__(self, **rules: AlarmRule) -> None:
        self.alarm_rules = rules


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """The record of a run whose values drift slowly and jump now and then, one place alone."""
    rng = np.random.default_rng(0)
    values = 0.8 + 0.02 * np.sin(np.arange(NUM_STEPS)[:, None] / 60) + 0.01 * rng.standard_normal((NUM_STEPS, 3))
    values[[200, 500, 800, 1100], 1] -= 0.4
    folder = tmp_path_factory.mktemp("healthy")
    with RunWriter(folder, config={}, units=[UnitRow(name="q")]) as writer:
        for step, row in enumerate(values, start=1):
            readings = {"fake": {"entropy": (PLACES, row), "size": (PLACES, 1 - row)}}
            writer.write_step(StepRow(step=step, norms=[1.0], readings=readings))
    with open_run(folder) as run:
        yield run


def num_alarms(rule, record, metric):
    """Alarms along the record, and how many readings the longest of them lasted."""
    steps, values, places = record.readings("fake", metric)
    watch = AlarmWatch({"fake": {metric: rule}})
    begun, ended = [], []
    for i, (step, row) in enumerate(zip(steps, values, strict=True)):
        judged = watch.judge(int(step), {"fake": {metric: Reading(places, np.asarray(row, np.float64))}})
        begun += [i for _ in judged.alarms]
        ended += [i for change in judged.changes if change.what == "ended"]
    ended += [len(steps)] * (len(begun) - len(ended))
    return len(begun), max((end - start for start, end in zip(begun, ended, strict=True)), default=0)


RULES = {
    "entropy": [PeakDrop(0.5), PeakDrop(0.01, ewma=1.0), Floor(0.1), Cusum(), AnyOf(PeakDrop(0.9), Floor(0.1))],
    "size": [Above(0.9)],
}
CASES = [(metric, detector, rate) for metric, some in RULES.items() for detector in some for rate in (1.0, 4.0)]


@pytest.mark.parametrize(("metric", "detector", "rate"), CASES)
def test_the_rate_is_kept_to_in_the_run_itself(metric, detector, rate, healthy):
    found = calibrate(healthy, [Fake(**{metric: AlarmRule(detector, "Bad.", fire_at=1)})], rate)
    one = found.found["fake"][metric]
    num, longest = num_alarms(one.rule, healthy, metric)
    assert num <= one.num_false <= rate * NUM_STEPS / 1000
    assert longest <= one.num_false * LASTING_STEPS
    assert found.num_steps == NUM_STEPS
    assert one.upper_per_1000_steps > 1000 * one.num_false / NUM_STEPS
    assert found.rules("fake") == {metric: one.rule}


def test_a_threshold_one_notch_more_sensitive_gives_too_many(healthy):
    rule = calibrate(healthy, [Fake(entropy=AlarmRule(PeakDrop(0.5, ewma=1.0), "Bad."))], 1.0).rules("fake")["entropy"]
    # Four dips of a half: the smallest drop that passes over all but one of them.
    assert 0.4 < rule.detector.drop < 0.6
    finer = replace(rule, detector=replace(rule.detector, drop=rule.detector.drop - 0.01))
    assert num_alarms(finer, healthy, "entropy")[0] > 1


def test_more_false_alarms_allowed_is_a_more_sensitive_threshold(healthy):
    rules = [
        calibrate(healthy, [Fake(entropy=AlarmRule(PeakDrop(0.5, ewma=1.0), "Bad."))], rate).rules("fake")["entropy"]
        for rate in (1.0, 4.0, 100.0)
    ]
    drops = [rule.detector.drop for rule in rules]
    assert drops[0] > drops[1] > drops[2]


def test_what_the_record_does_not_hold_is_left_out_with_the_reason(healthy):
    found = calibrate(healthy, [Fake(entropy=AlarmRule(Floor(0.5), "."), gone=AlarmRule(Floor(0.5), "."))], 1.0)
    assert set(found.rules("fake")) == {"entropy"}
    assert found.left_out == {"fake/gone": "the record holds no readings of it"}
    with pytest.raises(ConfigError, match=r"fake/gone.*same monitors"):
        calibrate(healthy, [Fake(gone=AlarmRule(Floor(0.5), "."))], 1.0)


@pytest.mark.parametrize(
    ("rate", "confidence", "setting"),
    [(0.5, 0.95, "record"), (0.0, 0.95, "false_per_1000_steps"), (math.nan, 0.95, "false_per_1000_steps"),
     (1.0, 1.0, "confidence")],
)  # fmt: skip
def test_a_record_too_short_for_the_rate_and_settings_out_of_range_are_refused(rate, confidence, setting, healthy):
    with pytest.raises(ConfigError) as caught:
        calibrate(healthy, [Fake(entropy=AlarmRule(Floor(0.5), "."))], rate, confidence=confidence)
    assert caught.value.setting == setting
    if setting == "record":
        assert "1200 steps" in str(caught.value)
        assert "at least 2000 steps" in str(caught.value)


@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
@pytest.mark.parametrize("num_events", [0, 1, 5, 40])
def test_the_bound_is_where_the_count_becomes_too_unlikely(num_events, confidence):
    mean = poisson_upper_bound(num_events, confidence)
    likely = sum(math.exp(k * math.log(mean) - math.lgamma(k + 1) - mean) for k in range(num_events + 1))
    assert likely == pytest.approx(1 - confidence, rel=1e-9)


def test_no_alarm_in_8800_steps_is_the_published_bound():
    assert 1000 * poisson_upper_bound(0) / 8800 == pytest.approx(0.34, abs=0.001)
