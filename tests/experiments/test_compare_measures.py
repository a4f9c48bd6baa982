"""The measures of a comparison against slow references, on arrays made by hand."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from trimtab.control.reasons import REASONS
from trimtab.experiments.arms import catches
from trimtab.experiments.compare.measures import (
    detection,
    fault_steps,
    full_share,
    mean_of_lines,
    over_seeds,
    reason_counts,
    repair,
    repaired_share,
    switches,
    trigger_rate,
)

UNITS = ["q", "k", "v"]
NUM_STEPS = 30


def window(unit, start, num_steps):
    return SimpleNamespace(unit=unit, start_step=start, end_step=start + num_steps)


def random_windows(seed):
    rng = np.random.default_rng(seed)
    return [
        window(UNITS[rng.integers(3)], int(rng.integers(1, NUM_STEPS + 3)), int(rng.integers(1, 12))) for _ in range(5)
    ]


def random_risk(seed):
    return np.random.default_rng(seed).uniform(0, 2, size=(NUM_STEPS, 3))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("after", "longer"), [(0, 0), (1, 0), (0, 4), (1, 4)])
def test_fault_steps_are_those_of_a_loop_over_steps_and_faults(seed, after, longer):
    windows = random_windows(seed)
    inside = fault_steps(windows, UNITS, NUM_STEPS, after=after, longer=longer)
    for step in range(1, NUM_STEPS + 1):
        for column, unit in enumerate(UNITS):
            slow = any(w.unit == unit and w.start_step + after <= step < w.end_step + longer for w in windows)
            assert inside[step - 1, column] == slow, (step, unit)


def test_a_fault_of_a_unit_that_is_not_asked_for_is_left_out():
    assert not fault_steps([window("other", 1, 5)], UNITS, NUM_STEPS).any()


@pytest.mark.parametrize("seed", range(20))
def test_recall_and_precision_are_those_of_counting_unit_steps(seed):
    windows, risk, act_from, width = random_windows(seed), random_risk(seed), 6, 3
    found = detection(risk, windows, UNITS, act_from_step=act_from, window_steps=width)
    faulty = caught = flagged = right = 0
    for step in range(1, NUM_STEPS + 1):
        for column, unit in enumerate(UNITS):
            own = [w for w in windows if w.unit == unit]
            is_flagged = risk[step - 1, column] > 1
            if any(w.start_step + 1 <= step <= w.end_step - 1 for w in own):
                faulty += 1
                caught += is_flagged
            if is_flagged and step > act_from:
                flagged += 1
                right += any(w.start_step <= step <= w.end_step - 1 + width for w in own)
    assert (found["faulty_unit_steps"], found["faulty_and_flagged"]) == (faulty, caught)
    assert (found["flagged_unit_steps"], found["flagged_in_fault"]) == (flagged, right)
    assert found["recall"] == pytest.approx(caught / faulty)
    assert found["precision"] == pytest.approx(right / flagged)


def test_a_perfect_detector_has_recall_and_precision_of_one_and_a_silent_one_has_no_precision():
    windows = [window("k", 10, 5)]
    perfect = np.where(fault_steps(windows, UNITS, NUM_STEPS, after=1), 3.0, 0.0)
    found = detection(perfect, windows, UNITS, act_from_step=0, window_steps=1)
    assert (found["recall"], found["precision"]) == (1.0, 1.0)
    silent = detection(np.zeros((NUM_STEPS, 3)), windows, UNITS, act_from_step=0, window_steps=1)
    assert (silent["recall"], silent["precision"]) == (0.0, None)
    assert detection(perfect, [], UNITS, act_from_step=0, window_steps=1)["recall"] is None


@pytest.mark.parametrize("seed", range(10))
def test_switches_and_full_share_are_those_of_a_loop(seed):
    routed = np.random.default_rng(seed).random((NUM_STEPS, 3)) < 0.4
    entries = sum(bool(routed[t, u]) and not (t > 0 and routed[t - 1, u]) for t in range(NUM_STEPS) for u in range(3))
    assert switches(routed) == entries
    assert full_share(routed, 2) == pytest.approx(sum(row.sum() >= 2 for row in routed) / NUM_STEPS)
    assert full_share(routed, 0) is None


def test_the_trigger_rate_is_over_observed_unit_steps_and_a_failed_norm_is_observed():
    gnmr = np.array([[1.0, math.nan], [math.inf, 2.0]])
    risk = np.array([[0.2, 5.0], [math.inf, 1.0]])
    assert trigger_rate(gnmr, risk) == pytest.approx(1 / 3)
    assert trigger_rate(np.full((2, 2), math.nan), risk) is None


def test_reasons_are_counted_by_name():
    codes = np.array([[REASONS.index("gnmr"), REASONS.index("locked")], [REASONS.index("gnmr"), 0]], dtype=np.int8)
    counts = reason_counts(codes)
    assert counts.pop("gnmr") == 2
    assert counts.pop("locked") == 1
    assert not any(counts.values())
    assert "none" not in counts


def test_catches_count_faults_whose_unit_was_recovered_while_they_lasted():
    routed = np.zeros((NUM_STEPS + 1, 3), dtype=bool)
    routed[12:14, 1] = True  # step 12 and 13 of unit k
    found = catches([window("k", 10, 5), window("k", 20, 5), window("q", 12, 2)], routed, UNITS, NUM_STEPS)
    assert found == (1, [2])
    # A fault that begins after the run, or outlasts it, is no error.
    assert catches([window("k", 40, 5), window("k", 13, 90)], routed, UNITS, NUM_STEPS) == (1, [0])


def test_nothing_is_repaired_where_the_faults_did_no_harm():
    assert repaired_share(low=1.0, clean=1.2, arm=0.9) is None
    assert repaired_share(low=math.inf, clean=1.2, arm=0.9) is None
    # The mean cost is a third of a nat, and its standard error more than half of it.
    found = repair([2.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0])
    assert (found["did_harm"], found["share"], found["interval"]) == (False, None, None)
    assert repair([], [], [])["did_harm"] is False


@pytest.mark.parametrize("seed", range(5))
def test_the_share_is_the_ratio_of_mean_differences_and_lies_in_its_interval(seed):
    rng = np.random.default_rng(seed)
    clean = rng.normal(2.0, 0.3, size=8)
    low = clean + rng.uniform(0.4, 0.6, size=8)
    arm = clean + rng.uniform(0.0, 0.2, size=8)
    found = repair(low, clean, arm)
    slow = sum(low - arm) / sum(low - clean)
    assert found["share"] == pytest.approx(slow)
    assert found["interval"][0] <= slow <= found["interval"][1]
    assert found["num_seeds"] == 8
    assert found["resamples_without_harm"] == 0
    # Whatever is common to the losses of a seed changes nothing: the resamples are paired.
    shift = rng.normal(0, 5, size=8)
    shifted = repair(low + shift, clean + shift, arm + shift)
    assert shifted["interval"] == pytest.approx(found["interval"])


def test_the_interval_is_that_of_all_resamples_of_two_seeds():
    # Of two seeds each resample is (0,0), (0,1), (1,0) or (1,1): shares 0.5, 0.7 and 0.9, the outer a quarter each.
    found = repair([2.0, 2.0], [1.0, 1.0], [1.5, 1.1])
    assert found["share"] == pytest.approx(0.7)
    assert found["interval"] == pytest.approx([0.5, 0.9])
    assert repair([2.0], [1.0], [1.5])["interval"] is None


def test_a_seed_without_a_finite_loss_is_left_out_of_all_three():
    found = repair([2.0, math.nan, 2.2], [1.0, 1.0, 1.1], [1.5, 1.0, 1.65])
    assert found["num_seeds"] == 2
    assert found["share"] == pytest.approx((0.5 + 0.55) / (1.0 + 1.1))


def test_means_over_seeds_say_how_many_they_are_of():
    assert over_seeds([1.0, 3.0, None, math.nan]) == {"mean": 2.0, "sd": pytest.approx(math.sqrt(2)), "n": 2}
    assert mean_of_lines([[1.0, 2.0], [3.0, 4.0]]) == [2.0, 3.0]
