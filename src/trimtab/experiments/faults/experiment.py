"""The fault experiment: every scenario of every seed and kind of model, then a table, a picture and summary.json."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from trimtab.errors import MissingExtraError
from trimtab.experiments.faults.measures import LEAVE_LOOKS, LEAVE_NATS, over_seeds, scenario_row
from trimtab.experiments.faults.models import ModelKind, WatchedPlan
from trimtab.experiments.faults.plot import write_pictures
from trimtab.experiments.faults.run import BASE, Part, run_part
from trimtab.experiments.faults.said import said_of
from trimtab.experiments.faults.scenarios import scenarios_of
from trimtab.experiments.faults.table import fault_tables
from trimtab.experiments.settings import FaultsSettings, fresh_summary, prepare_folder, write_whole
from trimtab.experiments.versions import package_versions
from trimtab.experiments.workers import num_processes, run_jobs, text_of

__all__ = ["run_faults"]

NOTES = (
    "This is fault injection: at this size nothing of the kind happens by itself. Each scenario goes on from the same "
    "healthy checkpoint, on the same data, and suffers its fault to the end.",
    "Numbers are steps, mean±sd over the seeds, (k/n) where not all have one. The columns of the signals: the first "
    f"alarm after the fault began. Loss leaves: held-out loss {LEAVE_NATS} nats above the healthy twin's, on average "
    f"over {LEAVE_LOOKS} looks. Lead: from the first alarm that is not one on the loss until then.",
    "Inexact: a notice of the shift residual, which is no alarm. Said: the diagnosis at the end of the run, of all "
    "alarms and notices of its seed.",
)


def run_faults(
    settings: FaultsSettings, console: Console | None = None, plan: WatchedPlan | None = None
) -> dict[str, Any]:
    """Run every part that is not finished yet, and report.

    Args:
        settings: Where, how long, how many seeds, which models.
        console: Where to print.
        plan: Model and schedule; the experiment's own when left out.

    Returns: What ``summary.json`` holds.

    Raises:
        ConfigError: when the folder cannot be written or the text is missing or too short.
        MissingExtraError: when transformers or the built-in text is not installed.
    """
    console = console or Console()
    if importlib.util.find_spec("transformers") is None:
        raise MissingExtraError("The experiment", "transformers", "demo")
    plan = plan or WatchedPlan()
    began = time.perf_counter()
    prepare_folder(settings.out)
    text_of(settings.data, plan.sequence)
    bases = [_part(settings, plan, model, seed, BASE) for seed in settings.all_seeds for model in settings.models[::-1]]
    num_parts = sum(1 + len(scenarios_of(base.model)) for base in bases)
    processes = num_processes(settings.workers, num_parts)
    console.print(
        f"[bold]trimtab experiment faults[/bold]: {len(settings.all_seeds)} seeds on {' and '.join(settings.models)}, "
        f"{settings.num_healthy} healthy steps and {settings.num_faulty} after the fault, {num_parts} parts in "
        f"{processes} processes.",
        highlight=False,
    )
    summary_path = fresh_summary(settings.out)
    parts: dict[str, dict[str, Any]] = {}
    columns = (TextColumn("{task.description:<44}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("begins", total=num_parts)
        for part, figures in run_jobs(
            run_part,
            bases,
            lambda part: _scenarios(settings, plan, part),
            folder=settings.out,
            data=settings.data,
            sequence=plan.sequence,
            processes=processes,
        ):
            parts[part.name] = figures
            progress.update(task, advance=1, description=f"{part.name}: {len(figures['alarms'])} alarms")
    for part in bases:
        for scenario in scenarios_of(part.model):
            name = f"{part.model}-seed{part.seed}-{scenario.name}"
            before, after = ([*parts[of]["alarms"], *parts[of]["notices"]] for of in (part.name, name))
            parts[name] = parts[name] | said_of(part.model, before, after)
    summary = _summary(settings, plan, parts)
    summary["seconds"] = time.perf_counter() - began
    summary["versions"] = package_versions()
    write_whole(summary_path, summary)
    _report(summary, settings, console)
    return summary


def _part(settings: FaultsSettings, plan: WatchedPlan, model: ModelKind, seed: int, scenario: str) -> Part:
    return Part(
        model=model,
        seed=seed,
        scenario=scenario,
        start_step=settings.num_healthy,
        num_steps=settings.num_faulty,
        plan=plan,
    )


def _scenarios(settings: FaultsSettings, plan: WatchedPlan, part: Part) -> list[Part]:
    """What a finished base makes possible."""
    if part.scenario != BASE:
        return []
    return [_part(settings, plan, part.model, part.seed, s.name) for s in scenarios_of(part.model)]


def _summary(settings: FaultsSettings, plan: WatchedPlan, parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    models: dict[str, dict[str, Any]] = {}
    false_alarms = 0
    healthy_steps = 0
    for model in settings.models:
        models[model] = {}
        for scenario in scenarios_of(model):
            of_seeds = [parts[f"{model}-seed{seed}-{scenario.name}"] for seed in settings.all_seeds]
            twins = [parts[f"{model}-seed{seed}-healthy"] for seed in settings.all_seeds]
            rows = [
                scenario_row(o, t, scenario.expected, settings.num_healthy)
                for o, t in zip(of_seeds, twins, strict=True)
            ]
            models[model][scenario.name] = {
                "title": scenario.title,
                "expected": list(scenario.expected),
                "watched": scenario.watched,
                "harmless": scenario.harmless,
                **over_seeds(rows),
                "by_seed": {str(seed): row for seed, row in zip(settings.all_seeds, rows, strict=True)},
            }
            if scenario.harmless and scenario.watched:
                false_alarms += sum(len(figures["alarms"]) for figures in of_seeds)
                healthy_steps += settings.num_faulty * len(of_seeds)
        bases = [parts[f"{model}-seed{seed}-{BASE}"] for seed in settings.all_seeds]
        false_alarms += sum(len(figures["alarms"]) for figures in bases)
        healthy_steps += settings.num_healthy * len(bases)
    unwatched = [models[m]["unwatched"]["by_seed"][str(s)] for m in settings.models for s in settings.all_seeds]
    return {
        "seeds": list(settings.all_seeds),
        "start_step": settings.num_healthy,
        "steps_after": settings.num_faulty,
        "leave_nats": LEAVE_NATS,
        "leave_looks": LEAVE_LOOKS,
        "data": [str(p) for p in settings.data] or "sotu",
        "plan": asdict(plan),
        "notes": list(NOTES),
        "watched_is_bit_identical": all(row["same_weights_as_twin"] for row in unwatched),
        "false_alarms": false_alarms,
        "harmless_steps": healthy_steps,
        "models": models,
        "parts": {name: parts[name] for name in sorted(parts)},
    }


def _report(summary: Mapping[str, Any], settings: FaultsSettings, console: Console) -> None:
    for table in fault_tables(summary, console.width):
        console.print(table)
    for note in NOTES:
        console.print(f"- {note}", highlight=False)
    same = "are" if summary["watched_is_bit_identical"] else "ARE NOT"
    console.print(
        f"- The weights of the watched healthy twins {same} bit for bit those of the unwatched ones. Alarms in "
        f"{summary['harmless_steps']} harmless steps (before the fault, in the twins, under the control): "
        f"{summary['false_alarms']}.",
        highlight=False,
    )
    if settings.plot:
        written, problem = write_pictures(summary, settings.out)
        if written:
            console.print(f"Picture: {', '.join(map(str, written))}", highlight=False)
        if problem:
            console.print(f"- {problem}", highlight=False)
    console.print(
        f"Figures: {settings.out / 'summary.json'}   One run record a part: trimtab runs {settings.out}",
        highlight=False,
    )
