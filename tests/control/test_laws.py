"""Laws that hold for any norms and any policy."""

import json
from dataclasses import replace

import array_api_strict
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.control import Controller, MatchedRandom, Policy, ReferenceController, TwoStage, robust

LARGEST = float(np.finfo(float).max)
NASTY = [0.0, -0.0, np.nan, np.inf, -np.inf, -1.0, -5e-324, 5e-324, 1e-310, 2.3e-308, 1e-30, 1e30, 1e308, LARGEST]
ARRAYS = {
    "numpy": np.asarray,
    "torch": lambda norms: torch.tensor(norms, dtype=torch.float64),
    "array_api_strict": array_api_strict.asarray,
}
SCORES, EXACT = ("gnmr", "delta", "risk", "scale"), ("active", "lock", "reason")

norms = st.one_of(st.floats(0.1, 10.0), st.sampled_from(NASTY), st.sampled_from([1.0, 2.0, 4.0]), st.floats())
thresholds = st.one_of(
    st.floats(0.5, 4.0),
    st.sampled_from([1.0, 5e-324, LARGEST]),
    st.builds(TwoStage, st.floats(0.5, 4.0), st.floats(0.5, 4.0), switch_step=st.integers(0, 10)),
)
policies = st.builds(
    Policy,
    alpha=thresholds,
    beta=thresholds,
    window_steps=st.integers(1, 6),
    lock_steps=st.integers(0, 4),
    max_active=st.one_of(st.integers(0, 5), st.floats(0, 1)),
    history=st.sampled_from(["mean", "ema", "window"]),
    ema_factor=st.sampled_from([0.0, 0.3, 0.5, 0.95]),
    history_steps=st.integers(1, 14),
    history_clip=st.sampled_from([None, 1.0, 4.0]),
    burn_in_steps=st.integers(0, 4),
    act_from_step=st.integers(0, 4),
    error_limit=st.one_of(st.none(), st.floats(0.1, 2.0), st.sampled_from([5e-324, LARGEST])),
)
ratios = st.one_of(st.floats(1.0, 4.0, exclude_min=True), st.sampled_from([1.5, LARGEST]))
policies = st.one_of(
    policies,
    st.builds(
        lambda policy, limit, factor: replace(policy, error_history="ema", error_limit=limit, error_ema_factor=factor),
        policies.map(lambda policy: replace(policy, error_limit=None)),
        st.one_of(st.none(), ratios),
        st.sampled_from([0.0, 0.3, 0.5, 0.95]),
    ),
)
policies = st.builds(
    lambda policy, limit: replace(policy, amax_limit=limit),
    policies,
    st.one_of(st.none(), st.floats(0.5, 20.0), st.sampled_from([1.5, 5e-324, LARGEST])),
)
errors = st.one_of(st.floats(0.0, 2.0), st.none(), st.sampled_from(NASTY), st.floats())


@st.composite
def runs(draw, max_steps=25, least_units=1):
    """Norms of every step, a policy, and which units are recoverable."""
    num_units = draw(st.integers(least_units, 6))
    trace = draw(st.lists(st.lists(norms, min_size=num_units, max_size=num_units), min_size=1, max_size=max_steps))
    recoverable = draw(st.one_of(st.none(), st.lists(st.booleans(), min_size=num_units, max_size=num_units)))
    return trace, draw(policies), recoverable


@st.composite
def full_runs(draw, max_steps=25, least_units=1):
    """Norms, channel errors, raised risks and amaxes of every step (None: there are none), a policy, which units are
    recoverable."""
    trace, policy, recoverable = draw(runs(max_steps, least_units))
    num_units = len(trace[0])
    beside = st.one_of(st.none(), st.lists(errors, min_size=num_units, max_size=num_units))
    return [(step_norms, draw(beside), draw(beside), draw(beside)) for step_norms in trace], policy, recoverable


def as_array(library, values):
    """What is beside the norms as an array of ``library``, which has no None."""
    if values is None:
        return None
    return ARRAYS[library]([np.nan if value is None else value for value in values])


def assert_same(one, other):
    for name in SCORES + EXACT:
        np.testing.assert_array_equal(np.asarray(getattr(one, name)), np.asarray(getattr(other, name)), err_msg=name)


def through_json(state):
    return json.loads(json.dumps(state, allow_nan=False))


@given(full_runs())
@settings(max_examples=150, deadline=None)
def test_any_input_gives_a_valid_decision_within_the_budget(run):
    trace, policy, recoverable = run
    controller = policy.start(len(trace[0][0]), recoverable)
    for step_norms, *beside in trace:
        decision = controller.update(step_norms, *beside)
        assert decision.active.sum() <= controller.budget
        assert not (decision.active & ~np.array(controller.recoverable)).any()
        assert not np.isnan(decision.risk).any()
        assert ((decision.lock == 0) | decision.active).all()
        failed = decision.risk == np.inf
        np.testing.assert_array_equal(failed, [not 0 <= norm <= LARGEST for norm in step_norms])
        assert ((decision.scale >= 0) & (decision.scale <= 1)).all()
        assert (decision.scale[failed] == 0).all()
        unobserved = np.array([norm == 0 for norm in step_norms])
        np.testing.assert_array_equal(np.isnan(decision.gnmr), unobserved)
        np.testing.assert_array_equal(np.isnan(decision.delta), unobserved)
        assert np.isfinite(decision.gnmr[~failed & ~unobserved]).all()
        assert np.isfinite(decision.delta[~failed & ~unobserved]).all()
        np.testing.assert_array_equal(decision.active, controller.active)


