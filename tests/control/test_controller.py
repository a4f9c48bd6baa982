"""The controller at its edges: kinds of arrays, extreme values, schedules that break, states that do not fit."""

import json
import warnings

import array_api_strict
import numpy as np
import pytest
import torch

from trimtab.control import Controller, ControllerLike, MatchedRandom, Policy, PolicyLike, ReferenceController, robust
from trimtab.errors import ConfigError, TrimtabWarning

LARGEST = float(np.finfo(float).max)


def feed(controller, trace):
    for norms in trace:
        decision = controller.update(norms)
    return decision


def assert_four_parts(error, setting, given):
    """Which setting, the value given, what is allowed, what to do."""
    assert isinstance(error, ConfigError)
    assert error.setting == setting
    assert str(error).startswith(f"{setting}={given}")
    for part in (error.allowed, error.remedy):
        assert len(part) > 8
        assert part.endswith((".", "?", ")"))
        assert part in str(error)


# Norms


@pytest.mark.parametrize(
    "kind",
    [
        list,
        tuple,
        np.array,
        lambda norms: np.array(norms, np.float32),
        lambda norms: np.array(norms, np.int64),
        lambda norms: np.array(norms, np.float16),
        torch.tensor,
        lambda norms: torch.tensor(norms, dtype=torch.bfloat16),
        lambda norms: torch.tensor(norms, dtype=torch.int32),
        lambda norms: torch.tensor(norms, requires_grad=True),
        array_api_strict.asarray,
        lambda norms: array_api_strict.asarray(norms, dtype=array_api_strict.float32),
    ],
)
def test_every_kind_of_array_and_number_is_widened_and_scored(kind):
    trace = [[1.0, 2.0, 0.0], [2.0, 2.0, 4.0], [1.0, 8.0, 4.0]]
    got = feed(Controller(3, Policy(max_active=1)), [kind(norms) for norms in trace])
    wanted = feed(Controller(3, Policy(max_active=1)), trace)
    for name in ("gnmr", "delta", "risk", "scale", "active", "lock"):
        np.testing.assert_array_equal(np.asarray(getattr(got, name)), getattr(wanted, name))
    assert "float64" in str(got.risk.dtype)
    assert "int64" in str(got.lock.dtype)
    assert "bool" in str(got.active.dtype)


def test_none_in_a_list_is_not_observed():
    assert feed(Controller(2, Policy()), [[None, 1.0]]).num_unobserved == 1


def test_the_state_follows_the_norms_to_another_library():
    trace = np.exp(np.random.default_rng(0).standard_normal((12, 4)))
    kinds = [np.asarray, lambda norms: torch.tensor(norms, dtype=torch.float64), array_api_strict.asarray, list]
    for policy in (Policy(), robust(burn_in_steps=2, act_from_step=3), Policy(history="window", history_steps=5)):
        steady, moving = policy.start(4), policy.start(4)
        for step, norms in enumerate(trace):
            a, b = steady.update(norms), moving.update(kinds[step % 4](norms.tolist()))
            assert type(b.risk) is type(kinds[step % 4]([0.0])) or step % 4 == 3
            np.testing.assert_array_equal(np.asarray(b.risk), a.risk)
            np.testing.assert_array_equal(np.asarray(b.active), a.active)


