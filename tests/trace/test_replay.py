from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.control import REASONS, Controller, MatchedRandom, Policy, TwoStage, robust
from trimtab.errors import ConfigError
from trimtab.trace import RunWriter, StepRow, UnitRow, open_run, replay
from trimtab.trace.what_if import recorded_policy, what_if

UNITS = [UnitRow(name="q"), UnitRow(name="k"), UnitRow(name="norm", recoverable=False), UnitRow(name="v")]
NAMES = [unit.name for unit in UNITS]
MASK = [unit.recoverable for unit in UNITS]


def _norms(num_steps, seed=0, num_units=4):
    """Norms with bursts, failed and unobserved ones."""
    rng = np.random.default_rng(seed)
    norms = rng.lognormal(0, 0.8, (num_steps, num_units))
    norms[rng.random(norms.shape) < 0.05] *= 30
    for value in (0.0, np.nan, np.inf, -1.0):
        norms[rng.random(norms.shape) < 0.02] = value
    return norms


def _errors(num_steps, seed=0, num_units=4):
    """Channel errors with faults, broken operands and gaps; None where nothing is known in a step."""
    rng = np.random.default_rng(100 + seed)
    errors = 0.1 + 0.3 * rng.random((num_steps, num_units)) ** 4
    for value in (np.nan, np.inf, 0.8):
        errors[rng.random(errors.shape) < 0.1] = value
    return [None if rng.random() < 0.1 else step_errors for step_errors in errors]


def _amaxes(num_steps, seed=0, num_units=4):
    """Amaxes as float32 has them, with faults, broken operands and gaps; None where nothing is known in a step."""
    rng = np.random.default_rng(200 + seed)
    amaxes = rng.lognormal(1, 0.3, (num_steps, num_units))
    for value in (np.nan, np.inf, 0.0, 99.0):
        amaxes[rng.random(amaxes.shape) < 0.06] = value
    amaxes = amaxes.astype(np.float32).astype(np.float64)
    return [None if rng.random() < 0.1 else step_amaxes for step_amaxes in amaxes]


def _row(step, norms, decision, **changes):
    names = ("gnmr", "delta", "risk", "active", "lock", "reason", "alpha", "beta")
    values = {name: getattr(decision, name) for name in names}
    return StepRow(step=step, norms=norms, **(values | changes))


def _assert_exact(run, policy=None):
    made, table = replay(run, policy), run.steps()
    observed = ~table.skipped
    assert made.num_different == 0
    assert made.notes == ()
    np.testing.assert_array_equal(made.steps.step, table.step[observed])
    np.testing.assert_array_equal(made.steps.active, table.active[observed])
    np.testing.assert_array_equal(made.steps.lock, table.lock[observed])
    np.testing.assert_array_equal(made.steps.reason, table.reason[observed])
    assert table.reason.any()
    for name in ("gnmr", "delta", "risk"):
        # Recorded in float32: one rounding apart, and what is finite stays finite.
        recorded, largest = getattr(table, name)[observed], float(np.finfo(np.float32).max)
        replayed = getattr(made.steps, name)
        replayed = np.where(np.isinf(replayed), replayed, np.minimum(replayed, largest))
        np.testing.assert_allclose(recorded, replayed, rtol=2**-23)
    return made


def test_replay_with_the_recorded_policy_gives_the_recorded_decisions(tmp_path):
    policy = robust(max_active=1, warmup_steps=0)
    policy = dataclasses.replace(policy, burn_in_steps=5, act_from_step=8, alpha=lambda step: 1.2 + 10 / step)
    controller = policy.start(NAMES, MASK)
    with RunWriter(tmp_path, config={"policy": policy.to_dict()}, units=UNITS) as writer:
        for step, norms in enumerate(_norms(120), start=1):
            if step % 10 == 0:
                writer.write_step(StepRow(step=step - 1, skipped=True, norms=norms))
            writer.write_step(_row(step, norms, controller.update(norms)))
    with open_run(tmp_path) as run:
        made = _assert_exact(run, None)
        assert made.steps.active.any()
        _assert_exact(run, policy)


