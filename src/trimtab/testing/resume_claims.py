"""Claims about saving a run in the middle and going on from there."""

from __future__ import annotations

import copy
import json
from typing import Any

import torch
from torch import Tensor

from trimtab.control import Policy
from trimtab.guard import attach
from trimtab.testing.recipe_hooks import RecipeHooks, assert_same
from trimtab.testing.snapshots import values_of

__all__ = ["ResumeClaims"]

NUM_STEPS, SAVED_AFTER = 6, 3


class ResumeClaims(RecipeHooks):
    """Weights, optimizer and guard, saved and loaded."""

    def test_weights_saved_in_the_middle_of_a_run_load_into_a_plain_model_and_back(self) -> None:
        """Strictly, by the same keys, with the same values."""
        with self.pair() as pair:
            self.gradients(pair.model, self.batch(pair.model))
            with torch.no_grad():
                for parameter in pair.model.parameters():
                    parameter.add_(0.01)
            saved = {name: value.clone() for name, value in pair.model.state_dict().items()}
            pair.plain.load_state_dict(saved)
            assert_same(saved, values_of(pair.plain), "weights of a converted model, loaded into a plain one")
            with torch.no_grad():
                for parameter in pair.model.parameters():
                    parameter.zero_()
            pair.model.load_state_dict(saved)
            assert_same(saved, values_of(pair.model), "weights of a converted model, loaded back into it")
            batch = self.batch(pair.model)
            pair.plain.eval()
            pair.model.eval()
            if self.evaluates_as_plain:
                with torch.no_grad():
                    outputs = [{"the output": model(batch)} for model in (pair.plain, pair.model)]
                assert_same(outputs[0], outputs[1], "a converted model with loaded weights")

    def test_a_weight_that_is_trained_is_the_weight_that_computes(self) -> None:
        """After the weights change, both paths compute with the new ones: no copy of the old is left in use."""
        other = self.model()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(-1.5)
        with self.pair() as pair, self.pair(other) as expected:
            for where, active in pair.routes().items():
                for one in (pair, expected):
                    one.conversion.begin_step(1)
                    one.conversion.route(active)
                self.gradients(pair.model, self.batch(pair.model))
                before = copy.deepcopy(pair.model.state_dict())
                pair.model.load_state_dict(other.state_dict())
                pair.conversion.begin_step(1)
                got = self.gradients(pair.model, self.batch(pair.model))
                assert_same(
                    self.gradients(expected.model, self.batch(expected.model)), got, f"{where}, with new weights loaded"
                )
                pair.model.load_state_dict(before)

    def test_a_resumed_run_decides_and_computes_as_the_uninterrupted_one(self) -> None:
        """Under a guard whose policy switches units; the state passes through JSON."""
        whole = _Run(self)
        whole.train(1, SAVED_AFTER)
        saved = whole.saved()
        whole.train(SAVED_AFTER + 1, NUM_STEPS)
        whole.guard.detach()
        assert len({tuple(active) for active in whole.active.values()}) > 1, "the policy has switched nothing"

        resumed = _Run(self)
        resumed.load(saved)
        resumed.train(SAVED_AFTER + 1, NUM_STEPS)
        resumed.guard.detach()
        for step, active in resumed.active.items():
            assert active == whole.active[step], f"step {step}: a resumed run puts other units on the recovery path"
            assert torch.equal(resumed.losses[step], whole.losses[step]), f"step {step}: a resumed run has another loss"
        assert_same(values_of(whole.model), values_of(resumed.model), "a resumed run ends with other weights")


class _Run:
    """A process of a training run."""

    def __init__(self, hooks: RecipeHooks) -> None:
        self.hooks = hooks
        self.model = hooks.model()
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-2)
        # Thresholds of 1 flag about half of all units in each step.
        policy = Policy(alpha=1.0, beta=1.0, window_steps=2, lock_steps=1, max_active=0.5)
        self.guard = attach(self.model, hooks.recipe(), policy=policy)
        self.losses: dict[int, Tensor] = {}
        self.active: dict[int, list[bool]] = {}

    def train(self, first: int, last: int) -> None:
        """Take steps ``first`` to ``last``."""
        decisions = {}
        for step in range(first, last + 1):
            loss = self.hooks.loss(self.model, self.hooks.batch(self.model, seed=step))
            loss.backward()
            # Read at the end: then each decision is taken when the next forward asks for the route.
            decisions[step] = self.guard.step(max_norm=1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses[step] = loss.detach()
        self.active |= {step: [bool(flag) for flag in decision.active] for step, decision in decisions.items()}

    def saved(self) -> dict[str, Any]:
        """A checkpoint."""
        return {
            "model": values_of(self.model),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "guard": json.dumps(self.guard.state_dict()),
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.guard.load_state_dict(json.loads(saved["guard"]))
