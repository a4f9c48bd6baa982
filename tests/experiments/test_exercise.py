"""Exercising the switch shows an effect where there is one, none where there is none, and changes nothing itself."""

import dataclasses

import pytest
import torch

import trimtab
from trimtab.control import Policy
from trimtab.control.policies import FixedSet
from trimtab.experiments.arms import TrainingPlan, build_model, train_arm
from trimtab.experiments.exercise import Exercise, exercise_sentence, exercise_summary
from trimtab.experiments.recipes import make_recipe
from trimtab.experiments.text import load_corpus
from trimtab.trace import open_run, summarize

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


BY_HAND = {
    "exercised": {"exercise_every": 2, "observable": "quantizers"},
    "always": {"recovers_always": True},
    "some": {"before_step": lambda step, guard, batch: guard.route(guard.units[:step]) if step % 3 else None},
    "none": {"before_step": lambda step, guard, batch: guard.route([]) if step == 3 else None},
    "left alone": {},
}


@pytest.mark.parametrize("case", BY_HAND)
def test_a_record_tells_the_sets_that_the_steps_ran_under_as_the_demo_counts_them(tmp_path, case):
    corpus = load_corpus(["The ship sails to port at dawn. " * 200], tokenizer="bytes", sequence=PLAN.sequence)
    model, recipe = build_model(PLAN, corpus.vocab_size), make_recipe("saved-activations")
    policy = FixedSet(["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"])
    plan = dataclasses.replace(PLAN, num_steps=7, num_validation=1)
    trained = train_arm(model, recipe, policy, plan, corpus, record=tmp_path, **BY_HAND[case])
    with open_run(tmp_path) as run:
        steps, summary = run.steps(), summarize(run)
    assert steps.routed.tolist() == trained.routed[1:].tolist()
    assert summary.routed_share == trained.routed[1:].mean()
    assert trained.routed.any(), "else this says nothing"
    assert summary.num_forced_steps == {"exercised": 3, "always": 7, "some": 5, "none": 1, "left alone": 0}[case]


@pytest.mark.parametrize(("recipe", "observable"), OBSERVABLES.items())
def test_what_came_of_it_is_one_sentence(tmp_path, recipe, observable):
    _, done, _ = train(tmp_path / "works", recipe, observable)
    assert exercise_sentence(done, 2).startswith(
        "Exercised by hand in 2 steps, 14 unit-steps: it took effect in all of "
    )
    _, done, _ = train(tmp_path / "stuck", recipe, observable, switches=False)
    assert "it took effect in none of them. Either both paths do the same" in exercise_sentence(done, 2)
    _, done, _ = train(tmp_path / "never", recipe, observable, every=5)
    assert exercise_sentence(done, 5) == "The switch was not exercised: that takes 5 steps."
    some = {"steps": [2], "units_forced": 7, "units_seen_on_recovery_path": 3, "observable": "quantizers"}
    assert "in 1 step of the demo, 7 unit-steps: it took effect in 3 of them (" in exercise_sentence(
        some, 2, " of the demo"
    )
