"""The largest magnitude of a unit's operand, judged by its own earlier ones."""

import json
import math
from dataclasses import replace

import array_api_strict
import numpy as np
import pytest
import torch

from trimtab.control import Controller, DampingOnly, MatchedRandom, Policy, ReferenceController, StaticHigh, robust
from trimtab.control.amax_history import AMAX_CLIP
from trimtab.control.protocol import ask
from trimtab.errors import ConfigError

LARGEST = float(np.finfo(float).max)
# Norms that never change are no risk under these, so that every risk is that of an amax.
BY_AMAX = Policy(alpha=1e6, beta=1e6, amax_limit=12.0, lock_steps=0)
CALM = 1 / 1e6


def risks(policy, amaxes):
    """The risks of one unit that has these amaxes, one a step; those of the slow truth are the same."""
    slow, fast = ReferenceController(1, policy), policy.start(1)
    found = []
    for amax in amaxes:
        decision = fast.update([1.0], amaxes=[amax])
        assert slow.update([1.0], amaxes=[amax]).risk == decision.risk.tolist()
        found.append(float(decision.risk[0]))
    assert slow.state_dict() == fast.state_dict()
    return found


def test_the_first_amax_has_the_ratio_1_whatever_it_is():
    for amax in (1e-3, 3.0, 4e4):
        assert risks(BY_AMAX, [amax]) == [1 / 12]


def test_a_unit_of_large_amaxes_is_no_risk_and_a_small_one_that_jumps_is():
    controller = Controller(2, BY_AMAX)
    for amaxes in ([400.0, 2.0], [420.0, 2.0], [410.0, 24.5]):
        decision = controller.update([1.0, 1.0], amaxes=amaxes)
    assert decision.active.tolist() == [False, True]
    assert decision.reasons == ("none", "amax")


def test_at_the_limit_it_is_no_risk_yet():
    assert risks(BY_AMAX, [2.0, 24.0])[1] == 1.0


def test_an_amax_enters_the_mean_as_at_most_the_clip_times_the_mean():
    controller = Controller(2, replace(BY_AMAX, error_ema_factor=0.5))
    for amaxes in ([1.0, 1.0], [1.25, 1e6]):
        controller.update([1.0, 1.0], amaxes=amaxes)
    memories = controller.state_dict()["units"].values()
    assert [memory["amax_mean"] for memory in memories] == [1.125, (1 + AMAX_CLIP) / 2]


def test_a_fault_that_lasts_stays_a_risk_for_as_long_as_the_clipped_mean_needs_to_reach_it():
    found = risks(BY_AMAX, [1.0] + [200.0] * 200)
    growth = 0.95 + 0.05 * AMAX_CLIP  # of the mean, a step
    num_steps = math.ceil(math.log(200 / 12) / math.log(growth))
    assert [risk > 1 for risk in found[1:]] == [True] * num_steps + [False] * (200 - num_steps)
    assert num_steps > 50


def test_an_amax_that_is_not_finite_is_the_largest_risk_at_any_step_and_poisons_no_mean():
    found = risks(replace(BY_AMAX, act_from_step=3), [0.5, np.inf, 0.5, 0.5, np.inf, 0.5])
    assert found[1] == found[4] == LARGEST  # +inf is kept for failed norms
    assert [found[0], found[2]] == [0.0, 0.0]
    assert found[3] == found[5] == 1 / 12


@pytest.mark.parametrize("unknown", [None, np.nan, -0.5, -np.inf, 0.0])
def test_an_amax_that_is_not_known_or_0_adds_nothing_and_is_not_remembered(unknown):
    with_gaps = risks(BY_AMAX, [0.5, unknown, 0.6, unknown, 9.0])
    assert with_gaps[1] == with_gaps[3] == CALM
    assert [with_gaps[i] for i in (0, 2, 4)] == risks(BY_AMAX, [0.5, 0.6, 9.0])


