"""Why a unit is risky or held: one code a unit, the same in every form of the controller."""

import array_api_strict
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.control import REASONS, Decision, MatchedRandom, Policy, ReferenceController
from trimtab.trace import RunWriter, StepRow, UnitRow, encoding, open_run

NAN, INF = float("nan"), float("inf")
CALM = Policy(alpha=2.0, beta=100.0, window_steps=1, error_limit=0.5, amax_limit=10.0, lock_steps=2, max_active=1.0)


def reasons_after(controller, *steps):
    for step in steps:
        decision = controller.update(*step)
    return decision.reasons


def test_the_names_are_the_contract():
    # A record holds the codes: a new one comes last.
    assert REASONS == ("none", "gnmr", "delta", "error", "raised", "failed", "locked", "amax")


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        (([1.0],), "none"),
        (([3.0],), "gnmr"),
        (([1.0], [0.6]), "error"),
        (([1.0], None, [1.5]), "raised"),
        (([NAN],), "failed"),
        (([0.0],), "none"),
        (([0.0], [0.6]), "error"),
        (([3.0], [0.6]), "gnmr"),  # 1.5 beside 1.2
        (([3.0], [0.9]), "error"),  # 1.5 beside 1.8
        (([3.0], [0.75]), "gnmr"),  # equal: the first named
        (([1.0], [0.75], [1.5]), "error"),
        (([1.0], [0.75], [1.6]), "raised"),
        (([1.0], [INF], [INF]), "error"),
        (([-1.0], [INF], [INF]), "failed"),
        (([1.0], [0.4], [1.0]), "none"),  # at the threshold is not above it
        (([1.0], None, None, [48.0]), "amax"),  # 4 above its own of before, times 10
        (([1.0], [0.4], [1.0], [40.0]), "none"),
        (([1.0], [0.6], [1.2], [48.0]), "error"),
        (([1.0], [0.5], [1.2], [48.0]), "raised"),
        (([1.0], [0.6], [1.1], [52.0]), "amax"),
        (([3.0], [0.6], [1.1], [56.0]), "gnmr"),
        (([1.0], [INF], None, [INF]), "error"),
        (([0.0], None, None, [INF]), "amax"),
        (([-1.0], None, None, [INF]), "failed"),
    ],
)
def test_the_greatest_term_is_the_reason(inputs, reason):
    for controller in (CALM.start(1), ReferenceController(1, CALM)):
        assert reasons_after(controller, ([1.0], None, None, [4.0]), inputs) == (reason,)


def test_a_jump_beside_the_recent_values_is_deltas():
    policy = Policy(alpha=100.0, beta=1.5, window_steps=1)
    assert reasons_after(policy.start(1), ([1.0],), ([1.0],), ([2.0],)) == ("delta",)


def test_a_unit_that_only_its_lock_holds_says_so_and_a_renewed_one_names_its_risk():
    controller, seen = CALM.start(["q"]), []
    for norm in (1.0, 3.0, 1.0, 9.0, 1.0, 1.0, 1.0):
        decision = controller.update([norm])
        seen.append((decision.reasons[0], bool(decision.active[0])))
    assert seen == [
        ("none", False),
        ("gnmr", True),
        ("locked", True),
        ("gnmr", True),
        ("locked", True),
        ("locked", True),
        ("none", False),
    ]


def test_a_risky_unit_over_the_budget_or_only_watched_still_says_why():
    decision = Policy(max_active=1).start(["a", "b", "c"], ["a", "b"]).update([NAN, NAN, NAN])
    assert decision.active.tolist() == [False, True, False]
    assert decision.reasons == ("failed",) * 3


def test_norms_are_no_reason_before_they_count_but_failures_and_errors_are():
    policy = Policy(alpha=0.5, act_from_step=10, error_limit=0.5)
    assert policy.start(4).update([5.0, NAN, 5.0, 0.0], [0.1, 0.1, 0.6, 0.6]).reasons == (
        "none",
        "failed",
        "error",
        "error",
    )


@pytest.mark.parametrize("make", [np.asarray, torch.tensor, array_api_strict.asarray])
def test_codes_are_int8_where_the_norms_live(make):
    decision = Policy().start(2).update(make([1.0, NAN]))
    assert "int8" in str(decision.reason.dtype)
    assert type(decision.reason) is type(decision.risk)
    assert decision.reasons == ("none", "failed")


