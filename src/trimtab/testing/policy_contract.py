"""What every policy has to keep."""

from __future__ import annotations

import json
import math
import unittest
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from trimtab.control import ControllerLike, Decision, PolicyLike

__all__ = ["PolicyContract"]

_FIELDS = ("gnmr", "delta", "risk", "scale", "active", "lock", "reason")
_NASTY = (0.0, math.nan, math.inf, -math.inf, -1.0, 5e-324, 1e-310, 1e308, float(np.finfo(float).max))
_BESIDE, _OFTEN = (0.1, 0.9, 3.0, math.nan, math.inf, -1.0), (0.6, 0.1, 0.1, 0.1, 0.05, 0.05)
"""Channel errors, raised risks and amaxes, and how often each is drawn."""


class _Inputs(NamedTuple):
    """What a controller is given in one step."""

    norms: list[float]
    errors: list[float] | None
    risks: list[float] | None


class _AmaxInputs(NamedTuple):
    """So too, where the policy judges amaxes; a controller whose policy does not need not take them."""

    norms: list[float]
    errors: list[float] | None
    risks: list[float] | None
    amaxes: list[float] | None


class PolicyContract:
    """The claims that a policy must meet, as tests that a subclass inherits.

    Subclass it in a test file under a name that the test runner collects, and give ``policy``; the other hooks have
    defaults. Everything runs on the CPU in a second, and needs no test runner: a claim is a method, and a claim that
    does not apply raises ``unittest.SkipTest``.

    Attributes:
        units: Names of the units, from the input to the loss.
        recoverable: Those of them with a recovery path.
        num_steps: Steps of a run; enough for the policy to have units active, if it ever has.
        is_ever_active: Whether it has some active within as many, on inputs of all kinds.
        rebuilds_from_dict: Whether ``type(policy).from_dict`` reads what ``to_dict`` wrote.

    Example:
        >>> from trimtab.control import Policy
        >>> class TestMyPolicy(PolicyContract):
        ...     def policy(self):
        ...         return Policy(max_active=2)
        >>> TestMyPolicy().test_the_budget_holds_whatever_the_inputs()
    """

    units: Sequence[str] = ("q", "k", "v", "o", "norm", "up", "down")
    recoverable: Sequence[str] = ("q", "k", "v", "up", "down")
    num_steps: int = 24
    is_ever_active: bool = True
    rebuilds_from_dict: bool = True

    def policy(self) -> PolicyLike:
        """The policy; called often, so that each test has its own."""
        raise NotImplementedError("A contract needs to know its policy: def policy(self): return MyPolicy()")

    # What a run is

    def started(self, units: Sequence[str] | None = None) -> ControllerLike:
        """A fresh controller; of the same units in another order where these are given."""
        return self.policy().start(list(units or self.units), list(self.recoverable))

    def inputs(self, seed: int = 0) -> list[_Inputs] | list[_AmaxInputs]:
        """Norms, channel errors and raised risks of a run: plain ones, bursts, and whatever a run may bring.

        With amaxes, where the policy has an ``amax_limit``.

        The first half is mostly plain; from there on some steps hold nothing, or nothing that is a number.
        """
        generator, num_units = np.random.default_rng(seed), len(self.units)
        found = []
        for step in range(self.num_steps):
            plain = generator.lognormal(0, 0.3, num_units) * generator.choice([1, 20], num_units, p=[0.9, 0.1])
            share = 0.05 if step < self.num_steps // 2 else generator.choice([0.0, 0.3, 1.0], p=[0.7, 0.2, 0.1])
            nasty = generator.choice(_NASTY, num_units)
            norms = np.where(generator.random(num_units) < share, nasty, plain)
            if step % 12 == 11:
                norms = np.full(num_units, generator.choice([0.0, math.nan, math.inf]))
            beside = [generator.choice(_BESIDE, num_units, p=_OFTEN) for _ in range(2)]
            errors, risks = (values.tolist() if generator.random() < 0.3 else None for values in beside)
            found.append(_Inputs(norms.tolist(), errors, risks))
        if getattr(self.policy(), "amax_limit", None) is None:
            return found
        amaxes = generator.choice(_BESIDE, (self.num_steps, num_units), p=_OFTEN).tolist()
        return [_AmaxInputs(*given, of_step) for given, of_step in zip(found, amaxes, strict=True)]

    def decisions(self, seeds: Sequence[int] = (0, 1, 2)) -> Iterator[tuple[ControllerLike, Decision]]:
        """Every decision of a run a seed, and the controller that has just taken it."""
        for seed in seeds:
            controller = self.started()
            for given in self.inputs(seed):
                yield controller, controller.update(*given)

    # Claims

    def test_it_is_a_policy_that_starts_a_controller(self) -> None:
        """Both have what the protocols ask for, and a fresh controller has taken no decision."""
        assert isinstance(self.policy(), PolicyLike), "it lacks a method of trimtab.control.PolicyLike"
        controller = self.started()
        assert isinstance(controller, ControllerLike), "its controller lacks a part of trimtab.control.ControllerLike"
        assert tuple(controller.units) == tuple(self.units), f"its units are {controller.units}"
        can = [name in self.recoverable for name in self.units]
        assert list(controller.recoverable) == can, f"its recoverable units are {controller.recoverable}"
        assert controller.step == 0, f"a fresh controller is at step {controller.step}"
        assert 0 <= controller.budget <= len(self.recoverable), f"its budget is {controller.budget}"

    def test_the_budget_holds_whatever_the_inputs(self) -> None:
        """Never more units than the budget, for NaN, infinite, negative, missing and extreme inputs too."""
        most = 0
        for controller, decision in self.decisions():
            num_active = int(np.asarray(decision.active).sum())
            most = max(most, num_active)
            assert num_active <= controller.budget, f"step {decision.step}: {num_active} of {controller.budget} active"
            same = np.array_equal(np.asarray(decision.active), np.asarray(controller.active))
            assert same, f"step {decision.step}: the controller's active set is not the decision's"
        assert (most > 0) == self.is_ever_active, f"at most {most} units were active at once"

    def test_a_unit_without_a_recovery_path_is_never_active(self) -> None:
        """Also where no unit has one, as without a recipe."""
        can = np.array([name in self.recoverable for name in self.units])
        for _, decision in self.decisions():
            wrong = np.flatnonzero(np.asarray(decision.active) & ~can)
            assert not wrong.size, f"step {decision.step}: {self.units[wrong[0]]} is active"
        watching = self.policy().start(list(self.units), [])
        for given in self.inputs():
            assert not np.asarray(watching.update(*given).active).any(), "active, and no unit can be switched"

    def test_every_decision_is_a_valid_one(self) -> None:
        """One value a unit, steps counted from 1, no risk that is NaN, and a reason for each risk above 1."""
        for controller, decision in self.decisions():
            assert decision.step == controller.step >= 1, f"step {decision.step} at the controller's {controller.step}"
            for name in _FIELDS:
                value = getattr(decision, name)
                if name == "reason" and value is None:
                    continue
                shape = np.asarray(value).shape
                assert shape == (len(self.units),), f"{name} has shape {shape}"
            risk, scale, lock = (np.asarray(getattr(decision, name)) for name in ("risk", "scale", "lock"))
            assert not np.isnan(risk).any(), f"step {decision.step}: a risk is NaN"
            assert ((scale >= 0) & (scale <= 1)).all(), f"step {decision.step}: a gradient is scaled up"
            assert (lock >= 0).all(), f"step {decision.step}: a lock is below 0"
            if decision.reason is not None:
                reasons = np.array(decision.reasons)
                unknown = (risk > 1) & np.isin(reasons, ["none", "locked"])
                assert not unknown.any(), f"step {decision.step}: a risk above 1 has no reason"
                without = (risk <= 1) & ~np.isin(reasons, ["none", "locked"])
                assert not without.any(), f"step {decision.step}: a reason, and no risk above 1"
                held = (reasons == "locked") & ~np.asarray(decision.active)
                assert not held.any(), f"step {decision.step}: a unit is locked, and not active"

    def test_the_same_inputs_give_the_same_decisions(self) -> None:
        """On every rank and after every restart; nothing is drawn from a global random stream."""
        one, other = self.started(), self.started()
        before = torch.get_rng_state()
        for given in self.inputs():
            _assert_same(one.update(*given), other.update(*given), "a second controller")
        assert torch.equal(before, torch.get_rng_state()), "it draws from torch's random stream"

    def test_arrays_of_torch_give_the_decisions_of_lists(self) -> None:
        """The norms may be a list, or a tensor of float64."""
        one, other = self.started(), self.started()
        for given in self.inputs():
            arrays = [None if values is None else torch.tensor(values, dtype=torch.float64) for values in given]
            _assert_same(one.update(*given), other.update(*arrays), "tensors")

    def test_saved_and_loaded_at_any_step_it_goes_on_bit_for_bit(self) -> None:
        """The state goes through JSON, and the run goes on as if it had not been stopped."""
        inputs = self.inputs()
        for at in range(self.num_steps):
            whole, first, resumed = (self.started() for _ in range(3))
            for given in inputs[:at]:
                whole.update(*given)
                first.update(*given)
            report = resumed.load_state_dict(_through_json(first.state_dict()))
            assert not report.new, f"a load of its own state finds {report.new} new"
            assert not report.gone, f"a load of its own state finds {report.gone} gone"
            assert resumed.step == at, f"saved at step {at}, loaded at {resumed.step}"
            same = np.array_equal(np.asarray(resumed.active), np.asarray(whole.active))
            assert same, f"loaded at step {at}, it has another active set"
            for given in inputs[at:]:
                _assert_same(whole.update(*given), resumed.update(*given), f"resumed at step {at}")
            assert _text(whole.state_dict()) == _text(resumed.state_dict()), f"resumed at step {at}, its state differs"

    def test_a_state_is_matched_by_name_in_whatever_order_the_units_are(self) -> None:
        """Each unit finds its own memory and its place in the active set again."""
        controller = self.started()
        for given in self.inputs()[: self.num_steps // 2]:
            controller.update(*given)
        saved = controller.state_dict()
        turned = list(reversed(self.units))
        other = self.started(turned)
        report = other.load_state_dict(_through_json(saved))
        assert not report.new, f"{report.new} are new in another order"
        assert not report.gone, f"{report.gone} are gone in another order"
        assert _text(other.state_dict()) == _text(saved), "in another order of units the state is another one"
        expected = dict(zip(self.units, np.asarray(controller.active).tolist(), strict=True))
        got = dict(zip(turned, np.asarray(other.active).tolist(), strict=True))
        assert expected == got, "in another order of units the active set is another one"

    def test_a_load_says_which_units_are_new_and_gone(self) -> None:
        """And keeps the budget."""
        controller = self.started()
        for given in self.inputs()[: self.num_steps // 2]:
            controller.update(*given)
        state = _through_json(controller.state_dict())
        missing = self.units[0]
        state["units"]["elsewhere"] = state["units"].pop(missing)
        other = self.started()
        report = other.load_state_dict(state)
        assert tuple(report.new) == (missing,), f"new: {report.new}"
        assert tuple(report.gone) == ("elsewhere",), f"gone: {report.gone}"
        assert int(np.asarray(other.active).sum()) <= other.budget, "after the load it is over its budget"

    def test_a_state_that_is_none_is_refused_and_changes_nothing(self) -> None:
        """With a ``ValueError``, such as ``ConfigError``."""
        controller = self.started()
        controller.update(*self.inputs()[0])
        before = _text(controller.state_dict())
        for state in ({}, {"step": 1}, controller.state_dict() | {"units": {self.units[0]: {}}}):
            try:
                controller.load_state_dict(state)
            except ValueError:
                pass
            else:
                raise AssertionError(f"it takes {state!r:.60} for a state")
            assert _text(controller.state_dict()) == before, "a refused state has changed something"

    def test_a_wrong_number_of_norms_is_refused(self) -> None:
        """None at all, one too few, one too many: a ``ValueError``, and no step is counted."""
        controller = self.started()
        for count in (0, len(self.units) - 1, len(self.units) + 1):
            try:
                controller.update([1.0] * count)
            except ValueError:
                pass
            else:
                raise AssertionError(f"it takes {count} norms for {len(self.units)} units")
        assert controller.step == 0, "a refused step is counted"

    def test_its_settings_are_plain_values(self) -> None:
        """``to_dict`` goes into every record, as JSON without NaN."""
        settings = self.policy().to_dict()
        assert _through_json(settings) == settings, "its settings do not survive JSON"

    def test_its_settings_are_read_back(self) -> None:
        """``from_dict`` gives an equal policy."""
        if not self.rebuilds_from_dict:
            raise unittest.SkipTest("its settings are written down, and not read back")
        policy: Any = self.policy()
        again = type(policy).from_dict(_through_json(policy.to_dict()))
        assert again == policy, f"read back it is {again!r}"


def _assert_same(expected: Decision, got: Decision, where: str) -> None:
    for name in _FIELDS:
        one, other = getattr(expected, name), getattr(got, name)
        same = (one is None) == (other is None)
        if same and one is not None:
            one, other = np.asarray(one), np.asarray(other)
            same = np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
        assert same, f"{where}: {name} of step {expected.step} is {other}, and was {one}"


def _through_json(value: Any) -> Any:
    return json.loads(json.dumps(value, allow_nan=False))


def _text(state: Any) -> str:
    return json.dumps(state, sort_keys=True, allow_nan=False)
