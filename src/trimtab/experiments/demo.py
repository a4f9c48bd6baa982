"""The demo of saved activations: every arm on the same text, data order and faults, then a table and summary.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from trimtab.experiments.arms import ARMS, EXERCISED, ArmResult, TrainingPlan, build_model, burst_schedule
from trimtab.experiments.console import arm_table, run_arms
from trimtab.experiments.exercise import EXERCISE_EVERY, exercise_sentence, exercise_summary
from trimtab.experiments.packages import require_packages
from trimtab.experiments.recipe_demo import run_recipe_demo
from trimtab.experiments.settings import DemoSettings, demo_packages, fresh_summary, prepare_folder, write_whole
from trimtab.experiments.text import Corpus, load_corpus, read_files, read_speeches
from trimtab.experiments.versions import package_versions
from trimtab.faults import StoredCopyBurst, random_bursts
from trimtab.precision import find_units
from trimtab.trace import open_run

__all__ = ["demo_bursts", "run_demo"]

LEGEND = (
    "loss: validation nats a token (a byte, where bytes are tokens); ppl: its exponential. repaired: share of the "
    "loss that the faults cost static 4-bit. recovered: share of unit-steps on the 8-bit path; switches: how often a "
    "unit entered it. Both as the steps were run: a run record counts decisions, the last of which routes no step. "
    "caught: faults whose unit was on it while they lasted; after: how many steps after their start. kept: bytes kept "
    "for backward, measured. step time: against unquantized."
)
NOTES = (
    "This is fault injection: for 10-25 steps at a time, 16 channels of one projection's 4-bit copy are 50-1000 times "
    "too large, as under a wrong or stale scale. At this size 4-bit activations do no harm by themselves.",
    "The effect needs global gradient clipping (here to 1.0): one unit's inflated gradient shrinks every other unit's "
    "step. Static 8-bit has no 4-bit copy, so no burst falls on it.",
    "GNMR routes a unit from the step after its gradient grew; damping scales that gradient back in the step itself.",
)
_EXERCISE_STEPS = 50
"""Most steps of the run in which the switch is exercised."""


def demo_bursts(units: Sequence[str], num_steps: int, seed: int) -> list[StoredCopyBurst]:
    """The demo's faults: 30 in 250 steps, between steps 50 and 210, and as dense in a run of another length."""
    return random_bursts(units, seed=seed, **burst_schedule(num_steps))


def run_demo(settings: DemoSettings, console: Console | None = None) -> dict[str, Any]:
    """Run every arm and report; with another recipe than saved activations, the arms of ``recipe_demo``.

    Args:
        settings: Where, how long, which seed and text.
        console: Where to print.

    Returns: What ``summary.json`` holds.

    Raises:
        ConfigError: when the folder cannot be written or the text is missing or too short.
        MissingExtraError: when transformers, the built-in text or the recipe's package is not installed.
    """
    console = console or Console()
    if settings.recipe != "saved-activations":
        return run_recipe_demo(settings, console)
    require_packages("The demo", demo_packages(settings))
    prepare_folder(settings.folder)
    documents = read_files(settings.data) if settings.data else read_speeches()
    plan = TrainingPlan(num_steps=settings.num_steps, seed=settings.seed)
    corpus = load_corpus(documents, tokenizer=settings.tokenizer, sequence=plan.sequence)
    model = build_model(plan, corpus.vocab_size)
    units = [unit.name for unit in find_units(model)]
    bursts = demo_bursts(units, plan.num_steps, plan.seed)
    source = "your text" if settings.data else f"{len(documents)} State of the Union speeches"
    num_parameters = sum(p.numel() for p in model.parameters())
    console.print(
        f"[bold]trimtab demo[/bold]: a LLaMA of {num_parameters / 1e6:.2f}M parameters and {len(units)} units, "
        f"{source} ({len(corpus.train) / 1e6:.1f}M training tokens), {plan.num_steps} steps an arm, "
        f"{len(bursts)} injected faults, seed {plan.seed}."
    )
    summary_path = fresh_summary(settings.folder)
    results = run_arms(ARMS, plan, corpus, settings.folder, console, bursts=bursts)
    exercise = _exercise(settings, plan, corpus, console)
    summary = _summary(settings, plan, corpus, num_parameters, len(units), bursts, results)
    summary |= {"exercise": exercise, "versions": package_versions()}
    write_whole(summary_path, summary)
    for table in _tables(summary, console.width):
        console.print(table)
    where = f" of a run of its own, {exercise['num_steps']} steps without faults (records/{EXERCISED.name})"
    for note in (LEGEND, exercise_sentence(exercise, EXERCISE_EVERY, where), *NOTES):
        console.print(f"- {note}", highlight=False)
    console.print(f"Figures: {summary_path}   One run record an arm: trimtab runs {settings.folder}", highlight=False)
    return summary


