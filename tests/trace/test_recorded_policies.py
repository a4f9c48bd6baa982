"""Every policy's record replays to its decisions; one that cannot be built again is refused with the reason."""

from __future__ import annotations

import json

import numpy as np
import pytest

from trimtab.cli import main
from trimtab.control import POLICIES, MatchedRandom, Policy, robust
from trimtab.control.policies import policy as policy_of_name
from trimtab.errors import ConfigError
from trimtab.trace import RunWriter, StepRow, UnitRow, open_run, replay
from trimtab.trace.what_if import changed, healthy_thresholds, recorded_policy, sweep, verify, what_if

UNITS = [UnitRow(name="q"), UnitRow(name="k"), UnitRow(name="norm", recoverable=False), UnitRow(name="v")]
NAMES = [unit.name for unit in UNITS]
NUM_STEPS, CUT = 60, 35

_GAPS = np.random.default_rng(7).standard_normal((NUM_STEPS, len(NAMES)))
SETTINGS = {
    "matched_random": {"counts": [1, 2, 0] * (NUM_STEPS // 3), "seed": 3},
    "fixed_set": {"units": ["k", "v"]},
    "adapt_style": {"profile_steps": 8, "share": 2},
    "oracle": {"gaps": [dict(zip(NAMES, row, strict=True)) for row in _GAPS.tolist()], "max_active": 2},
}
# Scores with a threshold that the record holds as text only, and with channel errors.
OWN_SCORES = Policy(alpha=lambda step: 1.2 + 1 / step, error_limit=0.3)
NEVER_ACTIVE = {"static_low", "damping_only"}


def made(name):
    if name == "robust":
        return robust(burn_in_steps=5, act_from_step=8)
    return policy_of_name(name, SETTINGS.get(name), total_steps=NUM_STEPS)


def norms_of(num_steps):
    rng = np.random.default_rng(1)
    norms = rng.lognormal(0, 0.6, (num_steps, len(UNITS)))
    norms[rng.random(norms.shape) < 0.08] *= 20
    for value in (0.0, np.nan, np.inf, -1.0):
        norms[rng.random(norms.shape) < 0.02] = value
    return norms


def record(folder, policy, *, with_state):
    """A run that is resumed by a new process, over units in another order; with its state, from before its end."""
    rng = np.random.default_rng(2)
    state, units = None, UNITS
    for first, last in ((1, CUT + 4 if with_state else CUT), (CUT + 1, NUM_STEPS)):
        if first > 1:
            units = [*reversed(UNITS)]
        names = [unit.name for unit in units]
        controller = policy.start(names, [unit.recoverable for unit in units])
        if state is not None:
            controller.load_state_dict(state)
        about = {"config": {"policy": policy.to_dict()}, "units": units, "start_step": first - 1}
        with RunWriter(folder, **about, state=state if with_state else None) as writer:
            for step in range(first, last + 1):
                by_name = dict(zip(NAMES, norms_of(NUM_STEPS)[step - 1], strict=True))
                norms = [by_name[name] for name in names]
                errors = 0.4 * rng.random(len(names))
                risks = {"k": 2.5} if step % 7 == 0 else {}
                decision = controller.update(norms, errors, *([[risks.get(n) for n in names]] if risks else []))
                scores = ("gnmr", "delta", "risk", "active", "lock", "reason", "alpha", "beta")
                values = {name: getattr(decision, name) for name in scores}
                extra = {"raised": risks} if risks else None
                writer.write_step(StepRow(step=step, norms=norms, errors=errors, extra=extra, **values))
                if step == CUT:
                    state = controller.state_dict()


@pytest.mark.parametrize("with_state", [True, False], ids=["state recorded", "state replayed"])
@pytest.mark.parametrize("name", [*POLICIES, "static_high with scores", "matched_random with scores"])
def test_the_record_of_every_policy_replays_to_its_decisions(name, with_state, tmp_path):
    kind, _, scores = name.partition(" with ")
    policy = made(kind)
    if scores:
        policy = changed(policy, {"scores": OWN_SCORES})
    record(tmp_path, policy, with_state=with_state)
    verified = verify(tmp_path)
    assert verified.is_exact
    assert verified.notes == ()
    with open_run(tmp_path) as run:
        made_again, table = replay(run), run.steps()
        assert made_again.num_different == 0
        assert table.active.any() == (kind not in NEVER_ACTIVE)
        for column in ("lock", "reason", "alpha", "beta"):
            np.testing.assert_array_equal(getattr(made_again.steps, column), getattr(table, column), err_msg=column)
        np.testing.assert_allclose(made_again.steps.risk, table.risk, rtol=2**-23)
        if not scores:
            assert recorded_policy(run) == policy
            assert what_if(run, {"same": recorded_policy(run)}).outcomes["same"].num_different == 0


def test_another_kind_of_policy_is_swept_over_its_own_settings(tmp_path):
    record(tmp_path, made("gsnr_style"), with_state=True)
    told = sweep(tmp_path, {"max_active": [0, 2], "factor": [0.5, 0.9]})
    assert list(told.outcomes) == [f"max_active={m}, factor={f}" for m in (0, 2) for f in (0.5, 0.9)]
    assert told.outcomes["max_active=0, factor=0.9"].recovered_share == 0
    assert told.outcomes["max_active=2, factor=0.9"].policy["kind"] == "gsnr_style"
    with pytest.raises(ConfigError, match="kind 'gsnr_style' has no such setting; it has scores, max_active, factor"):
        sweep(tmp_path, {"alpha": [2.0]})


def test_thresholds_of_a_healthy_run_rest_on_the_steps_after_its_scores_began(tmp_path):
    policy = MatchedRandom([1] * 200, seed=0, scores=robust(burn_in_steps=20, act_from_step=50))
    controller = policy.start(NAMES)
    with RunWriter(tmp_path, config={"policy": policy.to_dict()}, units=UNITS) as writer:
        for step, norms in enumerate(np.random.default_rng(0).lognormal(0, 0.2, (200, 4)), start=1):
            decision = controller.update(norms)
            scores = {name: getattr(decision, name) for name in ("gnmr", "delta", "risk", "active", "alpha", "beta")}
            writer.write_step(StepRow(step=step, norms=norms, **scores))
    with open_run(tmp_path) as run:
        assert healthy_thresholds(run, 10.0).num_steps == 150


def test_a_policy_of_somebody_elses_is_refused_with_the_reason(capsys, tmp_path):
    config = {"policy": {"kind": "by_gradient_direction", "share": 0.1}}
    with RunWriter(tmp_path, config=config, units=UNITS) as writer:
        writer.write_step(StepRow(step=1, norms=[1.0] * 4, active=[False] * 4))
    for do in (verify, lambda path: sweep(path, {"max_active": [1]})):
        with pytest.raises(ConfigError, match="kind='by_gradient_direction': no policy is of this kind"):
            do(tmp_path)
    assert main(["replay", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert len(said.strip().splitlines()) == 1
    assert "the recorded policy cannot be built again (kind='by_gradient_direction'" in said
    assert "--preset" in said
    # Its norms are all that another policy needs.
    assert main(["replay", str(tmp_path), "--preset", "paper", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_steps"] == 1


def test_the_command_line_verifies_another_kind_and_says_what_it_has(capsys, tmp_path):
    record(tmp_path, made("static_high"), with_state=True)
    assert main(["replay", str(tmp_path)]) == 0
    assert f"in all {NUM_STEPS} steps" in " ".join(capsys.readouterr().out.split())
    assert main(["replay", str(tmp_path), "--alpha", "2"]) == 2
    said = capsys.readouterr().err
    assert "alpha=2.0: a policy of kind 'static_high' has no such setting; it has scores." in said
