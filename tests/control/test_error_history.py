"""Channel errors judged by the unit's own earlier ones."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from trimtab.control import Controller, Policy, ReferenceController, robust
from trimtab.errors import ConfigError

LARGEST = float(np.finfo(float).max)
# Norms that never change are no risk under these, so that every risk is that of an error.
BY_HISTORY = Policy(alpha=1e6, beta=1e6, error_limit=1.5, error_history="ema", lock_steps=0)
CALM = 1 / 1e6


def risks(policy, errors):
    """The risks of one unit that has these errors, one a step; those of the slow truth are the same."""
    slow, fast = ReferenceController(1, policy), policy.start(1)
    found = []
    for error in errors:
        decision = fast.update([1.0], [error])
        assert slow.update([1.0], [error]).risk == decision.risk.tolist()
        found.append(float(decision.risk[0]))
    assert slow.state_dict() == fast.state_dict()
    return found


def test_the_first_error_has_the_ratio_1_whatever_it_is():
    for error in (1e-3, 0.85, 40.0):
        assert risks(BY_HISTORY, [error]) == [1 / 1.5]


def test_a_healthy_unit_of_large_errors_is_no_risk_and_one_of_small_errors_that_doubles_is():
    decision = [Controller(2, BY_HISTORY)]
    for errors in ([0.85, 0.1], [0.83, 0.1], [0.84, 0.2]):
        decision.append(decision[0].update([1.0, 1.0], errors))
    assert [d.active.tolist() for d in decision[1:]] == [[False, False], [False, False], [False, True]]
    assert decision[-1].reasons == ("none", "error")


def test_an_error_enters_the_mean_as_at_most_the_limit_times_the_mean():
    controller = Controller(2, replace(BY_HISTORY, error_ema_factor=0.5))
    for errors in ([1.0, 1.0], [1.25, 100.0]):
        controller.update([1.0, 1.0], errors)
    memories = controller.state_dict()["units"].values()
    assert [memory["error_mean"] for memory in memories] == [1.125, 1.25]


def test_a_fault_that_lasts_stays_a_risk_for_as_long_as_the_clipped_mean_needs_to_reach_it():
    found = risks(BY_HISTORY, [0.2] * 10 + [8.0] * 60)
    # Each update adds at most 2.5% to the mean, so it takes ln(8 / 1.5 / .2) / ln(1.025) = 133 steps.
    assert min(found[10:]) > 1


def test_an_error_that_is_not_finite_is_the_largest_risk_at_any_step_and_poisons_no_mean():
    policy = replace(BY_HISTORY, act_from_step=3)
    found = risks(policy, [0.5, np.inf, 0.5, 0.5, np.inf, 0.5])
    assert found[1] == found[4] == LARGEST
    assert [found[0], found[2]] == [0.0, 0.0]
    assert found[3] == found[5] == 1 / 1.5


@pytest.mark.parametrize("unknown", [None, np.nan, -0.5, -np.inf, 0.0])
def test_an_error_that_is_not_known_or_0_adds_nothing_and_is_not_remembered(unknown):
    with_gaps = risks(BY_HISTORY, [0.5, unknown, 0.6, unknown, 1.2])
    assert with_gaps[1] == with_gaps[3] == CALM
    assert [with_gaps[i] for i in (0, 2, 4)] == risks(BY_HISTORY, [0.5, 0.6, 1.2])


def test_up_to_act_from_step_errors_are_remembered_and_no_risk():
    found = risks(replace(BY_HISTORY, act_from_step=2), [0.1, 0.5, 0.5])
    assert found[:2] == [0.0, 0.0]
    # The second entered clipped: the mean is .95 * .1 + .05 * .15.
    assert found[2] == pytest.approx(0.5 / (0.95 * 0.1 + 0.05 * 0.15) / 1.5)


def test_errors_of_the_burn_in_do_not_enter_the_mean():
    found = risks(replace(BY_HISTORY, burn_in_steps=2), [9.0, 9.0, 0.5, 1.0])
    assert found == [1 / 1.5, 1 / 1.5, 1 / 1.5, 2 / 1.5]


def test_a_unit_whose_norm_is_not_observed_is_judged_by_its_error_all_the_same():
    controller = Controller(1, BY_HISTORY)
    for error in (0.2, 0.4):
        decision = controller.update([0.0], [error])
    assert decision.active.tolist() == [True]
    assert decision.scale.tolist() == [1.0]


def test_the_mean_is_saved_by_name_and_moves_with_the_norms():
    controller, moved = (Controller(["q", "k"], BY_HISTORY) for _ in range(2))
    for errors in ([0.1, 0.8], [0.12, 0.7]):
        controller.update([1.0, 1.0], errors)
        moved.update(torch.ones(2), torch.tensor(errors, dtype=torch.float64))
    state = json.loads(json.dumps(controller.state_dict(), allow_nan=False))
    resumed = Controller(["k", "q"], BY_HISTORY)
    assert resumed.load_state_dict(state).new == ()
    expected = controller.update([1.0, 1.0], [0.3, 0.7]).risk.tolist()
    assert resumed.update([1.0, 1.0], [0.7, 0.3]).risk.tolist() == expected[::-1]
    assert moved.update([1.0, 1.0], [0.3, 0.7]).risk.tolist() == expected


def test_a_state_without_a_history_of_errors_is_as_before_and_starts_one_afresh():
    absolute = Controller(1, Policy(error_limit=0.3))
    absolute.update([1.0], [0.5])
    state = absolute.state_dict()
    assert not {"error_seen", "error_mean"} & set(state["units"]["unit_0"])
    controller = Controller(1, BY_HISTORY)
    controller.load_state_dict(state)
    assert controller.update([1.0], [0.9]).risk.tolist() == [1 / 1.5]


@pytest.mark.parametrize("key", ["error_seen", "error_mean"])
def test_a_state_whose_errors_are_none_is_refused(key):
    state = Controller(1, BY_HISTORY).state_dict()
    state["units"]["unit_0"][key] = -1
    with pytest.raises(ConfigError, match=key):
        Controller(1, BY_HISTORY).load_state_dict(state)


@pytest.mark.parametrize(
    ("setting", "settings"),
    [
        ("error_history", {"error_history": "emma"}),
        ("error_limit", {"error_history": "ema", "error_limit": 0.3}),
        ("error_limit", {"error_history": "ema", "error_limit": 1.0}),
        ("error_ema_factor", {"error_ema_factor": 1.0}),
        ("error_ema_factor", {"error_ema_factor": True}),
        ("error_ema_factor", {"error_ema_factor": np.nan}),
    ],
)
def test_a_history_that_cannot_be_meant_is_refused(setting, settings):
    with pytest.raises(ConfigError) as caught:
        Policy(**settings)
    assert caught.value.setting == setting
    assert caught.value.allowed
    assert caught.value.remedy


def test_the_robust_preset_passes_it_through():
    policy = robust(error_limit=1.5, error_history="ema")
    assert (policy.error_limit, policy.error_history) == (1.5, "ema")
    assert Policy.from_dict(json.loads(json.dumps(policy.to_dict()))) == policy
