"""Detectors: the fast form over places is the readable one of a single signal, and each does what it says."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.errors import ConfigError
from trimtab.monitors import Above, AnyOf, Cusum, Detector, Floor, PeakDrop

SPECIAL = [0.0, -0.0, 1.0, 0.5, 0.7, -1.0, math.nan, math.inf, -math.inf, 5e-324, 1e30, -1e30, 3e38, 1e39, 1.7e308]
values = st.one_of(st.floats(0.0, 1.0), st.sampled_from(SPECIAL), st.floats())
warmups = st.integers(0, 4)
hystereses = st.one_of(st.just(0.15), st.floats(0, 1))
simple = st.one_of(
    st.builds(PeakDrop, st.floats(0.01, 0.99), hystereses, st.sampled_from([0.5, 1.0, 0.1]), warmups),
    st.builds(Floor, st.sampled_from([0.5, 0.0, -0.5]), hystereses, warmups, st.sampled_from([1.0, 0.1])),
    st.builds(Above, st.sampled_from([0.5, 0.0, -0.5]), hystereses, warmups, st.sampled_from([1.0, 0.1])),
    st.builds(Cusum, st.sampled_from([0.5, 0.0]), st.sampled_from([0.5, 5.0]), st.integers(2, 5)),
)
detectors = st.one_of(simple, st.builds(AnyOf, simple, simple))


def fresh(detector: Detector) -> Detector:
    """One with the same settings, before its first value."""
    if isinstance(detector, AnyOf):
        return AnyOf(*(fresh(part) for part in detector.detectors))
    made = type(detector)(**{k: v for k, v in detector.to_dict().items() if k != "detector"})
    assert made.to_dict() == detector.to_dict()
    return made


@given(detectors, st.integers(1, 4), st.data())
@settings(max_examples=200, deadline=None)
def test_the_form_over_places_is_the_single_one_at_each_place_to_the_last_bit(detector, num_places, data):
    row = st.lists(values, min_size=num_places, max_size=num_places)
    trace = data.draw(st.lists(row, max_size=20))
    singles = [fresh(detector) for _ in range(num_places)]
    places = detector.over([f"head_{i}" for i in range(num_places)])
    for step in trace:
        assert places.update(step).tolist() == [one.update(value) for one, value in zip(singles, step, strict=True)]
        signal, reference = places.judged()
        np.testing.assert_array_equal(signal, [one.signal for one in singles])
        np.testing.assert_array_equal(reference, [one.reference for one in singles])
    columns = places.state_dict()
    for i, one in enumerate(singles):
        assert {name: column[i] for name, column in columns.items() if name in one.state_dict()} == one.state_dict()


class Slow(PeakDrop):
    """One that has written ``update`` alone."""

    advance = Detector.advance


def test_a_detector_that_only_has_the_readable_form_works_over_places_too():
    rng = np.random.default_rng(0)
    slow, fast = Slow(0.2).over("abc"), PeakDrop(0.2).over("abc")
    fired = 0
    for step in rng.random((50, 3)):
        on = slow.update(step)
        assert on.tolist() == fast.update(step).tolist()
        fired += int(on.any())
    assert 0 < fired < 50


@given(detectors, st.lists(values, max_size=20), st.integers(0, 20))
@settings(max_examples=150, deadline=None)
def test_a_state_through_json_goes_on_as_if_nothing_had_happened(detector, trace, cut):
    whole, first = fresh(detector), fresh(detector)
    over = detector.over(["a"])
    for value in trace[:cut]:
        whole.update(value)
        first.update(value)
        over.update([value])
    resumed, resumed_over = fresh(detector), detector.over(["other", "b"])
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    resumed_over.load_state_dict(json.loads(json.dumps(over.state_dict(), allow_nan=False)))
    assert (resumed.on, resumed.signal, resumed.reference) == (whole.on, whole.signal, whole.reference)
    for value in trace[cut:]:
        on = whole.update(value)
        assert resumed.update(value) == on
        assert resumed_over.update([value]).tolist() == [on]


@given(detectors, st.lists(values, max_size=20), st.integers(0, 20))
@settings(max_examples=100, deadline=None)
def test_nan_is_no_value_wherever_it_comes(detector, trace, at):
    without, with_nan = fresh(detector), fresh(detector)
    for value in trace:
        without.update(value)
    for value in [*trace[:at], math.nan, *trace[at:]]:
        on = with_nan.on
        assert with_nan.update(value) == on or not math.isnan(value)
    assert with_nan.state_dict() == without.state_dict()


class TestPeakDrop:
    def test_it_fires_below_the_share_of_the_peak_and_clears_at_the_hysteresis_above_it(self):
        detector = PeakDrop(0.25, hysteresis=0.125, ewma=1.0, warmup=0)
        trace = [(8.0, False), (6.0, False), (5.9, True), (6.9, True), (7.0, False), (6.0, False), (5.9, True)]
        assert [detector.update(value) for value, _ in trace] == [on for _, on in trace]
        assert detector.reference == 8.0

    def test_it_judges_an_average_of_which_the_newest_value_is_half(self):
        detector = PeakDrop(0.3, warmup=0)
        detector.update(1.0)
        assert not detector.update(0.5)
        assert detector.signal == 0.75
        assert detector.update(0.5)
        assert detector.signal == 0.625

    def test_a_drop_smaller_than_the_hysteresis_clears_at_the_whole_peak(self):
        detector = PeakDrop(0.1, hysteresis=0.5, ewma=1.0, warmup=0)
        assert [detector.update(value) for value in (1.0, 0.8, 0.99, 1.0)] == [False, True, True, False]

    def test_the_first_values_set_no_peak_and_give_no_alarm(self):
        transient = PeakDrop(0.3, ewma=1.0, warmup=3)
        assert not any(transient.update(value) for value in (9.0, 9.0, 9.0, 1.0, 1.0, 0.8))
        assert transient.reference == 1.0
        assert transient.update(0.6)

    def test_a_signal_without_a_positive_peak_gives_no_alarm(self):
        detector = PeakDrop(0.3, ewma=1.0, warmup=0)
        assert not any(detector.update(value) for value in (-1.0, -2.0, 0.0, -5.0))

    def test_a_peak_is_never_forgotten(self):
        detector = PeakDrop(0.3, ewma=1.0, warmup=0)
        detector.update(1.0)
        assert all(detector.update(0.5) for _ in range(1000))


def test_a_floor_and_a_ceiling_have_hysteresis_also_below_zero():
    floor, above = Floor(-1.0, hysteresis=0.5, warmup=0), Above(-1.0, hysteresis=0.5, warmup=0)
    assert [floor.update(value) for value in (-1.0, -1.1, -0.6, -0.5)] == [False, True, True, False]
    assert [above.update(value) for value in (-1.0, -0.9, -1.4, -1.5)] == [False, True, True, False]


def test_an_infinite_value_is_above_every_level_and_leaves_a_state_that_json_takes():
    above = Above(0.5, warmup=0)
    assert above.update(math.inf)
    json.dumps(above.state_dict(), allow_nan=False)
    assert not above.update(0.1)


def test_an_average_lets_a_single_step_above_the_level_pass_and_not_a_lasting_one():
    above = Above(0.5, warmup=0, ewma=0.1)
    assert [above.update(value) for value in (0.1, 3.0, 0.1)] == [False, False, False]
    assert [above.update(1.0) for _ in range(8)] == [False] * 2 + [True] * 6


def test_a_cusum_finds_a_shift_that_no_single_value_shows_and_clears_when_it_has_gone():
    rng = np.random.default_rng(0)
    detector = Cusum(warmup=50)
    healthy = [detector.update(value) for value in 1 + 0.1 * rng.standard_normal(150)]
    shifted = [detector.update(value) for value in 0.9 + 0.1 * rng.standard_normal(100)]
    after = [detector.update(value) for value in 1.05 + 0.1 * rng.standard_normal(100)]
    assert not any(healthy[:100])
    assert shifted[-1]
    assert not after[-1]


def test_any_of_reports_the_first_part_that_gives_alarm():
    detector = AnyOf(PeakDrop(0.2, ewma=1.0, warmup=0), Floor(0.5, warmup=0))
    assert not detector.update(1.0)
    assert detector.update(0.7)
    assert detector.reference == 1.0
    low = AnyOf(PeakDrop(0.2, ewma=1.0, warmup=0), Floor(0.5, warmup=0))
    assert low.update(0.4)
    assert (low.signal, low.reference) == (0.4, 0.5)


def test_places_go_on_by_name_when_their_number_changes():
    over = PeakDrop(0.3, ewma=1.0, warmup=0).over(["a", "b"])
    over.update([1.0, 2.0])
    over.move_to(["b", "new", "a"])
    assert over.update([1.0, 1.0, 1.0]).tolist() == [True, False, False]
    assert over.judged()[1].tolist() == [2.0, 1.0, 1.0]


def test_a_wrong_number_of_values_is_told_with_both_numbers():
    with pytest.raises(ValueError, match=r"got shape \(3,\), but there are 2 places"):
        Floor(0.5).over(["a", "b"]).update([1.0, 2.0, 3.0])


def test_what_is_no_state_changes_nothing():
    over = Floor(0.5, warmup=0).over(["a"])
    over.update([0.1])
    for state in ({}, {"places": ["a"]}, over.state_dict() | {"seen": [1, 2]}):
        with pytest.raises(ValueError, match="no state of Floor"):
            over.load_state_dict(state)
    assert over.on.tolist() == [True]


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (lambda: PeakDrop(0.0), "drop"),
        (lambda: PeakDrop(1.0), "drop"),
        (lambda: PeakDrop(math.nan), "drop"),
        (lambda: PeakDrop("0.3"), "drop"),
        (lambda: PeakDrop(0.3, ewma=0.0), "ewma"),
        (lambda: PeakDrop(0.3, hysteresis=-0.1), "hysteresis"),
        (lambda: PeakDrop(0.3, warmup=-1), "warmup"),
        (lambda: Floor(math.inf), "level"),
        (lambda: Above(math.nan), "level"),
        (lambda: Above(0.5, warmup=1.5), "warmup"),
        (lambda: Above(0.5, ewma=0.0), "ewma"),
        (lambda: Cusum(slack=-1.0), "slack"),
        (lambda: Cusum(limit=0.0), "limit"),
        (lambda: Cusum(warmup=1), "warmup"),
        (lambda: AnyOf(), "detectors"),
        (lambda: AnyOf(0.3), "detectors"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_in_four_parts(make, setting):
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.setting == setting
    assert all(part.endswith(".") for part in (caught.value.allowed, caught.value.remedy))
