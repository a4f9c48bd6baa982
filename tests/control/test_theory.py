"""The theory as code: relations that it states, and rates that it promises."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.control import Oracle, Policy
from trimtab.control.theory import (
    alpha_for_false_trigger_rate,
    capture,
    memory_bound,
    oracle_set,
    penalty,
    recovery_gap,
)
from trimtab.errors import ConfigError

NAN, INF = math.nan, math.inf
gaps = st.lists(st.one_of(st.integers(-3, 3).map(float), st.just(NAN)), min_size=1, max_size=6)


# Penalty and gap


def test_the_penalty_is_bias_against_the_gradient_plus_noise_under_smoothness():
    assert penalty(eta=0.1, G=3.0, mu=2.0, L=5.0, Gamma=7.0, v=11.0) == 0.1 * 3 * 2 + 5 * 0.1**2 / 2 * 7 * 11
    assert penalty(0.1, 3.0, [0.0, 1.0], 1.0, 1.0, [0.0, 1.0]).shape == (2,)


def test_for_a_small_step_bias_outweighs_noise():
    eta = np.array([1.0, 0.1, 0.01])
    bias, noise = penalty(eta, 1.0, 1.0, 1.0, 1.0, 0.0), penalty(eta, 1.0, 0.0, 1.0, 1.0, 1.0)
    np.testing.assert_allclose(bias / noise, 2 / eta)


def test_a_gap_is_what_recovery_saves():
    np.testing.assert_array_equal(recovery_gap([2.0, 1.0], [0.5, 3.0]), [1.5, -2.0])


# The oracle, and what a policy captures


@given(gaps, st.integers(0, 7))
@settings(deadline=None)
def test_no_set_within_the_budget_recovers_more_than_the_oracles(values, max_active):
    chosen = oracle_set(values, max_active)
    known = np.nan_to_num(values)
    assert chosen.sum() <= max_active
    assert (known[chosen] > 0).all()
    sets = itertools.chain.from_iterable(
        itertools.combinations(known, n) for n in range(min(max_active, len(known)) + 1)
    )
    assert known[chosen].sum() == max(sum(one) for one in sets)


def test_of_equal_gaps_the_unit_nearest_the_loss_wins_as_in_the_controller():
    assert oracle_set([1.0, 1.0, 1.0], 2).tolist() == [False, True, True]
    assert Policy(max_active=2).start(3).update([NAN] * 3).active.tolist() == [False, True, True]


@given(st.lists(gaps.filter(lambda g: len(g) == 3), min_size=1, max_size=5), st.integers(0, 3))
@settings(deadline=None, max_examples=40)
def test_the_oracle_policy_captures_everything(run, max_active):
    controller = Oracle([dict(zip("abc", step, strict=True)) for step in run], max_active=max_active).start(list("abc"))
    active = [controller.update([1.0] * 3).active for _ in run]
    np.testing.assert_array_equal(active, oracle_set(run, max_active))
    found = capture(run, active, max_active)
    np.testing.assert_array_equal(found.per_step, 1.0)
    assert found.of_run == 1.0


def test_capture_is_gap_recovered_over_the_oracles():
    found = capture([[4.0, 2.0, 1.0], [4.0, 2.0, -2.0]], [[False, True, True], [True, False, True]], max_active=2)
    np.testing.assert_allclose(found.per_step, [3 / 6, 2 / 6])
    assert found.of_run == 5 / 12
    single = capture([4.0, 2.0], [False, True], 1)
    assert (single.per_step.tolist(), single.of_run) == ([0.5], 0.5)


def test_where_nothing_could_be_recovered_nothing_was_missed_but_harm_is_harm():
    found = capture([[0.0, -1.0], [NAN, -1.0], [-1.0, 2.0]], [[True, False], [True, True], [False, True]], 1)
    np.testing.assert_array_equal(found.per_step, [1.0, -INF, 1.0])
    assert found.of_run == (2.0 - 1.0) / 2.0
    assert capture([[0.0]], [[False]], 1).of_run == 1.0


@pytest.mark.parametrize(
    ("call", "setting"),
    [
        (lambda: capture([[1.0, 2.0]], [[True]], 1), "active"),
        (lambda: capture([INF], [True], 1), "gaps"),
        (lambda: oracle_set(np.zeros((1, 1, 1)), 1), "gaps"),
        (lambda: oracle_set([1.0], -1), "max_active"),
        (lambda: oracle_set([1.0], 0.5), "max_active"),
        (lambda: memory_bound([1.0], 8, 4, 1), "high_bits"),
        (lambda: memory_bound([-1.0], 4, 8, 1), "saved_elements"),
    ],
)
def test_what_cannot_be_meant_is_refused(call, setting):
    with pytest.raises(ConfigError) as caught:
        call()
    assert caught.value.setting == setting


# Memory


@given(st.lists(st.integers(0, 10**6), max_size=8), st.integers(0, 9), st.lists(st.booleans(), min_size=8, max_size=8))
@settings(deadline=None)
def test_no_active_set_within_the_budget_keeps_more_than_the_bound(elements, max_active, wanted):
    active = [n for n, flag in zip(elements, wanted, strict=False) if flag][:max_active]
    assert sum(active) * (8 - 4) / 8 <= memory_bound(elements, 4, 8, max_active)


# Calibration


def test_alpha_is_exceeded_at_most_as_often_as_wanted_and_hardly_less():
    values = np.random.default_rng(0).lognormal(0, 0.4, (50, 20))
    for rate in (0.5, 0.1, 0.01, 0.002):
        share = np.mean(values > alpha_for_false_trigger_rate(values, rate))
        assert rate - 2 / values.size <= share <= rate


@pytest.mark.parametrize("sample", ["lognormal", "pareto"])
def test_the_rate_holds_on_average_over_records_whatever_the_distribution(sample):
    generator, rate, num_records, n = np.random.default_rng(1), 0.05, 2000, 99
    draw = getattr(generator, sample)
    records = draw(*((0.0, 1.0) if sample == "lognormal" else (1.5,)), size=(num_records, n + 1)) + 1e-9
    triggered = np.array([record[-1] > alpha_for_false_trigger_rate(record[:-1], rate) for record in records])
    # Exactly floor(100 * .05) / 100 in expectation; 4 sigma of a share of 2000.
    assert abs(triggered.mean() - rate) < 4 * math.sqrt(rate * (1 - rate) / num_records)


def test_with_a_confidence_the_rate_holds_for_that_share_of_records():
    generator, rate, confidence, num_records, n = np.random.default_rng(2), 0.05, 0.9, 1000, 4000
    records = (generator.random(n) for _ in range(num_records))
    alphas = np.array([alpha_for_false_trigger_rate(record, rate, confidence) for record in records])
    held = np.mean(1 - alphas <= rate)  # of a uniform value the true rate is 1 - alpha
    spread = 4 * math.sqrt(confidence * (1 - confidence) / num_records)
    # No wider than it must be: the next order statistic adds one term of the binomial, at most that of its mode.
    one_more = 1 / math.sqrt(2 * math.pi * n * rate * (1 - rate))
    assert confidence - spread < held < confidence + one_more + spread


@pytest.mark.parametrize("confidence", [None, 0.95])
def test_too_few_values_are_answered_with_how_many_there_must_be(confidence):
    least = {None: 99, 0.95: 299}[confidence]
    with pytest.raises(ConfigError, match=rf"^gnmr=\({least - 1} values\): a rate of 0\.01 needs at least {least} "):
        alpha_for_false_trigger_rate(np.ones(least - 1), 0.01, confidence)
    assert alpha_for_false_trigger_rate(np.arange(1, least + 1), 0.01, confidence) == least


def test_unobserved_values_are_left_out_and_failed_ones_refused():
    values = np.arange(1.0, 100.0)
    with_gaps = np.append(values, [NAN] * 50)
    assert alpha_for_false_trigger_rate(with_gaps, 0.1) == alpha_for_false_trigger_rate(values, 0.1) == 90.0
    for bad in (INF, 0.0, -1.0):
        with pytest.raises(ConfigError, match=r"^gnmr="):
            alpha_for_false_trigger_rate([*values, bad], 0.1)
    for rate in (0, 1, NAN, True):
        with pytest.raises(ConfigError, match=r"^rate="):
            alpha_for_false_trigger_rate(values, rate)


def test_a_policy_with_the_calibrated_alpha_triggers_as_rarely_in_a_like_run():
    generator = np.random.default_rng(3)
    policy = Policy(alpha=1e9, beta=1e9, history="ema")

    def gnmr_of(num_steps):
        controller = policy.start(10)
        trace = np.exp(0.3 * generator.standard_normal((num_steps, 10)))
        return np.array([controller.update(norms).gnmr for norms in trace])[50:]

    alpha = alpha_for_false_trigger_rate(gnmr_of(550), 0.01)
    share = np.mean(gnmr_of(1050) > alpha)
    # Two records of 5,000 and 10,000 values: 4 sigma of both shares.
    assert abs(share - 0.01) < 4 * math.sqrt(0.01 * 0.99 * (1 / 5000 + 1 / 10000))