# Terms that are often equal, and of which no one is always the greatest.
values = st.sampled_from([0.0, 0.5, 1.0, 1.0, 2.0, 4.0, NAN, INF, -1.0])


@given(st.lists(st.tuples(*[st.lists(values, min_size=3, max_size=3)] * 4), min_size=1, max_size=12), st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_a_reason_is_that_of_the_risk(run, max_active):
    policy = Policy(alpha=1.0, beta=1.0, window_steps=2, max_active=max_active, error_limit=1.0, amax_limit=1.5)
    fast, slow = policy.start(3), ReferenceController(3, policy)
    for step in run:
        decision, truth = fast.update(*step), slow.update(*step)
        np.testing.assert_array_equal(decision.reason, truth.reason)
        for unit, reason in enumerate(decision.reasons):
            risk = decision.risk[unit]
            assert (risk > 1) == (reason not in ("none", "locked"))
            assert (reason == "failed") == (risk == INF)
            assert (reason == "locked") == (bool(decision.active[unit]) and risk <= 1)
            largest = np.finfo(float).max
            if reason in ("gnmr", "delta"):
                assert risk == getattr(decision, reason)[unit]
            elif reason in ("error", "raised"):
                assert risk == min(step[1 if reason == "error" else 2][unit], largest)


def test_a_random_choice_is_held_by_no_lock():
    controller = MatchedRandom([2] * 6, seed=0, scores=Policy(lock_steps=5)).start(2)
    seen = [controller.update(norms).reasons for norms in ([1.0, 1.0], [1.0, 9.0], [1.0, 1.0])]
    assert seen == [("none", "none"), ("none", "gnmr"), ("none", "none")]


def test_a_decision_that_says_no_reason_has_none():
    fields = {name: np.zeros(2) for name in ("gnmr", "delta", "risk", "active", "lock", "scale")}
    decision = Decision(**fields, step=1, alpha=1.0, beta=1.0)
    assert decision.reason is None
    assert decision.reasons == ("none", "none")
    assert "reason" not in vars(Decision)  # a lazy subclass fills it in on first use


# The record


@given(st.lists(st.integers(0, len(REASONS) - 1), min_size=0, max_size=70))
@settings(deadline=None)
def test_packed_reasons_come_back_and_take_no_room_for_quiet_units(codes):
    reason = np.array(codes, dtype=np.int8)
    blob = encoding.pack_reasons(reason)
    np.testing.assert_array_equal(encoding.unpack_reasons(blob, len(codes)), reason)
    assert len(blob) == np.count_nonzero(reason) * (1 if len(codes) <= 32 else 2)


def test_reasons_of_very_many_units_are_packed_wider():
    reason = np.zeros(10_000, np.int8)
    reason[[0, 9_999]] = 6, 3
    assert len(encoding.pack_reasons(reason)) == 8
    np.testing.assert_array_equal(encoding.unpack_reasons(encoding.pack_reasons(reason), 10_000), reason)


@pytest.mark.parametrize(("blob", "num_units"), [(b"\x18", 3), (b"\x19", 3), (b"\x01\x02\x03", 40)])
def test_reasons_that_cannot_be_are_damage(blob, num_units):
    with pytest.raises(ValueError, match=r"reasons|buffer size"):
        encoding.unpack_reasons(blob, num_units)


def test_a_row_without_reasons_reads_as_none(tmp_path):
    with RunWriter(tmp_path, config={}, units=[UnitRow(name="q"), UnitRow(name="k")]) as writer:
        writer.write_step(StepRow(step=1, norms=[1.0, 1.0]))
        writer.write_step(StepRow(step=2, norms=[1.0, 1.0], reason=[0, 6]))
        with pytest.raises(ValueError, match=r"reason of step 3 has shape \(3,\)"):
            writer.write_step(StepRow(step=3, reason=[0, 6, 1]))
    with open_run(tmp_path) as run:
        table = run.steps()
    assert table.reason.dtype == np.int8
    assert table.reason.tolist() == [[0, 0], [0, 6]]
