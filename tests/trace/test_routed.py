"""Which set a step really ran under: forced by hand, or else the decision in force."""

import numpy as np
import pytest

from trimtab.trace import RunWriter, StepRow, UnitRow, open_run, summarize

RECOVERABLE = {"a": True, "b": True, "c": False, "d": True}


def write_nasty_run(folder, seed):
    """Two starts with other units in another order, skipped and missing steps, superseded rows, and sets by hand.

    Returns: The rows that count, as (units, skipped, decided, forced), the last three in names.
    """
    random = np.random.default_rng(seed)
    told = []
    for start_step, units in ((0, ("a", "b", "c", "d")), (12, ("d", "e", "a", "c"))):
        told = [row for row in told if row[0] <= start_step]
        rows = [UnitRow(name=name, recoverable=RECOVERABLE.get(name, True)) for name in units]
        with RunWriter(folder, config={}, units=rows, start_step=start_step) as writer:
            for step in range(start_step + 1, start_step + 20):
                if random.random() < 0.1:
                    continue
                able = [RECOVERABLE.get(name, True) for name in units]
                by_hand = [n for n, on in zip(units, able, strict=True) if on and random.random() < 0.5]
                forced = by_hand if random.random() < 0.3 else None
                active = (random.random(4) < 0.4) & able
                skipped = bool(random.random() < 0.2)
                decides = not skipped and random.random() < 0.9
                extra = {"monitors": {}} if forced is None else {"routed_by_hand": forced}
                kwargs = {"norms": np.ones(4), "active": active} if decides else {}
                writer.write_step(StepRow(step=step, skipped=skipped, extra=extra, **kwargs))
                decided = {n for n, on in zip(units, active, strict=True) if on} if decides else set()
                told.append((step, units, skipped, decided, forced))
    return told


@pytest.mark.parametrize("seed", range(20))
def test_a_step_ran_under_the_set_forced_by_hand_or_else_under_the_decision_in_force(tmp_path, seed):
    told = write_nasty_run(tmp_path, seed)
    with open_run(tmp_path) as run:
        steps, summary = run.steps(), summarize(run)
    in_force, expected, num_forced, num_routed, num_unit_steps = set(), [], 0, 0, 0
    for _, units, skipped, decided, forced in told:
        ran = in_force & set(units) if forced is None else set(forced)
        expected.append([name in ran for name in steps.units])
        if not skipped:
            in_force = decided
            able = {name for name in units if RECOVERABLE.get(name, True)}
            num_unit_steps += len(able)
            num_routed += len(ran & able)
            num_forced += 0 if forced is None else len(forced)
    assert steps.step.tolist() == [row[0] for row in told]
    assert steps.routed.tolist() == expected
    observed_by_hand = [row for row in told if not row[2] and row[4] is not None]
    assert summary.num_forced_steps == len(observed_by_hand)
    assert (summary.forced_share, summary.routed_share) == (num_forced / num_unit_steps, num_routed / num_unit_steps)


def test_a_set_forced_by_hand_is_no_decision(tmp_path):
    with RunWriter(tmp_path, config={}, units=[UnitRow(name="q"), UnitRow(name="k")]) as writer:
        for step, forced in ((1, None), (2, ["q", "k"]), (3, []), (4, None)):
            extra = None if forced is None else {"routed_by_hand": forced}
            writer.write_step(StepRow(step=step, norms=[1, 1], active=[False, step == 2], extra=extra))
    with open_run(tmp_path) as run:
        steps, summary = run.steps(), summarize(run)
    assert steps.routed.tolist() == [[False] * 2, [True] * 2, [False] * 2, [False] * 2]
    assert steps.active[:, 1].tolist() == [False, True, False, False]
    assert (summary.recovered_share, summary.num_switches) == (1 / 8, 1)
    assert (summary.num_forced_steps, summary.forced_share, summary.routed_share) == (2, 2 / 8, 2 / 8)


def test_what_somebody_else_calls_routed_by_hand_is_passed_over(tmp_path):
    with RunWriter(tmp_path, config={}, units=[UnitRow(name="q")]) as writer:
        for step, named in ((1, True), (2, "q"), (3, {"q": 1}), (4, ["elsewhere"])):
            writer.write_step(StepRow(step=step, norms=[1], active=[False], extra={"routed_by_hand": named}))
    with open_run(tmp_path) as run:
        assert not run.steps().routed.any()
        assert (summarize(run).num_forced_steps, summarize(run).forced_share) == (1, 0)
