"""Exercising the switch shows an effect where there is one, none where there is none, and changes nothing itself."""

import pytest
import torch

import trimtab
from trimtab.control import Policy
from trimtab.experiments.arms import TrainingPlan, build_model
from trimtab.experiments.exercise import Exercise, exercise_summary
from trimtab.experiments.recipes import make_recipe
from trimtab.trace import open_run

PLAN = TrainingPlan(num_steps=4, hidden=32, ffn=64, num_layers=1, num_heads=2)
OBSERVABLES = {"quantized-gemm": "outputs", "saved-activations": "quantizers"}


def train(tmp_path, recipe, observable, *, every=2, switches=True, looks=True, **settings):
    """Four steps; the weights afterwards and what the record says of the exercise."""
    model = build_model(PLAN, 64)
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with trimtab.attach(model, make_recipe(recipe, **settings), policy=Policy(max_active=0), record=tmp_path) as guard:
        if not switches:
            guard.conversion.route = lambda active: None
        exercise = Exercise(guard, every, observable) if looks else None
        for step in range(1, PLAN.num_steps + 1):
            if exercise is not None:
                exercise.begin_step(step)
            elif step % every == 0:
                guard.route(guard.units)
            model(input_ids=ids, labels=ids).loss.backward()
            guard.step(max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            if exercise is not None:
                exercise.end_step(step)
    with open_run(tmp_path) as run:
        events = [e for e in run.events() if e.kind == "forced" or e.data.get("about") == "exercise"]
        return torch.cat([p.detach().flatten() for p in model.parameters()]), exercise_summary(run), events


@pytest.mark.parametrize(("recipe", "observable"), OBSERVABLES.items())
def test_a_switch_that_works_is_seen_to_by_every_unit_and_step(tmp_path, recipe, observable):
    _, summary, events = train(tmp_path, recipe, observable)
    assert summary["steps"] == [2, 4]
    assert summary["units_forced"] == summary["units_seen_on_recovery_path"] == 2 * 7
    assert [event.kind for event in events] == ["forced", "note"] * 2
    assert [event.step for event in events if event.kind == "note"] == [2, 4]
    if observable == "outputs":
        assert 0 < summary["smallest_change"] <= summary["largest_change"] < 1


@pytest.mark.parametrize(("recipe", "observable"), OBSERVABLES.items())
def test_an_order_that_nothing_follows_is_seen_to_have_no_effect(tmp_path, recipe, observable):
    _, summary, events = train(tmp_path, recipe, observable, switches=False)
    assert summary["units_forced"] == 14
    assert summary["units_seen_on_recovery_path"] == 0
    assert next(event for event in events if event.kind == "note").data["not_seen"]


def test_two_paths_that_are_the_same_are_not_told_apart(tmp_path):
    _, summary, _ = train(tmp_path, "saved-activations", "quantizers", low_bits=8, high_bits=8)
    assert summary["units_seen_on_recovery_path"] == 0


def test_a_unit_that_was_never_seen_on_the_low_cost_path_is_not_seen_to_leave_it(tmp_path):
    _, summary, _ = train(tmp_path, "saved-activations", "quantizers", every=1)
    assert summary["units_forced"] == 28
    assert summary["units_seen_on_recovery_path"] == 0


@pytest.mark.parametrize(("recipe", "observable"), OBSERVABLES.items())
def test_looking_leaves_training_bit_for_bit_as_it_is(tmp_path, recipe, observable):
    looked_at, _, _ = train(tmp_path / "looked", recipe, observable)
    left_alone, _, _ = train(tmp_path / "alone", recipe, observable, looks=False)
    assert torch.equal(looked_at, left_alone)