def _exercise(settings: DemoSettings, plan: TrainingPlan, corpus: Corpus, console: Console) -> dict[str, Any]:
    """A short run in which the switch is exercised by hand; after the arms, none of which it touches."""
    short = dataclasses.replace(plan, num_steps=min(_EXERCISE_STEPS, plan.num_steps))
    run_arms((EXERCISED,), short, corpus, settings.folder, console)
    with open_run(settings.folder / "records" / EXERCISED.name) as run:
        return {"num_steps": short.num_steps, **exercise_summary(run)}


def _summary(
    settings: DemoSettings,
    plan: TrainingPlan,
    corpus: Corpus,
    num_parameters: int,
    num_units: int,
    bursts: Sequence[StoredCopyBurst],
    results: dict[str, ArmResult],
) -> dict[str, Any]:
    clean, hit = results["static_4bit_clean"].val_loss, results["static_4bit"].val_loss
    plain = results["unquantized_clean"]
    arms = {}
    for name, result in results.items():
        values = asdict(result)
        del values["name"]
        faulty = name in ("gnmr", "random", "damping", "gnmr_damping")
        # Of the harm that the faults did to static 4-bit, how much this arm did not suffer.
        values["repaired_share"] = (hit - result.val_loss) / (hit - clean) if faulty and hit > clean else None
        values["step_time_ratio"] = result.step_seconds / plain.step_seconds
        arms[name] = values
    return {
        "seed": plan.seed,
        "steps": plan.num_steps,
        "data": [str(p) for p in settings.data] or "sotu",
        "tokenizer": settings.tokenizer,
        "bytes_per_token": corpus.bytes_per_token,
        "num_parameters": num_parameters,
        "num_units": num_units,
        "max_grad_norm": plan.max_norm,
        "plan": asdict(plan),
        "notes": list(NOTES),
        "arms": arms,
        "bursts": [asdict(b) for b in bursts],
    }


def _tables(summary: dict[str, Any], width: int) -> list[Table]:
    """One table where the terminal is wide enough, or else quality and cost, one below the other."""
    quality = [
        ("loss", lambda r: f"{r['val_loss']:.4f}"),
        ("ppl", lambda r: f"{r['val_perplexity']:.3f}"),
        ("repaired", lambda r: "" if r["repaired_share"] is None else f"{r['repaired_share']:.0%}"),
        ("recovered", lambda r: f"{r['recovered_share']:.1%}"),
        ("switches", lambda r: str(r["switches"])),
        ("caught", lambda r: f"{r['faults_caught']}/{r['num_faults']}" if _recovers(r) else ""),
        ("after", lambda r: f"{r['mean_latency_steps']:.1f}" if _recovers(r) and r["faults_caught"] else ""),
    ]
    cost = [
        ("kept, projections", lambda r: f"{r['projection_saved_bytes'] / 2**20:.2f} MiB"),
        ("kept, model", lambda r: f"{r['model_saved_bytes'] / 2**20:.1f} MiB"),
        ("step time", lambda r: f"{r['step_time_ratio']:.2f}x"),
    ]
    arms = summary["arms"].values()
    if width >= 130:
        return [arm_table("Validation on held-out text, and cost", quality + cost, arms)]
    return [arm_table("Validation on held-out text", quality, arms), arm_table("Cost", cost, arms)]


def _recovers(result: dict[str, Any]) -> bool:
    return result["num_faults"] > 0 and result["recovered_share"] > 0