def test_a_decision_reads_no_value_back():
    # Tensors on the meta device have no values: whatever needs one raises.
    windowed = Policy(history="window", history_steps=3, history_clip=2)
    for policy in (Policy(max_active=2), robust(), windowed, Policy(max_active=2, error_limit=0.3)):
        controller = policy.start(5, [True, True, True, False, True])
        for _ in range(3):
            decision = controller.update(torch.empty(5, device="meta"), torch.empty(5, device="meta"))
        assert decision.active.shape == (5,)
        assert decision.risk.device.type == "meta"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_on_an_accelerator_a_decision_waits_for_nothing_and_equals_the_host():
    trace = torch.exp(torch.randn(40, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    on_device = trace.cuda()
    host, device = (Policy(max_active=9).start(300) for _ in range(2))
    device.update(on_device[0])
    host.update(trace[0].numpy())
    decisions = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for norms in on_device[1:]:
            decisions.append(device.update(norms))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for norms, decision in zip(trace[1:], decisions, strict=True):
        wanted = host.update(norms.numpy())
        np.testing.assert_array_equal(decision.risk.cpu().numpy(), wanted.risk)
        np.testing.assert_array_equal(decision.active.cpu().numpy(), wanted.active)


def test_a_wrong_number_of_norms_is_told_with_both_numbers():
    controller = Controller(3, Policy())
    for norms in ([1.0], np.ones(4), torch.ones(2)):
        with pytest.raises(ValueError, match=rf"got {len(norms)}, but there are 3 units"):
            controller.update(norms)
    with pytest.raises(ValueError, match=r"shape \(3, 1\).*3 units"):
        controller.update(np.ones((3, 1)))
    assert controller.step == 0


def test_a_wrong_number_of_errors_is_told_with_both_numbers():
    # With and without a limit: one that counts nothing is a mistake all the same.
    for policy in (Policy(error_limit=0.3), Policy(), MatchedRandom([1], seed=0)):
        controller = policy.start(3)
        for errors in ([0.1], np.ones(4), torch.ones(2)):
            with pytest.raises(ValueError, match=rf"errors: got {len(errors)}, but there are 3 units"):
                controller.update([1.0] * 3, errors)
        assert controller.step == 0
    with pytest.raises(ValueError, match=r"errors: got 1, .*3 units"):
        ReferenceController(3, Policy()).update([1.0] * 3, [0.1])


def test_changing_the_norms_or_a_decision_afterwards_leaves_the_state_alone():
    for policy in (Policy(max_active=1, lock_steps=3), Policy(history="window", history_steps=2, window_steps=1)):
        plain, touched = policy.start(2), policy.start(2)
        for values in ([1.0, 1.0], [1.0, 9.0], [1.0, 1.0], [1.0, 2.0]):
            norms = np.array(values)
            decision = touched.update(norms)
            wanted = plain.update(values)
            np.testing.assert_array_equal(decision.lock, wanted.lock)
            np.testing.assert_array_equal(decision.gnmr, wanted.gnmr)
            norms[:] = 77.0
            touched.active[:] = True
            for name in ("gnmr", "delta", "risk", "active", "lock", "scale"):
                getattr(decision, name)[:] = 1


# Scores


def test_delta_compares_with_the_queue_before_the_step():
    controller = Controller(1, Policy(window_steps=2, history="ema", ema_factor=0.0))
    decision = feed(controller, [[1.0], [1.0], [2.0]])
    assert decision.gnmr[0] == 2.0
    assert decision.delta[0] == 2.0


def test_a_ratio_that_overflows_stops_at_the_largest_double():
    decision = feed(Controller(1, Policy()), [[5e-324], [LARGEST]])
    assert decision.gnmr[0] == LARGEST
    assert decision.risk[0] <= LARGEST
    decision = feed(Controller(1, Policy(alpha=0.5)), [[5e-324], [LARGEST]])
    assert decision.risk[0] == LARGEST


def test_the_queue_holds_the_largest_double_without_overflow():
    # Every GNMR is the largest double, because the norms enter the history clipped; so each Delta is 1.
    policy = Policy(window_steps=3, history="ema", ema_factor=0.95, history_clip=1.0)
    decision = feed(Controller(1, policy), [[5e-324]] * 12 + [[LARGEST]] * 6)
    assert decision.gnmr[0] == LARGEST
    assert decision.delta[0] == 1.0


@pytest.mark.parametrize("history", ["mean", "ema", "window"])
def test_a_history_of_the_largest_norms_does_not_overflow(history):
    decision = feed(Controller(1, Policy(history=history, history_steps=7)), [[LARGEST]] * 20)
    np.testing.assert_allclose(decision.gnmr, 1.0, rtol=1e-15)


def test_a_mean_that_underflowed_to_zero_does_not_clip_what_enters_to_zero():
    policy = Policy(history="ema", ema_factor=0.5, history_clip=4.0)
    decision = feed(Controller(1, policy), [[5e-324]] * 12 + [[1.0], [1.0]])
    assert decision.gnmr[0] == 2.0  # against a mean of one half


def test_constant_norms_give_scores_of_exactly_one():
    policy = Policy(window_steps=7, alpha=1.0, beta=1.0)
    for norm in (0.1, 1 / 3, 1e-7, 12345.678):
        controller = Controller(1, policy)
        for _ in range(30):
            assert controller.update([norm]).risk[0] == 1.0


def test_equal_risks_go_to_the_unit_nearest_the_loss():
    decision = Controller(5, Policy(max_active=2)).update([np.nan, np.inf, 1.0, -1.0, np.nan])
    assert decision.active.tolist() == [False, False, False, True, True]


def test_damping_scales_a_risky_unit_to_its_mean_and_a_failed_one_to_nothing():
    trace = [[2.0, 2.0, 2.0, 2.0], [2.0, 16.0, np.nan, 0.0]]
    assert feed(Controller(4, Policy()), trace).scale.tolist() == [1.0, 0.125, 0.0, 1.0]


def test_a_risk_without_a_history_scales_nothing():
    decision = Controller(1, Policy(alpha=0.5)).update([3.0])
    assert decision.risk[0] == 2.0
    assert decision.scale[0] == 1.0


def test_before_act_from_step_only_failed_units_are_risky():
    controller = Controller(2, Policy(act_from_step=2))
    decision = feed(controller, [[1.0, 1.0], [50.0, np.nan]])
    assert decision.gnmr[0] == 50.0
    assert decision.risk.tolist() == [0.0, np.inf]
    assert decision.scale.tolist() == [1.0, 0.0]
    assert controller.update([500.0, 1.0]).risk[0] > 1


def test_history_clip_waits_for_ten_norms_after_burn_in():
    policy = Policy(history_clip=2.0, burn_in_steps=3)
    controller = feed_and_return(Controller(1, policy), [[1.0]] * 12)
    assert controller.state_dict()["units"]["unit_0"]["entered"] == 9
    controller.update([101.0])
    mean = controller.state_dict()["units"]["unit_0"]["mean"]
    assert mean == 11.0  # the tenth norm enters whole
    controller.update([1e6])
    assert controller.state_dict()["units"]["unit_0"]["mean"] == mean + (2 * mean - mean) / 11


def feed_and_return(controller, trace):
    feed(controller, trace)
    return controller


# Channel errors


def test_an_error_above_its_limit_is_a_risk_and_one_at_it_is_none():
    decision = Controller(4, Policy(error_limit=0.3)).update([1.0] * 4, [0.6, 0.3, 0.31, 0.0])
    assert decision.risk.tolist() == [2.0, 1.0, 0.31 / 0.3, 1 / 1.3]
    assert decision.active.tolist() == [True, False, True, False]


def test_an_error_that_is_not_known_adds_nothing():
    for unknown in (np.nan, -0.5, -np.inf, None):
        decision = Controller(2, Policy(error_limit=0.1)).update([1.0, 0.0], [unknown, unknown])
        assert decision.risk.tolist() == [1 / 1.3, 0.0]


def test_an_infinite_error_is_the_largest_risk_but_a_failed_norm_goes_first():
    decision = Controller(3, Policy(error_limit=0.3, max_active=1)).update([1.0, np.nan, 1.0], [0.0, 0.0, np.inf])
    assert decision.risk.tolist() == [1 / 1.3, np.inf, LARGEST]
    assert decision.active.tolist() == [False, True, False]
    assert decision.num_failed == 1


def test_an_error_counts_where_the_norm_was_not_observed():
    decision = Controller(2, Policy(error_limit=0.5)).update([0.0, 0.0], [1.0, 0.25])
    assert decision.risk.tolist() == [2.0, 0.5]
    assert decision.active.tolist() == [True, False]
    assert decision.num_unobserved == 2
    assert decision.scale.tolist() == [1.0, 1.0]


def test_errors_count_before_act_from_step():
    decision = feed(Controller(2, Policy(error_limit=0.5, act_from_step=9)), [[1.0, 1.0]])
    assert decision.risk.tolist() == [0.0, 0.0]
    decision = Controller(2, Policy(error_limit=0.5, act_from_step=9)).update([1.0, 1.0], [1.0, 0.1])
    assert decision.active.tolist() == [True, False]


def test_without_a_limit_errors_are_ignored():
    decision = Controller(2, Policy()).update([1.0, 1.0], [np.inf, 5.0])
    assert decision.risk.tolist() == [1 / 1.3] * 2


def test_a_risk_by_the_error_alone_scales_no_gradient():
    controller = Controller(3, Policy(error_limit=0.3))
    controller.update([2.0, 2.0, 2.0])
    # The first has grown a little, under its thresholds; the last one's norm is risky by itself.
    decision = controller.update([2.5, 2.0, 16.0], [9.0, 0.0, 9.0])
    assert (decision.risk > 1).tolist() == [True, False, True]
    assert decision.scale.tolist() == [1.0, 1.0, 0.125]


def test_errors_keep_a_lock_alive():
    controller = Controller(1, Policy(error_limit=0.3, lock_steps=2))
    locks = [int(controller.update([1.0], errors).lock[0]) for errors in ([0.5], [0.1], [0.5], [0.1], None, None)]
    assert locks == [2, 1, 2, 1, 0, 0]


@pytest.mark.parametrize(
    "kind",
    [
        list,
        np.array,
        lambda values: np.array(values, np.float32),
        lambda values: torch.tensor(values, dtype=torch.bfloat16),
        lambda values: torch.tensor(values, requires_grad=True),
        array_api_strict.asarray,
    ],
)
@pytest.mark.parametrize("norms", [[1.0, 1.0], torch.ones(2), array_api_strict.asarray([1.0, 1.0])])
def test_errors_of_every_kind_of_array_go_with_norms_of_any_other(norms, kind):
    decision = Controller(2, Policy(error_limit=0.25)).update(norms, kind([0.5, 0.125]))
    assert np.asarray(decision.risk).tolist() == [2.0, 1 / 1.3]


# Raised risks


def test_a_raised_risk_counts_as_it_is_beside_what_the_norms_say():
    decision = Controller(4, Policy()).update([1.0] * 4, None, [2.0, 1.0, 0.1, np.nan])
    assert decision.risk.tolist() == [2.0, 1.0, 1 / 1.3, 1 / 1.3]
    assert decision.active.tolist() == [True, False, False, False]


def test_a_raised_risk_that_is_none_adds_nothing():
    for none in (np.nan, -0.5, -np.inf, None):
        assert Controller(2, Policy()).update([1.0, 0.0], None, [none, none]).risk.tolist() == [1 / 1.3, 0.0]


def test_raised_risks_are_under_the_budget_and_a_failed_norm_goes_before_an_infinite_one():
    decision = Controller(3, Policy(max_active=1)).update([1.0, np.nan, 1.0], None, [9.0, 0.0, np.inf])
    assert decision.risk.tolist() == [9.0, np.inf, LARGEST]
    assert decision.active.tolist() == [False, True, False]


def test_a_raised_risk_counts_before_act_from_step_and_without_a_norm_and_scales_nothing():
    decision = Controller(2, Policy(act_from_step=9)).update([1.0, 0.0], None, [2.0, 2.0])
    assert decision.risk.tolist() == [2.0, 2.0]
    assert decision.scale.tolist() == [1.0, 1.0]


def test_a_unit_without_a_recovery_path_is_never_active_however_high_its_risk_is_raised():
    controller = Controller(2, Policy(max_active=2), recoverable=[False, True])
    assert controller.update([1.0, 1.0], None, [9.0, 9.0]).active.tolist() == [False, True]


def test_random_units_are_chosen_as_without_a_raised_risk_which_is_scored_all_the_same():
    one, other = (MatchedRandom([1] * 9, seed=3).start(5) for _ in range(2))
    for _ in range(9):
        raised, plain = one.update([1.0] * 5, None, [7.0] * 5), other.update([1.0] * 5)
        assert raised.active.tolist() == plain.active.tolist()
        assert raised.risk.tolist() == [7.0] * 5


@pytest.mark.parametrize("norms", [[1.0, 1.0], torch.ones(2), array_api_strict.asarray([1.0, 1.0])])
@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, array_api_strict.asarray])
def test_raised_risks_of_every_kind_of_array_go_with_norms_of_any_other(norms, kind):
    decision = Controller(2, Policy()).update(norms, None, kind([2.0, 0.5]))
    assert np.asarray(decision.risk).tolist() == [2.0, 1 / 1.3]


