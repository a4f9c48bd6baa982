"""Runs a comparison: every arm on every seed, then tables, a picture and summary.json."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from trimtab.errors import MissingExtraError
from trimtab.experiments.arms import TrainingPlan
from trimtab.experiments.compare.arms import read_arm
from trimtab.experiments.compare.comparison import MODELS, Comparison
from trimtab.experiments.compare.part import BASE, Part, run_part
from trimtab.experiments.compare.plot import write_plot
from trimtab.experiments.compare.summary import summarise
from trimtab.experiments.compare.table import LEGEND, comparison_table
from trimtab.experiments.compare_settings import CompareSettings
from trimtab.experiments.recipes import make_recipe
from trimtab.experiments.settings import fresh_summary, prepare_folder, write_whole
from trimtab.experiments.source import source_of
from trimtab.experiments.versions import package_versions
from trimtab.experiments.workers import num_processes, run_jobs, text_of

__all__ = ["run_compare", "run_comparison"]

_MOST_WARNINGS = 5


def run_compare(settings: CompareSettings, console: Console | None = None) -> dict[str, Any]:
    """Run what the command line asks for; the results lie in ``settings.folder`` itself.

    Args:
        settings: What is compared, and where the results go.
        console: Where to print.

    Returns: What ``summary.json`` holds.

    Raises:
        ConfigError: when a setting cannot be meant, the folder cannot be written or the text is missing or too short.
        MissingExtraError: when transformers, the built-in text or the recipe's package is not installed.
    """
    plan = TrainingPlan(num_steps=settings.steps)
    comparison = settings.comparison(plan)
    return _run(
        comparison, settings.folder, settings.data, settings.workers, console, reports=True, draws=settings.plot
    )


def run_comparison(
    comparison: Comparison,
    out: Path,
    *,
    data: Sequence[Path] = (),
    workers: int | None = None,
    console: Console | None = None,
    reports: bool = True,
) -> dict[str, Any]:
    """Run every part that is not finished yet, and report.

    Writes tables to the console and, in the folder of the comparison's name below ``out``, ``summary.json``, a picture
    and a run record a part. Started again after a kill, it goes on with the parts that are not finished.

    Args:
        comparison: What is compared.
        out: Folder for the results.
        data: Text files; the State of the Union speeches where there are none.
        workers: Processes; two where there are cores for them when left out.
        console: Where to print.
        reports: Whether to print the tables and draw the picture; without it only the progress is shown.

    Returns: What ``summary.json`` holds.

    Raises:
        ConfigError: when the folder cannot be written or the text is missing or too short.
        MissingExtraError: when transformers, the built-in text or the recipe's package is not installed.
    """
    return _run(comparison, out / comparison.name, data, workers, console, reports=reports, draws=reports)


def _run(
    comparison: Comparison,
    folder: Path,
    data: Sequence[Path],
    workers: int | None,
    console: Console | None,
    *,
    reports: bool,
    draws: bool,
) -> dict[str, Any]:
    console = console or Console()
    if importlib.util.find_spec("transformers") is None:
        raise MissingExtraError("The comparison", "transformers", "demo")
    began = time.perf_counter()
    # So that what a recipe cannot mean, or a package that it lacks, is said before anything is trained.
    make_recipe(comparison.recipe, **comparison.recipe_settings)
    prepare_folder(folder)
    text_of(data, comparison.plan.sequence)
    first = _first(comparison, tuple(data))
    num_parts = len(comparison.seeds) * (len(comparison.arms) + (comparison.model == "lora"))
    processes = num_processes(workers, num_parts)
    console.print(
        f"[bold]{comparison.title}[/bold]: {len(comparison.arms)} arms, {len(comparison.seeds)} seeds, "
        f"{comparison.plan.num_steps} steps each, {MODELS[comparison.model]}, {comparison.recipe}, "
        f"faults: {comparison.faults}, budget {comparison.max_active}; {num_parts} parts in {processes} processes.",
        highlight=False,
    )
    summary_path = fresh_summary(folder)
    parts: dict[tuple[str, int], dict[str, Any]] = {}
    every: list[dict[str, Any]] = []
    columns = (TextColumn("{task.description:<44}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("begins", total=num_parts)
        for part, figures in run_jobs(
            run_part,
            first,
            _then,
            folder=folder,
            data=data,
            sequence=comparison.plan.sequence,
            processes=processes,
        ):
            every.append(figures)
            if part.arm != BASE:
                parts[part.arm, part.seed] = figures
            loss = figures["val_loss"]
            said = "no finite loss" if loss is None else f"loss {loss:.3f}"
            progress.update(task, advance=1, description=f"{part.name}: {said}")
    summary = summarise(comparison, data, parts)
    # Of this start alone; and of all the starts that it took.
    summary["seconds"] = time.perf_counter() - began
    summary["worker_seconds"] = sum(figures["seconds"] for figures in every)
    summary["source"] = _common_source(every)
    summary["versions"] = package_versions()
    write_whole(summary_path, summary)
    # Read back, so that it is what a later reader of the file has.
    summary = json.loads(summary_path.read_text(encoding="utf-8"))
    if reports:
        _report(summary, folder, console, draws)
    return summary


def _common_source(every: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The source that the parts came from. They are all of the same files, but these may have been committed since."""
    first = every[0]["source"]
    return dict(first) if all(figures["source"] == first for figures in every) else source_of()


def _first(comparison: Comparison, data: tuple[Path, ...]) -> list[Part]:
    """The parts that need no other."""
    kinds = [BASE] if comparison.model == "lora" else _free_arms(comparison)
    return [Part(comparison=comparison, arm=arm, seed=seed, data=data) for seed in comparison.seeds for arm in kinds]


def _then(part: Part) -> list[Part]:
    """The parts that this one was needed for."""
    if part.arm == BASE:
        return [replace(part, arm=arm) for arm in _free_arms(part.comparison)]
    return [replace(part, arm=text) for text in part.comparison.arms if read_arm(text).reference == part.arm]


def _free_arms(comparison: Comparison) -> list[str]:
    return [text for text in comparison.arms if read_arm(text).reference is None]


def _report(summary: Mapping[str, Any], folder: Path, console: Console, draws: bool) -> None:
    for table in comparison_table(summary):
        console.print(table)
    warned = list(summary["warnings"].items())
    heard = [f"Warned in {count} of the parts: {text}" for text, count in warned[:_MOST_WARNINGS]]
    if len(warned) > _MOST_WARNINGS:
        heard.append(f"And {len(warned) - _MOST_WARNINGS} more warnings, in summary.json.")
    for note in (*LEGEND, *summary["notes"], *heard):
        console.print(f"- {note}", highlight=False, markup=False)
    if draws:
        written, problem = write_plot(summary, folder)
        if written:
            console.print(f"Picture: {', '.join(map(str, written))}", highlight=False)
        if problem:
            console.print(f"- {problem}", highlight=False)
    console.print(f"Figures: {folder / 'summary.json'}   One run record a part: trimtab runs {folder}", highlight=False)