def test_up_to_act_from_step_amaxes_are_remembered_and_no_risk():
    found = risks(replace(BY_AMAX, act_from_step=2), [0.1, 50.0, 50.0])
    assert found[:2] == [0.0, 0.0]
    # The second entered clipped: the mean is .95 * .1 + .05 * .2.
    assert found[2] == pytest.approx(50.0 / (0.95 * 0.1 + 0.05 * 0.2) / 12)


def test_amaxes_of_the_burn_in_do_not_enter_the_mean():
    assert risks(replace(BY_AMAX, burn_in_steps=2), [9.0, 9.0, 0.5, 1.0]) == [1 / 12, 1 / 12, 1 / 12, 2 / 12]


def test_a_unit_whose_norm_is_not_observed_is_judged_by_its_amax_all_the_same():
    controller = Controller(1, BY_AMAX)
    for amax in (0.2, 4.0):
        decision = controller.update([0.0], amaxes=[amax])
    assert decision.active.tolist() == [True]
    assert decision.scale.tolist() == [1.0]


def test_a_risk_by_amax_alone_scales_no_gradient():
    controller = Controller(1, replace(BY_AMAX, damping=True))
    for norm, amax in ((1.0, 1.0), (2.0, 99.0)):
        decision = controller.update([norm], amaxes=[amax])
    assert decision.risk[0] > 1
    assert decision.scale.tolist() == [1.0]


def test_the_greater_of_error_and_amax_is_the_risk_and_each_has_a_mean_of_its_own():
    controller = Controller(2, replace(BY_AMAX, error_limit=1.5, error_history="ema"))
    controller.update([1.0] * 2, [0.1, 0.1], None, [3.0, 3.0])
    decision = controller.update([1.0] * 2, [0.9, 0.2], None, [72.0, 72.0])
    assert decision.risk.tolist() == [0.9 / 0.1 / 1.5, 2.0]  # beside 2 by amax, and 1.33 by the error
    assert decision.reasons == ("error", "amax")
    means = [(unit["error_mean"], unit["amax_mean"]) for unit in controller.state_dict()["units"].values()]
    assert means == [pytest.approx((0.1 * 1.025, 3 * 1.05))] * 2


def test_without_a_limit_amaxes_are_ignored_and_not_remembered():
    controller = Controller(2, Policy())
    assert controller.update([1.0, 1.0], amaxes=[np.inf, 5.0]).risk.tolist() == [1 / 1.3] * 2
    assert "amax_seen" not in controller.state_dict()["units"]["unit_0"]


@pytest.mark.parametrize("policy", [BY_AMAX, Policy(), MatchedRandom([1], seed=0), StaticHigh()])
def test_a_wrong_number_of_amaxes_is_told_with_both_numbers(policy):
    controller = policy.start(3)
    for amaxes in ([0.1], np.ones(4), torch.ones(2)):
        with pytest.raises(ValueError, match=rf"amaxes: got {len(amaxes)}, but there are 3 units"):
            controller.update([1.0] * 3, amaxes=amaxes)
    assert controller.step == 0
    with pytest.raises(ValueError, match=r"amaxes: got 1, .*3 units"):
        ReferenceController(3, BY_AMAX).update([1.0] * 3, amaxes=[0.1])


@pytest.mark.parametrize("kind", [list, np.array, array_api_strict.asarray, torch.tensor])
@pytest.mark.parametrize("norms", [[1.0, 1.0], torch.ones(2), array_api_strict.asarray([1.0, 1.0])])
def test_amaxes_of_every_kind_of_array_go_with_norms_of_any_other(norms, kind):
    controller = Controller(2, BY_AMAX)
    for amaxes in ([0.5, 0.125], [12.0, 0.125]):
        decision = controller.update(norms, amaxes=kind(amaxes))
    assert np.asarray(decision.risk).tolist() == [2.0, 1 / 12]