def test_a_wrong_number_of_raised_risks_is_told_with_both_numbers():
    for controller in (Controller(3, Policy()), MatchedRandom([1], seed=0).start(3), ReferenceController(3, Policy())):
        with pytest.raises(ValueError, match=r"risks: got 1, .*3 units"):
            controller.update([1.0] * 3, None, [0.1])
        assert controller.step == 0


# Units


def test_a_count_of_units_names_them():
    assert Controller(2, Policy()).units == ("unit_0", "unit_1")
    assert Controller(np.int64(1), Policy()).units == ("unit_0",)


@pytest.mark.parametrize(
    ("units", "given"),
    [(0, "0"), (-1, "-1"), ([], r"\[\]"), (True, "True"), ("q", "'q'"), (1.5, "1.5"), (["q", 3], "3")],
)
def test_units_that_are_none_are_refused(units, given):
    with pytest.raises(ConfigError, match=rf"^units={given}: ") as caught:
        Controller(units, Policy())
    assert_four_parts(caught.value, "units", given.replace("\\", ""))


def test_a_unit_that_occurs_twice_is_named():
    with pytest.raises(ConfigError) as caught:
        Controller(["q", "k", "q"], Policy())
    assert_four_parts(caught.value, "units", "'q'")


def test_an_unknown_recoverable_unit_is_answered_with_the_nearest_names():
    with pytest.raises(ConfigError, match=r"'layer\.0\.q'") as caught:
        Controller(["layer.0.q", "layer.0.k"], Policy(), recoverable=["layer.0.qq"])
    assert_four_parts(caught.value, "recoverable", "'layer.0.qq'")