@settings(max_examples=20, deadline=None)
@given(
    cut=st.integers(1, 39),
    end=st.integers(1, 40),
    how=st.sampled_from(["same process", "new process", "new process with state"]),
    seed=st.integers(0, 9),
    window=st.integers(1, 6),
)
def test_replay_is_exact_across_a_resume_in_the_middle(cut, end, how, seed, window, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    policy = Policy(alpha=TwoStage(1.5, 1.1, switch_step=15), window_steps=window, lock_steps=3, max_active=2)
    settings_ = {"config": {"policy": policy.to_dict()}, "units": UNITS}
    controller, norms, saved = Controller(NAMES, policy, MASK), _norms(80, seed), None
    writer = RunWriter(folder, **settings_)
    for step in range(1, max(cut, end) + 1):
        writer.write_step(_row(step, norms[step], controller.update(norms[step])))
        if step == cut:
            saved = controller.state_dict()
    controller = Controller(NAMES, policy, MASK)
    controller.load_state_dict(saved)
    if how == "same process":
        writer.resume(cut)
    else:
        writer.close(finished=False)
        writer = RunWriter(folder, **settings_, start_step=cut, state=saved if "state" in how else None)
    for step in range(cut + 1, cut + 21):
        writer.write_step(_row(step, norms[step + 20], controller.update(norms[step + 20])))
    writer.close()
    with open_run(folder) as run:
        assert run.num_steps == cut + 20
        _assert_exact(run)


@pytest.mark.parametrize("kind", ["robust", "mean", "errors by history"])
def test_replay_with_recorded_errors_is_exact_across_a_resume(kind, tmp_path):
    policy = Policy(max_active=2, lock_steps=2, error_limit=0.3)
    if kind == "robust":
        policy = robust(burn_in_steps=5, act_from_step=8, max_active=1, error_limit=0.3)
    if kind == "errors by history":
        policy = Policy(max_active=2, lock_steps=2, burn_in_steps=3, error_limit=1.3, error_history="ema")
    settings_ = {"config": {"policy": policy.to_dict()}, "units": UNITS}
    norms, errors = _norms(80), _errors(80)
    saved = policy.start(NAMES, MASK).state_dict()
    for first, last in ((1, 40), (31, 80)):
        controller = policy.start(NAMES, MASK)
        controller.load_state_dict(saved)
        with RunWriter(tmp_path, **settings_, start_step=first - 1) as writer:
            for step in range(first, last + 1):
                norm, error = norms[step - 1], errors[step - 1]
                writer.write_step(_row(step, norm, controller.update(norm, error), errors=error))
                if step == 30:
                    saved = controller.state_dict()
    with open_run(tmp_path) as run:
        made = _assert_exact(run)
        assert {"gnmr", "delta", "error", "failed"} <= {REASONS[code] for code in np.unique(made.steps.reason)}
        assert Policy.from_dict(run.config["policy"]) == policy
        given = np.array([np.full(4, np.nan) if error is None else error for error in errors])
        np.testing.assert_array_equal(made.steps.errors, given)
        # The errors did decide: without a limit other units would have been chosen.
        assert replay(run, dataclasses.replace(policy, error_limit=None)).num_different > 0
        if kind == "errors by history":
            assert replay(run, dataclasses.replace(policy, error_history="absolute")).num_different > 0


INT4 = {"error_limit": 1.3, "error_history": "ema", "amax_limit": 12.0}


@pytest.mark.parametrize(
    "policy",
    [
        Policy(max_active=2, lock_steps=2, burn_in_steps=3, amax_limit=12.0),
        robust(burn_in_steps=5, act_from_step=8, max_active=1, **INT4),
        MatchedRandom([1, 2] * 40, seed=1, scores=Policy(burn_in_steps=3, **INT4)),
    ],
    ids=["amaxes alone", "as for INT4", "random"],
)
@pytest.mark.parametrize("state_is_recorded", [True, False])
def test_replay_with_recorded_amaxes_is_exact_across_a_resume(policy, state_is_recorded, tmp_path):
    settings_ = {"config": {"policy": policy.to_dict()}, "units": UNITS}
    norms, errors, amaxes = _norms(80), _errors(80), _amaxes(80)
    saved, recorded = policy.start(NAMES, MASK).state_dict(), None
    for first, last in ((1, 40), (31, 80)):
        controller = policy.start(NAMES, MASK)
        controller.load_state_dict(saved)
        with RunWriter(tmp_path, **settings_, start_step=first - 1, state=recorded) as writer:
            for step in range(first, last + 1):
                norm, error, amax = norms[step - 1], errors[step - 1], amaxes[step - 1]
                quantizer = None if amax is None else {"amax": amax}
                made = controller.update(norm, error, None, amax)
                writer.write_step(_row(step, norm, made, errors=error, quantizer=quantizer))
                if step == 30:
                    saved = controller.state_dict()
                    recorded = saved if state_is_recorded else None
    with open_run(tmp_path) as run:
        made = _assert_exact(run)
        assert "amax" in {REASONS[code] for code in np.unique(made.steps.reason)}
        assert recorded_policy(run) == policy
        assert what_if(run, {"same": recorded_policy(run)}).outcomes["same"].num_different == 0
        given = np.array([np.full(4, np.nan) if amax is None else amax for amax in amaxes])
        np.testing.assert_array_equal(made.steps.amax, given)
        if isinstance(policy, Policy):
            # The amaxes did decide: without a limit other units would have been chosen.
            assert replay(run, dataclasses.replace(policy, amax_limit=None)).num_different > 0


def test_amaxes_that_are_not_recorded_are_noted(tmp_path):
    policy = Policy()
    controller = policy.start(NAMES, MASK)
    with RunWriter(tmp_path, config={"policy": policy.to_dict()}, units=UNITS) as writer:
        writer.write_step(_row(1, np.ones(4), controller.update(np.ones(4))))
    with open_run(tmp_path) as run:
        assert replay(run).notes == ()
        (note,) = replay(run, Policy(amax_limit=12.0)).notes
    assert "no amaxes for the policy's amax_limit" in note


def test_replay_is_exact_when_a_resume_brings_other_units(tmp_path):
    policy = Policy(max_active=1)
    settings_ = {"config": {"policy": policy.to_dict()}}
    first = policy.start(["a", "b", "c"])
    with RunWriter(tmp_path, units=[{"name": name} for name in "abc"], **settings_) as writer:
        for step, norms in enumerate(_norms(30, num_units=3), start=1):
            writer.write_step(_row(step, norms, first.update(norms)))
    second = policy.start(["c", "d", "a"])
    second.load_state_dict(first.state_dict())
    with RunWriter(tmp_path, units=[{"name": name} for name in "cda"], start_step=30, **settings_) as writer:
        for step, norms in enumerate(_norms(30, seed=1, num_units=3), start=31):
            writer.write_step(_row(step, norms, second.update(norms)))
    with open_run(tmp_path) as run:
        made = replay(run)
        assert made.num_different == 0
        np.testing.assert_array_equal(made.steps.lock, run.steps().lock)


def test_a_record_that_begins_in_the_middle_is_exact_only_with_its_state(tmp_path):
    policy = Policy(max_active=1)
    before = policy.start(NAMES, MASK)
    for norms in _norms(20):
        before.update(norms)
    for name, state in (("with", before.state_dict()), ("without", None)):
        controller = policy.start(NAMES, MASK)
        controller.load_state_dict(before.state_dict())
        with RunWriter(
            tmp_path / name, config={"policy": policy.to_dict()}, units=UNITS, start_step=20, state=state
        ) as writer:
            for step, norms in enumerate(_norms(20, seed=1), start=21):
                writer.write_step(_row(step, norms, controller.update(norms)))
    with open_run(tmp_path / "with") as run:
        _assert_exact(run)
    with open_run(tmp_path / "without") as run:
        assert "without the controller's state" in replay(run).notes[0]


def test_a_set_routed_by_hand_changes_no_replayed_decision(tmp_path):
    policy = Policy(max_active=1)
    controller = policy.start(NAMES, MASK)
    with RunWriter(tmp_path, config={"policy": policy.to_dict()}, units=UNITS) as writer:
        for step, norms in enumerate(_norms(20), start=1):
            extra = {"routed_by_hand": ["q", "k", "v"]} if step in (5, 9) else None
            writer.write_step(_row(step, norms, controller.update(norms), extra=extra))
    with open_run(tmp_path) as run:
        _assert_exact(run)
        assert replay(run).notes == ()


def test_replay_with_recorded_risks_is_exact(tmp_path):
    policy = Policy(max_active=1)
    controller, without = policy.start(NAMES, MASK), policy.start(NAMES, MASK)
    num_changed = 0
    with RunWriter(tmp_path, config={"policy": policy.to_dict()}, units=UNITS) as writer:
        for step, norms in enumerate(_norms(40), start=1):
            raised = {"k": 0.1 + step, "norm": 9.0} if step % 4 == 0 else {}
            made = controller.update(norms, None, [raised.get(name) for name in NAMES])
            num_changed += int((made.active != without.update(norms).active).any())
            writer.write_step(_row(step, norms, made, extra={"raised": raised} if raised else None))
    assert num_changed > 0
    with open_run(tmp_path) as run:
        _assert_exact(run)


def test_another_policy_gives_its_own_decisions(tmp_path):
    recorded, other = Policy(max_active=1), Policy(max_active=3, alpha=1.1, lock_steps=4)
    first, second = recorded.start(NAMES, MASK), other.start(NAMES, MASK)
    norms = _norms(50)
    with RunWriter(tmp_path, config={"policy": recorded.to_dict()}, units=UNITS) as writer:
        for step, values in enumerate(norms, start=1):
            writer.write_step(_row(step, values, first.update(values)))
    with open_run(tmp_path) as run:
        made = replay(run, other)
    expected = np.array([np.array(second.update(values).active) for values in norms])
    assert np.array_equal(made.steps.active, expected)
    assert made.num_different == np.count_nonzero(expected != made.recorded_active) > 0
    assert (made.steps.alpha == 1.1).all()


def test_what_the_record_cannot_tell_is_noted(tmp_path):
    policy = Policy()
    controller = policy.start(NAMES, MASK)
    with RunWriter(tmp_path, config={"policy": policy.to_dict()}, units=UNITS) as writer:
        for step in (1, 2, 6, 7):
            writer.write_step(_row(step, [1.0] * 4, controller.update([1.0] * 4)))
    with open_run(tmp_path) as run:
        notes = replay(run).notes
    assert "no steps 3 to 5" in notes[0]


@pytest.mark.parametrize("config", [{}, {"policy": "random"}, {"policy": {"counts": [1], "seed": 3}}])
def test_a_policy_that_cannot_be_built_again_asks_for_one(config, tmp_path):
    with RunWriter(tmp_path, config=config, units=UNITS) as writer:
        writer.write_step(StepRow(step=1, norms=[1.0] * 4))
    with open_run(tmp_path) as run:
        with pytest.raises(ConfigError, match="Pass replay a policy"):
            replay(run)
        assert len(replay(run, Policy()).steps) == 1


def test_an_empty_run_replays_to_nothing(tmp_path):
    writer = RunWriter(tmp_path, config={"policy": Policy().to_dict()}, units=UNITS)
    with open_run(tmp_path) as run:
        assert len(replay(run).steps) == 0
    writer.close()