def test_a_decision_on_amaxes_reads_no_value_back():
    # Tensors on the meta device have no values: whatever needs one raises.
    controller, some = replace(BY_AMAX, max_active=2).start(5), torch.empty(5, device="meta")
    for _ in range(3):
        decision = controller.update(some, some, None, some)
    assert decision.risk.device.type == "meta"


def test_the_mean_is_saved_by_name_and_moves_with_the_norms():
    controller, moved = (Controller(["q", "k"], BY_AMAX) for _ in range(2))
    for amaxes in ([0.1, 0.8], [0.12, 0.7]):
        controller.update([1.0, 1.0], amaxes=amaxes)
        moved.update(torch.ones(2), amaxes=torch.tensor(amaxes, dtype=torch.float64))
    state = json.loads(json.dumps(controller.state_dict(), allow_nan=False))
    resumed = Controller(["k", "q"], BY_AMAX)
    assert resumed.load_state_dict(state).new == ()
    expected = controller.update([1.0, 1.0], amaxes=[3.0, 0.7]).risk.tolist()
    assert resumed.update([1.0, 1.0], amaxes=[0.7, 3.0]).risk.tolist() == expected[::-1]
    assert moved.update([1.0, 1.0], amaxes=[3.0, 0.7]).risk.tolist() == expected


def test_a_state_of_before_has_no_amaxes_and_loads():
    before = Controller(1, Policy(error_limit=1.5, error_history="ema"))
    before.update([1.0], [0.5])
    state = before.state_dict()
    assert not {"amax_seen", "amax_mean"} & set(state["units"]["unit_0"])
    controller = Controller(1, BY_AMAX)
    controller.load_state_dict(state)
    assert controller.update([1.0], amaxes=[0.9]).risk.tolist() == [1 / 12]


@pytest.mark.parametrize("key", ["amax_seen", "amax_mean"])
def test_a_state_whose_amaxes_are_none_is_refused(key):
    state = Controller(1, BY_AMAX).state_dict()
    state["units"]["unit_0"][key] = -1
    with pytest.raises(ConfigError, match=key):
        Controller(1, BY_AMAX).load_state_dict(state)


def test_the_robust_preset_passes_it_through_and_settings_survive_json():
    policy = robust(error_limit=1.5, error_history="ema", amax_limit=12)
    assert policy.amax_limit == 12.0
    assert Policy.from_dict(json.loads(json.dumps(policy.to_dict()))) == policy
    settings = policy.to_dict()
    del settings["amax_limit"]  # those of before have none
    assert Policy.from_dict(settings) == robust(error_limit=1.5, error_history="ema")


def test_what_is_compared_with_it_judges_amaxes_as_its_scores_do_and_chooses_by_its_own():
    for policy in (MatchedRandom([0] * 9, seed=0, scores=BY_AMAX), StaticHigh(scores=BY_AMAX)):
        assert policy.amax_limit == 12.0
        controller = policy.start(2)
        for amaxes in ([1.0, 1.0], [1.0, 30.0]):
            decision = controller.update([1.0, 1.0], None, None, amaxes)
        assert decision.reasons == ("none", "amax")
        assert decision.active.all() == isinstance(policy, StaticHigh)
    assert DampingOnly(scores=BY_AMAX).start(1).update([1.0], amaxes=[np.inf]).risk.tolist() == [LARGEST]


class Plain:
    """A controller that knows norms and errors alone, as one of before amaxes and raised risks."""

    def __init__(self):
        self.asked = []

    def update(self, norms, errors=None):
        self.asked.append((norms, errors))


def test_a_controller_that_takes_no_amaxes_works_while_its_policy_judges_none():
    controller, some = Plain(), np.ones(2)
    for policy in (object(), Policy()):
        ask(controller, policy, some, some, None, some)
    ask(controller, BY_AMAX, some, some, None, None)
    assert len(controller.asked) == 3
    with pytest.raises(TypeError):
        ask(controller, BY_AMAX, some, some, None, some)