def test_a_mask_of_another_length_is_refused():
    with pytest.raises(ConfigError) as caught:
        Controller(3, Policy(), recoverable=[True, False])
    assert_four_parts(caught.value, "recoverable", "2 entries")
    with pytest.raises(ConfigError, match=r"Write \['unit_0'\]"):
        Controller(3, Policy(), recoverable="unit_0")


def test_the_budget_is_a_share_of_the_recoverable_units():
    controller = Controller(10, Policy(max_active=0.5), recoverable=[True] * 4 + [False] * 6)
    assert controller.budget == 2
    assert controller.recoverable == (True,) * 4 + (False,) * 6
    assert Controller(3, Policy(), recoverable=[]).budget == 0
    decision = controller.update([np.nan] * 10)
    assert decision.active.tolist() == [False, False, True, True] + [False] * 6


def test_no_policy_is_refused():
    with pytest.raises(ConfigError) as caught:
        Controller(3, {"alpha": 2})
    assert_four_parts(caught.value, "policy", "{'alpha': 2}")


# Schedules that break in a run


@pytest.mark.parametrize("broken", [0.0, -1.0, np.nan, np.inf, "much", None])
def test_a_schedule_that_breaks_in_a_run_keeps_its_last_value_and_warns_once(broken):
    def schedule(step):
        return 1.0 + step / 10 if step < 4 else broken

    controller = Controller(2, Policy(alpha=schedule))
    for _ in range(3):
        assert controller.update([1.0, 1.0]).alpha < 1.4
    with pytest.warns(TrimtabWarning, match=r"alpha=.*step 4.*stays 1\.3") as caught:
        assert controller.update([1.0, 1.0]).alpha == 1.3
    assert caught[0].filename == __file__
    assert controller.update([1.0, 1.0]).alpha == 1.3
    resumed = Controller(2, Policy(alpha=schedule))
    resumed.load_state_dict(json.loads(json.dumps(controller.state_dict())))
    with pytest.warns(TrimtabWarning):
        assert resumed.update([1.0, 1.0]).alpha == 1.3