@pytest.mark.parametrize("library", ARRAYS)
@given(run=full_runs(), as_list=st.booleans())
@settings(max_examples=100, deadline=None)
def test_the_fast_form_equals_the_slow_truth_to_the_last_bit(library, run, as_list):
    trace, policy, recoverable = run
    slow = ReferenceController(len(trace[0][0]), policy, recoverable)
    fast = Controller(len(trace[0][0]), policy, recoverable)
    for step_norms, *beside in trace:
        given_beside = beside if as_list else [as_array(library, values) for values in beside]
        assert_same(slow.update(step_norms, *beside), fast.update(ARRAYS[library](step_norms), *given_beside))
    assert slow.state_dict() == fast.state_dict()


@given(full_runs())
@settings(max_examples=80, deadline=None)
def test_errors_risks_and_amaxes_change_neither_what_is_remembered_nor_what_is_damped(run):
    trace, policy, recoverable = run
    with_all, without = (policy.start(len(trace[0][0]), recoverable) for _ in range(2))
    for step_norms, step_errors, step_risks, step_amaxes in trace:
        a = with_all.update(step_norms, step_errors, step_risks, step_amaxes)
        b = without.update(step_norms)
        for name in ("gnmr", "delta", "scale"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
        assert (a.risk >= b.risk).all()
        beside = ((policy.error_limit, step_errors), (policy.amax_limit, step_amaxes))
        if step_risks is None and all(limit is None or values is None for limit, values in beside):
            np.testing.assert_array_equal(a.risk, b.risk)
    routed = {"active", "lock", "error_seen", "error_mean", "amax_seen", "amax_mean"}
    memories = zip(with_all.state_dict()["units"].values(), without.state_dict()["units"].values(), strict=True)
    for one, other in memories:
        assert {k: v for k, v in one.items() if k not in routed} == {k: v for k, v in other.items() if k not in routed}


@given(full_runs(), st.data())
@settings(max_examples=100, deadline=None)
def test_save_and_load_at_any_step_equals_an_uninterrupted_run(run, data):
    trace, policy, recoverable = run
    at = data.draw(st.integers(0, len(trace)))
    whole, resumed = (policy.start(len(trace[0][0]), recoverable) for _ in range(2))
    first = policy.start(len(trace[0][0]), recoverable)
    for step_inputs in trace[:at]:
        whole.update(*step_inputs)
        first.update(*step_inputs)
    resumed.load_state_dict(through_json(first.state_dict()))
    np.testing.assert_array_equal(resumed.active, whole.active)
    assert resumed.step == whole.step
    for step_inputs in trace[at:]:
        assert_same(resumed.update(*step_inputs), whole.update(*step_inputs))
    assert resumed.state_dict() == whole.state_dict()


@given(runs(max_steps=12), st.data())
@settings(max_examples=60, deadline=None)
def test_a_random_baseline_resumes_as_if_never_stopped(run, data):
    trace, _, recoverable = run
    counts = data.draw(st.lists(st.integers(0, 7), min_size=len(trace), max_size=len(trace)))
    at = data.draw(st.integers(0, len(trace)))
    policy = MatchedRandom(counts, seed=data.draw(st.integers(0, 2**64)))
    whole, first, resumed = (policy.start(len(trace[0]), recoverable) for _ in range(3))
    for step_norms in trace[:at]:
        whole.update(step_norms)
        first.update(step_norms)
    resumed.load_state_dict(through_json(first.state_dict()))
    np.testing.assert_array_equal(resumed.active, whole.active)
    for step_norms in trace[at:]:
        assert_same(resumed.update(step_norms), whole.update(step_norms))


@given(runs(least_units=2), st.data())
@settings(max_examples=100, deadline=None)
def test_a_failed_norm_changes_the_unit_next_to_it_only_by_taking_its_place(run, data):
    trace, policy, recoverable = run
    bad = data.draw(st.integers(0, len(trace[0]) - 1))
    others = np.arange(len(trace[0])) != bad
    healthy, broken = (policy.start(len(trace[0]), recoverable) for _ in range(2))
    for step_norms in trace[:-1]:
        healthy.update(step_norms)
        broken.update(step_norms)
    last = trace[-1]
    failed = [data.draw(st.sampled_from([np.nan, np.inf, -2.0])) if u == bad else n for u, n in enumerate(last)]
    a, b = healthy.update(last), broken.update(failed)
    for name in SCORES:
        np.testing.assert_array_equal(getattr(a, name)[others], getattr(b, name)[others], err_msg=name)
    gained = b.active & ~a.active & others
    displaced = a.active & ~b.active & others
    assert not gained.any()
    assert displaced.sum() <= 1
    assert not displaced.any() or (b.active[bad] and not a.active[bad])
    # What the others remember is the same as well.
    a, b = healthy.update(last), broken.update(last)
    for name in ("gnmr", "delta", "risk"):
        np.testing.assert_array_equal(getattr(a, name)[others], getattr(b, name)[others], err_msg=name)


@given(full_runs(least_units=2), st.data())
@settings(max_examples=100, deadline=None)
def test_a_failed_amax_changes_no_other_units_scores_in_this_step_or_a_later_one(run, data):
    trace, policy, recoverable = run
    bad = data.draw(st.integers(0, len(trace[0][0]) - 1))
    at = data.draw(st.integers(0, len(trace) - 1))
    others = np.arange(len(trace[0][0])) != bad
    healthy, broken = (policy.start(len(trace[0][0]), recoverable) for _ in range(2))
    for step, (step_norms, step_errors, step_risks, step_amaxes) in enumerate(trace):
        amaxes = [None] * len(step_norms) if step_amaxes is None else step_amaxes
        failed = [np.inf if unit == bad and step == at else amax for unit, amax in enumerate(amaxes)]
        a = healthy.update(step_norms, step_errors, step_risks, amaxes)
        b = broken.update(step_norms, step_errors, step_risks, failed)
        for name in SCORES:
            np.testing.assert_array_equal(getattr(a, name)[others], getattr(b, name)[others], err_msg=name)
        assert b.active.sum() <= broken.budget
        if step == at and policy.amax_limit is not None:
            assert b.risk[bad] >= LARGEST


@given(runs(max_steps=12))
@settings(max_examples=40, deadline=None)
def test_the_same_norms_give_the_same_decisions(run):
    trace, policy, recoverable = run
    one, other = (policy.start(len(trace[0]), recoverable) for _ in range(2))
    for step_norms in trace:
        assert_same(one.update(step_norms), other.update(list(step_norms)))


# A window of one step, because Deltas of exactly 1 (until the queue is full) make equal risks.
@given(st.integers(0, 2**32), st.integers(0, 4), st.sampled_from(["mean", "ema"]))
@settings(max_examples=40, deadline=None)
def test_the_order_of_units_does_not_matter_where_no_risks_are_equal(seed, lock_steps, history):
    policy = Policy(window_steps=1, lock_steps=lock_steps, max_active=3, history=history)
    generator = np.random.default_rng(seed)
    order = generator.permutation(9)
    plain, permuted = (policy.start(9) for _ in range(2))
    for step_norms in np.exp(generator.standard_normal((30, 9))):
        a, b = plain.update(step_norms), permuted.update(step_norms[order])
        for name in SCORES + EXACT:
            np.testing.assert_array_equal(getattr(a, name)[order], getattr(b, name), err_msg=name)


@given(runs(), st.data())
@settings(max_examples=60, deadline=None)
def test_units_that_are_only_watched_never_use_the_budget(run, data):
    trace, policy, _ = run
    # A count of the budget, because a share of the recoverable units is the same in both only by their number.
    num_units = len(trace[0])
    with_watched = policy.start([f"u{u}" for u in range(num_units)] + ["watched"], [f"u{u}" for u in range(num_units)])
    without = policy.start([f"u{u}" for u in range(num_units)])
    for step_norms in trace:
        a, b = with_watched.update([*step_norms, data.draw(norms)]), without.update(step_norms)
        for name in SCORES + EXACT:
            np.testing.assert_array_equal(getattr(a, name)[:-1], getattr(b, name), err_msg=name)
        assert not a.active[-1]
        assert a.lock[-1] == 0


def healthy_trace(num_steps=600, num_units=40, seed=0):
    """Norms that decay from 6 times their later level over 40 steps, under lognormal noise of 30%."""
    generator = np.random.default_rng(seed)
    level = np.exp(2 * generator.standard_normal(num_units))
    decay = 1 + 5 * np.exp(-np.arange(num_steps) / 40)
    return level * decay[:, None] * np.exp(0.3 * generator.standard_normal((num_steps, num_units)))


def share_flagged(policy, trace):
    controller = policy.start(trace.shape[1])
    return np.mean([controller.update(step_norms).risk > 1 for step_norms in trace])


def test_robust_flags_a_healthy_run_rarely_and_the_published_thresholds_flag_it_often():
    trace = healthy_trace()
    quiet, loud = share_flagged(robust(), trace), share_flagged(Policy(), trace)
    assert quiet < 0.006
    assert loud > 20 * quiet
    assert loud > 0.05


def test_robust_still_sees_a_fault_late_in_a_run_that_the_full_mean_has_grown_blind_to():
    trace = healthy_trace()
    fault = np.exp(np.log(trace[-50:]).mean(axis=0)) * 6
    robustly, published = robust().start(40), Policy(alpha=4.0, beta=1e6).start(40)
    for step_norms in trace:
        robustly.update(step_norms)
        published.update(step_norms)
    assert (robustly.update(fault).risk > 1).mean() > (published.update(fault).gnmr > 4.5).mean()
    assert robustly.active.sum() == robustly.budget
