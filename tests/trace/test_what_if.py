"""What other policies would have decided is what a slow count of their replay says; the recorded one is verified."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.control import Policy, paper, robust
from trimtab.errors import ConfigError, MissingExtraError
from trimtab.experiments.faults.plot import fault_figure
from trimtab.experiments.picture import demo_figure
from trimtab.trace import RunWriter, StepRow, UnitRow, open_run, replay
from trimtab.trace.what_if import (
    MOST_POLICIES,
    changed,
    healthy_thresholds,
    recorded_policy,
    sweep,
    verify,
    what_if,
)
from trimtab.trace.what_if_picture import check_picture, what_if_figure, write_picture

UNITS = [UnitRow(name="q"), UnitRow(name="k"), UnitRow(name="norm", recoverable=False), UnitRow(name="v")]
NAMES = [unit.name for unit in UNITS]
FAULTS = [("k", 30, 12), ("v", 36, 5), ("k", 70, 1), ("q", 119, 40)]


def _norms(num_steps, seed=0):
    rng = np.random.default_rng(seed)
    norms = rng.lognormal(0, 0.3, (num_steps, len(UNITS)))
    for value in (0.0, np.nan, np.inf, -1.0):
        norms[rng.random(norms.shape) < 0.01] = value
    for unit, start, length in FAULTS:
        norms[start - 1 : start - 1 + length, NAMES.index(unit)] *= 20
    return norms


def _record(folder, policy, *, num_steps=120, seed=0, errors=False, raised=False, cut=None, faults=True, flip=None):
    """A run under ``policy``; from ``cut`` on by a new process, over units in another order, with one more."""
    rng = np.random.default_rng(seed + 100)
    controller, state, units = None, None, UNITS
    segments = [(1, num_steps)] if cut is None else [(1, cut + 3), (cut + 1, num_steps)]
    for first, last in segments:
        if first > 1:
            units = [*reversed(UNITS), UnitRow(name="new")]
        names = [unit.name for unit in units]
        controller = policy.start(names, [unit.recoverable for unit in units])
        if state is not None:
            controller.load_state_dict(state)
        about = {"config": {"policy": policy.to_dict()}, "units": units, "start_step": first - 1}
        with RunWriter(folder, **about, state=state) as writer:
            for step in range(first, last + 1):
                by_name = dict(zip(NAMES, _norms(num_steps + 5, seed)[step - 1], strict=True)) | {"new": 1.0}
                norms = [by_name[name] for name in names]
                of_step = 0.4 * rng.random(len(names)) if errors else None
                risks = {names[0]: 2.5} if raised and step % 7 == 0 else {}
                more = () if not risks else ([risks.get(name) for name in names],)
                made = controller.update(norms, of_step, *more)
                scores = {name: getattr(made, name) for name in ("gnmr", "delta", "risk", "lock", "alpha", "beta")}
                active = np.array(made.active)
                if flip == step:
                    active[0] = ~active[0]
                for unit, start, length in FAULTS if faults else ():
                    if start == step:
                        data = {"fault": "stored copy", "start_step": start, "num_steps": length}
                        writer.write_event("fault", step, unit, data)
                extra = {"raised": risks} if risks else None
                writer.write_step(StepRow(step=step, norms=norms, errors=of_step, active=active, extra=extra, **scores))
                if step == 20:
                    writer.write_step(StepRow(step=step, skipped=True))
                if step == cut:
                    state = controller.state_dict()
    if flip is None:
        verified = verify(folder)
        assert verified.is_exact
        assert verified.notes == ()
        assert verified.num_steps == num_steps
        assert verified.first_different_step is None
    return folder


@pytest.mark.parametrize(
    "policy",
    [
        Policy(max_active=2),
        robust(burn_in_steps=5, act_from_step=8, max_active=1),
        Policy(alpha=lambda step: 1.2 + 10 / step, max_active=0.5, history="window", history_steps=9),
        Policy(max_active=2, error_limit=0.3, lock_steps=3),
    ],
    ids=["mean", "robust", "function", "errors"],
)
@pytest.mark.parametrize("cut", [None, 45])
def test_the_recorded_policy_is_verified_on_every_record(policy, cut, tmp_path):
    folder = _record(tmp_path, policy, errors=policy.error_limit is not None, raised=True, cut=cut)
    with open_run(folder) as run:
        told = what_if(run, {"same": recorded_policy(run)})
    assert told.recorded.num_switches > 0
    if cut is None or not callable(policy.alpha):
        assert told.outcomes["same"].num_different == 0
        assert told.outcomes["same"].num_switches == told.recorded.num_switches


def test_a_decision_that_was_changed_is_found(tmp_path):
    verified = verify(_record(tmp_path, Policy(max_active=2), flip=57))
    assert not verified.is_exact
    assert (verified.num_different, verified.first_different_step) == (1, 57)


def _slow_outcome(table, recorded, mask):
    """Every figure by loops over plain values."""
    counts = {"active": 0, "switches": 0, "different": 0, "false": 0}
    routed = {}
    before = dict.fromkeys(table.units, False)
    for t, step in enumerate(table.step.tolist()):
        for i, unit in enumerate(table.units):
            on = bool(table.active[t, i])
            routed[step + 1, unit] = on
            counts["active"] += on and mask[i]
            counts["switches"] += on and not before[unit]
            counts["different"] += on != bool(recorded[t, i])
            suffers = any(unit == u and start <= step + 1 < start + length for u, start, length in FAULTS)
            counts["false"] += on and not suffers
            before[unit] = on
    latencies = []
    for unit, start, length in FAULTS:
        caught = [step for step in range(start, start + length) if routed.get((step, unit))]
        latencies += [caught[0] - start] if caught else []
    return counts, latencies


@settings(max_examples=12, deadline=None)
@given(
    alpha=st.sampled_from([1.1, 2.0, 6.0]),
    max_active=st.sampled_from([0, 1, 3, 0.5]),
    lock=st.integers(0, 4),
    cut=st.sampled_from([None, 33, 80]),
    seed=st.integers(0, 5),
)
def test_every_figure_is_that_of_a_slow_count(alpha, max_active, lock, cut, seed, tmp_path_factory):
    folder = _record(tmp_path_factory.mktemp("run"), Policy(max_active=2), cut=cut, seed=seed)
    policy = Policy(alpha=alpha, max_active=max_active, lock_steps=lock)
    with open_run(folder) as run:
        told, made = what_if(run, {"other": policy}), replay(run, policy)
        mask = [unit.recoverable for unit in run.unit_table]
    assert (told.num_units, told.num_recoverable) == (len(mask), sum(mask))
    assert told.steps.tolist() == made.steps.step.tolist()
    recorded = dataclasses.replace(made.steps, active=made.recorded_active)
    for one, table in ((told.outcomes["other"], made.steps), (told.recorded, recorded)):
        counts, latencies = _slow_outcome(table, made.recorded_active, mask)
        assert one.recovered_share == pytest.approx(counts["active"] / (len(table) * sum(mask)))
        assert (one.num_switches, one.num_different) == (counts["switches"], counts["different"])
        assert one.num_false == counts["false"]
        assert (one.num_caught, list(one.latencies)) == (len(latencies), latencies)
        assert one.active_counts.tolist() == table.active.sum(axis=1).tolist()


def test_a_sweep_is_each_of_its_policies_alone(tmp_path):
    folder = _record(tmp_path, robust(burn_in_steps=5, act_from_step=8, max_active=1))
    grid = {"alpha": [1.5, 4.0], "max_active": [1, 0.5], "history": ["ema", "mean"]}
    told = sweep(folder, grid)
    assert len(told.outcomes) == 8
    assert told.grid == {name: tuple(values) for name, values in grid.items()}
    with open_run(folder) as run:
        base = recorded_policy(run)
        for alpha, max_active, history in itertools.product(*grid.values()):
            policy = changed(base, {"alpha": alpha, "max_active": max_active, "history": history})
            alone = what_if(run, {"alone": policy}).outcomes["alone"]
            swept = told.outcomes[f"alpha={alpha}, max_active={max_active}, history={history}"]
            assert swept.to_dict() == alone.to_dict()
            assert swept.policy == policy.to_dict()


def test_a_fault_that_is_at_no_unit_is_told_apart(tmp_path):
    with RunWriter(tmp_path, config={"policy": Policy().to_dict()}, units=UNITS) as writer:
        for step in range(1, 6):
            writer.write_step(StepRow(step=step, norms=np.ones(4), active=np.zeros(4, np.bool_)))
        for place, data in (("optimizer", {"start_step": 2, "num_steps": 3}), ("q", {}), ("q", {"num_steps": 2})):
            writer.write_event("fault", 2, place, data)
    told = what_if(tmp_path, {"same": Policy()})
    assert [(fault.unit, fault.start_step, fault.end_step) for fault in told.faults] == [("q", 2, 4)]
    assert told.num_faults_elsewhere == 2
    assert told.outcomes["same"].num_caught == told.recorded.num_caught == 0


def test_a_threshold_that_was_a_function_stays_what_the_rows_say(tmp_path):
    folder = _record(tmp_path, Policy(alpha=lambda step: 1.5 + 1 / step, max_active=2))
    with open_run(folder) as run:
        policy = changed(recorded_policy(run), {"beta": 9.0})
        assert [policy.thresholds(step) for step in (1, 2, 50)] == [(2.5, 9.0), (2.0, 9.0), (1.52, 9.0)]


def test_another_policy_keeps_its_own_memory_over_a_resume(tmp_path):
    other = Policy(alpha=1.1, max_active=3, lock_steps=200)
    whole = what_if(_record(tmp_path / "whole", Policy(max_active=1)), {"other": other}).outcomes["other"]
    cut = what_if(_record(tmp_path / "cut", Policy(max_active=1), cut=60), {"other": other}).outcomes["other"]
    # Up to the resume the units are the same, and with them the decisions; so are the locks that outlast it.
    assert cut.active_counts[:60].tolist() == whole.active_counts[:60].tolist()
    assert cut.active_counts[60] > 0


def test_channel_errors_that_are_not_recorded_are_noted(tmp_path):
    told = what_if(_record(tmp_path, Policy()), {"errors": Policy(error_limit=0.3)})
    assert any("error_limit" in note for note in told.notes)


@pytest.mark.parametrize(
    ("grid", "parts"),
    [
        ({"alhpa": [1.5]}, ["alhpa=1.5", "Did you mean 'alpha'?"]),
        ({"alpha": [1.5, -1]}, ["alpha=-1", "above 0"]),
        ({"alpha": []}, ["alpha=[]", "needs a value"]),
        ({}, ["(0 policies)"]),
        ({"lock_steps": range(MOST_POLICIES + 1)}, [f"1 to {MOST_POLICIES}", "List fewer values."]),
    ],
)
def test_a_sweep_that_cannot_be_meant_is_refused(grid, parts, tmp_path):
    folder = _record(tmp_path, Policy())
    with pytest.raises(ConfigError) as caught:
        sweep(folder, grid)
    assert all(part in str(caught.value) for part in parts)


def test_a_record_without_steps_or_policy_is_refused(tmp_path):
    with RunWriter(tmp_path / "empty", config={"policy": Policy().to_dict()}, units=UNITS):
        pass
    for do in (verify, lambda path: what_if(path, {})):
        with pytest.raises(ConfigError, match="no decision"):
            do(tmp_path / "empty")
    with RunWriter(tmp_path / "bare", config={}, units=UNITS) as writer:
        writer.write_step(StepRow(step=1, norms=np.ones(4), active=np.zeros(4, np.bool_)))
    with pytest.raises(ConfigError, match="holds no policy"):
        verify(tmp_path / "bare")
    with pytest.raises(ConfigError, match="holds no policy"):
        sweep(tmp_path / "bare", {"alpha": [2.0]})
    assert what_if(tmp_path / "bare", {"paper": paper()}).outcomes["paper"].num_different == 0


def test_healthy_thresholds_keep_to_the_rate_in_the_run_itself(tmp_path):
    folder = _record(tmp_path, robust(max_active=1), num_steps=400, faults=False)
    for rate in (5.0, 50.0):
        with open_run(folder) as run:
            found = healthy_thresholds(run, rate)
            table = run.steps()
        acts = (table.step > 40) & ~table.skipped
        gnmr, delta = table.gnmr[acts], table.delta[acts]
        with np.errstate(invalid="ignore"):
            triggers = np.isfinite(gnmr) & ((gnmr > found.alpha) | (delta > found.beta))
        assert found.num_unit_steps == np.count_nonzero(np.isfinite(gnmr))
        assert found.num_false == np.count_nonzero(triggers)
        assert 0 < found.num_false <= rate / 1000 * found.num_unit_steps < 2.5 * found.num_false
        assert found.upper_per_1000 > 1000 * found.num_false / found.num_unit_steps
        assert found.num_failed == np.count_nonzero(np.isinf(gnmr))
        assert found.num_steps == np.count_nonzero(acts)


def test_thresholds_from_a_record_that_cannot_give_them_are_refused(tmp_path):
    with open_run(_record(tmp_path / "faulty", Policy())) as run, pytest.raises(ConfigError, match="without faults"):
        healthy_thresholds(run, 1.0)
    with open_run(_record(tmp_path / "short", Policy(), faults=False)) as run:
        with pytest.raises(ConfigError, match="Record at least 1000 steps"):
            healthy_thresholds(run, 1.0)
        for rate in (0.0, -1.0, float("nan"), 1000.0):
            with pytest.raises(ConfigError, match="false_per_1000"):
                healthy_thresholds(run, rate)


def test_a_picture_is_drawn_of_a_sweep_and_of_policies(tmp_path):
    pytest.importorskip("plotly")
    folder = _record(tmp_path, Policy(max_active=2))
    swept = sweep(folder, {"alpha": [1.5, 2.0, 3.0], "max_active": [1, 2]})
    figure = what_if_figure(swept)
    lines = [line for line in figure.data if line.name != "as recorded"]
    assert len(lines) == 4 * 2
    assert list(lines[0].y) == [swept.outcomes[f"alpha={a}, max_active=1"].recovered_share for a in (1.5, 2.0, 3.0)]
    told = what_if(folder, {"paper": paper()})
    assert list(what_if_figure(told).data[0].y) == told.outcomes["paper"].active_counts.tolist()
    write_picture(told, tmp_path / "told.html")
    assert "plotly" in (tmp_path / "told.html").read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match=r"told\.svg, say"):
        check_picture(tmp_path / "told.sgv")
    with pytest.raises(ConfigError, match="could not be written"):
        write_picture(told, tmp_path / "nowhere" / "told.html")


def test_what_is_told_prints_as_one_line(tmp_path):
    _record(tmp_path, robust(max_active=1))
    with open_run(tmp_path) as run:
        assert repr(replay(run)) == "<Replay of 120 steps, 4 units: 0 unit-steps differ>"
        told = sweep(run, {"alpha": [1.5, 2.0]})
    assert repr(told) == "<WhatIf of 120 steps, 4 units: 2 policies (alpha=1.5, alpha=2.0)>"
    assert "array" not in repr(told.recorded)


def test_a_picture_without_plotly_names_the_extra_of_the_docs(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.subplots", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'trimtab\[report\]'"):
        check_picture(Path("told.html"))
    with pytest.raises(MissingExtraError, match=r"trimtab\[report\]"):
        fault_figure({}, Path())
    with pytest.raises(MissingExtraError, match=r"trimtab\[report\]"):
        demo_figure(Path())