def test_a_schedule_that_raises_in_a_run_does_not_stop_it():
    controller = Controller(1, Policy(beta=[9.0, 2.0, 3.0].__getitem__))
    assert controller.update([1.0]).beta == 2.0
    assert controller.update([1.0]).beta == 3.0
    with pytest.warns(TrimtabWarning, match=r"IndexError.*beta stays 3\.0"):
        assert controller.update([1.0]).beta == 3.0
    assert controller.step == 3


# State


def trained(policy, units, steps=12, seed=1):
    controller = policy.start(units)
    num_units = len(controller.units)
    feed(controller, np.exp(np.random.default_rng(seed).standard_normal((steps, num_units))))
    return controller


@pytest.mark.parametrize("policy", [Policy(), Policy(history="window"), MatchedRandom([1] * 20, seed=0)])
def test_a_state_is_read_by_name_in_any_order_of_units(policy):
    saved = trained(policy, ["a", "b", "c"])
    other = policy.start(["c", "a", "b"])
    report = other.load_state_dict(saved.state_dict())
    assert report.new == report.gone == ()
    assert other.step == saved.step == 12
    a, b = saved.update([1.0, 2.0, 3.0]), other.update([3.0, 1.0, 2.0])
    np.testing.assert_array_equal(a.gnmr[[2, 0, 1]], b.gnmr)
    np.testing.assert_array_equal(a.delta[[2, 0, 1]], b.delta)


