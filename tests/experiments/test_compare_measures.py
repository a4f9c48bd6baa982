"""The measures of a comparison against slow references, on arrays made by hand."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from trimtab.control.reasons import REASONS
from trimtab.experiments.arms import catches
from trimtab.experiments.compare.measures import (
    detection,
    difference,
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
    windows, risk, first, width = random_windows(seed), random_risk(seed), 6, 3
    found = detection(risk, windows, UNITS, first_step=first, tolerance_steps=width)
    faulty = caught = flagged = right = 0
    seen = {}
    for step in range(first + 1, NUM_STEPS + 1):
        for column, unit in enumerate(UNITS):
            is_flagged = bool(risk[step - 1, column] > 1)
            own = [number for number, w in enumerate(windows) if w.unit == unit]
            within = [number for number in own if windows[number].start_step <= step < windows[number].end_step]
            for number in within:
                seen[number] = seen.get(number, False) or is_flagged
            faulty += bool(within)
            caught += bool(within) and is_flagged
            flagged += is_flagged
            right += is_flagged and any(
                windows[number].start_step <= step < windows[number].end_step + width for number in own
            )
    assert (found["faulty_unit_steps"], found["faulty_and_flagged"]) == (faulty, caught)
    assert (found["flagged_unit_steps"], found["flagged_in_fault"]) == (flagged, right)
    assert found["recall"] == pytest.approx(caught / faulty)
    assert found["precision"] == pytest.approx(right / flagged)
    assert found["event_recall"] == pytest.approx(sum(seen.values()) / len(seen))


def test_a_perfect_detector_has_recall_and_precision_of_one_from_the_first_step_of_a_fault_on():
    windows = [window("k", 10, 5)]
    perfect = np.where(fault_steps(windows, UNITS, NUM_STEPS), 3.0, 0.0)
    found = detection(perfect, windows, UNITS, first_step=0, tolerance_steps=1)
    assert (found["recall"], found["event_recall"], found["precision"]) == (1.0, 1.0, 1.0)
    late = perfect.copy()
    late[9] = 0.0
    assert detection(late, windows, UNITS, first_step=0)["recall"] == 0.8
    assert detection(late, windows, UNITS, first_step=0)["event_recall"] == 1.0


def test_a_silent_detector_has_no_precision_and_without_faults_none_has_any():
    windows = [window("k", 10, 5)]
    silent = detection(np.zeros((NUM_STEPS, 3)), windows, UNITS, first_step=0)
    assert (silent["recall"], silent["event_recall"], silent["precision"]) == (0.0, 0.0, None)
    loud = detection(np.full((NUM_STEPS, 3), 9.0), [], UNITS, first_step=0)
    assert (loud["recall"], loud["event_recall"], loud["precision"]) == (None, None, None)
    assert loud["flagged_unit_steps"] == 3 * NUM_STEPS
    # A fault that is over before anything is scored was missed by nobody.
    assert detection(np.zeros((NUM_STEPS, 3)), windows, UNITS, first_step=14)["event_recall"] is None


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
    # The mean cost is a third of a nat, and its interval reaches far below 0.
    found = repair([2.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0])
    assert (found["did_harm"], found["share"], found["interval"]) == (False, None, None)
    assert found["harm_interval"][0] < 0 < found["mean_harm"]
    # On every seed, and for the greater part on one.
    assert repair([2.0, 1.1, 1.1], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0])["did_harm"] is False
    # It differs from seed to seed, as the faults do, and its interval by itself reaches below 0.
    found = repair([1.1, 1.2, 1.3], [1.0, 1.0, 1.0], [1.01, 1.02, 1.03])
    assert (found["did_harm"], found["harm_interval"][0] < 0) == (True, True)
    assert (found["share"], found["interval"]) == (pytest.approx(0.9), pytest.approx([0.9, 0.9]))


def test_of_one_seed_or_none_no_harm_and_no_share_is_told():
    found = repair([2.0], [1.0], [1.5])
    assert (found["did_harm"], found["share"], found["interval"]) == (None, None, None)
    assert (found["mean_harm"], found["harm_interval"], found["num_seeds"]) == (1.0, None, 1)
    assert repair([], [], [])["did_harm"] is None


@pytest.mark.parametrize("seed", range(5))
def test_the_share_is_the_ratio_of_mean_differences(seed):
    rng = np.random.default_rng(seed)
    clean = rng.normal(2.0, 0.3, size=8)
    low = clean + rng.uniform(0.2, 0.9, size=8)
    arm = clean + rng.uniform(0.0, 0.1, size=8)
    found = repair(low, clean, arm)
    slow = sum(low - arm) / sum(low - clean)
    assert found["share"] == pytest.approx(slow)
    squares = [((a - b) - slow * (a - c)) ** 2 for a, b, c in zip(low, arm, clean, strict=True)]
    reach = 2.365 * math.sqrt(sum(squares) / 7) / math.sqrt(8) / (sum(low - clean) / 8)
    assert found["interval"] == pytest.approx([slow - reach, slow + reach])
    assert found["num_seeds"] == 8
    # Whatever is common to the losses of a seed changes nothing: the seeds are paired.
    shift = rng.normal(0, 5, size=8)
    shifted = repair(low + shift, clean + shift, arm + shift)
    assert shifted["interval"] == pytest.approx(found["interval"])


@pytest.mark.parametrize("num_seeds", [2, 3, 8])
@pytest.mark.parametrize("spread", [0.0, 0.4])
def test_the_intervals_hold_what_is_true_in_at_least_95_of_100_repeats(num_seeds, spread):
    rng, repeats = np.random.default_rng(0), 2000
    # The harm of a seed is what its faults do; chance is in what an arm makes of it.
    harms = 1.0 + spread * np.linspace(-1, 1, num_seeds)
    held = held_difference = told = 0
    for _ in range(repeats):
        clean = rng.normal(2.0, 0.3, size=num_seeds)
        low, arm = clean + harms, clean + 0.4 * harms + rng.normal(0, 0.1, size=num_seeds)
        found = repair(low, clean, arm)
        told += found["did_harm"]
        held += found["did_harm"] and found["interval"][0] <= 0.6 <= found["interval"][1]
        between = difference(low, arm, harms)["interval"]
        held_difference += between[0] <= 0.6 <= between[1]
    assert told == repeats
    reach = 3 * math.sqrt(0.95 * 0.05 / repeats)
    for one in (held, held_difference):
        assert one / repeats > 0.95 - reach
        # As wide as it has to be where the harm is the same on all seeds, and somewhat wider where it is not.
        assert one / repeats < 0.95 + reach + (0.04 if spread else 0.0)


def test_of_causes_that_do_no_harm_about_one_in_fourteen_passes_with_three_seeds():
    rng = np.random.default_rng(1)
    passed = np.mean([repair(rng.normal(0, 1, 3), [0, 0, 0], [0, 0, 0])["did_harm"] for _ in range(4000)])
    assert abs(passed - 1 / 14) < 0.02


def test_a_diverged_run_is_counted_and_the_others_do_not_speak_for_it():
    harmed = repair([2.0, math.nan, 2.2], [1.0, 1.0, 1.1], [1.5, 1.0, 1.65])
    assert (harmed["did_harm"], harmed["mean_harm"], harmed["share"]) == (None, None, None)
    assert harmed["num_diverged"] == {"low": 1, "clean": 0, "arm": 0}
    arm = repair([2.0, 2.1, 2.2], [1.0, 1.0, 1.1], [1.5, math.inf, 1.65])
    # What the arm did says nothing of the harm.
    assert (arm["did_harm"], arm["share"], arm["interval"]) == (True, None, None)
    assert arm["num_diverged"] == {"low": 0, "clean": 0, "arm": 1}
    assert arm["num_seeds"] == 3


def test_a_difference_is_that_of_paired_seeds_and_a_diverged_one_is_counted():
    found = difference([2.0, 3.0, 4.5], [1.0, 2.0, 3.0], [2.0, 2.0, 2.0])
    assert found["mean"] == pytest.approx(3.5 / 6)
    reach = 4.303 * np.std([0.5, 0.5, 0.75], ddof=1) / math.sqrt(3)
    assert found["interval"] == pytest.approx([3.5 / 6 - reach, 3.5 / 6 + reach])
    assert difference([2.0], [1.0], [2.0]) == {"mean": 0.5, "interval": None, "num_seeds": 1, "num_diverged": 0}
    assert difference([2.0, 1.0], [math.nan, 1.0], [1.0, 1.0]) == {
        "mean": None, "interval": None, "num_seeds": 2, "num_diverged": 1,
    }  # fmt: skip
    assert difference([2.0, 1.0], [1.0, 1.0], [-1.0, -1.0])["mean"] is None


def test_means_over_seeds_say_how_many_they_are_of():
    assert over_seeds([1.0, 3.0, None, math.nan]) == {"mean": 2.0, "sd": pytest.approx(math.sqrt(2)), "n": 2, "of": 4}
    assert mean_of_lines([[1.0, 2.0], [3.0, 4.0]]) == [2.0, 3.0]
