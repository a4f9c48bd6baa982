"""The fast controller of replay takes every decision of the ``Controller``, in every array and to the last bit."""

from __future__ import annotations

import dataclasses
import json
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.control import REASONS, Policy, StaticHigh, TwoStage, robust
from trimtab.errors import TrimtabWarning
from trimtab.trace.fast_replay import FastController, start_replay

ARRAYS = ("gnmr", "delta", "risk", "active", "lock", "scale", "reason")
# Beside the healthy ones: not observed, failed, and what over- or underflows a quotient, a sum or a mean.
NASTY = (0.0, np.nan, np.inf, -np.inf, -1.0, 5e-324, 1e-310, 1e308, 1.7976931348623157e308, 2.0)

POLICIES = st.builds(
    Policy,
    alpha=st.sampled_from([0.9, 1.5, 4.0, TwoStage(2.0, 1.1, switch_step=7), lambda step: 1.0 + 3.0 / step]),
    beta=st.sampled_from([1.0, 1.3, 1e-300, lambda step: 2.0 if step < 9 else 1.2]),
    error_limit=st.sampled_from([None, 0.3, 1e-300]),
    error_ema_factor=st.sampled_from([0.0, 0.5, 0.95]),
    amax_limit=st.sampled_from([None, 1.5, 12.0, 1e-300]),
    window_steps=st.integers(1, 6),
    lock_steps=st.integers(0, 4),
    max_active=st.sampled_from([0, 1, 2, 5, 100, 0.0, 0.34, 1.0]),
    history=st.sampled_from(["mean", "ema", "window"]),
    ema_factor=st.sampled_from([0.0, 0.5, 0.95]),
    history_steps=st.integers(1, 7),
    history_clip=st.sampled_from([None, 1.0, 4.0]),
    burn_in_steps=st.sampled_from([0, 3]),
    act_from_step=st.sampled_from([0, 5]),
    damping=st.booleans(),
)

POLICIES = st.one_of(
    POLICIES, POLICIES.map(lambda policy: dataclasses.replace(policy, error_history="ema", error_limit=1.5))
)


def norms_of(rng, num_steps, num_units, share):
    norms = np.exp(0.5 * rng.standard_normal((num_steps, num_units)))
    norms[:, num_units // 2] = norms[:, 0]  # ties
    norms[rng.random(norms.shape) < 0.05] *= 30
    nasty = rng.random(norms.shape) < share
    norms[nasty] = rng.choice(NASTY, int(nasty.sum()))
    return norms


def some_or_none(rng, num_units, values):
    return rng.choice(values, num_units) if rng.random() < 0.5 else None


def assert_same(made, expected):
    assert (made.step, made.alpha, made.beta) == (expected.step, expected.alpha, expected.beta)
    for name in ARRAYS:
        one, other = getattr(made, name), getattr(expected, name)
        assert one.dtype == other.dtype, name
        # By value, for 0 and -0 are one risk; NaN where NaN is.
        np.testing.assert_array_equal(one, other, err_msg=name)


@settings(max_examples=60, deadline=None)
@given(
    policy=POLICIES,
    num_units=st.integers(1, 9),
    share=st.sampled_from([0.0, 0.02, 0.4, 1.0]),
    seed=st.integers(0, 10_000),
    cut=st.integers(0, 30),
)
def test_the_fast_controller_takes_the_truths_decisions(policy, num_units, share, seed, cut):
    rng = np.random.default_rng(seed)
    names = [f"u{index}" for index in range(num_units)]
    mask = (rng.random(num_units) < 0.8).tolist()
    fast, truth = FastController(policy, names, mask), policy.start(names, mask)
    assert (fast.budget, fast.units, fast.recoverable) == (truth.budget, truth.units, truth.recoverable)
    for step, norms in enumerate(norms_of(rng, 30, num_units, share)):
        errors = some_or_none(rng, num_units, [np.nan, np.inf, -1.0, 0.0, 0.1, 0.5, 1e308])
        risks = some_or_none(rng, num_units, [np.nan, np.inf, -1.0, 0.5, 1.0, 3.0])
        amaxes = some_or_none(rng, num_units, [np.nan, np.inf, -1.0, 0.0, 1.0, 1.4, 40.0, 5e-324, 1e308])
        if step == cut:
            state = fast.state_dict()
            assert json.dumps(state, sort_keys=True) == json.dumps(truth.state_dict(), sort_keys=True)
            # On in each other's place, in another order of units.
            order = rng.permutation(num_units)
            names, mask = [names[i] for i in order], [mask[i] for i in order]
            fast, truth = FastController(policy, names, mask), policy.start(names, mask)
            assert fast.load_state_dict(state) == truth.load_state_dict(state)
        before = norms.copy()
        assert_same(fast.update(norms, errors, risks, amaxes), truth.update(norms, errors, risks, amaxes))
        np.testing.assert_array_equal(norms, before)
        np.testing.assert_array_equal(fast.active, truth.active)
        assert fast.step == truth.step


@pytest.mark.parametrize("history", ["mean", "ema", "window"])
def test_the_comparison_meets_every_reason_and_more_candidates_than_places(history):
    rng = np.random.default_rng(0)
    policy = Policy(max_active=2, lock_steps=2, error_limit=0.3, amax_limit=5.0, window_steps=3)
    policy = dataclasses.replace(policy, history=history, history_steps=5)
    names = [f"u{index}" for index in range(12)]
    fast, truth = FastController(policy, names, [True] * 12), policy.start(names)
    met, most_risky = set(), 0
    for norms in norms_of(rng, 200, 12, 0.02):
        errors = some_or_none(rng, 12, [0.01] * 40 + [0.5])
        risks = some_or_none(rng, 12, [np.nan] * 40 + [9.0])
        amaxes = some_or_none(rng, 12, [1.0] * 40 + [20.0])
        made, expected = fast.update(norms, errors, risks, amaxes), truth.update(norms, errors, risks, amaxes)
        assert_same(made, expected)
        met |= {REASONS[code] for code in expected.reason}
        most_risky = max(most_risky, int((expected.risk > 1).sum()))
    assert met == set(REASONS)
    assert most_risky > 2


def test_a_decision_is_not_touched_by_the_next_ones():
    fast = FastController(Policy(max_active=2), ["a", "b", "c"], [True] * 3)
    first = fast.update(np.array([1.0, 2.0, np.nan]))
    kept = {name: getattr(first, name).copy() for name in ARRAYS}
    for _ in range(5):
        fast.update(np.array([9.0, 0.0, 3.0]))
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(first, name), kept[name])


def test_a_schedule_that_breaks_keeps_its_last_value_and_is_named_once():
    policy = Policy(alpha=lambda step: 2.0 if step < 3 else float("nan"))
    fast, truth = FastController(policy, ["a"], [True]), policy.start(["a"])
    said = []
    for controller in (fast, truth):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made = [controller.update(np.array([norm])) for norm in (1.0, 1.0, 5.0, 1.0)]
        assert [decision.alpha for decision in made] == [2.0] * 4
        said.append([str(w.message) for w in caught if w.category is TrimtabWarning])
    assert said[0] == said[1]
    assert len(said[0]) == 1


def test_what_it_does_not_know_is_decided_by_the_policys_own_controller():
    @dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
    class Wider(Policy):
        more: float = 0.0

    for policy in (robust(damping=True), Policy(error_limit=1.5, error_history="ema", amax_limit=12.0)):
        assert type(start_replay(policy, ["a"], [True])) is FastController
    for policy in (Wider(more=1.0), StaticHigh()):
        assert type(start_replay(policy, ["a"], [True])) is type(policy.start(["a"], [True]))