def test_a_load_with_other_units_says_which_are_new_and_gone_and_takes_the_rest():
    saved = trained(Policy(), ["a", "b"])
    other = Policy().start(["b", "x"])
    report = other.load_state_dict(saved.state_dict())
    assert (report.new, report.gone) == (("x",), ("a",))
    states = other.state_dict()["units"]
    assert states["b"] == saved.state_dict()["units"]["b"]
    assert states["x"]["seen"] == 0


def test_another_window_keeps_the_most_recent_values():
    queue = trained(Policy(window_steps=6), 2).state_dict()["units"]["unit_0"]["queue"]
    for window_steps in (1, 4, 6, 9):
        other = Policy(window_steps=window_steps).start(2)
        other.load_state_dict(trained(Policy(window_steps=6), 2).state_dict())
        assert other.state_dict()["units"]["unit_0"]["queue"] == queue[-window_steps:]
        deltas = [other.update([2.0, 2.0]).delta[0] for _ in range(3)]
        assert (deltas[0] == 1.0) == (window_steps > 6)  # 6 values do not fill a window of 9


def test_a_state_of_another_kind_of_history_goes_on_from_its_mean():
    saved = trained(Policy(), 2)
    other = Policy(history="window").start(2)
    other.load_state_dict(saved.state_dict())
    np.testing.assert_array_equal(other.update([1.0, 2.0]).gnmr, saved.update([1.0, 2.0]).gnmr)
    back = Policy(history="ema").start(2)
    back.load_state_dict(other.state_dict())
    assert back.update([1.0, 2.0]).gnmr.tolist() == other.update([1.0, 2.0]).gnmr.tolist()


