"""Every policy keeps the contract of a policy, and the contract sees one that does not."""

import unittest

import numpy as np
import pytest

from trimtab.control import (
    POLICIES,
    AdaptStyle,
    Controller,
    DampingOnly,
    FixedSet,
    GsnrStyle,
    JacobianProxy,
    MatchedRandom,
    Oracle,
    Policy,
    StaticHigh,
    StaticLow,
    TwoStage,
    paper,
    robust,
)
from trimtab.testing import PolicyContract

NUM_STEPS = PolicyContract.num_steps


def gaps():
    generator = np.random.default_rng(0)
    names = PolicyContract.units
    return [dict(zip(names, generator.standard_normal(len(names)), strict=True)) for _ in range(NUM_STEPS)]


EARLY = {"burn_in_steps": 3, "act_from_step": 5, "max_active": 2}
FACTORIES = {
    "paper": lambda: paper(max_active=2),
    "paper-deepseek": lambda: paper("deepseek", total_steps=200),
    "paper with errors": lambda: Policy(max_active=2, error_limit=0.3),
    "robust": lambda: robust(**EARLY),
    "robust with errors": lambda: robust(error_limit=0.3, **EARLY),
    "robust with errors by history": lambda: robust(error_limit=1.5, error_history="ema", **EARLY),
    "robust with errors and amaxes": lambda: robust(error_limit=1.5, error_history="ema", amax_limit=2.0, **EARLY),
    "matched_random with amaxes": lambda: MatchedRandom([2] * NUM_STEPS, seed=1, scores=Policy(amax_limit=2.0)),
    "gsnr_style with amaxes": lambda: GsnrStyle(max_active=2, scores=Policy(amax_limit=2.0)),
    "window": lambda: Policy(max_active=0.5, history="window", history_steps=6, alpha=TwoStage(2, 1, switch_step=4)),
    "damping": lambda: robust(damping=True, **EARLY),
    "static_low": StaticLow,
    "static_high": StaticHigh,
    "fixed_set": lambda: FixedSet(["k", "down"]),
    "adapt_style": lambda: AdaptStyle(6),
    "adapt_style by norm": lambda: AdaptStyle(4, share=2, score="norm", scores=robust(damping=True)),
    "matched_random": lambda: MatchedRandom([1, 2, 3] * (NUM_STEPS // 3), seed=5),
    "gsnr_style": lambda: GsnrStyle(max_active=2),
    "jacobian_proxy": lambda: JacobianProxy(max_active=2),
    "damping_only": lambda: DampingOnly(scores=Policy()),
    "oracle": lambda: Oracle(gaps(), max_active=2),
}
NEVER_ACTIVE = {"static_low", "damping_only"}


class TestPolicies(PolicyContract):
    @pytest.fixture(autouse=True, params=FACTORIES)
    def settings(self, request):
        self.made = FACTORIES[request.param]
        self.is_ever_active = request.param not in NEVER_ACTIVE

    def policy(self):
        return self.made()


def test_every_kind_of_policy_is_under_contract():
    presets = {"robust", "paper", "paper-2.0", "paper-3.0", "paper-deepseek", "paper-lora", "paper-moe"}
    assert set(POLICIES) - presets <= set(FACTORIES)


# The contract itself: each broken policy is caught by the claim that is named beside it


class Broken:
    """A policy whose controller is broken; ``Controller`` otherwise."""

    def __init__(self, controller):
        self.controller = controller

    def start(self, units, recoverable=None):
        return self.controller(units, Policy(max_active=2), recoverable)

    def to_dict(self):
        return {"kind": "broken"}


class OverBudget(Controller):
    @property
    def budget(self):
        return 1


class SwitchesWatchedUnits(Controller):
    def __init__(self, units, policy, recoverable=None):
        super().__init__(units, policy)
        self.claimed = tuple(name in recoverable for name in self.units)

    @property
    def recoverable(self):
        return self.claimed


class DrawsAtRandom(Controller):
    generator = np.random.default_rng(0)

    def update(self, norms, errors=None, risks=None):
        return super().update(np.asarray(norms, float) * self.generator.random(len(norms)), errors, risks)


class ForgetsLocks(Controller):
    def state_dict(self):
        state = super().state_dict()
        for unit in state["units"].values():
            unit["lock"] = 0
        return state


class LoadsByPosition(Controller):
    def load_state_dict(self, state):
        renamed = dict(zip(self.units, state["units"].values(), strict=True))
        return super().load_state_dict(state | {"units": renamed})


class CountsRefusedSteps(Controller):
    def update(self, norms, errors=None, risks=None):
        try:
            return super().update(norms, errors, risks)
        except ValueError:
            self._step += 1
            raise


class TakesAnything(Controller):
    def load_state_dict(self, state):
        try:
            return super().load_state_dict(state)
        except ValueError:
            self._step = 0


class GivesNoReason(Controller):
    def update(self, norms, errors=None, risks=None):
        decision = super().update(norms, errors, risks)
        decision.reason[:] = 0
        return decision


@pytest.mark.parametrize(
    ("controller", "claim", "message"),
    [
        (OverBudget, "the_budget_holds_whatever_the_inputs", "2 of 1 active"),
        (SwitchesWatchedUnits, "a_unit_without_a_recovery_path_is_never_active", "is active"),
        (DrawsAtRandom, "the_same_inputs_give_the_same_decisions", "a second controller: gnmr"),
        (ForgetsLocks, "saved_and_loaded_at_any_step_it_goes_on_bit_for_bit", "resumed at step"),
        (LoadsByPosition, "a_state_is_matched_by_name_in_whatever_order_the_units_are", "another order"),
        (CountsRefusedSteps, "a_wrong_number_of_norms_is_refused", "counted"),
        (TakesAnything, "a_state_that_is_none_is_refused_and_changes_nothing", "for a state"),
        (GivesNoReason, "every_decision_is_a_valid_one", "has no reason"),
    ],
)
def test_the_contract_sees_a_broken_policy(controller, claim, message):
    class Contract(PolicyContract):
        def policy(self):
            return Broken(controller)

    with pytest.raises(AssertionError, match=message):
        getattr(Contract(), f"test_{claim}")()


class ForgetsAmaxes(Controller):
    def state_dict(self):
        state = super().state_dict()
        for unit in state["units"].values():
            unit.pop("amax_mean", None)
        return state


def test_the_contract_gives_amaxes_to_a_policy_that_judges_them_and_to_no_other():
    class Judging(Broken):
        amax_limit = 2.0

        def start(self, units, recoverable=None):
            return self.controller(units, Policy(max_active=2, amax_limit=self.amax_limit), recoverable)

    class Contract(PolicyContract):
        kind = Judging

        def policy(self):
            return self.kind(ForgetsAmaxes)

    claim = "test_saved_and_loaded_at_any_step_it_goes_on_bit_for_bit"
    with pytest.raises(AssertionError, match="resumed at step"):
        getattr(Contract(), claim)()
    Contract.kind = Broken
    getattr(Contract(), claim)()
    assert {len(given) for given in Contract().inputs()} == {3}


def test_the_contract_sees_settings_that_json_cannot_hold():
    class Contract(PolicyContract):
        def policy(self):
            policy = Broken(Controller)
            policy.to_dict = lambda: {"counts": (1, 2)}
            return policy

    with pytest.raises(AssertionError, match="survive"):
        Contract().test_its_settings_are_plain_values()


def test_a_policy_that_is_not_read_back_is_left_out_of_that_claim():
    class Contract(PolicyContract):
        rebuilds_from_dict = False

    with pytest.raises(unittest.SkipTest):
        Contract().test_its_settings_are_read_back()