def test_a_smaller_budget_holds_from_the_moment_of_the_load():
    saved = Policy(max_active=4, lock_steps=3).start(4)
    feed(saved, [[1.0] * 4, [9.0] * 4])
    assert saved.active.all()
    other = Policy(max_active=2, lock_steps=3).start(4, recoverable=[True, True, True, False])
    other.load_state_dict(saved.state_dict())
    assert other.active.tolist() == [False, True, True, False]
    assert other.update([1.0] * 4).active.tolist() == [False, True, True, False]
    random = MatchedRandom([2], seed=0).start(4)
    random.load_state_dict(saved.state_dict())
    assert random.active.sum() == 2


def broken_states():
    good = trained(Policy(), ["a"]).state_dict()
    unit = good["units"]["a"]
    yield "state", None
    yield "state", []
    yield "state", "weights"
    yield "state.version", {}
    yield "state.version", good | {"version": 2}
    yield "state.step", good | {"step": -1}
    yield "state.step", good | {"step": 1.5}
    yield "state.alpha", good | {"alpha": 0.0}
    yield "state.beta", good | {"beta": float("nan")}
    yield "state.units", good | {"units": ["a"]}
    yield "units['a']", good | {"units": {"a": 3}}
    for key in unit:
        yield f"units['a'].{key}", good | {"units": {"a": {k: v for k, v in unit.items() if k != key}}}
        yield f"units['a'].{key}", good | {"units": {"a": unit | {key: "x"}}}
    yield "units['a'].mean", good | {"units": {"a": unit | {"mean": float("inf")}}}
    yield "units['a'].queue", good | {"units": {"a": unit | {"queue": [1.0, float("nan")]}}}
    yield "units['a'].active", good | {"units": {"a": unit | {"active": 1}}}


@pytest.mark.parametrize(("setting", "state"), list(broken_states()))
def test_a_state_that_is_none_is_refused_and_changes_nothing(setting, state):
    for policy in (Policy(), MatchedRandom([1] * 20, seed=0)):
        controller = trained(policy, ["a"], steps=3)
        before = controller.state_dict()
        with pytest.raises(ConfigError) as caught:
            controller.load_state_dict(state)
        assert_four_parts(caught.value, setting, "")
        assert controller.state_dict() == before


def test_a_state_needs_no_more_than_strict_json():
    controller = Policy(history="window").start(3)
    feed(controller, [[np.nan, np.inf, 5e-324], [LARGEST, -1.0, LARGEST]])
    text = json.dumps(controller.state_dict(), allow_nan=False)
    assert json.loads(text) == controller.state_dict()


# Protocols


def test_both_kinds_of_policy_keep_the_protocols():
    for policy in (Policy(), robust(), MatchedRandom([1, 2], seed=0)):
        assert isinstance(policy, PolicyLike)
        assert isinstance(policy.start(3), ControllerLike)
        json.dumps(policy.to_dict(), allow_nan=False)


def test_a_decision_can_be_filled_lazily_by_a_subclass():
    from trimtab.control import Decision

    class Pending(Decision):
        def __init__(self, take):
            object.__setattr__(self, "_take", take)

        def __getattr__(self, name):
            return getattr(self._take(), name)

    taken = Controller(2, Policy()).update([0.0, np.nan])
    pending = Pending(lambda: taken)
    assert pending.step == 1
    assert pending.active is taken.active
    assert (pending.num_unobserved, pending.num_failed) == (1, 1)


def test_the_slow_truth_warns_of_a_wrong_number_of_norms_too():
    with pytest.raises(ValueError, match=r"got 1, but .* 2 units"):
        ReferenceController(2, Policy()).update([1.0])


def test_no_warning_is_given_for_any_number():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        feed(
            Controller(4, Policy(alpha=1e-300)),
            [[5e-324, LARGEST, np.nan, 1.0], [LARGEST, 5e-324, np.inf, -np.inf]] * 12,
        )
